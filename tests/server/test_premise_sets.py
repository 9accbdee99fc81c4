"""Premises of each claim, for each mechanism, runtime and transport, and how each premise is known there."""

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from flwr.superlink.grid.inmemory_grid import InMemoryGrid
from rich.console import Console
from statements import heard
from support import failures

from cloister.client.app import app
from cloister.config.run import parse
from cloister.privacy.accounting.events import Pure
from cloister.privacy.claims import premises as declared
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.premises import CRYPTOGRAPHY, Attestation, Contributor, Premise, known_by, of_transport
from cloister.privacy.claims.render import contract
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.mechanisms.mechanism import Mechanism
from cloister.server.build import build
from cloister.server.client_claims import client_claim
from cloister.server.polling_grid import Transport
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import as_shown
from cloister.server.secure_sum import SecureSum
from cloister.simulation.grid import LocalGrid
from cloister.utils.arrays import Layout
from cloister.utils.errors import PluginError, PrivacyError
from cloister.utils.registry import Registry

LAYOUT = Layout.of({"w": np.zeros(4, np.float32)})
COMMON = {"task.model": "softmax", "client.local-epochs": 1, "client.batch-size": 32}
GLOBAL = {"privacy.server": "global-dp", "privacy.noise-multiplier": 2.0}


def noised(client):
    return {"privacy.server": "none", "privacy.client": client, f"privacy.{client}-noise-multiplier": 1.5}


SECURE = GLOBAL | {"secure-aggregation.enabled": True, "secure-aggregation.threshold": 3, "strategy.min-nodes": 4}
SETTINGS = {
    "global-dp": GLOBAL,
    "global-dp, adaptive": GLOBAL | {"privacy.clipping": "adaptive"},
    "global-dp, rule": GLOBAL | {"privacy.placement": "rule", "strategy.name": "fedmedian"},
    "metric": GLOBAL | {"privacy.server": "metric", "privacy.distance-release": "private"},
    "secure aggregation": SECURE,
    "gaussian": noised("gaussian"),
    "laplace": noised("laplace") | {"privacy.radius": 1.0},
    "laplace, as published": noised("laplace") | {"privacy.radius": 0.0},
    "dp-sgd": noised("dp-sgd"),
}
GRIDS = {
    "in process": LocalGrid.simulated(app, {}, 4),
    "simulation": object.__new__(InMemoryGrid),
    "flower's": Transport(packed=True, gated=False),
    "flower's, signed": Transport(packed=True, gated=False, signed=True),
    "flower's, not packed": Transport(packed=False, gated=False),
    "cloister's": Transport(packed=True, gated=True),
    "cloister's, not packed": Transport(packed=False, gated=True),
}
TOGETHER = ("in process", "simulation")


@dataclass(frozen=True)
class Handed:
    """A grid over a SuperLink."""

    transport: Transport


def claim_of(mechanism, place, tmp_path, checked=True, keys=True, resumes=0):
    """The claim about a mechanism, as the end of a run makes it: what nodes state, and what the grid shows."""
    plan = build(parse(COMMON | SETTINGS[mechanism] | {"output-dir": str(tmp_path)}))
    object.__setattr__(plan, "resumes", resumes)
    if isinstance(plan.strategy, SecureSum) and keys:
        plan.strategy._by_provisioner = frozenset()
    if plan.config.privacy.client.is_on:
        claim = client_claim(plan, LAYOUT, 2, attested=heard(stated(plan, checked)))
    else:
        claim = plan.claim
    found = GRIDS[place]
    return as_shown(claim, Handed(found) if isinstance(found, Transport) else found, resumes > 0)


def stated(plan, checked):
    """Return the statement of a node with 300 examples, as the run asks for it."""
    privacy = plan.config.privacy
    if privacy.client.clips_gradients:
        return Attestation("dp-sgd", "example", (LocalSteps(300, 32, 1).event(1.5),), 300, checked=checked)
    mechanism = privacy.client.noise_on_update
    events = privacy.circumstances.events(mechanism.caveats(), lambda: mechanism.events(LAYOUT.size))
    return Attestation(privacy.client.name, "client", events, 0, checked=checked)


TRANSPORTS = {
    "in process": "apart enforced, authentic enforced, instructed enforced",
    "simulation": "apart enforced, authentic enforced, instructed enforced",
    "flower's": "apart assumed, authentic assumed, instructed assumed",
    "flower's, signed": "apart assumed, authentic attested, instructed assumed",
    "flower's, not packed": "apart assumed, authentic assumed, instructed assumed",
    "cloister's": "apart enforced, authentic enforced, instructed enforced",
    "cloister's, not packed": "apart assumed, authentic enforced, instructed enforced",
}
"""Premises of each transport."""
MECHANISMS = {
    "global-dp": ("", "", "cryptography"),
    "global-dp, adaptive": ("", "", "cryptography"),
    "global-dp, rule": ("", "", "cryptography"),
    "metric": ("", "", "cryptography"),
    "secure aggregation": (
        "bundle enforced, roster enforced, keys enforced",
        "bundle assumed, roster assumed, keys attested",
        "cryptography, key-agreement, collusion",
    ),
    "gaussian": ("bundle enforced", "bundle stated", "cryptography"),
    "laplace": ("bundle enforced", "bundle stated", "cryptography"),
    "laplace, as published": ("bundle enforced", "bundle stated", "cryptography"),
    "dp-sgd": ("bundle enforced", "bundle stated", "cryptography, kernels, time"),
}
"""Premises of each mechanism: where one process plays all parties, elsewhere, and standing assumptions."""


def told(premises):
    """Premises with how they are known; then the standing assumptions."""
    own = ", ".join(f"{each.name} {each.known}" for each in premises if not each.standing)
    return own, ", ".join(each.name for each in premises if each.standing)


def test_what_a_claim_rests_on(tmp_path):
    def check(mechanism, place):
        together, elsewhere, standing = MECHANISMS[mechanism]
        own = together if place in TOGETHER else elsewhere
        claim = claim_of(mechanism, place, tmp_path)
        assert told(claim.premises) == (", ".join(filter(None, (own, TRANSPORTS[place]))), standing)
        found = {each.known for each in claim.premises if not each.standing}
        guaranteed = "conditional" if found & {"stated", "assumed"} else "sound"
        assert claim.status == ("heuristic" if mechanism == "laplace, as published" else guaranteed)

    assert failures(product(SETTINGS, GRIDS), check) == []


def test_a_run_that_was_resumed_rests_on_why_it_was(tmp_path):
    def check(mechanism):
        before = claim_of(mechanism, "in process", tmp_path)
        claim = claim_of(mechanism, "in process", tmp_path, resumes=1)
        assert claim.premises == (*before.premises, declared.UNBROKEN)
        assert claim.status == ("heuristic" if mechanism == "laplace, as published" else "conditional")

    assert failures(SETTINGS, check) == []


def test_what_carried_messages_before_a_run_was_resumed_is_not_known(tmp_path):
    claim = claim_of("global-dp", "cloister's", tmp_path, resumes=1)
    assert told(claim.premises)[0] == "apart assumed, authentic assumed, instructed assumed, unbroken assumed"


def test_a_bundle_that_a_node_has_not_checked_is_assumed(tmp_path):
    assert told(claim_of("dp-sgd", "cloister's", tmp_path, checked=False).premises)[0].startswith("bundle assumed")


def test_before_the_first_round_keys_are_assumed(tmp_path):
    claim = claim_of("secure aggregation", "cloister's", tmp_path, keys=False)
    assert "keys assumed" in told(claim.premises)[0]


def test_while_messages_are_to_come_none_is_known_to_be_packed(tmp_path):
    plan = build(parse(COMMON | GLOBAL | {"output-dir": str(tmp_path)}))
    started = as_shown(plan.claim, Handed(Transport(packed=True, gated=True)), resumed=False, ended=False)
    assert told(started.premises)[0] == "apart assumed, authentic enforced, instructed enforced"
    assert contract(started, 2.0).endswith("ε at most 2 for the whole run, if its premises hold: apart")
    in_process = as_shown(plan.claim, GRIDS["in process"], resumed=False, ended=False)
    assert "; sound, reasonable; " in contract(in_process, 2.0) and "if its premises" not in contract(in_process, 2.0)
    assert contract(plan.claim).startswith("global-dp (") and "; conditional; " in contract(plan.claim)


def test_the_start_of_a_run_names_the_premises_that_are_open(tmp_path):
    plan = build(parse(COMMON | GLOBAL | {"output-dir": str(tmp_path)}))
    console = Console(width=400, record=True, quiet=False, file=(tmp_path / "log").open("w"))
    directory = type("Directory", (), {"path": tmp_path})
    ConsoleReporter(1, console).opening(plan, directory, plan.claim, 2.0)
    (line,) = [line for line in console.export_text().splitlines() if line.startswith("privacy")]
    assert line.endswith("if its premises hold: apart, authentic, instructed") and "sound" not in line


# --- declarations ---


def test_a_mechanism_without_premises_is_not_defined():
    for premises in ((), None, ("apart",), [CRYPTOGRAPHY]):
        with pytest.raises(PluginError, match=r"test_premise_sets.Bare has premises = .*declare premises = \(cloister"):
            type("Bare", (Mechanism,), {"__module__": __name__, "__qualname__": "Bare", "premises": premises})


def test_one_that_says_nothing_of_premises_is_not_defined_either():
    with pytest.raises(PluginError, match="Silent has premises = "):

        class Silent(Mechanism):
            name = "silent"


def test_a_transport_without_premises_is_not_defined():
    with pytest.raises(PluginError, match="Wire has premises = "):

        class Wire(Contributor):
            packed = True


def test_a_plugin_without_premises_is_named_with_the_remedy(tmp_path, monkeypatch):
    text = "from cloister import Mechanism\n\nclass Bare(Mechanism):\n    name = 'bare'\n"
    (tmp_path / "bare_package.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        PluginError, match=r"mechanism 'bare' .* does not load: bare_package.Bare has .*declare premises"
    ):
        Registry("mechanism", "cloister.none", {"bare": "bare_package:Bare"}).load("bare")


def test_a_transport_contributes_what_it_declares():
    assert [each.name for each in of_transport(False, True, True)] == [each.name for each in Transport.premises]


def test_a_condition_of_a_package_of_its_own_is_in_its_claim():
    hospital = Premise("hospital", "the hospital counts patients once", "the hospital", "stated")

    class Own(Mechanism):
        name = "own"
        premises = (hospital, CRYPTOGRAPHY)

        def events(self, layout, sampling):
            return (Pure(1.0),)

        def release(self, contributions):
            raise AssertionError

        def parameters(self):
            return {}

    from flwr.serverapp.strategy import FedAvg

    from cloister.server.private_strategy import PrivateStrategy

    claim = PrivateStrategy(FedAvg(), Own()).claim()
    assert hospital in claim.premises and claim.status == "conditional"


def test_a_claim_without_premises_is_an_error():
    for premises in ((), (CRYPTOGRAPHY,)):
        with pytest.raises(PrivacyError, match="the claim about global-dp has no premise beside standing assumptions"):
            Claim("global-dp", premises=premises)
    assert Claim("none").status == "none"


def test_what_a_claim_does_not_rest_on_is_not_shown():
    assert known_by((CRYPTOGRAPHY,), [declared.ROSTER]) == (CRYPTOGRAPHY,)


# --- docs/threat-model.md ---

PAGE = Path(__file__).parents[2] / "docs" / "threat-model.md"
COLUMNS = {"one process": TOGETHER, "`cloister superlink`": ("cloister's", "cloister's, not packed")}
COLUMNS["Flower's SuperLink"] = ("flower's", "flower's, signed", "flower's, not packed")


def known(tmp_path):
    """Return the states of each premise in each column of the table: all that are possible there."""
    found = {}
    for mechanism in ("secure aggregation", "gaussian"):
        for column, places in COLUMNS.items():
            for place in places:
                for changes in ({}, {"checked": False}, {"keys": False}, {"resumes": 1}):
                    for each in claim_of(mechanism, place, tmp_path, **changes).premises:
                        found.setdefault((each.name, column), set()).add(each.known)
    return found


def table(tmp_path):
    """The table of premises, and that of standing assumptions, by the values in `premises.py`."""
    every = [each for each in vars(declared).values() if isinstance(each, Premise)]
    found, order = known(tmp_path), ("enforced", "attested", "stated", "assumed")
    rows = ["| premise | what holds | who sees to it | " + " | ".join(COLUMNS) + " |", "|---|---|---|---|---|---|"]
    for each in (each for each in every if not each.standing):
        ways = (found.get((each.name, column), {each.known}) for column in COLUMNS)
        cells = [" or ".join(way for way in order if way in some) for some in ways]
        rows.append(f"| `{each.name}` | {each.sentence} | {each.by} | {' | '.join(cells)} |")
    standing = ["| assumption | what holds | who sees to it |", "|---|---|---|"]
    standing += [f"| `{each.name}` | {each.sentence} | {each.by} |" for each in every if each.standing]
    return "\n".join(rows), "\n".join(standing)


def test_the_threat_model_has_the_tables_that_follow_from_the_values(tmp_path):
    text = PAGE.read_text()
    missing = [each for each in table(tmp_path) if f"\n\n{each}\n\n" not in text]
    assert not missing, "put this into docs/threat-model.md:\n\n" + "\n\n".join(missing)


def test_the_threat_model_has_at_most_1_500_words():
    assert len(re.findall(r"\S*\w\S*", PAGE.read_text())) <= 1500
