"""Canary examples with gradients of their own: sound steps of DP-SGD are not flagged, those with less noise are.

Coins, directions, batches and noise are seeded. With others a sound step is flagged with a chance of `FALSE_ALARM`.
"""

import math

import keras
import numpy as np
import pytest
from dp_sgd_canaries import linear_loss, linear_network, on_linear_network, steps_with_canaries

from cloister.audits.canaries import OneRun
from cloister.privacy.accounting.account import Account
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.dpsgd.noise import clipped_sum, grid_of, noisy_sum
from cloister.privacy.dpsgd.step import DpSgd
from cloister.privacy.mechanisms.distributed.plan import add_noise
from cloister.privacy.mechanisms.distributed.shares import Parties
from cloister.privacy.mechanisms.distributed.steps import SharedDpSgd, encode_clipped_sum
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.canaries import Canaries

FALSE_ALARM = 1e-3
DELTA = 1e-5
COUNT = 200
SIZE = 8000
CLIP = 0.7
SIGMA = 2.0
EVERYBODY = LocalSteps(COUNT, COUNT, 2)
"""Two steps, each on all examples: one Gaussian mechanism together."""
SOME = LocalSteps(COUNT, COUNT // 4, 2)
"""Eight steps, each on a quarter of the examples on average."""


def one_by_one(sigma=SIGMA, noise=None):
    """Steps of the small models' DP-SGD, in NumPy."""
    source = GaussianNoise(3)

    def step(gradients):
        rows = [lambda row=row: (row,) for row in gradients]
        like = (np.zeros(SIZE, np.float32),)
        (total,) = noisy_sum(rows, like, clipping_norm=CLIP, noise_multiplier=sigma, noise=noise() if noise else source)
        return total

    return step


def run(step, steps=EVERYBODY):
    seen = steps_with_canaries(step, Canaries.drawn(COUNT, 1), steps, size=SIZE, clipping_norm=CLIP, seed=4)
    assert seen.rounds == steps.count
    return OneRun(seen.coins, seen.scores, seen.guesses)


def claimed(steps=EVERYBODY):
    return Account([steps.event(SIGMA)]).epsilon(DELTA, "pld")


def is_flagged(step):
    found, claim = run(step).gaussian(DELTA), claimed()
    print(f"claimed {claim:.3f}, Gaussian shape {found:.3f}")
    return found > claim


class TestSmallModels:
    def test_sound_steps_are_not_flagged_and_most_is_seen(self):
        told = run(one_by_one())
        assert told.gaussian(DELTA, 1 - FALSE_ALARM) <= claimed()
        assert told.shift(0.5) > 0.5 * math.sqrt(2) / SIGMA

    def test_under_poisson_batches_without_a_distribution(self):
        claim = Account([SOME.event(SIGMA)]).epsilon(DELTA)
        assert claim < claimed(LocalSteps(COUNT, COUNT, 8)), "the draw amplifies"
        assert run(one_by_one(), SOME).distribution_free(DELTA, 1 - FALSE_ALARM) <= claim

    def test_half_of_the_noise_is_flagged(self):
        assert is_flagged(one_by_one(SIGMA / 2))

    def test_the_same_noise_in_every_step_is_flagged(self):
        assert is_flagged(one_by_one(noise=lambda: GaussianNoise(3)))

    def test_a_clip_that_is_left_out_is_flagged(self, monkeypatch):
        monkeypatch.setattr("cloister.privacy.dpsgd.noise._factor", lambda gradient, clipping_norm: 1.0)
        assert is_flagged(one_by_one())


MEMBERS, COLLUDING = 6, 2
"""Members of a list, and those that work with the server: it sees the sum, and their noise."""


def in_shares(sigma=SIGMA, bound=CLIP, draw=None, divided_again=1):
    """Steps on a secure sum, seen by the server together with c members: it subtracts their noise.

    Args:
        sigma: of the noise.
        bound: of a gradient.
        draw: secrets of the noise; None: seeded ones, new for every share.
        divided_again: of a broken twin: how many times smaller a share is than it should be.
    """
    parties = Parties(members=MEMBERS, threshold=MEMBERS, colluding=COLLUDING)
    plan = SharedDpSgd(sigma, CLIP, sampling_rate=1.0, parties=parties).plan(SIZE, 1, MEMBERS)
    draw, like = draw or np.random.default_rng(8).bytes, (np.zeros(SIZE, np.float32),)

    def step(gradients):
        total = np.zeros(SIZE, np.int64)
        for number, own in enumerate(np.array_split(gradients, MEMBERS)):
            numbers = encode_clipped_sum(clipped_sum([lambda row=row: (row,) for row in own], like, bound), plan)
            noise = np.zeros_like(numbers)
            if number >= COLLUDING:
                add_noise(noise, plan, draw, {})
            total += numbers + noise // divided_again
        return total * (plan.bound / plan.steps)

    return step


class TestStepsInShares:
    def test_sound_ones_are_not_flagged_and_most_is_seen_by_a_server_with_c_members(self):
        told = run(in_shares())
        assert told.gaussian(DELTA, 1 - FALSE_ALARM) <= claimed()
        assert told.shift(0.5) > 0.5 * math.sqrt(2) / SIGMA

    def test_half_of_the_noise_is_flagged(self):
        assert is_flagged(in_shares(divided_again=2))

    def test_the_same_noise_of_all_members_and_steps_is_flagged(self):
        assert is_flagged(in_shares(draw=lambda size: bytes(size)))

    def test_a_clip_that_is_left_out_is_flagged(self):
        assert is_flagged(in_shares(bound=1e6))


class ClipSkipped(DpSgd):
    def clipped_sum(self, x, y, clipping_norm, groups=None, shares=None):
        return super().clipped_sum(x, y, 1e6)


class NoisePerMicrobatch(DpSgd):
    """Each of eight microbatches carries an equal share of the noise: variances add up, deviations do not."""

    def _noised_mean(self, sums, grid):
        return super()._noised_mean(sums, grid_of(CLIP, SIGMA / math.sqrt(8), self._parameters))


class Stuck(DpSgd):
    def _noised_mean(self, sums, grid):
        self.noise = GaussianNoise(7)
        return super()._noised_mean(sums, grid)


def keras_steps(kind=DpSgd, sigma=SIGMA):
    dp_sgd = kind(
        linear_network(SIZE),
        batch_size=COUNT,
        noise_multiplier=sigma,
        clipping_norm=CLIP,
        optimizer=keras.optimizers.SGD(1.0),
        loss=linear_loss,
        probe=(np.random.default_rng(0).uniform(0.1, 1, (3, SIZE)).astype(np.float32), np.zeros(3, np.int64)),
    )
    dp_sgd.noise = GaussianNoise(5)
    return on_linear_network(dp_sgd)


@pytest.mark.slow
class TestKerasModels:
    def test_sound_steps_are_not_flagged_and_most_is_seen(self):
        told = run(keras_steps())
        assert told.gaussian(DELTA, 1 - FALSE_ALARM) <= claimed()
        assert told.shift(0.5) > 0.5 * math.sqrt(2) / SIGMA

    @pytest.mark.parametrize("kind", [ClipSkipped, NoisePerMicrobatch, Stuck])
    def test_broken_ones_are_flagged(self, kind):
        assert is_flagged(keras_steps(kind))

    def test_half_of_the_noise_is_flagged(self):
        assert is_flagged(keras_steps(sigma=SIGMA / 2))
