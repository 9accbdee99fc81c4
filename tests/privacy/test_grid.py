"""Releases are on a public grid: low bits carry no information."""

import dataclasses
import math

import numpy as np
import pytest
from flwr.serverapp.strategy import FedMedian
from statistics_of_noise import is_normal, std_is
from support import all_nodes, content, failures, grid_of, one_round, random_models, zeros
from test_clipping import cohort_of

from cloister import DiscreteGaussian
from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import (
    BLOCK,
    GRID_BITS,
    HEADROOM,
    GaussianNoise,
    grid_step,
    noised,
    refuse_beyond,
)
from cloister.privacy.mechanisms.release import bounded_models, bounded_sum, noisy_mean, noisy_trimmed_mean
from cloister.server.private_strategy import MetricDP
from cloister.utils.errors import ConfigError, PrivacyError, UnboundedSensitivity

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def on_grid(values, step):
    steps = np.asarray(values, np.float64) / step
    return bool((steps == np.rint(steps)).all())


def test_the_step_is_a_power_of_two_far_below_the_noise():
    def check(std):
        step = grid_step(std)
        assert np.frexp(step)[0] == 0.5
        assert std / 2 ** (GRID_BITS + 1) < step <= std / 2**GRID_BITS

    assert failures([1e-4, 0.7, 1.0, 300.0], check) == []


def test_without_noise_there_is_no_grid():
    assert grid_step(0.0) == 0.0
    target = np.array([1 / 3])
    GaussianNoise(3).add_on_grid((target,), 0.0)
    assert target == 1 / 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_land_on_the_grid_whatever_they_were(dtype):
    target = np.random.default_rng(0).standard_normal(200_000).astype(dtype)
    plain = target.copy()
    GaussianNoise(3).add_on_grid((target,), 0.5)
    assert on_grid(target, grid_step(0.5)) and not on_grid(plain, grid_step(0.5))
    difference = target.astype(np.float64) - plain
    assert std_is(difference, 0.5) and is_normal(difference, 0.5)
    assert not std_is(difference, 0.5 * 2 / 3) and not std_is(difference, 0.5 * 3 / 2)


@pytest.mark.parametrize("width", [3, 70_000])
def test_every_number_of_a_mean_is_written_from_the_updates_and_the_noise(width):
    """In poisoned memory; what is left of the sum without its noise is the sum of the clipped updates."""
    sent, *models = random_models(3, 0.1, like=zeros(width))
    cohort = clip(cohort_of(models, sent), 1.0)
    plain, noised_mean = (noisy_mean(cohort, z, 2, GaussianNoise(1)) for z in (0.0, 2.0))
    expected = [s + sum(f * (r - s) for f, r in zip(cohort.factors, rows, strict=True)) / 2
                for s, *rows in zip(cohort.sent, *cohort.rows, strict=True)]  # fmt: skip
    np.testing.assert_allclose(np.concatenate(plain.model), np.concatenate(expected), atol=1e-5)
    noise = np.concatenate(noised_mean.model).astype(np.float64) - np.concatenate(plain.model)
    assert np.isfinite(noise).all() and (noise != 0).mean() > 0.999
    if len(noise) > 1000:
        assert std_is(noise, 1.0) and not std_is(noise, 2 / 3) and not std_is(noise, 3 / 2)


def test_without_noise_nothing_is_rounded():
    model = tuple(np.concatenate([a.ravel() for a in m.values()]) for m in random_models(1))
    np.testing.assert_array_equal(noised(model, 0.0, GaussianNoise(1))[0], model[0])


def test_half_precision_is_noised_in_single():
    (noisy,) = noised((np.zeros(100_000, np.float16),), 1.0, GaussianNoise(1))
    assert noisy.dtype == np.float32 and std_is(noisy, 1.0)


# By hand, from the normals of the same stream


def noise_of(seed, sizes, std):
    """The normals of a stream for arrays of these sizes, in double precision."""
    noise, found = GaussianNoise(seed), [np.zeros(size) for size in sizes]
    for piece in found:
        noise.add(piece, std)
    return found


def rounded(values, step):
    return np.rint(values / step) * step


def test_a_trimmed_mean_by_hand():
    def check(asked, trimmed):
        sent, *models = random_models(4, 0.5)
        cohort = clip(cohort_of(models, sent), 0.75)
        release = noisy_trimmed_mean(cohort, 2.0, asked, trimmed, GaussianNoise(5))
        kept = asked - 2 * trimmed
        assert (release.noise_std, release.sensitivity) == (2.0 * (0.75 / kept), 0.75 / kept)
        step, source = Grid.of(0.75, 2.0, kept).step, DiscreteGaussian(2**24, GaussianNoise(5))
        for layer, piece in enumerate(release.model):
            rows = [
                np.trunc((row[layer] - cohort.sent[layer]) * np.float32(f / step)).astype(int)
                for f, row in zip(cohort.factors, cohort.rows, strict=True)
            ]
            filled = np.sort([*rows, *[np.zeros_like(rows[0])] * (asked - 3)], axis=0)[trimmed : asked - trimmed]
            noisy = filled.sum(axis=0) + source.integers(piece.size)
            np.testing.assert_array_equal(piece, (cohort.sent[layer] + noisy * (step / kept)).astype(np.float32))
            assert piece.dtype == np.float32

    assert failures([(3, 1), (4, 1), (5, 2), (6, 2), (3, 0), (9, 0), (8, 3)], check) == []


def test_a_median_is_the_mean_of_the_one_or_the_two_in_the_middle():
    def check(asked, bound):
        cohort = clip(cohort_of(random_models(3, 0.5)), 0.75)
        release = noisy_trimmed_mean(cohort, 2.0, asked, (asked - 1) // 2, GaussianNoise(5))
        twin = noisy_trimmed_mean(cohort, 2.0, asked, (asked - 1) // 2, GaussianNoise(5))
        assert (release.sensitivity, release.noise_std) == (bound, 2.0 * bound)
        for piece, other in zip(release.model, twin.model, strict=True):
            np.testing.assert_array_equal(piece, other)

    assert failures([(3, 0.75), (4, 0.375), (5, 0.75), (8, 0.375)], check) == []


def test_a_private_deviation_does_not_move_the_grid():
    """It follows the largest there could have been, unless that leaves less than 2^12 steps in a deviation."""
    step, model = grid_step(10.0), (np.zeros(1000),)
    for std in (0.05, 0.3, 10.0):
        assert on_grid(noised(model, std, GaussianNoise(1), widest=10.0)[0], step)
        assert on_grid(noised(model, std, GaussianNoise(1))[0], step) == (std == 10.0)
    for std, widest in ((0.03, 10.0), (0.05, math.inf), (0.05, 0.01)):
        np.testing.assert_array_equal(
            noised(model, std, GaussianNoise(1), widest)[0], noised(model, std, GaussianNoise(1))[0]
        )


@pytest.fixture
def steps(monkeypatch):
    """Record the steps of the grids of releases; None: the grid follows the deviation."""
    found, add, of = [], GaussianNoise.add_on_grid, Grid.of

    def listen(self, row, std, step=None):
        found.append(step)
        add(self, row, std, step)

    def make(*given):
        grid = of(*given)
        found.append(grid.step)
        return grid

    monkeypatch.setattr(GaussianNoise, "add_on_grid", listen)
    monkeypatch.setattr(Grid, "of", make)
    return found


def test_an_exact_distance_moves_no_grid(steps):
    """One that scales the noise is private: clients that lie further apart get less noise, on the same grid."""

    def check(placement):
        inner = FedMedian() if placement == "rule" else all_nodes()
        options, multipliers = {"placement": placement, "max_distance": 3.0}, set()
        steps.clear()
        for spread in (0.05, 0.08, 0.2):
            models = random_models(3, spread)
            strategy = MetricDP(inner, noise_multiplier=1.0, clipping_norm=50.0, noise=GaussianNoise(1), **options)
            one_round(strategy, grid_of(lambda node, _, models=models: content(models[node - 1]), 3), zeros())
            multipliers.add(strategy.measured.noise_multiplier)
        assert len(multipliers) == 3 == len(steps) and len(set(steps)) == 1 and None not in steps

    assert failures(["update", "rule", "model"], check) == []


def test_what_cannot_be_a_mean_or_a_median():
    free, noise = cohort_of(random_models(3)), GaussianNoise(1)
    bounded = clip(free, 1.0)
    for release in (lambda: noisy_mean(free, 1.0, 3, noise), lambda: noisy_trimmed_mean(free, 1.0, 3, 1, noise)):
        with pytest.raises(UnboundedSensitivity) as refused:
            release()
        assert str(refused.value) == "noise was asked for before anything bounded a contribution; clip first"
    with pytest.raises(UnboundedSensitivity) as refused:
        bounded_sum(free)
    assert str(refused.value) == "a sum was asked for before anything bounded a contribution; clip first"
    with pytest.raises(PrivacyError) as refused:
        noisy_trimmed_mean(bounded, 1.0, 2, 0, noise)
    assert str(refused.value) == "3 clients replied and 2 were asked: that number is not public"
    for release, says in (
        (lambda: noisy_mean(bounded, 1.0, 0, noise), "cohort_size must be > 0, got 0"),
        (lambda: noisy_mean(bounded, -1.0, 3, noise), "noise_multiplier must be >= 0, got -1.0"),
        (lambda: noisy_trimmed_mean(bounded, 1.0, 4, 2, noise), "values_kept must be > 0, got 0"),
        (lambda: noisy_trimmed_mean(bounded, -1.0, 3, 1, noise), "noise_multiplier must be >= 0, got -1.0"),
        (lambda: noisy_trimmed_mean(bounded, 1.0, 3, -1, noise), "trimmed must be >= 0, got -1"),
    ):
        with pytest.raises(ConfigError) as refused:
            release()
        assert str(refused.value) == says


@pytest.mark.parametrize("step", [None, 2.0**-3])
def test_sums_by_hand(step):
    target, out = np.array([1.0, -2.0, 3.3]), np.full(3, np.nan, np.float32)
    maker = GaussianNoise(3).maker()
    maker.add_on_grid(target, 0.7, (5,), step, out)
    normals = GaussianNoise(3).maker().normals(5, 3, 0.7)
    grid = 2.0**-21 if step is None else step
    np.testing.assert_array_equal(out, rounded(target + normals, grid).astype(np.float32))
    assert target.tolist() == [1.0, -2.0, 3.3]
    maker.add_on_grid(target, 0.7, (5,), step)
    np.testing.assert_array_equal(target.astype(np.float32), out)


def test_sums_of_a_row_go_where_they_are_wanted():
    row, out = (np.array([1.0, -2.0]), np.array([3.3])), (np.zeros(2), np.zeros(1, np.float32))
    GaussianNoise(3).add_on_grid(row, 0.7, 2.0**-3, out)
    assert [piece.tolist() for piece in row] == [[1.0, -2.0], [3.3]]
    GaussianNoise(3).add_on_grid(row, 0.7, 2.0**-3)
    assert all(np.array_equal(*pair) for pair in zip(row, out, strict=True))


def test_each_block_of_a_sum_has_noise_from_its_own_place():
    target = np.zeros(BLOCK + 2)
    GaussianNoise(3).maker().add_on_grid(target, 0.7, (5, 2))
    for found, number in ((target[:BLOCK], 5), (target[BLOCK:], 2)):
        normals = GaussianNoise(3).maker().normals(number, len(found), 0.7)
        np.testing.assert_array_equal(found, rounded(normals, 2.0**-21))


def test_without_noise_numbers_are_copied():
    target, out = np.array([1 / 3, 2.0]), np.zeros(2)
    GaussianNoise(1).maker().add_on_grid(target, 0.0, (0,), out=out)
    assert out.tolist() == target.tolist() == [1 / 3, 2.0]


def test_the_step_by_hand():
    def check(std, step):
        assert grid_step(std) == step and type(grid_step(std)) is float and type(grid_step(0.0)) is float

    assert failures([(1.0, 2.0**-20), (1.99, 2.0**-20), (2.0, 2.0**-19), (0.5, 2.0**-21)], check) == []


def test_the_range_of_noise():
    limits = np.finfo(np.float32)
    low, high = math.log(limits.tiny) + GRID_BITS, math.log(limits.max) - math.log(HEADROOM)
    for inside in (low + 1e-9, 0.0, high - 1e-9):
        refuse_beyond(inside)
    for outside in (low, low - 1.0, high, high + 1.0, math.nan):
        with pytest.raises(PrivacyError) as refused:
            refuse_beyond(outside)
        assert str(refused.value) == "this asks for noise beyond the range of single precision; scale the model"


def test_a_model_by_hand():
    model = (np.array([1.0, 2.0], np.float32), np.array([3.0]))
    kept = [piece.copy() for piece in model]
    found = noised(model, 0.5, GaussianNoise(4))
    for piece, plain, normals in zip(found, kept, noise_of(4, [2, 1], 0.5), strict=True):
        np.testing.assert_allclose(piece, rounded(plain + normals, grid_step(0.5)).astype(plain.dtype), rtol=1e-7)
        assert piece.dtype == plain.dtype
    for piece, plain in zip(model, kept, strict=True):
        np.testing.assert_array_equal(piece, plain)


def test_a_model_within_the_bound_is_shown_as_it_came():
    sent, near, far = random_models(3, 1e-3)
    far = {name: array + 100 for name, array in far.items()}
    cohort = clip(cohort_of([near, far], sent), 1.0)
    shown = bounded_models(cohort)
    assert all(piece is own for piece, own in zip(shown[0], cohort.rows[0], strict=True))
    factor = np.float32(cohort.factors[1])
    for piece, own, base in zip(shown[1], cohort.rows[1], cohort.sent, strict=True):
        np.testing.assert_array_equal(piece, base + (own - base) * factor)
        assert piece.dtype == np.float32
    doubled = dataclasses.replace(cohort, factors=np.array([2.0, 1.0]))
    np.testing.assert_allclose(
        bounded_models(doubled)[0][0], 2 * cohort.rows[0][0] - cohort.sent[0], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("part", [{"factors": np.ones(1)}, {"sent": (np.zeros(12, np.float32),)}])
def test_a_cohort_that_lacks_a_part_is_shown_to_nobody(part):
    """Rather than without a client, or without an array."""
    with pytest.raises(ValueError, match=r"zip\(\)"):
        bounded_models(dataclasses.replace(clip(cohort_of(random_models(2)), 1.0), **part))
