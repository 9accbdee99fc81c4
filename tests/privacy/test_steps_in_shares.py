"""A step of DP-SGD as integers with noise in shares: how far one unit moves them, and how much noise a sum keeps."""

import math
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from statistics_of_noise import std_is

from cloister.client.dp_sgd import PrivateNumpyTrainer
from cloister.client.trainers import SumsGradients
from cloister.config.calibration import calibrated, smallest_multiplier
from cloister.config.run import parse
from cloister.privacy.accounting.events import Gaussian, Repeated
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.client import dp_sgd_claim, sound_unit
from cloister.privacy.claims.render import protected
from cloister.privacy.dpsgd import noise as dpsgd_noise
from cloister.privacy.dpsgd.batches import places_of, poisson
from cloister.privacy.dpsgd.local_steps import LocalDpSgd, LocalSteps, OneStep, multiplier_of_each
from cloister.privacy.dpsgd.noise import clipped_sum
from cloister.privacy.mechanisms.distributed.plan import add_noise
from cloister.privacy.mechanisms.distributed.shared import SharedSum
from cloister.privacy.mechanisms.distributed.shares import Parties
from cloister.privacy.mechanisms.distributed.steps import DistributedStep, SharedDpSgd, encode_clipped_sum
from cloister.privacy.mechanisms.selection import ReleaseContext
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.numpy_models import LinearRegression, SoftmaxRegression
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import Layout
from cloister.utils.errors import ConfigError, PrivacyError

PARTIES = Parties(members=6, threshold=4, colluding=1)
NOTHING = ReleaseContext(False, 1, True, 1.0)


def shared(sigma=1.0, bound=1.0, parties=PARTIES, rate=0.1):
    return SharedDpSgd(sigma, bound, sampling_rate=rate, parties=parties)


def distance(one, other):
    """The L2 distance of two integer vectors, squared, without rounding."""
    return sum(int(step) ** 2 for step in one - other)


def summed_of(gradients, bound, like):
    return clipped_sum([partial(tuple, (each,)) for each in gradients], (like,), bound)


def clipped_afterwards(gradients, bound, like):
    """A broken twin: the sum as a whole is clipped, and no single gradient."""
    total = np.sum(gradients, axis=0) if gradients else np.zeros(like.size)
    return (total * min(1.0, bound / max(np.linalg.norm(total), 1e-300)),)


def most_moved(summing, encode, trials=60):
    """The largest squared move of the integers, over D², by a unit more: lengths and directions are adversarial."""
    rng, largest = np.random.default_rng(5), 0.0
    for trial in range(trials):
        p, bound = int(rng.choice([1, 2, 40, 40_000])), float(rng.choice([1e-6, 0.37, 1.0, 1e4]))
        plan = shared(bound=bound).plan(p, 1)
        lengths = rng.choice([0.0, 1e-30, 0.5, 1 - 1e-12, 1.0, 1 + 1e-9, 3.0, 1e30], int(rng.integers(0, 12)))
        way = rng.normal(size=p) if trial % 2 else np.ones(p)
        others = [bound * length * (d / np.linalg.norm(d)) for length in lengths if (d := rng.normal(size=p)).any()]
        if trial % 3 == 0:  # all that the others sum to lies just below half of a step
            others = [np.full(p, 0.4999 * plan.bound / plan.steps)]
        unit = bound * float(rng.choice([1.0, 1e20, -1.0])) * way / np.linalg.norm(way)
        like = np.zeros(p)
        first, second = (encode(summing(each, bound, like), plan) for each in (others, [*others, unit]))
        largest = max(largest, distance(first, second) / plan.steps**2)
    return largest


class TestOneUnitMovesTheIntegers:
    def test_by_d_at_most(self):
        assert most_moved(summed_of, encode_clipped_sum) <= 1

    def test_and_the_search_finds_a_sum_that_is_clipped_as_a_whole(self):
        assert most_moved(clipped_afterwards, encode_clipped_sum) > 1

    def test_and_the_search_finds_a_grid_without_room_for_rounding(self):
        def narrow(sums, plan):
            left = plan.steps - dpsgd_noise.rounding_steps(plan.parameters)
            return encode_clipped_sum(sums, plan.at(plan.bound * left / plan.steps))

        assert most_moved(summed_of, narrow) > 1

    def test_and_no_number_leaves_the_public_range(self):
        plan = shared().plan(3, 1)
        numbers = encode_clipped_sum((np.array([1e12, -1e12, 0.25]),), plan)
        assert list(numbers[:2]) == [plan.units * plan.steps, -plan.units * plan.steps]
        assert plan.units == places_of(1 << 16) and plan.bits == 64

    def test_and_a_sum_that_is_no_number_counts_as_zero(self):
        plan = shared().plan(2, 1)
        assert list(encode_clipped_sum((np.array([math.nan, math.inf]),), plan)) == [0, plan.units * plan.steps]

    def test_and_a_sum_of_another_size_is_refused(self):
        with pytest.raises(PrivacyError, match=r"a sum of 3 numbers, found 2"):
            encode_clipped_sum((np.zeros(2),), shared().plan(3, 1))


def noise_of(plan, missing=0):
    """Return a sum of zeros over a whole list, with the noise of its honest members alone."""
    total = np.zeros(plan.parameters, np.int64)
    for _ in range(plan.shares.parties.honest - missing):
        add_noise(total, plan, os.urandom, {})
    return total


class TestTheNoiseOfASum:
    @pytest.mark.parametrize("members", PARTIES.survivors())
    @pytest.mark.parametrize("sigma", [0.7, 3.0])
    def test_is_what_is_charged_for_every_length_of_the_list(self, members, sigma):
        plan = shared(sigma).plan(120_000, 1, members)
        assert std_is(noise_of(plan), math.sqrt((sigma * plan.steps) ** 2 + 25))
        # In whole steps the shares are rounded up, so that no list has less.
        honest = (members - PARTIES.colluding) * plan.shares.left(members)
        assert 0 <= honest - (sigma * plan.steps) ** 2 - 25 < 1e-3 * honest

    def test_is_less_where_an_honest_share_is_missing(self):
        plan = shared().plan(120_000, 1, 5)
        assert not std_is(noise_of(plan, missing=1), math.sqrt(plan.steps**2 + 25))

    @pytest.mark.parametrize("members", [PARTIES.threshold - 1, PARTIES.members + 1])
    def test_is_planned_for_no_list_that_is_too_short_or_too_long(self, members):
        with pytest.raises(PrivacyError, match=f"a list must have 4 to 6 members, found {members}"):
            shared().plan(650, 1, members)

    def test_is_in_the_terms_of_a_round(self):
        assert len({shared().plan(650, 1, members).terms() for members in PARTIES.survivors()}) == len(
            PARTIES.survivors()
        )

    def test_is_that_of_one_share_where_the_provisioner_made_more_keys_than_may_collude(self):
        own = shared(2.0)
        assert own.multiplier(650, by_provisioner=1) == 2.0
        alone = own.multiplier(650, by_provisioner=2)
        base = own.plan(650, 1).shares.base
        assert alone == pytest.approx(base / own.plan(650, 1).steps, rel=1e-6) and alone < 2.0 / math.sqrt(4)


class TestTheClaim:
    @pytest.mark.parametrize("sigma, rate, steps", [(1.0, 0.02, 100), (0.6, 0.5, 8), (4.0, 1.0, 3)])
    def test_is_that_of_central_dp_sgd_on_all_data(self, sigma, rate, steps):
        everybody = Parties(members=20, threshold=20, colluding=0)
        ours = dp_sgd_claim(shared(sigma, parties=everybody, rate=rate), [OneStep.of(50, rate)], steps, 1e-5, NOTHING)
        epoch = LocalSteps(1000, round(rate * 1000), 1)
        central = dp_sgd_claim(LocalDpSgd(sigma, 1.0), [epoch], steps // epoch.count, 1e-5, NOTHING)
        one, other = ours.sizes[0].figures[0], central.sizes[0].figures[0]
        assert one.steps == other.steps == steps
        assert one.by_accountant == pytest.approx(other.by_accountant, rel=1e-9)
        assert OneStep.of(50, rate).event(sigma) == Repeated(Gaussian(sigma, Sampling("bounded-poisson", rate)), 1)

    def test_is_against_the_server_with_c_members_for_a_unit_at_one_site(self):
        claim = dp_sgd_claim(shared(), [OneStep.of(50, 0.1)], 3, 1e-5, NOTHING)
        (figure, client) = claim.sizes[0].figures
        assert figure.adversary == client.adversary
        assert figure.adversary == "the server together with one client, and any party that sees the models of the run"
        assert (claim.unit, figure.steps, figure.sampling) == ("example", 3, "poisson, 0.1")
        assert {premise.name for premise in claim.premises} >= {
            *("bundle", "roster", "keys", "collusion", "key-agreement", "time")
        }
        assert claim.sizes[0].heuristic == ()

    def test_says_that_a_group_at_several_clients_loses_more_than_their_ledgers_add_up_to(self):
        claim = dp_sgd_claim(replace(shared(), group_cap=4), [OneStep.of(50, 0.1)], 3, 1e-5, NOTHING)
        assert claim.unit == "group" and "at k clients loses what k times as many rounds cost at σ/√k" in protected(
            claim
        )

    def test_counts_every_holder_of_a_unit_with_its_part_of_the_noise(self):
        step = OneStep.of(50, 0.1)
        assert multiplier_of_each((step, step), 2.0) == pytest.approx(math.sqrt(2))
        assert multiplier_of_each((step,), 2.0) == 2.0
        assert multiplier_of_each((LocalSteps(50, 5, 1),) * 2, 2.0) == 2.0
        # With q = 1 both holders move the sum together by 2S.
        whole = OneStep.of(50, 1.0)
        assert sound_unit([whole, whole], 2.0, 1).epsilon(1e-5) >= sound_unit([whole], 1.0, 1).epsilon(1e-5) - 1e-9


class TestAStep:
    def test_has_places_for_every_size(self):
        for size in (1, 7, 1000, 65_000):
            for rate in (1e-9, 0.1, 1 / 3, 1.0):
                step = OneStep.of(size, rate)
                assert step.batch_size >= rate * size and step.rate == rate and step.count == 1
        with pytest.raises(ConfigError, match=r"dp-sgd-sampling-rate = 1 of 70000 units is a batch of 70000"):
            OneStep.of(70_000, 1.0)

    def test_draws_each_unit_with_the_common_rate(self):
        drawn = [len(next(OneStep.of(400, 0.25).batches(seed))) for seed in range(300)]
        assert np.mean(drawn) == pytest.approx(100, abs=6 * math.sqrt(75 / 300))

    def test_moves_the_model_by_the_mean_over_the_expected_batch(self):
        layout = Layout.of({"w": np.zeros(3, np.float32)})
        step = DistributedStep(shared(sigma=0.0, rate=0.5), lambda number: 0.1 * number)
        plan = step.dp_sgd.plan(3, 2)
        total = encode_clipped_sum((np.array([1.0, -2.0, 0.0]),), plan)
        released = step.released(SharedSum(total, 4, 4, 8), (np.ones(3, np.float32),), layout, 2)
        np.testing.assert_allclose(released.models[0][0], 1 - 0.2 / 4 * np.array([1.0, -2.0, 0.0]), atol=1e-6)

    def test_has_no_divisor_without_a_size(self):
        step, layout = DistributedStep(shared(rate=0.5)), Layout.of({"w": np.zeros(3, np.float32)})
        with pytest.raises(PrivacyError, match="the 4 survivors of round 2 attest no public size"):
            step.released(SharedSum(np.zeros(3, np.int64), 4, 4), (np.ones(3, np.float32),), layout, 2)

    def test_has_no_sum_without_survivors(self):
        with pytest.raises(ConfigError, match="survivors"):
            SharedSum(np.zeros(3, np.int64), 0, 0)

    def test_needs_no_size_for_its_noise(self):
        keys = {
            "task.model": "softmax",
            "privacy.server": "none",
            "privacy.client": "dp-sgd",
            "privacy.dp-sgd-noise-multiplier": "auto",
            "privacy.client-max-epsilon": 2.0,
            "privacy.dp-sgd-sampling-rate": 0.05,
            "num-rounds": 40,
            "strategy.min-nodes": 5,
            "secure-aggregation.enabled": True,
        }
        config = parse(keys)
        sigma = calibrated(config).privacy.client.noise_multiplier
        # Two epochs of 20 steps of central DP-SGD need the same noise.
        central = smallest_multiplier(config.privacy, [LocalSteps(1000, 50, 1)], 2)
        assert sigma == pytest.approx(central, rel=2e-3) and sigma >= central


PRIVACY = parse(
    {
        "privacy.server": "none",
        "privacy.client": "dp-sgd",
        "privacy.dp-sgd-sampling-rate": 0.3,
        "privacy.dp-sgd-clipping-norm": 0.5,
        "strategy.min-nodes": 5,
        "secure-aggregation.enabled": True,
    }
).privacy.model_copy(update={"noise_seed": 3})
"""Of a run, with a seed of the draws, which no run with secure aggregation may have."""


def data(clients, model, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(5, 60, clients)
    if isinstance(model, LinearRegression):
        return [Examples(rng.normal(size=(n, 4)).astype(np.float32), rng.normal(size=n)) for n in sizes]
    return [Examples(rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n)) for n in sizes]


@pytest.mark.parametrize("make", [lambda: SoftmaxRegression(4, 3), lambda: LinearRegression(4)])
def test_without_noise_all_clients_together_take_a_step_of_central_dp_sgd(make):
    """For the same draws, within half a step of the grid for each client and number."""
    model, own = make(), SharedDpSgd(0.0, 0.5, sampling_rate=0.3, parties=PARTIES)
    clients, total, pooled = data(6, model), 0, []
    p = sum(weight.size for weight in model.weights.values())
    plan = own.plan(p, 1)
    trainer = PrivateNumpyTrainer(model, Recipe(1, 10, 0.1), PRIVACY)
    assert isinstance(trainer, SumsGradients)
    for number, examples in enumerate(clients):
        step = OneStep.of(len(examples), 0.3)
        round_plan = TrainingPlan(1, step.batch_size, 0.1, 0.0, (1, 1, number), 1, len(examples))
        sums = trainer.summed(examples, round_plan)
        assert {name: array.shape for name, array in sums.items()} == {n: w.shape for n, w in model.weights.items()}
        total = total + encode_clipped_sum(tuple(sums.values()), plan)
        (drawn,) = poisson(len(examples), 0.3, 1, trainer._sources.batch_seed(round_plan))
        pooled += [examples.take(np.array([row])) for row in drawn]
    like = tuple(weight.reshape(-1) for weight in model.weights.values())
    central = np.concatenate(clipped_sum((partial(trainer._gradient, one) for one in pooled), like, 0.5))
    step = plan.bound / plan.steps
    assert len(pooled) > 20 and np.abs(central).max() > 100 * step
    np.testing.assert_allclose(total * step, central, atol=len(clients) * step / 2 * (1 + 1e-6))
