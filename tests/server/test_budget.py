"""Budgets: spent over all runs on the same data, on the server and on a node, and never passed."""

import json

import pytest
from rich.console import Console

from cloister.client.app import app
from cloister.client.books import promised
from cloister.core.config import parse
from cloister.core.errors import ConfigError, PrivacyError
from cloister.local.grid import LocalGrid
from cloister.local.simulation import simulate
from cloister.privacy.accounting import best_epsilon
from cloister.privacy.ledger import Ledger
from cloister.server.build import data_identity
from cloister.server.console import Narrator
from cloister.server.run import run

SOUND = {
    "task.model": "softmax",
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 2.0,
    "tensorboard": False,
    "num-rounds": 4,
}
FINALIZERS = ["fedavg", "fedprox", "fedavgm", "fedopt", "fedadam", "fedyogi", "fedadagrad"]


def silent(rounds=4):
    return Narrator(rounds, Console(quiet=True))


def go(tmp_path, **changes):
    settings = SOUND | {"output-dir": str(tmp_path)} | {key.replace("__", "."): value for key, value in changes.items()}
    return simulate({key.replace("_", "-"): value for key, value in settings.items()}, 4, silent())


def ledger_of(tmp_path, **changes):
    return Ledger(tmp_path / "ledgers" / f"{data_identity(parse(SOUND | changes))}.jsonl")


def test_a_run_stops_before_the_round_that_would_pass_the_budget(tmp_path, capsys):
    settings = SOUND | {"output-dir": str(tmp_path), "privacy.max-epsilon": 4.0}
    outcome = simulate(settings, 4)
    assert 0 < len(outcome.rounds) - 1 < 4
    assert "stopped before round" in outcome.stopped and "past the budget of 4" in outcome.stopped
    assert outcome.stopped in " ".join(capsys.readouterr().out.split("\n"))
    assert (outcome.directory.path / "model.npz").exists()
    assert outcome.privacy["claims"][0]["epsilon"] <= 4.0
    assert outcome.privacy["rounds"] == len(outcome.rounds) - 1


def test_the_next_run_on_the_same_data_goes_on_where_the_last_one_stopped(tmp_path):
    first = go(tmp_path, privacy__max_epsilon=4.0)
    second = go(tmp_path, privacy__max_epsilon=4.0)
    assert len(first.rounds) > 1 and len(second.rounds) == 1 and "before round 1" in second.stopped
    third = go(tmp_path, privacy__max_epsilon=4.0, privacy__data_identity="other")
    assert len(third.rounds) == len(first.rounds)


@pytest.mark.parametrize("strategy", FINALIZERS)
def test_a_calibrated_run_spends_its_budget_and_the_ledger_says_the_same(tmp_path, strategy):
    outcome = go(tmp_path, strategy__name=strategy, privacy__noise_multiplier="auto", privacy__max_epsilon=6.0)
    assert len(outcome.rounds) == 5 and not outcome.stopped
    (claim, _) = outcome.privacy["claims"]
    assert 0.95 * 6.0 < claim["epsilon"] <= 6.0
    account = ledger_of(tmp_path).account("client")
    assert best_epsilon(account, 1e-5)[0] == pytest.approx(claim["epsilon"])
    written = json.loads((outcome.directory.path / "privacy.json").read_text())
    assert written == outcome.privacy
    assert Ledger(outcome.directory.path / "ledger.jsonl").head == ledger_of(tmp_path).head


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy__server": "metric"}, "distance"),
        ({"privacy__placement": "model"}, "placement"),
        ({"privacy__noise_seed": 3}, "seeded"),
        ({"privacy__noise_multiplier": 0.0}, "no noise"),
    ],
)
def test_a_budget_for_what_has_no_guarantee_is_refused(tmp_path, changes, reason):
    with pytest.raises(ConfigError, match=rf"privacy\.max-epsilon = 5 .*{reason}"):
        go(tmp_path, privacy__max_epsilon=5.0, **changes)


def test_releases_without_a_guarantee_cannot_be_budgeted_afterwards(tmp_path):
    go(tmp_path, privacy__server="metric")
    outcome = go(tmp_path, privacy__max_epsilon=50.0)
    assert len(outcome.rounds) == 1 and "nothing can be claimed" in outcome.stopped


def test_a_sound_run_after_a_heuristic_one_claims_for_itself_alone(tmp_path):
    go(tmp_path, privacy__server="metric")
    facts = go(tmp_path).privacy
    assert [claim["scope"] for claim in facts["claims"]] == ["this run"]
    assert facts["ledger"]["holds-releases-without-a-guarantee"]


def test_a_heuristic_run_claims_nothing(tmp_path):
    facts = go(tmp_path, privacy__server="metric").privacy
    assert facts["status"] == "heuristic" and facts["claims"] == [] and facts["reasons"]


def test_a_private_distance_claims_the_least_noise_or_the_budget(tmp_path):
    private = {"privacy__server": "metric", "privacy__distance_release": "private"}
    (claim,) = go(tmp_path, **private).privacy["claims"]
    assert claim["epsilon"] >= claim["realised-epsilon"] > 0 and "least noise" in claim["basis"]
    budgeted = go(tmp_path, privacy__max_epsilon=30.0, privacy__data_identity="b", **private)
    first = budgeted.privacy["claims"][0]
    assert first["realised-epsilon"] <= first["epsilon"] <= 30.0
    calibrated = go(
        tmp_path, privacy__max_epsilon=60.0, privacy__noise_multiplier="auto", privacy__data_identity="c", **private
    )
    assert len(calibrated.rounds) == 5


def test_amplification_is_claimed_for_a_poisson_draw_and_for_a_registered_population(tmp_path):
    few = {"strategy__fraction_train": 0.5, "strategy__min_nodes": 1}
    plain = go(tmp_path, privacy__data_identity="a", **few).privacy
    poisson = go(tmp_path, privacy__data_identity="b", strategy__sampling="poisson", **few).privacy
    registered = go(tmp_path, privacy__data_identity="c", privacy__population=4, **few).privacy
    assert poisson["claims"][0]["epsilon"] < plain["claims"][0]["epsilon"]
    assert "amplification accounted for" in poisson["sampling"] and "no amplification" in plain["sampling"]
    assert registered["claims"][0]["relation"] == "replace-one" and "accounted for" in registered["sampling"]


def nodes(tmp_path, **budgets):
    return [
        {"partition-id": i, "num-partitions": 3, "ledger-dir": str(tmp_path / f"node-{i}")} | budgets.get(f"n{i}", {})
        for i in range(3)
    ]


def federated(tmp_path, node_configs, **changes):
    config = parse(SOUND | {"output-dir": str(tmp_path)} | changes)
    return run(LocalGrid(app, config.flat(), node_configs), config, silent())


def node_entries(tmp_path, node):
    (path,) = (tmp_path / f"node-{node}").glob("*.jsonl")
    return Ledger(path).entries


def test_a_node_whose_budget_is_spent_abstains_and_the_round_goes_on(tmp_path):
    outcome = federated(tmp_path, nodes(tmp_path, n1={"max-epsilon": 4.0}))
    accepted = [done.measured.accepted for done in outcome.rounds[1:]]
    assert accepted[0] == 3 and accepted[-1] == 2
    (rejection,) = outcome.rounds[-1].measured.rejected
    assert (
        rejection.node_id == 2 and "BudgetExhausted" in rejection.detail and "past the budget of 4" in rejection.detail
    )
    assert len(node_entries(tmp_path, 1)) == accepted.count(3)
    assert len(node_entries(tmp_path, 0)) == 4
    assert all(entry.event.noise_multiplier == 2.0 for entry in node_entries(tmp_path, 0))


def test_a_nodes_budget_holds_over_runs(tmp_path):
    configs = nodes(tmp_path, n1={"max-epsilon": 4.0})
    federated(tmp_path, configs)
    spent = len(node_entries(tmp_path, 1))
    outcome = federated(tmp_path, configs)
    assert all(done.measured.accepted == 2 for done in outcome.rounds[1:])
    assert len(node_entries(tmp_path, 1)) == spent


def test_a_node_with_a_budget_takes_no_part_in_what_has_no_guarantee(tmp_path):
    outcome = federated(tmp_path, nodes(tmp_path, n1={"max-epsilon": 4.0}), **{"privacy.server": "metric"})
    assert all(done.measured.accepted == 2 for done in outcome.rounds[1:])


@pytest.mark.parametrize("promise", [[0.0], [-1.0], [1], "much"])
def test_a_promise_that_cannot_be_read_is_refused(promise):
    with pytest.raises(PrivacyError, match="privacy-multipliers"):
        promised({"privacy-multipliers": promise})
