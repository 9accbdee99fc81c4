"""Noise scaled by a distance under secure aggregation: what the server learns, tells and charges, what nodes do."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from secure_runs import MODEL, SecureRun, app_with, phase_of, random_updates, settings
from statistics_of_noise import is_normal, std_is

from cloister.client.ledgers import ledger_of
from cloister.client.node import node_of
from cloister.privacy.mechanisms.distributed import mean
from cloister.privacy.mechanisms.distributed.plan import Plan
from cloister.utils.wire import CONFIG, DISTANCE

Z_D = "privacy.distance-noise-multiplier"
METRIC = {
    "privacy.server": "metric",
    "privacy.distance": "rms",
    "privacy.distance-release": "private",
    Z_D: 0.005,
}


def run_of(folder, updates=None, gone=None, nodes=None, app=None, **more):
    updates = updates or random_updates(5, scale=0.02)
    return SecureRun(settings(folder, clients=len(updates), **(METRIC | more)), updates, gone, nodes, app)


def rows_of(updates):
    return [np.concatenate([array.ravel() for array in update.values()]) for update in updates]


def told(messages):
    return {one.content.config_records[CONFIG].get(DISTANCE) for one in messages}


class TestTheDistance:
    @pytest.mark.slow
    def test_is_that_of_the_survivors_and_told_in_each_message_of_the_next_round(self, tmp_path):
        """One of them vanishes before it shows its surplus: its noise is known all the same."""
        updates = random_updates(5, scale=0.02)
        run = run_of(tmp_path, updates, {4: "unmask"}, z=0.01)
        arrays, _ = run.strategy.aggregate_train(1, run.collect())
        expected = math.sqrt(np.mean([np.sum((a - b) ** 2) for a, b in combinations(rows_of(updates), 2)]))
        measured, first = run.strategy.measured, len(run.asked)
        assert arrays is not None and measured.released_distance == pytest.approx(expected, rel=0.03)
        assert (measured.noise_multiplier, told(run.asked)) == (0.01, {1.0})
        resumed = run_of(tmp_path, updates, z=0.01)
        resumed.strategy.load_state_dict(run.strategy.state_dict())
        assert resumed.strategy.mechanism == run.strategy.mechanism
        run.strategy.aggregate_train(2, run.collect(2))
        assert told(run.asked[first:]) == {measured.released_distance}
        assert run.strategy.measured.noise_multiplier == pytest.approx(0.01 / measured.released_distance)

    def test_stays_where_it_was_if_the_round_is_abandoned(self, tmp_path):
        run = run_of(tmp_path, gone={1: "sign", 2: "sign"})
        run.strategy.mechanism = replace(run.strategy.mechanism, distance=0.5)
        assert run.strategy.aggregate_train(1, run.collect()) == (None, None)
        assert run.strategy.mechanism.distance == 0.5


def noise_of(folder, distance):
    """Return the noise in the sums of five rounds, over C, where the server sends a distance."""
    updates = [{name: np.zeros_like(array) for name, array in MODEL.items()} for _ in range(5)]
    run, found = run_of(folder, updates, colluding=1), []
    run.strategy.mechanism = replace(run.strategy.mechanism, distance=distance)
    for number in range(1, 6):
        found.append(run.collect(number).sum.total[:650])
    return np.concatenate(found) / run.strategy.mechanism.plan(650).steps


@pytest.mark.slow
class TestTheNoise:
    """Two-sided. Of five survivors four are honest at least: they hold 5/4 of the variance that is charged."""

    @pytest.mark.parametrize(("distance", "factor"), [(0.4, 2.5), (1e300, 0.5)])
    def test_in_the_sum_follows_what_is_told_down_to_the_least(self, distance, factor, tmp_path):
        sample, expected = noise_of(tmp_path, distance), factor * math.sqrt(5 / 4)
        assert std_is(sample, expected, 0.08) and is_normal(sample, expected)
        assert not std_is(sample, expected * 0.85, 0.08) and not std_is(sample, expected * 1.2, 0.08)

    def test_of_nodes_that_do_not_hold_what_they_are_told_is_found(self, tmp_path, monkeypatch):
        def unheld(bound, multiplier, parties, parameters, beside, *given):
            return Plan.of(bound, multiplier / 4, parties, parameters, beside=beside)

        monkeypatch.setattr(mean, "_planned", unheld)
        assert not std_is(noise_of(tmp_path, 1e300), 0.5 * math.sqrt(5 / 4), 0.08)


class TestCharges:
    def test_both_sides_count_both_releases_at_the_least_noise(self, tmp_path):
        policy = tmp_path / "policy.toml"
        policy.write_text('tasks = ["digits"]\nmechanisms = ["metric"]\nmax-epsilon = 90.0\nmin-colluding = 1\n')
        own = [{"policy": str(policy), "ledger-dir": str(tmp_path / str(n))} for n in range(5)]
        nodes = [{"partition-id": n, "num-partitions": 5, **node} for n, node in enumerate(own)]
        run = run_of(tmp_path, nodes=nodes, gone={2: "share"}, z=3.0, colluding=1, **{Z_D: 2.0})
        run.strategy.mechanism = replace(run.strategy.mechanism, distance=0.5)
        run.collect()
        squares, update = run.spent()
        assert (squares.parameters, update.parameters) == (1, 650)
        assert squares.multiplier("add-or-remove", True) == pytest.approx(2.0, rel=1e-4)
        assert update.multiplier("add-or-remove", True) == pytest.approx(1.5, rel=1e-4)
        replaced = [("example", squares.replaced()), ("example", update.replaced())]
        for number, node in enumerate(nodes, start=1):
            entries = ledger_of(node_of(node), "digits").entries
            expected = [("client", squares), ("client", update), *replaced] if number != 2 else []
            assert [(entry.unit, entry.event) for entry in entries] == expected

    @pytest.mark.parametrize(("minimum", "taken"), [pytest.param(1.1, True, marks=pytest.mark.slow), (1.3, False)])
    def test_a_policy_counts_the_least_noise_of_both(self, minimum, taken, tmp_path):
        """1.5 for the updates and 2 for the squares are 1.2 together, whatever distance is told."""
        (tmp_path / "policy.toml").write_text(
            f'tasks = ["digits"]\nmechanisms = ["metric"]\nmin-server-noise-multiplier = {minimum}\n'
        )
        nodes = [{"partition-id": n, "num-partitions": 5, "policy": str(tmp_path / "policy.toml")} for n in range(5)]
        run = run_of(tmp_path, nodes=nodes, z=3.0, **{Z_D: 2.0})
        run.strategy.mechanism = replace(run.strategy.mechanism, distance=0.1)
        assert (run.collect().sum is not None) == taken


class TestWhatAServerTells:
    def test_who_was_told_another_one_is_in_no_sum(self, tmp_path):
        inner, updates = None, random_updates(5)

        def app(sent, context):
            if phase_of(sent) == "mask" and context.node_id == 1:
                sent.content.config_records[CONFIG][DISTANCE] = 0.5
            return inner(sent, context)

        inner = app_with(updates)
        summed = run_of(tmp_path, updates, app=app).collect()
        assert summed.sum.survivors == 4
        assert [(one.node_id, one.detail) for one in summed.rejected] == [
            (1, "'client-00000' has not signed the noise and the sharers of this attempt")
        ]
