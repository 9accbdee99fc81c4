"""Runs with DP-SGD on the clients: what their ledgers say is what was done, and no budget is passed."""

import json
import math

import numpy as np
import pytest
from flwr.app import RecordDict
from rich.console import Console
from support import mostly_slow

from cloister.client.app import app
from cloister.client.budget import _limit
from cloister.client.costs import PrivacyCost
from cloister.client.ledgers import InMemoryLedger, identity_of
from cloister.client.node import node_of
from cloister.client.trainers import ModelAndTrainer, _made
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import parse
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian, Repeated, Unaccounted
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.utils.errors import BudgetExhausted, ConfigError, FederationError

CLIENTS = 4
DELTA = 1e-5
EXAMPLE_BUDGET = "max-example-epsilon"
SETTINGS = {
    "task.model": "softmax",
    "task.test-fraction": 0.0,
    "client.local-epochs": 1,
    "client.batch-size": 36,
    "client.learning-rate": 0.5,
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
    "privacy.dp-sgd-noise-multiplier": 2.0,
    "tensorboard": False,
    "num-rounds": 3,
    "seed": 1,
}
EXAMPLES = {359, 360}
"""Four fifths of 1,797 digits, dealt to four."""


def silent():
    return ConsoleReporter(3, Console(quiet=True))


def settings(tmp_path, **changes):
    return (
        SETTINGS
        | {"output-dir": str(tmp_path)}
        | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    )


def nodes(tmp_path, **special):
    return [
        {"partition-id": i, "num-partitions": CLIENTS, "ledger-dir": str(tmp_path / f"node-{i}")}
        | special.get(f"n{i}", {})
        for i in range(CLIENTS)
    ]


def federated(tmp_path, configured, **changes):
    config = parse(settings(tmp_path, **changes))
    return run(LocalGrid(app, config.flat(), configured), config, silent())


def entries(tmp_path, node, unit="example"):
    name = identity_of(node_of({"partition-id": node, "num-partitions": CLIENTS}), "digits")
    found = Ledger(tmp_path / f"node-{node}" / f"{name}.jsonl").entries
    return [entry for entry in found if entry.unit == unit]


def step(examples, sigma=2.0, batch=36):
    return Repeated(Gaussian(sigma, Sampling("bounded-poisson", batch / examples)), math.ceil(examples / batch))


def spent(rounds, examples=359):
    """Recomputed from the configuration alone."""
    return Account().plus(Gaussian(2.0, Sampling("bounded-poisson", 36 / examples)), 10 * rounds).epsilon(DELTA)


@pytest.mark.parametrize("model", mostly_slow(["softmax", "mlp"], ["softmax"]))
def test_a_run_learns_something(tmp_path, model):
    changes = {"client__learning_rate": 1.0, "num_rounds": 4, "privacy__dp_sgd_clipping_norm": 2.0}
    outcome = simulate(settings(tmp_path, task__model=model, **changes), CLIENTS, silent())
    assert outcome.rounds[-1].central["accuracy"] > 0.5 > outcome.rounds[0].central["accuracy"]
    assert all(done.train == {} for done in outcome.rounds)


def test_a_nodes_ledger_holds_the_steps_of_every_round(tmp_path):
    federated(tmp_path, nodes(tmp_path), privacy__clipping_decay=0.5, privacy__min_clipping_norm=0.1)
    for node in range(CLIENTS):
        found = entries(tmp_path, node)
        assert [entry.round for entry in found] == [1, 2, 3] and all(entry.done for entry in found)
        assert {entry.mechanism for entry in found} == {"dp-sgd"}
        assert [entry.clip for entry in found] == [1.0, 0.5, 0.25]
        (event,) = {entry.event for entry in found}
        assert event in [step(examples) for examples in EXAMPLES]
        # About the client itself the server promised nothing.
        assert all(isinstance(entry.event, Unaccounted) for entry in entries(tmp_path, node, "client"))


def test_its_epsilon_is_that_of_an_independent_recomputation(tmp_path):
    federated(tmp_path, nodes(tmp_path))
    ledgers = [entries(tmp_path, node) for node in range(CLIENTS)]
    epsilons = [Account(entry.event for entry in found).epsilon(DELTA) for found in ledgers]
    # 1,438 examples for four: two have one more.
    assert sorted(epsilons) == pytest.approx([spent(3, 360)] * 2 + [spent(3, 359)] * 2)


def test_simulated_clients_count_in_their_state(tmp_path):
    config = parse(settings(tmp_path))
    grid = LocalGrid.simulated(app, config.flat(), CLIENTS)
    run(grid, config, silent())
    for context in grid._contexts.values():
        ((event, count),) = context.state.config_records["example-releases"].items()
        assert count == 30 and json.loads(event)["sampling"]["kind"] == "bounded-poisson"


class TestBudget:
    def test_of_the_run_ends_the_part_of_every_client(self, tmp_path):
        budget = (spent(2, 359) + spent(3, 360)) / 2
        outcome = simulate(settings(tmp_path, privacy__client_max_epsilon=budget), CLIENTS, silent())
        assert [done.measured.accepted for done in outcome.rounds[1:]] == [4, 4, 0]
        assert all("BudgetExhausted" in item.detail for item in outcome.rounds[3].measured.rejected)
        # Nobody trained: the model is that of the round before.
        assert outcome.rounds[3].central == outcome.rounds[2].central

    def test_of_a_node_is_its_own_and_holds_over_runs(self, tmp_path):
        budget = (spent(2) + spent(3)) / 2
        special = {"n1": {EXAMPLE_BUDGET: budget}}
        outcome = federated(tmp_path, nodes(tmp_path, **special))
        assert [done.measured.accepted for done in outcome.rounds[1:]] == [4, 4, 3]
        assert len(entries(tmp_path, 1)) == 2 and len(entries(tmp_path, 1, "client")) == 2
        assert Account(entry.event for entry in entries(tmp_path, 1)).epsilon(DELTA) <= budget
        again = federated(tmp_path, nodes(tmp_path, **special), num_rounds=1)
        assert again.rounds[1].measured.accepted == 3
        assert len(entries(tmp_path, 1)) == 2 and len(entries(tmp_path, 0)) == 4

    def test_a_tally_counts_nothing_past_it(self):
        tally = PrivacyBudget(InMemoryLedger(RecordDict()), "", "example", DELTA, spent(2), kind="renyi")
        with tally.release(step(359), 1):
            pass
        before = tally.account().epsilon(DELTA)
        with pytest.raises(BudgetExhausted), tally.release(step(359), 2):
            pytest.fail("the block was entered")
        assert tally.account().epsilon(DELTA) == before == pytest.approx(spent(1))

    def test_the_smaller_one_wins(self):
        privacy = PrivacyConfig(server="none", client="dp-sgd", client_max_epsilon=2.0, target_delta=1e-4)

        def limit(run, own, unit="example"):
            return _limit(
                PrivacyCost(unit, ()), run, node_of({"max-epsilon": 9.0, EXAMPLE_BUDGET: own, "target-delta": 1e-6})
            )

        assert limit(privacy, 3.0) == (1e-6, 2.0)
        assert limit(privacy, 1.0) == (1e-6, 1.0)
        assert limit(privacy, 0.0) == (1e-4, 2.0)
        assert limit(PrivacyConfig(server="none", client="dp-sgd"), 0.0)[1] == 0
        # The run's is about examples here, and about the client with noise on what it sends.
        assert limit(privacy, 3.0, "client") == (1e-6, 9.0)
        local = PrivacyConfig(server="none", client="gaussian", client_max_epsilon=2.0, target_delta=1e-4)
        assert limit(local, 0.0, "client") == (1e-6, 2.0) and limit(local, 3.0) == (1e-6, 3.0)

    def test_a_node_with_one_takes_no_part_without_dp_sgd(self, tmp_path):
        changes = {"privacy__client": "none", "privacy__dp_sgd_noise_multiplier": 1.0, "num_rounds": 1}
        outcome = federated(tmp_path, nodes(tmp_path, n1={EXAMPLE_BUDGET: 100.0}), **changes)
        assert outcome.rounds[1].measured.accepted == 3
        assert entries(tmp_path, 1) == []
        # The others trained in the open, and their ledgers know it.
        assert math.isinf(Account(entry.event for entry in entries(tmp_path, 0)).epsilon(DELTA))

    def test_nor_with_seeded_noise(self, tmp_path):
        outcome = federated(tmp_path, nodes(tmp_path, n1={EXAMPLE_BUDGET: 100.0}), num_rounds=1, privacy__noise_seed=3)
        assert outcome.rounds[1].measured.accepted == 3

    def test_a_budget_that_no_round_fits_ends_the_run(self, tmp_path):
        config = parse(settings(tmp_path, privacy__client_max_epsilon=0.01))
        with pytest.raises(FederationError, match="no budget of this node covers this round"):
            run(LocalGrid.simulated(app, config.flat(), CLIENTS), config, silent())

    @pytest.mark.parametrize("budget", ["much", -1.0])
    def test_a_node_whose_budget_is_no_number_takes_no_part(self, tmp_path, budget, caplog):
        outcome = federated(tmp_path, nodes(tmp_path, n2={EXAMPLE_BUDGET: budget}), num_rounds=1)
        (rejection,) = outcome.rounds[1].measured.rejected
        assert rejection.node_id == 3 and "NodeConfigError: details are in the log" in rejection.detail
        assert f"max-example-epsilon = {budget!r} is not valid" in caplog.text


@pytest.mark.slow
def test_with_noise_on_the_server_too_both_are_counted(tmp_path):
    changes = {"privacy__server": "global-dp", "privacy__noise_multiplier": 1.5, "privacy__clipping_norm": 0.5}
    outcome = federated(tmp_path, nodes(tmp_path), **changes)
    assert {entry.event for entry in entries(tmp_path, 0, "client")} == {Gaussian(1.5)}
    assert {entry.event for entry in entries(tmp_path, 0)} <= {step(examples) for examples in EXAMPLES}
    server = outcome.privacy["claims"][0]
    assert server["unit"] == "client" and server["epsilon"] == pytest.approx(
        Account([Gaussian(1.5)] * 3).epsilon(DELTA, "pld")
    )


def test_shuffled_batches_are_recorded_without_amplification(tmp_path):
    federated(tmp_path, nodes(tmp_path), privacy__batch_sampling="shuffle", client__local_epochs=2, num_rounds=1)
    assert {entry.event for entry in entries(tmp_path, 0)} == {Repeated(Gaussian(2.0), 2)}


def test_seeded_runs_repeat_and_others_do_not(tmp_path):
    def model(**changes):
        outcome = simulate(settings(tmp_path, num_rounds=1, **changes), CLIENTS, silent())
        return np.concatenate([array.numpy().ravel() for array in outcome.arrays.values()])

    np.testing.assert_array_equal(model(privacy__noise_seed=5), model(privacy__noise_seed=5))
    # Of 650 numbers in single precision one is the same by chance in one of some ten thousand pairs of runs.
    assert (model() != model()).mean() > 0.99


class Crash:
    def fit(self, examples, plan):
        raise MemoryError


def test_what_a_training_would_cost_is_on_disk_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(ModelAndTrainer, "trainer", Crash())
    _made.cache_clear()  # a bench of an earlier test has its trainer already
    with pytest.raises(FederationError, match="MemoryError"):
        federated(tmp_path, nodes(tmp_path), num_rounds=1)
    (entry,) = entries(tmp_path, 0)
    assert entry.event in [step(examples) for examples in EXAMPLES] and not entry.done


@pytest.mark.slow
def test_what_scores_cost_is_recorded_too(tmp_path):
    federated(tmp_path, nodes(tmp_path), task__test_fraction=0.2, evaluation__federated="on", num_rounds=1)
    train, score = entries(tmp_path, 0)
    assert isinstance(train.event, Repeated) and score.event == Unaccounted("scores left without noise")


def test_a_budget_of_the_run_lets_no_scores_leave(tmp_path):
    asked = {"task__test_fraction": 0.2, "evaluation__federated": "on", "privacy__client_max_epsilon": 100.0}
    with pytest.raises(ConfigError, match="scores leave clients without noise, and no budget covers that"):
        federated(tmp_path, nodes(tmp_path), **asked)
    assert not any(entries(tmp_path, number) for number in range(CLIENTS))
