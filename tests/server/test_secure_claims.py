"""Runs with secure aggregation: which are refused and why, and what is claimed, planned and shown of the others."""

import json
import math

import pytest
from claimed import HELD
from rich.console import Console
from secure_runs import settings
from support import failures

from cloister.client import secure
from cloister.client.app import app
from cloister.config.privacy import SWITCHED_OFF
from cloister.config.run import parse
from cloister.estimate.preview import Options, preview
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import DistributedGaussian, Gaussian, from_json
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.render import meanings, render
from cloister.privacy.claims.server import NO_CLIENT, OUTSIDERS, ZEROED, statement
from cloister.privacy.claims.to_json import record, statement_of
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, Parties
from cloister.secure_aggregation.roster import Roster
from cloister.server.build import build
from cloister.server.polling_grid import PollingGrid
from cloister.server.prepare import prepare
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.status import run_state
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.keys import REMEDY

SHORT = {"tensorboard": False, "report": False, "num-rounds": 2, "run-name": "r", "client.local-epochs": 1}


RMS = {"privacy.server": "metric", "privacy.distance": "rms", "privacy.distance-release": "private"}
GROUPS = {"privacy.server": "laplace-clustering", "privacy.noise-multiplier": None, "privacy.clipping-norm": None}


def test_what_cannot_be(tmp_path):
    cases = [
        ({"secure-aggregation.enabled": False}, "have no effect with secure-aggregation.enabled = False"),
        ({"secure-aggregation.threshold": 0, "strategy.min-nodes": 3}, "threshold = 0 follows from strategy.min-nodes"),
        ({"secure-aggregation.threshold": 1}, "threshold = 1 must be at least 2"),
        ({"secure-aggregation.threshold": 101}, "and at most 100"),
        ({"secure-aggregation.colluding": 4}, "above secure-aggregation.colluding = 4"),
        ({"strategy.min-nodes": 3}, "strategy.min-nodes = 3: .* a round needs 4 to 7 clients"),
        ({"strategy.min-nodes": 8}, "strategy.min-nodes = 8: "),
        ({"privacy.server": "metric"}, "distance of two clients needs single updates, .* use 'rms'"),
        (RMS | {"privacy.distance-release": "exact"}, "use 'private' and 'after'"),
        (RMS | {"privacy.distance-release": "exact", "privacy.distance-clip": "before"}, "use 'private' and 'after'"),
        (RMS | {"privacy.clipping": "adaptive"}, "a distance is of one clip; use 'fixed'"),
        (RMS | {"privacy.distance-noise-multiplier": 257.0}, "multiplier = 257: .* at most 256"),
        (GROUPS, "groups and choices need single updates"),
        ({"privacy.server": "some-plugin"}, "privacy.server = 'some-plugin'"),
        ({"privacy.placement": "rule"}, "privacy.placement = 'rule'"),
        ({"privacy.placement": "model"}, "privacy.placement = 'model'"),
        (
            {"privacy.clipping": "adaptive", "privacy.clipping-count-noise-multiplier": 257.0},
            "multiplier = 257: .* at most 256",
        ),
        ({"privacy.noise-multiplier": "auto", "privacy.max-epsilon": 5.0}, "privacy.noise-multiplier = 'auto'"),
        ({"privacy.examples-cap": 5.0, "strategy.weighting": "examples"}, "every update counts the same"),
        ({"privacy.client": "gaussian"}, "privacy.client = 'gaussian'"),
        ({"privacy.client": "dp-sgd"}, "privacy.client = 'dp-sgd'"),
        ({"privacy.noise-seed": 7}, "privacy.noise-seed = 7"),
        ({"privacy.population": 5}, "no draw is secret"),
        ({"strategy.sampling": "poisson"}, "no draw is secret"),
        ({"privacy.canaries": 4}, "made-up clients"),
        ({"strategy.min-replies": 4}, "secure-aggregation.threshold says how many"),
    ]

    def check(changes, says):
        with pytest.raises(ConfigError, match=says):
            parse({key: value for key, value in (settings(tmp_path) | changes).items() if value is not None})

    assert failures(cases, check) == []


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedavgm", "fedopt", "fedadam", "fedyogi", "fedadagrad"])
def test_strategies_on_the_mean_are_taken(name, tmp_path):
    assert build(parse(settings(tmp_path, **{"strategy.name": name}))).is_accounted


@pytest.mark.parametrize("name", ["fedmedian", "fedtrimmedavg", "krum"])
def test_strategies_that_need_every_reply_are_not(name, tmp_path):
    with pytest.raises(ConfigError, match="which needs every reply: the server learns the sum"):
        build(parse(settings(tmp_path, **{"strategy.name": name})))


def test_a_sum_that_has_no_room_takes_the_wider_ring_or_none(tmp_path):
    for z, bits in ((2.0, 32), (200.0, 64)):
        assert parse(settings(tmp_path, 100, 100, z=z)).shared_release.plan(650).bits == bits
    with pytest.raises(PrivacyError, match="at most"):
        parse(settings(tmp_path, 5, 4, z=1e4)).shared_release.plan(650)


def test_more_than_a_hundred_are_not_taken(tmp_path):
    assert parse(settings(tmp_path, 80, 67)).secure_aggregation.parties == Parties(100, 67, 0)


def test_nodes_that_are_started_for_each_message_are_refused(tmp_path):
    config = parse(settings(tmp_path))
    grid = LocalGrid.simulated(app, config.flat(), 5)
    grid.keeps_memory = False
    with pytest.raises(ConfigError, match="has lost the secrets of the round"):
        run(PollingGrid(grid), config)
    assert not list(tmp_path.iterdir())


def go(folder, **changes):
    config = parse(settings(folder, **(SHORT | changes)))
    grid = LocalGrid.simulated(app, config.flat(), config.strategy.min_nodes)
    return run(grid, config, ConsoleReporter(2, Console(quiet=True)))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return go(tmp_path_factory.mktemp("secure"), colluding=1)


class TestARun:
    def test_claims_against_the_server(self, outcome):
        of_run, of_all = outcome.privacy["claims"]
        assert (
            of_run["adversary"] == "the server together with one client, and any party that sees the models of the run"
        )
        assert of_all["adversary"] == NO_CLIENT
        assert {one["neighbours"] for one in (of_run, of_all)} == {ZEROED}
        assert "premises" not in of_run and [one["name"] for one in of_all["premises"]] == ["unchosen"]
        assert outcome.privacy["parameters"][COLLUDING] == 1
        assert outcome.privacy["status"] == "sound"

    def test_costs_what_the_central_noise_does(self, outcome):
        central, _ = best_epsilon(Account([Gaussian(1.0)] * 2), 1e-5)
        assert outcome.privacy["claims"][0]["epsilon"] == pytest.approx(central, rel=1e-3)

    def test_is_in_the_ledger_as_what_it_is(self, outcome):
        lines = (outcome.directory.path / "ledger.jsonl").read_text().splitlines()
        events = [from_json(line["event"]) for line in map(json.loads, lines) if "event" in line]
        assert len(events) == 2 and all(isinstance(event, DistributedGaussian) for event in events)
        assert {event.honest for event in events} == {3}

    def test_is_told_in_words(self, outcome):
        said = statement_of(outcome.privacy)
        told = "\n".join(render(said))
        assert "no claim against the server" not in told
        assert "the server sees sums of updates alone, and cannot check what a hostile client puts into them" in told
        assert "the server sees sums of updates alone." in meanings(said)[0].against
        assert any("whose updates are in the sum" in item for item in outcome.privacy["unprotected"])

    def test_shows_in_the_status(self, outcome):
        assert run_state(outcome.directory.path).privacy == "global-dp (secure aggregation)"

    def test_leaves_no_secret_of_a_round(self, outcome):
        nodes = json.loads((outcome.directory.path / "nodes.json").read_text())
        assert {tuple(node["config"]) for node in nodes.values()} == {("secure-round",)}
        assert {tuple(node["config"]["secure-round"]) for node in nodes.values()} == {("run", "round")}


def test_without_noise_nothing_is_claimed(tmp_path):
    outcome = go(tmp_path, z=0.0, **{"num-rounds": 1})
    assert outcome.privacy["status"] == "heuristic" and not outcome.privacy["claims"]
    assert any("noise-multiplier is 0" in reason for reason in outcome.privacy["reasons"])


def budget_in(folder):
    return PrivacyBudget(Ledger(folder / "ledger.jsonl"), "run")


def said_of(budget, colluding):
    claim = Claim("global-dp", premises=HELD, parameters={COLLUDING: colluding}, by_provisioner=())
    return statement(claim, budget, 1, "fixed")


NORTH = "the provisioner, who made the signing keys of north"
MANY = tuple(f"site-{number}" for number in range(9))


@pytest.mark.parametrize(
    ("colluding", "names", "adversary"),
    [
        (1, ("north",), f"{NORTH}"),
        (2, ("north",), f"{NORTH} and one other client"),
        (4, ("north",), f"{NORTH} and up to 3 other clients"),
        (0, ("north",), f"{NORTH} and all clients but one"),
        (1, ("north", "south"), f"{NORTH}, south and all clients but one"),
        (9, MANY, f"the provisioner, who made the signing keys of {', '.join(MANY[:5])} and 4 others"),
        (1, ("\x1b" * 99,), f"the provisioner, who made the signing keys of {'�' * 48}"),
    ],
)
def test_against_the_provisioner_of_keys(colluding, names, adversary, tmp_path):
    budget = budget_in(tmp_path)
    budget.spend(DistributedGaussian(4, 2.0**20, 2.0**20, 650), 1)
    claim = Claim("global-dp", premises=HELD, parameters={COLLUDING: colluding}, by_provisioner=names)
    said = statement(claim, budget, 1, "fixed")
    figure = said.claim.figures[0]
    apart = " and is none of its clients" if colluding == len(names) else ""  # who know their own shares
    assert (
        figure.adversary
        == f"the server together with {adversary}, and any party that sees the models of the run{apart}"
    )
    assert record(statement_of(record(said))) == record(said)
    assert REMEDY in "\n".join(render(statement_of(record(said))))


def played(monkeypatch, number):
    """Let the provisioner have made the keys of so many simulated clients."""
    made = secure._simulated

    def older(clients):
        keys, roster = made(clients)
        return keys, Roster(roster.keys, frozenset(sorted(keys)[number:]))

    monkeypatch.setattr(secure, "_simulated", older)


@pytest.mark.parametrize(("number", "honest"), [(1, 3), (5, 1)])
def test_members_with_keys_of_the_provisioner_count_as_colluding(tmp_path, monkeypatch, number, honest):
    """With an older roster, all of whose keys it made, one share of the noise is left, and that is what is claimed."""
    played(monkeypatch, number)
    outcome = go(tmp_path, colluding=1)
    mechanism = parse(settings(tmp_path, colluding=1)).shared_release
    plan = mechanism.plan(650)
    there = 1.0 if honest > 1 else plan.shares.base / plan.steps
    noise, _ = best_epsilon(Account([Gaussian(there)] * 2), 1e-5)
    assert outcome.privacy["claims"][0]["epsilon"] == pytest.approx(noise, rel=1e-3)
    assert "the provisioner, who made the signing keys of client-00000" in outcome.privacy["claims"][0]["adversary"]
    assert outcome.privacy["keys-by-provisioner"] == [f"client-{n:05}" for n in range(number)]
    lines = (outcome.directory.path / "ledger.jsonl").read_text().splitlines()
    events = [from_json(line["event"]) for line in map(json.loads, lines) if "event" in line]
    assert [event.honest for event in events] == [honest] * 2
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [5, 5], (
        "the server promises what nodes reckon with"
    )


def test_what_the_provisioner_can_sign_as_is_known_after_a_run_broke_off(tmp_path):
    one, other, third = (build(parse(settings(tmp_path))).strategy for _ in range(3))
    one._by_provisioner = frozenset({"north"})
    other.load_state_dict(one.state_dict())
    assert other.claim().by_provisioner == ("north",)
    third.load_state_dict(build(parse(settings(tmp_path))).strategy.state_dict())
    assert third.claim().by_provisioner is None


@pytest.mark.parametrize(
    ("colluding", "adversary"),
    [
        (0, "the server, and any party that sees the models of the run and is none of its clients"),
        (1, "the server together with one client, and any party that sees the models of the run"),
        (2, "the server together with up to 2 clients, and any party that sees the models of the run"),
    ],
)
def test_against_whom(colluding, adversary, tmp_path):
    budget = budget_in(tmp_path)
    budget.spend(DistributedGaussian(4, 2.0**20, 2.0**20, 650), 1)
    said = said_of(budget, colluding)
    assert said.claim.figures[0].adversary == adversary
    alone = any("no claim against the other clients" in line for line in render(said))
    assert alone == (colluding == 0)


def test_a_later_run_without_it_claims_nothing_against_clients_over_all_runs(tmp_path):
    budget = budget_in(tmp_path)
    budget.ledger.open(DistributedGaussian(4, 2.0**20, 2.0**20, 650), "client", "earlier", 1, lambda: None)
    budget.spend(Gaussian(4.0), 1)
    of_run, of_all = statement(Claim("global-dp", premises=HELD), budget, 1, "fixed").claim.figures
    assert (of_run.adversary, of_all.adversary) == (OUTSIDERS, NO_CLIENT)
    assert (of_run.neighbours, of_all.neighbours) == (None, ZEROED)


def test_a_plan_knows_it(tmp_path):
    keys = settings(tmp_path, **SHORT)
    found = preview(keys, Options(clients=5, epsilon=8.0))
    expected = build(parse(keys)).maximum_epsilon(prepare(parse(keys)).layout)
    assert found.forecast.last.claim.figures[0].epsilon == pytest.approx(expected)
    assert found.noise.std == (0.2, 0.2) and found.timing is None
    (within,) = found.within
    other = {**keys, "privacy.noise-multiplier": within.noise, "privacy.max-epsilon": 8.0}
    prepared = prepare(parse(other))
    assert prepared.plan.budget.fits(prepared.plan.strategy.events(prepared.layout)) == 2
    assert math.isfinite(within.noise)


def test_switching_it_off_gives_the_same_run_with_a_trusted_server(tmp_path):
    config = parse(settings(tmp_path) | SWITCHED_OFF)
    assert build(config).strategy.claim().parameters.keys().isdisjoint({COLLUDING})


@pytest.mark.slow
def test_a_run_learns(tmp_path):
    keys = {"num-rounds": 6, "client.local-epochs": 2, "privacy.clipping-norm": 2.0}
    outcome = go(tmp_path, clients=10, threshold=7, colluding=1, z=0.2, **keys)
    assert outcome.rounds[-1].central["accuracy"] > 0.75
