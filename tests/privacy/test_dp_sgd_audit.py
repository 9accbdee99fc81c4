"""DP-SGD keeps its claim when somebody tries to tell whether a canary was in it; broken steps are caught the same way.

The adversary chooses the other examples, and knows the model before: all of them push it the same way with a gradient
of norm S, and the canary pushes it back. Noise is seeded, so that a test gives the same answer until the generator
changes. With another stream a sound step fails with probability at most `FALSE_ALARM`.
"""

from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from cloister.audits.testing import Trials
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.dpsgd.clipped_sums import ClippedSum
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.dpsgd.noise import grid_of, noisy_sum
from cloister.privacy.dpsgd.step import DpSgd
from cloister.privacy.mechanisms.noise import GaussianNoise

FALSE_ALARM = 1e-4
RUNS = 1000
DELTA = 0.1
"""A claim has to hold at every δ; at this one so many runs see most of ε."""
SIGMA = 1.0
CLIP = 0.5
OTHERS = 3
FAR = np.array([[30.0, 0, 0, 0]], np.float32)
"""An input whose gradient is longer than the clip by far."""


def linear():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax", name="out")], name="net")


class Right(DpSgd):
    """The real thing. A clipped sum depends on the examples alone, so it is computed once for all runs."""

    def __init__(self, **options):
        super().__init__(
            linear(),
            batch_size=OTHERS + 1,
            noise_multiplier=SIGMA,
            clipping_norm=CLIP,
            optimizer=keras.optimizers.SGD(1.0),
            **options,
        )
        self.noise = GaussianNoise(5)
        self._sums = {}

    def clipped_sum(self, x, y, clipping_norm, groups=None, shares=None):
        key = (x.tobytes(), y.tobytes(), clipping_norm)
        if key not in self._sums:
            found = super().clipped_sum(x, y, clipping_norm)
            self._sums[key] = ClippedSum(tuple(np.array(total) for total in found.sums), found.examples, 0, 0)
        return self._sums[key]


class ClipSkipped(Right):
    def clipped_sum(self, x, y, clipping_norm, groups=None, shares=None):
        return super().clipped_sum(x, y, 1e6)


class NoisePerMicrobatch(Right):
    """Each microbatch carries an equal share of the noise: variances add up, standard deviations do not."""

    def step(self, x, y, clipping_norm=None, groups=None):
        totals = [np.zeros(variable.shape) for variable in self.model.trainable_variables]
        for start in range(0, OTHERS + 1):
            piece = slice(start, start + 1)
            sums = self.clipped_sum(x[piece], y[piece], self.clipping_norm).sums
            noised = self._noised_mean(sums, grid_of(CLIP, SIGMA / (OTHERS + 1), self._parameters))
            totals = [total + part for total, part in zip(totals, noised, strict=True)]
        self._descend(*[tf.constant(total, tf.float32) for total in totals])


class DividedByTheActualSize(Right):
    def step(self, x, y, clipping_norm=None, groups=None):
        self.batch_size = len(x)
        super().step(x, y)


def released(dp_sgd, x, y):
    """Return the movement of the model along the canary's direction by a step."""
    variables = dp_sgd.model.trainable_variables
    for variable in variables:
        variable.assign(np.zeros(variable.shape))
    dp_sgd.step(x, y)
    kernel = next(variable for variable in variables if len(variable.shape) == 2).numpy()
    return float(kernel[0, 1] - kernel[0, 0])


@cache
def trials(kind):
    dp_sgd = kind()
    x, y = np.repeat(FAR, OTHERS + 1, axis=0), np.array([0] * OTHERS + [1])
    # Without a clip it is the canary that is too long.
    x[-1] *= 10 if kind is ClipSkipped else 1
    present = np.array([released(dp_sgd, x, y) for _ in range(RUNS)])
    absent = np.array([released(dp_sgd, x[:-1], y[:-1]) for _ in range(RUNS)])
    return Trials(present, absent)


def claimed():
    return Account([Gaussian(SIGMA)]).epsilon(DELTA, "pld")


BROKEN = [ClipSkipped, NoisePerMicrobatch, DividedByTheActualSize]


class TestAStep:
    @pytest.mark.slow
    def test_shows_less_than_is_claimed(self):
        assert 0 < trials(Right).epsilon(DELTA, 1 - FALSE_ALARM) <= claimed()
        # A Gaussian mechanism, and hardly better than it must be: 1/σ is what it may show.
        assert 0.6 / SIGMA < trials(Right).shift(1 - FALSE_ALARM) <= 1 / SIGMA

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", BROKEN)
    def test_that_is_broken_is_caught(self, kind):
        assert trials(kind).epsilon(DELTA, 1 - FALSE_ALARM) > claimed()
        assert trials(kind).shift(1 - FALSE_ALARM) > 1 / SIGMA


@pytest.mark.slow
class TestARound:
    """Several Poisson steps on all examples, one by one in NumPy; the canary is the last."""

    STEPS = LocalSteps(OTHERS + 1, 2, 2)

    def score(self, noise, length, present, seed):
        total = 0.0
        for batch in self.STEPS.batches(seed):
            chosen = [i for i in batch if present or i != OTHERS]
            pushes = [lambda i=i: (np.array([length if i == OTHERS else -CLIP]),) for i in chosen]
            (release,) = noisy_sum(pushes, (np.zeros(1),), clipping_norm=CLIP, noise_multiplier=SIGMA, noise=noise)
            total += float(release[0])
        return total

    def told_apart(self, length):
        """The canary's gradient is so long before it is clipped."""
        noise, seeds = GaussianNoise(6), iter(range(10**6))
        present = np.array([self.score(noise, length, True, next(seeds)) for _ in range(2 * RUNS)])
        absent = np.array([self.score(noise, length, False, next(seeds)) for _ in range(2 * RUNS)])
        return Trials(present, absent).epsilon(DELTA, 1 - FALSE_ALARM)

    def test_shows_less_than_is_claimed(self):
        claim = Account([self.STEPS.event(SIGMA)]).epsilon(DELTA, "pld")
        assert 0 < self.told_apart(1e3 * CLIP) <= claim

    def test_without_a_clip_it_would_be_caught(self, monkeypatch):
        monkeypatch.setattr("cloister.privacy.dpsgd.noise._factor", lambda gradient, clipping_norm: 1.0)
        assert self.told_apart(20 * CLIP) > Account([self.STEPS.event(SIGMA)]).epsilon(DELTA, "pld")
