"""Tests of DP-SGD in Keras and in PyTorch (mark `torch`): the sum, how far one unit moves it, and the noise."""

import numpy as np
import pytest
from dpsgd_frameworks import (
    BATCH,
    CLASSES,
    FEATURES,
    FRAMEWORKS,
    STEPPING,
    Summed,
    examples,
    gradient,
    kind_of,
    norm,
    stepping,
    weights,
    weights_of,
)
from statistics_of_noise import std_is

S, SIGMA = 0.5, 2.0

every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
every_step = pytest.mark.parametrize("framework", STEPPING)


def by_definition(framework, own, x, y, bound, groups=None, shares=None):
    """Σ of the mean gradient of each group, clipped to its share of the bound."""
    names = np.arange(len(x)) if groups is None else groups
    shares = np.ones(len(x)) if shares is None else shares
    total = [np.zeros((FEATURES, CLASSES)), np.zeros(CLASSES)]
    for name in np.unique(names):
        rows = np.flatnonzero(names == name)
        mean = [np.mean(same, 0) for same in zip(*(gradient(*own, x[i], y[i], framework) for i in rows), strict=True)]
        factor = min(1.0, shares[rows].mean() * bound / norm(mean))
        total = [old + factor * new for old, new in zip(total, mean, strict=True)]
    return total


def error(found, expected):
    return norm([a - b for a, b in zip(found, expected, strict=True)]) / max(norm(expected), 1e-300)


@every_framework
def test_the_sum_is_that_of_its_definition(framework):
    x, y = examples()
    median = float(
        np.median([norm(gradient(*weights(), one, label, framework)) for one, label in zip(x, y, strict=True)])
    )
    assert (
        error(Summed(framework, weights()).of(x, y, median), by_definition(framework, weights(), x, y, median)) < 5e-4
    )


@every_framework
def test_a_large_bound_gives_the_plain_sum_of_gradients(framework):
    x, y = examples()
    each = [gradient(*weights(), *pair, framework) for pair in zip(x, y, strict=True)]
    plain = [sum(same) for same in zip(*each, strict=True)]
    assert error(Summed(framework, weights()).of(x, y, 1e6), plain) < 1e-5


@every_framework
def test_a_group_is_clipped_as_one_and_to_the_mean_of_its_shares(framework):
    x, y = examples()
    groups, shares = np.array([4, 0, 4, 2, 0, 4, 7, 2]), np.linspace(0.1, 1, BATCH)
    for bound in (S, 20.0):
        found = Summed(framework, weights(), cap=3).of(x, y, bound, groups, shares)
        assert error(found, by_definition(framework, weights(), x, y, bound, groups, shares)) < 5e-4


@every_framework
def test_an_empty_batch_has_a_sum_of_zero(framework):
    assert norm(Summed(framework, weights()).of(*examples(0), S)) == 0


@every_framework
def test_one_unit_moves_the_sum_by_the_bound_at_most_whatever_the_weights(framework):
    """From weights whose scores vanish to such as overflow; examples of all scales, and bounds of any."""
    rng, moves = np.random.default_rng(3), []
    for power in (-38, -20, 0, 20, 38):
        own = [np.clip(array, -3e38, 3e38).astype(np.float32) for array in weights(scale=10.0**power)]
        summed = Summed(framework, own)
        for bound in (1e-12, S, 1e6):
            x, y = examples(seed=int(rng.integers(100)))
            x *= (10.0 ** rng.uniform(-30, 12, (BATCH, 1))).astype(np.float32)
            whole, others = summed.with_and_without(x, y, bound, leaving=int(rng.integers(BATCH)))
            moves.append(norm([a - b for a, b in zip(whole, others, strict=True)]) / bound)
    assert 0.9 < max(moves) <= 1


@every_framework
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_contributes_zero_and_takes_no_bit_of_the_others_along(framework, bad):
    x, y = examples()
    x[3] = bad * np.where(np.arange(FEATURES) % 2, 1, -1)
    whole, others = Summed(framework, weights(scale=10.0)).with_and_without(x, y, S, leaving=3)
    assert all(np.array_equal(a, b) for a, b in zip(whole, others, strict=True))


def twin(framework, name):
    """A class with one fault."""
    kind = kind_of(framework)

    class NoClip(kind):
        def clipped_sum(self, x, y, clipping_norm, groups=None, shares=None):
            return super().clipped_sum(x, y, 1e6, groups, shares)

    class ActualDivisor(kind):
        def step(self, x, y, clipping_norm=None, groups=None, shares=None):
            self.batch_size = max(len(x), 1)
            return super().step(x, y, clipping_norm, groups, shares)

    class TwoNoises(kind):
        def step(self, x, y, clipping_norm=None, groups=None, shares=None):
            super().step(x[:2], y[:2], clipping_norm)
            return super().step(x[2:], y[2:], clipping_norm)

    class NoNoiseWithoutExamples(kind):
        def step(self, x, y, clipping_norm=None, groups=None, shares=None):
            return super().step(x, y, clipping_norm, groups, shares) if len(x) else None

    return next(each for each in (NoClip, ActualDivisor, TwoNoises, NoNoiseWithoutExamples) if each.__name__ == name)


def noise_of(framework, size, kind=None, steps=20):
    """B·Δw + the clipped sum, over several steps: what was added, if the rest is right."""
    step = stepping(framework, weights(), kind, noise_multiplier=SIGMA, clipping_norm=S)
    x, y = examples(size)
    found = []
    for _ in range(steps):
        before = weights_of(framework, step)
        total = by_definition(framework, [part.astype(np.float32) for part in before], x, y, S)
        step.step(x, y)
        after = weights_of(framework, step)
        found += [(BATCH * (a - b) - t).ravel() for a, b, t in zip(before, after, total, strict=True)]
    return np.concatenate(found)


@every_step
@pytest.mark.parametrize("size", [BATCH, 0])
def test_noise_is_neither_smaller_nor_larger_than_it_should_be(framework, size):
    assert std_is(noise_of(framework, size), SIGMA * S, tolerance=0.1)


@every_step
@pytest.mark.parametrize(("name", "size"), [("ActualDivisor", 3), ("TwoNoises", BATCH), ("NoNoiseWithoutExamples", 0)])
def test_broken_noise_is_caught(framework, name, size):
    assert not std_is(noise_of(framework, size, twin(framework, name)), SIGMA * S, tolerance=0.1)


@every_step
def test_a_skipped_clip_is_caught(framework):
    x, y = examples()
    step = stepping(framework, weights(), twin(framework, "NoClip"))
    without = step.clipped_sum(x[1:], y[1:], 1e-3).sums
    assert norm([a - b for a, b in zip(step.clipped_sum(x, y, 1e-3).sums, without, strict=True)]) > 0.1
