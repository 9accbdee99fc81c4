"""What is released lies on a public grid: low bits say nothing."""

import numpy as np
import pytest
from statistics_of_noise import is_normal, std_is
from support import random_models, zeros
from test_clipping import cohort_of

from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.noise import GRID_BITS, GaussianNoise, grid_step, noised
from cloister.privacy.mechanisms.release import noisy_mean

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def on_grid(values, step):
    steps = np.asarray(values, np.float64) / step
    return bool((steps == np.rint(steps)).all())


@pytest.mark.parametrize("std", [1e-4, 0.7, 1.0, 300.0])
def test_the_step_is_a_power_of_two_far_below_the_noise(std):
    step = grid_step(std)
    assert np.frexp(step)[0] == 0.5
    assert std / 2 ** (GRID_BITS + 1) < step <= std / 2**GRID_BITS


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


def test_a_release_is_on_the_grid_of_its_sum():
    """With a cohort of 1 and a model of zeros the release is the noised sum itself."""
    bounded = clip(cohort_of(random_models(1, 0.1, like=zeros(50_000))), 1.0)
    released = noisy_mean(bounded, 2.0, 1, GaussianNoise(1))
    assert {piece.dtype for piece in released.model} == {np.dtype(np.float32)}, "as the clients' own models"
    # float32 holds multiples of the step exactly up to 2^24 steps, 16 standard deviations.
    assert on_grid(np.concatenate(released.model), grid_step(2.0))


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
