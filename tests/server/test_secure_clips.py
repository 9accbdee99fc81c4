"""Adaptive clips under secure aggregation: what the server learns, tells and charges, and what nodes take from it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from secure_runs import MODEL, SecureRun, app_with, phase_of, random_updates, settings
from statistics_of_noise import is_normal, std_is

from cloister.client import secure
from cloister.client.ledgers import ledger_of
from cloister.client.node import node_of
from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.plan import add_noise
from cloister.privacy.mechanisms.distributed.shares import STEPS
from cloister.utils.wire import CLIPPING_NORM, CONFIG

ADAPTIVE = {
    "privacy.clipping": "adaptive",
    "privacy.clipping-rate": 1.0,
    "privacy.clipping-count-noise-multiplier": 1e-3,
}
"""With the least noise on the bits that is made: it moves C by a thousandth."""


def long_updates(*norms):
    """An update of each norm."""
    return [{name: np.full_like(array, norm / math.sqrt(650)) for name, array in MODEL.items()} for norm in norms]


def run_of(folder, updates, gone=None, nodes=None, app=None, **more):
    """Five clients of which four have to be left, whose clip adapts."""
    own = {} if more.get("privacy.clipping") == "fixed" else ADAPTIVE
    keys = settings(folder, clients=len(updates), **(own | more))
    return SecureRun(keys, updates, gone, nodes, app)


def one_round(run, number=1):
    return run.strategy.aggregate_train(number, run.collect(number))


def told(run):
    """C in every message so far."""
    return [one.content.config_records[CONFIG].get(CLIPPING_NORM) for one in run.asked]


class TestTheClip:
    def test_follows_the_rule_for_the_survivors(self, tmp_path):
        run = run_of(tmp_path, long_updates(0.5, 0.9, 0.99, 3.0, 4.0), {4: "mask"})
        arrays, _ = one_round(run)
        assert arrays is not None
        assert run.strategy.mechanism.clip.bound == pytest.approx(math.exp(-(3 / 4 - 0.5)), rel=1e-2)
        assert run.strategy.measured.clipping_norm == 1.0

    def test_of_the_next_round_is_told_in_each_of_its_messages_and_clips_the_updates(self, tmp_path):
        run = run_of(tmp_path, long_updates(*[8.0] * 5), **{"privacy.noise-multiplier": 0.0})
        one_round(run)
        first, second = len(run.asked), run.strategy.mechanism.clip.bound
        assert second == pytest.approx(math.exp(0.5), rel=1e-2)
        summed = run.collect(2)
        assert set(told(run)[:first]) == {1.0} and set(told(run)[first:]) == {second}
        steps = run.strategy.mechanism.plan(650).steps
        assert np.linalg.norm(summed.sum.total[:-1].astype(float)) == pytest.approx(5 * steps, rel=1e-2)
        arrays, _ = run.strategy.aggregate_train(2, summed)
        released = np.concatenate([array.numpy().ravel() for array in arrays.values()])
        assert np.linalg.norm(released) == pytest.approx(second, rel=1e-2)

    def test_stays_where_it_was_if_the_round_is_abandoned(self, tmp_path):
        run = run_of(tmp_path, random_updates(5), {1: "sign", 2: "sign"})
        assert one_round(run) == (None, None)
        assert run.strategy.mechanism.clip == AdaptiveClip(1.0, rate=1.0, bits_multiplier=1e-3)

    def test_goes_on_where_the_run_goes_on(self, tmp_path):
        run, resumed = (run_of(tmp_path, random_updates(5)) for _ in range(2))
        one_round(run)
        resumed.strategy.load_state_dict(run.strategy.state_dict())
        assert resumed.strategy.mechanism == run.strategy.mechanism
        assert resumed.strategy.mechanism.clip.bound != 1.0

    @pytest.mark.slow
    def test_finds_the_norm_of_most(self, tmp_path):
        keys = {"privacy.clipping-count-noise-multiplier": 0.3}
        run = run_of(tmp_path, long_updates(0.2, 0.2, 0.2, 0.2, 5.0), **keys)
        for number in range(1, 7):
            one_round(run, number)
        assert 0.1 < run.strategy.mechanism.clip.bound < 0.45


@pytest.mark.slow
class TestTheNoise:
    """Of 1,500 bits a client instead of one, which are charged as one: noise of each is a number of a sample."""

    def sample(self, folder, monkeypatch, gone=None):
        plan, updates = DistributedMean.plan, long_updates(*[0.5] * 5)
        monkeypatch.setattr(DistributedMean, "events", lambda own, layout, *_, **__: plan(own, layout.size).events())
        monkeypatch.setattr(
            DistributedMean, "plan", lambda own, size, *_, **__: replace(plan(own, size), beside=(own.bits,) * 1500)
        )
        keys = {"threshold": 3, "privacy.clipping-count-noise-multiplier": 2.0}
        run, noise = run_of(folder, updates, gone, **keys), []
        for number in range(1, 6):
            summed = run.collect(number)
            noise.append(summed.sum.total[650:] - summed.sum.survivors * STEPS)
        return np.concatenate(noise) / STEPS

    @pytest.mark.parametrize(("gone", "survivors"), [({}, 5), ({5: "mask"}, 4)])
    def test_in_the_sum_is_that_of_all_survivors(self, gone, survivors, tmp_path, monkeypatch):
        expected, sample = 2.0 * math.sqrt(survivors / 3), self.sample(tmp_path, monkeypatch, gone)
        assert std_is(sample, expected, 0.05) and is_normal(sample, expected)
        assert not std_is(sample, expected * 0.9, 0.05) and not std_is(sample, expected * 1.1, 0.05)

    def test_of_clients_that_leave_it_out_is_missed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            secure, "add_noise", lambda numbers, plan, *given: add_noise(numbers, replace(plan, beside=()), *given)
        )
        assert not self.sample(tmp_path, monkeypatch).any()


class TestCharges:
    def test_both_sides_count_both_releases(self, tmp_path):
        policy = tmp_path / "policy.toml"
        policy.write_text('tasks = ["digits"]\nmechanisms = ["global-dp"]\nmax-epsilon = 90.0\nmin-colluding = 1\n')
        own = [{"policy": str(policy), "ledger-dir": str(tmp_path / str(n))} for n in range(5)]
        nodes = [{"partition-id": n, "num-partitions": 5, **node} for n, node in enumerate(own)]
        keys = {"colluding": 1, "privacy.clipping-count-noise-multiplier": 2.0}
        run = run_of(tmp_path, random_updates(5), {2: "share"}, nodes, **keys)
        run.strategy.mechanism = replace(run.strategy.mechanism, clip=replace(run.strategy.mechanism.clip, bound=0.25))
        run.collect()
        bits, update = run.spent()
        assert (bits.parameters, update.parameters) == (1, 650)
        assert bits.multiplier("add-or-remove", True) == pytest.approx(2.0, rel=1e-4)
        expected = [("client", bits), ("client", update), ("example", bits.replaced()), ("example", update.replaced())]
        for number, node in enumerate(nodes, start=1):
            entries = ledger_of(node_of(node), "digits").entries
            assert [(entry.unit, entry.event) for entry in entries] == (expected if number != 2 else [])
            assert {entry.clip for entry in entries} <= {0.25}


class TestWhatAServerTells:
    """C decides what a step is worth. Nodes take it in its range, and from one server all the same."""

    def changed(self, folder, change, phases=("mask",), **more):
        """Return the reasons for which nodes refuse messages in which a server has changed C."""
        inner, updates = None, random_updates(5)

        def app(sent, context):
            if phase_of(sent) in phases:
                change(sent.content.config_records[CONFIG], context.node_id)
            return inner(sent, context)

        inner = app_with(updates)
        run = run_of(folder, updates, app=app, **more)
        summed = run.collect()
        return summed, {one.node_id: one.detail for one in summed.rejected}

    def test_who_was_told_another_one_is_in_no_sum(self, tmp_path):
        """It has signed other terms than the others have, who would not unmask a sum that it is in."""

        def change(config, node):
            config[CLIPPING_NORM] = 2.0 if node == 1 else 1.0

        summed, found = self.changed(tmp_path, change)
        assert summed.sum.survivors == 4
        assert found == {1: "'client-00000' has not signed the noise and the sharers of this attempt"}

    @pytest.mark.parametrize(
        ("rule", "side", "clipping"),
        [("min-client-clipping-norm = 2.0", "least", "fixed"), ("max-client-clipping-norm = 0.5", "most", "adaptive")],
    )
    def test_a_policy_bounds_it_before_anything_is_charged(self, rule, side, clipping, tmp_path):
        (tmp_path / "policy.toml").write_text(f'tasks = ["digits"]\nmechanisms = []\n{rule}\n')
        nodes = [{"partition-id": n, "num-partitions": 5, "policy": str(tmp_path / "policy.toml")} for n in range(5)]
        run = run_of(tmp_path, random_updates(5), nodes=nodes, **{"privacy.clipping": clipping})
        summed = run.collect()
        limit = rule.rpartition(" ")[2].rstrip(".0") or "2"
        assert summed.sum is None and not run.spent()
        assert all(f"clipping-norm = 1, demanded: at {side} {limit}" in one.detail for one in summed.rejected)

    @pytest.mark.parametrize(
        ("clipping", "rules", "says"),
        [
            ("fixed", "min-server-noise-multiplier = 1.0", ""),
            ("adaptive", "min-server-noise-multiplier = 0.89", ""),
            ("adaptive", "min-server-noise-multiplier = 0.9", "multiplier of 0.8944, demanded: at least 0.9"),
            (
                "fixed",
                "max-epsilon = 9.0\nmax-learning-rate = 0.1",
                "client.learning-rate = 0.5, demanded: at most 0.1",
            ),
        ],
    )
    def test_who_forbids_the_training_or_its_noise_says_so_before_anything_is_charged(
        self, clipping, rules, says, tmp_path
    ):
        """The noise is that of both releases, where the bits of a clip are one: 1/z² = 1/1² + 1/2²."""
        policy, keys = tmp_path / "policy.toml", {"privacy.clipping": clipping, "client.learning-rate": 0.5}
        policy.write_text(f'tasks = ["digits"]\nmechanisms = ["global-dp"]\n{rules}\n')
        own = [{"policy": str(policy), "ledger-dir": str(tmp_path / str(n))} for n in range(5)]
        nodes = [{"partition-id": n, "num-partitions": 5, **node} for n, node in enumerate(own)]
        bits = {"privacy.clipping-count-noise-multiplier": 2.0} if clipping == "adaptive" else {}
        run = run_of(tmp_path, random_updates(5), nodes=nodes, **keys, **bits)
        summed = run.collect()
        assert (summed.sum is None, bool(run.spent())) == (bool(says), not says)
        assert len(summed.rejected) == (5 if says else 0) and all(says in one.detail for one in summed.rejected)

    def test_and_again_in_the_message_that_asks_for_the_update(self, tmp_path):
        (tmp_path / "policy.toml").write_text('tasks = ["digits"]\nmechanisms = []\nmax-client-clipping-norm = 2.0\n')
        inner, updates = None, random_updates(5)

        def app(sent, context):
            if phase_of(sent) == "mask":
                sent.content.config_records[CONFIG][CLIPPING_NORM] = 2.5
            return inner(sent, context)

        inner = app_with(updates)
        nodes = [{"partition-id": n, "num-partitions": 5, "policy": str(tmp_path / "policy.toml")} for n in range(5)]
        summed = run_of(tmp_path, updates, nodes=nodes, app=app).collect()
        assert {one.node_id for one in summed.rejected} == {1, 2, 3, 4, 5}
        assert all("clipping-norm = 2.5, demanded: at most 2" in one.detail for one in summed.rejected)
