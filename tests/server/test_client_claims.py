"""The claim of `privacy.json` about clients never exceeds their own budget."""

import json
import re

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from rich.console import Console

from cloister.client.app import app
from cloister.client.data import _part, _parts, benchmark_of
from cloister.config.run import parse
from cloister.estimate.budget import for_all
from cloister.estimate.preview import Options, preview
from cloister.estimate.render import render as rendered
from cloister.privacy.accounting.account import by_accountant
from cloister.privacy.claims.client import sound_unit
from cloister.privacy.claims.render import render_clients
from cloister.privacy.claims.to_json import record_clients
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.server import round
from cloister.server.build import build
from cloister.server.client_claims import client_claim, shared_units, sizes_known
from cloister.server.preflight import calibrated_for
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.html.page import write_report
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.tasks.base import Dataset, Examples
from cloister.tasks.datasets.regressions import Linear
from cloister.utils.arrays import Layout, stacked
from cloister.utils.errors import ConfigError, FederationError

SETTINGS = {
    "task.model": "softmax",
    "client.local-epochs": 1,
    "client.batch-size": 32,
    "client.learning-rate": 0.1,
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
    "num-rounds": 1,
    "tensorboard": False,
}


WHOLE = {"task.test-fraction": 0.0, "evaluation.federated": "off"}
LAYOUT = Layout.of({"w": np.zeros(1, np.float32)})


def clients_of(tmp_path, **changes):
    keys = SETTINGS | {"output-dir": str(tmp_path)}
    keys |= {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return simulate(keys, 4, ConsoleReporter(1, Console(quiet=True))).privacy["clients"]


@pytest.mark.slow
def test_noise_alone_is_claimed_for_the_sizes_that_a_simulation_dealt(tmp_path):
    facts = clients_of(tmp_path, seed=3)
    config = parse(SETTINGS)
    dealt = list(map(len, LocalGrid.simulated(app, config.flat(), 4).units(config, 3)))
    assert facts["status"] == "sound" and facts["sizes-are-known"]
    assert [size["examples"] for size in facts["by-examples"]] == sorted(set(dealt))
    assert sum(dealt) == pytest.approx(0.8 * 1797, rel=0.01)


@pytest.mark.slow
def test_and_for_examples_of_sizes_where_nobody_knows_them(tmp_path):
    facts = record_clients(client_claim(build(parse(SETTINGS | {"output-dir": str(tmp_path)})), LAYOUT, 1))
    spent = {size["examples"]: size["claims"][0]["epsilon"] for size in facts["by-examples"]}
    assert list(spent) == [32, 33, 320, 3200] and not facts["sizes-are-known"]
    assert max(spent.values()) == spent[33]


@pytest.mark.slow
def test_of_many_sizes_four_stand_for_all(tmp_path):
    plan = build(parse(SETTINGS | {"output-dir": str(tmp_path), "client.batch-size": 64}))
    sizes = [LocalSteps(units, 64, 1) for units in (9, 40, 64, 65, 70, 128, 500)]
    told = client_claim(plan, LAYOUT, 1, sizes)
    assert [size.size for size in told.sizes] == [9, 65, 500] and told.known
    assert next(iter(sorted(told.by_size.items(), key=lambda item: -item[1].epsilon)))[0] in (9, 65)


@pytest.fixture
def three_hospitals(monkeypatch):
    """Make `linear` three hospitals of 4, 4 and 8 visits; patient 9 was in all of them, patient 8 in two."""

    def clear():
        benchmark_of.cache_clear()
        _parts.cache_clear()
        _part.cache_clear()

    patients = np.array([1, 1, 9, 8, 2, 9, 9, 3, 9, 4, 4, 5, 6, 7, 8, 8])
    examples = Examples(np.zeros((16, 2), np.float32), np.zeros(16, np.float32))
    data = Dataset(examples, examples, owners=np.repeat([0, 1, 2], [4, 4, 8]), groups={"patient": patients})
    monkeypatch.setattr(Linear, "load", lambda self: data)
    clear()
    yield parse(SETTINGS | {"task.name": "linear", "task.model": "linear", "task.group": "patient", **WHOLE})
    clear()


def test_who_holds_data_of_one_person_is_counted(three_hospitals):
    plan = build(three_hospitals)
    few, many = LocalSteps(3, 32, 1), LocalSteps(6, 32, 1)
    grid = LocalGrid.simulated(app, three_hospitals.flat(), 3)
    assert sizes_known(plan, grid) == (few, few, many)
    assert shared_units(plan, grid) == {(few, few, many), (few, many)}


def test_a_person_of_three_hospitals_pays_at_each_of_them(three_hospitals):
    plan = build(three_hospitals)
    grid = LocalGrid.simulated(app, three_hospitals.flat(), 3)
    claim = client_claim(plan, LAYOUT, 2, sizes_known(plan, grid), shared_units(plan, grid))
    each = sound_unit([LocalSteps(3, 32, 1)] * 3, plan.config.privacy.dp_sgd.noise_multiplier, 2)
    assert {figure.epsilon for figure in claim.by_size.values()} == {min(by_accountant(each, 1e-5).values())}
    assert {figure.holders for figure in claim.by_size.values()} == {3}


def test_noise_from_a_budget_counts_a_person_at_all_hospitals(three_hospitals):
    auto = {"privacy.dp-sgd-noise-multiplier": "auto", "privacy.client-max-epsilon": 8.0}
    config = parse(three_hospitals.flat() | auto)
    found = calibrated_for(config, LocalGrid.simulated(app, {}, 3))
    plan, grid = build(found), LocalGrid.simulated(app, found.flat(), 3)
    claim = client_claim(plan, LAYOUT, found.num_rounds, sizes_known(plan, grid), shared_units(plan, grid))
    assert 6.0 < max(figure.epsilon for figure in claim.by_size.values()) <= 8.0


def test_a_plan_from_a_budget_has_that_noise_and_names_patients(three_hospitals):
    auto = {"privacy.dp-sgd-noise-multiplier": "auto", "privacy.client-max-epsilon": 8.0}
    noise = calibrated_for(parse(three_hospitals.flat() | auto), LocalGrid.simulated(app, {}, 3)).privacy.client
    planned = preview(three_hospitals.flat(), Options(3, epsilon=8.0, timing=False))
    (all_sizes,) = for_all(planned.within)
    assert all_sizes.noise == noise.noise_multiplier
    lines = "\n".join(rendered(planned))
    assert "for one patient of a client with 6 patients" in lines and "one patient: privacy.dp-sgd-noise" in lines
    assert not re.search(r"\bgroups?\b", lines.replace("task.group", ""))


def test_where_whole_groups_are_dealt_one_client_holds_each(three_hospitals):
    config = parse(three_hospitals.flat() | {"task.partition": "iid"})
    assert shared_units(build(config), LocalGrid.simulated(app, config.flat(), 3)) == frozenset()


def test_examples_that_are_dealt_again_are_counted_at_each_client(three_hospitals):
    again = {"task.partition": "iid", "task.examples-per-client": 8, "task.group": ""}
    config = parse(three_hospitals.flat() | again)
    found = shared_units(build(config), LocalGrid.simulated(app, config.flat(), 4))
    assert found == {(LocalSteps(8, 32, 1),) * 2}


def test_scores_of_clients_that_never_train_tell_of_people_who_are_at_others_too(three_hospitals):
    """Without noise: what a patient's visits at a held-out hospital do to them is bounded by nothing."""
    config = parse(three_hospitals.flat() | {"evaluation.held-out-clients": 0.4, "evaluation.federated": "on"})
    plan = build(config)
    grid = LocalGrid.simulated(app, config.flat(), 3)
    sizes, shared = sizes_known(plan, grid), shared_units(plan, grid)
    assert client_claim(plan, LAYOUT, 1, sizes, frozenset()).is_guaranteed
    assert "of those that never train leave" in "".join(client_claim(plan, LAYOUT, 1, sizes, shared).reasons)


def test_nodes_with_data_of_their_own_tell_no_size(tmp_path):
    nodes = [{"partition-id": 0, "num-partitions": 2}, {"data-path": "not-read", "public-size": 7}]
    config = parse(SETTINGS | {"output-dir": str(tmp_path)})
    grid = LocalGrid(app, config.flat(), nodes)
    assert sizes_known(build(config), grid) == () and shared_units(build(config), grid) is None


def test_clients_that_all_abstain_have_told_nothing(tmp_path):
    """Their budget decides it by public numbers: what was planned never happened."""
    settings = SETTINGS | {"output-dir": str(tmp_path), "privacy.client-max-epsilon": 0.01, "num-rounds": 3}
    config = parse(settings)
    with pytest.raises(FederationError, match="no reply counted in round 1"):
        run(LocalGrid.simulated(app, config.flat(), 4), config, ConsoleReporter(3, Console(quiet=True)))
    (path,) = tmp_path.glob("*/privacy.json")
    facts = json.loads(path.read_text())["clients"]
    assert {(size["rounds"], size["claims"][0]["epsilon"]) for size in facts["by-examples"]} == {(0, 0.0)}
    page = write_report(path.parent).read_text()
    assert "No client trained" in page and "instead of 50 %" not in page


def nobody(tmp_path, config, nodes):
    """The clients' part of `privacy.json`, and the report, of a run in which nobody may train."""
    with pytest.raises(FederationError):
        outcome = run(LocalGrid(app, config.flat(), nodes), config, ConsoleReporter(3, Console(quiet=True)))
        raise FederationError(outcome.stopped)
    (path,) = tmp_path.glob("*/privacy.json")
    return json.loads(path.read_text())["clients"], write_report(path.parent).read_text()


def test_a_run_that_too_few_nodes_came_to_has_asked_nobody(tmp_path):
    settings = SETTINGS | {"output-dir": str(tmp_path), "num-rounds": 3, "node-timeout": 0.1, "strategy.min-nodes": 2}
    told, page = nobody(tmp_path, parse(settings), [{"partition-id": 0, "num-partitions": 2}])
    assert {(size["rounds"], size["claims"][0]["epsilon"]) for size in told["by-examples"]} == {(0, 0.0)}
    assert "No client trained" in page and "instead of 50 %" not in page


def test_clients_whose_policies_all_refuse_have_told_nothing(tmp_path):
    """As the operator of a federation sees it who begins a run of another task."""
    policy = tmp_path / "policy.toml"
    policy.write_text("mechanisms = []\ntasks = ['heart-disease']\n")
    nodes = [
        {"partition-id": n, "num-partitions": 2, "policy": str(policy), "ledger-dir": str(tmp_path)} for n in (0, 1)
    ]
    told, page = nobody(tmp_path, parse(SETTINGS | {"output-dir": str(tmp_path), "num-rounds": 3}), nodes)
    assert {(size["rounds"], size["claims"][0]["epsilon"]) for size in told["by-examples"]} == {(0, 0.0)}
    assert "No client trained" in page and "allowed: heart-disease" in page


def test_one_that_did_not_only_abstain_counts_all_that_was_planned(tmp_path):
    """A reply that came and did not count, or a client that was silent, may have trained."""

    class Spoiled(LocalGrid):
        def _answer(self, message):
            reply = super()._answer(message)
            if message.metadata.dst_node_id == 4:
                reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "DataError: no"), reply_to=message)
            return reply

    settings = SETTINGS | {"output-dir": str(tmp_path), "privacy.client-max-epsilon": 0.01, "num-rounds": 3}
    config = parse(settings)
    with pytest.raises(FederationError):
        run(Spoiled.simulated(app, config.flat(), 4), config, ConsoleReporter(3, Console(quiet=True)))
    (path,) = tmp_path.glob("*/privacy.json")
    (first, *_) = json.loads(path.read_text())["clients"]["by-examples"]
    assert first["rounds"] == 3 and "counted for all rounds" in first["claims"][0]["counts"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evaluation__federated": "on"}, "scores of models"),
        (
            {"privacy__server": "laplace-clustering", "privacy__clusters": 2, "privacy__choice": "exact"},
            "which hypothesis suits the examples",
        ),
    ],
)
def test_what_leaves_beside_the_noise_takes_the_claim_away(tmp_path, changes, reason):
    facts = clients_of(tmp_path, **changes)
    assert facts["status"] == "heuristic" and any(reason in each for each in facts["reasons"])
    assert not any(size["claims"] for size in facts["by-examples"])


@pytest.mark.slow
def test_a_private_choice_among_hypotheses_is_in_the_claim(tmp_path):
    """It was charged on the node, and missing in what the server says of it."""

    def claims(**clusters):
        keys = SETTINGS | {"privacy.server": "laplace-clustering", "output-dir": str(tmp_path)} | clusters
        facts = record_clients(client_claim(build(parse(keys)), LAYOUT, 3))
        assert facts["status"] == "conditional", "no transport has shown its premises"
        return {size["examples"]: [claim["epsilon"] for claim in size["claims"]] for size in facts["by-examples"]}

    alone = claims(**{"privacy.clusters": 1})
    chosen = claims(**{"privacy.clusters": 2, "privacy.choice-epsilon": 2.0})
    for size, (example, client) in alone.items():
        assert example + 0.5 < chosen[size][0] <= example + 3 * 2.0 + 1e-3
        assert chosen[size][1] == pytest.approx(client + 3 * 2.0 * size)
    first = {"privacy.clusters": 2, "privacy.choice-epsilon": 2.0, "privacy.clusters-split-round": 1}
    assert claims(**first) == chosen


def test_scores_of_those_who_never_train_do_not(tmp_path):
    assert clients_of(tmp_path, evaluation__held_out_clients=0.25)["status"] == "sound"


class Renamed(LocalGrid):
    """Every node was started again after the second round, under a new id and with the data that it had."""

    rounds = 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.rounds += messages[0].metadata.message_type == "train"
        return super().send_and_receive(messages, timeout=timeout)

    def get_node_ids(self):
        if self.rounds == 2 and 1 in self._contexts:
            self._contexts = {node + 100: context for node, context in self._contexts.items()}
            for node, context in self._contexts.items():
                context.node_id = node
        return list(self._contexts)


@pytest.mark.slow
def test_scores_of_those_who_may_have_trained_under_another_id_do(tmp_path):
    settings = SETTINGS | {"num-rounds": 4, "evaluation.held-out-clients": 0.25, "output-dir": str(tmp_path)}
    config = parse(settings)
    facts = run(Renamed.simulated(app, config.flat(), 4), config, ConsoleReporter(1, Console(quiet=True))).privacy[
        "clients"
    ]
    assert facts["status"] == "heuristic"
    assert any("come back under a new id" in reason for reason in facts["reasons"])


@pytest.mark.parametrize("hypotheses", [1, 3])
def test_under_laplace_a_client_is_charged_for_the_one_hypothesis_it_sends(tmp_path, hypotheses):
    """The softmax model of digits has 650 parameters, however many of them the server trains side by side."""
    laplace = {"privacy.client": "laplace", "privacy.radius": 1.0, "privacy.laplace-noise-multiplier": 5.0}
    cluster = {"privacy.server": "laplace-clustering", "privacy.clusters": hypotheses}
    plan = build(parse(SETTINGS | laplace | cluster | {"output-dir": str(tmp_path), "task.test-fraction": 0.0}))
    one = plan.task.build().arrays()
    layout = Layout.of(stacked([one] * plan.hypotheses))
    leaked = record_clients(client_claim(plan, layout, 1))["leakage-of-a-release"]
    assert layout.size == 650 * hypotheses
    assert leaked == 650 / 5.0


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy.client": "gaussian", "privacy.gaussian-clipping-norm": 0.5},
        {"privacy.client": "laplace"},
        {"privacy.client": "laplace", "privacy.radius": 2.0, "privacy.per-layer": True},
        {"privacy.clipping-decay": 0.1, "privacy.min-clipping-norm": 0.2, "privacy.batch-sampling": "shuffle"},
    ],
)
@pytest.mark.parametrize("choice", [{}, {"privacy.server": "laplace-clustering", "privacy.choice": "exact"}])
def test_the_server_claims_for_the_mechanism_that_its_clients_have(tmp_path, changes, choice):
    """Each side reads the configuration by itself; what they read is the same."""
    settings = SETTINGS | changes | choice
    noisy = {f"privacy.{settings['privacy.client']}-noise-multiplier": 3.0, "output-dir": str(tmp_path)}
    config = parse(settings | noisy)
    mechanism = config.privacy.client.noise_on_update or config.privacy.dp_sgd.mechanism()
    circumstances = config.privacy.circumstances
    claim = client_claim(build(config), LAYOUT, 1)
    assert claim.parameters.items() >= mechanism.parameters().items()
    assert claim.reasons == (*mechanism.caveats(), *circumstances.caveats())


def test_a_mechanism_without_a_claim_is_not_taken_for_another(tmp_path, monkeypatch):
    plan = build(parse(SETTINGS | {"output-dir": str(tmp_path)}))
    monkeypatch.setattr("cloister.config.variants.DpSgdPrivacy.clips_gradients", False)
    with pytest.raises(ConfigError, match=r"privacy.client = 'dp-sgd' has no claim"):
        client_claim(plan, Layout.of(plan.task.build().arrays()), 1)


def test_scores_take_it_away_under_laplace_too(tmp_path):
    laplace = {"privacy__client": "laplace", "privacy__radius": 1.0}
    assert clients_of(tmp_path, **laplace)["claims"]
    assert not clients_of(tmp_path, evaluation__federated="on", **laplace)["claims"]


def test_a_round_whose_replies_came_counts_though_nothing_was_made_of_it(tmp_path):
    class Broken(round.RoundLoop):
        def _send(self, number, messages):
            replies = super()._send(number, messages)
            if number == 2:
                raise KeyboardInterrupt
            return replies

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("cloister.server.run.RoundLoop", Broken)
        clients_of(tmp_path, num_rounds=3)
    (path,) = tmp_path.glob("*/privacy.json")
    facts = json.loads(path.read_text())
    # Whoever stopped it may have done so for what was released: what was planned is claimed.
    assert facts["rounds"] == 1 and facts["clients"]["by-examples"][0]["rounds"] == 3


def test_raw_models_are_named_where_hypotheses_are_trained_without_noise(tmp_path):
    keys = {"privacy__server": "laplace-clustering", "privacy__client": "none"}
    outcome = SETTINGS | {"output-dir": str(tmp_path)}
    outcome |= {key.replace("__", "."): value for key, value in keys.items()}
    facts = simulate(outcome, 4, ConsoleReporter(1, Console(quiet=True))).privacy
    assert "every client's model, to the server" in facts["unprotected"]


def test_where_groups_are_clipped_together_the_claim_is_for_a_group(tmp_path):
    """It has the name of the groups' column."""
    grouped = {"task.name": "mnist-writers", "task.group": "writer", "privacy.group-cap": 3}
    keys = SETTINGS | grouped | {"task.model": "auto", "output-dir": str(tmp_path)}
    claim = client_claim(build(parse(keys)), LAYOUT, 2)
    facts = record_clients(claim)
    assert facts["parameters"]["privacy.group-cap"] == 3
    for size in facts["by-examples"]:
        assert "examples" not in size and size["groups"] > 0
        of_a_unit = size["claims"][0]
        assert of_a_unit["unit"] == "group" and "one writer" in of_a_unit["neighbours"]
    assert any("for one writer of a client with 32 writers" in line for line in render_clients(claim))


def test_units_at_several_clients_that_choose_among_hypotheses_have_no_figure(tmp_path):
    """The costliest combination of clients was found without its choices: the figure could be too small."""
    keys = SETTINGS | {"privacy.server": "laplace-clustering", "privacy.clusters": 2, "output-dir": str(tmp_path)}
    plan, shared = build(parse(keys)), frozenset({(LocalSteps(3, 32, 1), LocalSteps(9, 32, 1))})
    claim = client_claim(plan, LAYOUT, 2, [LocalSteps(3, 32, 1)], shared)
    assert claim.status == "heuristic" and "several clients hold data of one unit" in claim.reasons[0]
    assert not any(size.figures for size in claim.sizes)
    assert client_claim(plan, LAYOUT, 2, [LocalSteps(3, 32, 1)], frozenset()).is_guaranteed
