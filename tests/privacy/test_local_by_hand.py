"""Local mechanisms by hand, from the normals of the same stream."""

from itertools import product

import numpy as np
import pytest
from support import failures

from cloister import DiscreteGaussian
from cloister.privacy.accounting.events import Gaussian, Laplace, Pure, Unaccounted
from cloister.privacy.mechanisms import local
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.laplace import deviation, public_step
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, PublishedLaplace, no_noise
from cloister.privacy.mechanisms.noise import BLOCK, GaussianNoise, grid_step
from cloister.utils.errors import ConfigError, PrivacyError

in_poisoned_memory = pytest.mark.usefixtures("poisoned_memory")


def arrays(*values, dtype=np.float32):
    return {str(number): np.asarray(value, dtype) for number, value in enumerate(values)}


def expected_release(start, trained, factor, std, step, seed, before=0):
    """start + what is on the grid of factor·Δ + noise, array by array; `before` draws came first."""
    noise, found = GaussianNoise(seed), {}
    for _ in range(before):
        noise.standard_normal(3, np.float64)
    for name, array in start.items():
        update = (trained[name].astype(np.float64) - array).ravel() * factor
        if std:
            noise.add(update, std)
            update = np.rint(update / step) * step
        found[name] = (update + array.ravel()).astype(array.dtype).reshape(array.shape)
    return found


def same(found, expected):
    assert list(found) == list(expected)
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])
        assert array.dtype == expected[name].dtype


START = arrays([[1.0, 2.0], [0.5, 4.0]], [3.0, -1.0, 7.0])
TRAINED = arrays([[4.0, 2.0], [0.5, 8.0]], [3.0, -13.0, 7.0])
"""Δ is of norm 5 in the first array, of 12 in the second, of 13 in all."""


def test_a_gaussian_release_by_hand():
    def check(clip, factor):
        found = LocalGaussian(clip, 1.5).release(TRAINED, START, GaussianNoise(3))
        grid, expected = Grid.of(clip, 1.5, 1), {}
        source = DiscreteGaussian(2**24, GaussianNoise(3))
        for name, array in START.items():
            update = (TRAINED[name].astype(np.float64) - array).ravel()
            steps = [int(number * factor * (grid.steps / clip)) for number in update]
            noisy = (steps + source.integers(array.size).astype(int)).astype(float) * grid.step
            expected[name] = (noisy + array.ravel()).astype(array.dtype).reshape(array.shape)
        same(found, expected)

    assert failures([(20.0, 1.0), (13.1, 1.0), (2.6, 2.6 / (13.0 * (1 + 2.0**-30)))], check) == []


@pytest.mark.parametrize(("radius", "factor"), [(20.0, 1.0), (2.6, 2.6 / (13.0 * (1 + 2.0**-30)))])
def test_a_laplace_release_by_hand(radius, factor):
    epsilon, noise = 7 / 5.0 / radius, GaussianNoise(3)
    std = deviation(noise, 7, epsilon)
    drawn = next(noise._numbers)
    found = LocalLaplace(radius, 5.0).release(TRAINED, START, GaussianNoise(3))
    same(found, expected_release(START, TRAINED, factor, std, public_step(7, epsilon), 3, before=drawn))


@pytest.mark.parametrize("mechanism", [LocalLaplace(2.0, 5.0, per_layer=True), PublishedLaplace(5.0, per_layer=True)])
def test_a_release_per_layer_by_hand(mechanism):
    found = mechanism.release(TRAINED, START, GaussianNoise(3))
    noise = GaussianNoise(3)
    for name, norm in (("0", 5.0), ("1", 12.0)):
        bounded = isinstance(mechanism, LocalLaplace)
        epsilon = START[name].size / 5.0 / (2.0 if bounded else norm)
        std, step = deviation(noise, START[name].size, epsilon), public_step(START[name].size, epsilon)
        update = (TRAINED[name].astype(np.float64) - START[name]).ravel()
        update *= 2.0 / (norm * (1 + 2.0**-30)) if bounded else 1.0
        noise.add(update, std)
        expected = (np.rint(update / step) * step + START[name].ravel()).astype(np.float32)
        np.testing.assert_array_equal(found[name].ravel(), expected)


def test_a_published_release_by_hand():
    epsilon, noise = 7 / 5.0 / 13.0, GaussianNoise(3)
    std = deviation(noise, 7, epsilon)
    drawn = next(noise._numbers)
    found = PublishedLaplace(5.0).release(TRAINED, START, GaussianNoise(3))
    same(found, expected_release(START, TRAINED, 1.0, std, public_step(7, epsilon), 3, before=drawn))


@pytest.mark.parametrize(("mechanism", "length"), [(LocalLaplace(2.0, 5.0), 2.0), (PublishedLaplace(5.0), 0.75)])
def test_no_grid_of_a_release_follows_the_draw(mechanism, length):
    """Draw the noise of one parameter with deviations far apart: its grid would reveal which it was."""
    start, trained, epsilon, grids = (
        arrays([1.0], dtype=np.float64),
        arrays([1.75], dtype=np.float64),
        1 / 5 / length,
        set(),
    )
    for seed in range(12):
        noise = GaussianNoise(seed)
        std = deviation(noise, 1, epsilon)
        expected = expected_release(start, trained, 1.0, std, public_step(1, epsilon), seed, next(noise._numbers))
        same(mechanism.release(trained, start, GaussianNoise(seed)), expected)
        grids.add(grid_step(std))
    assert len(grids) > 1


def test_a_release_without_noise_by_hand():
    def check(mechanism, factor):
        found = mechanism.release(TRAINED, START, GaussianNoise(3))
        for name, array in expected_release(START, TRAINED, factor, 0.0, 1.0, 3).items():
            np.testing.assert_allclose(found[name], array, rtol=1e-6)

    cases = [(LocalGaussian(2.6, 0.0), 0.2), (LocalLaplace(2.6, 0.0), 0.2), (PublishedLaplace(0.0), 1.0)]
    assert failures(cases, check) == []


def test_an_update_that_the_published_noise_has_no_room_for_is_not_sent():
    found = PublishedLaplace(5.0).release(arrays([1.5, 2.0]), arrays([1.5, 2.0]), GaussianNoise(3))
    assert found["0"].tolist() == [1.5, 2.0]
    far = PublishedLaplace(5.0).release(arrays([3e38, 2.0]), arrays([1.5, 2.0]), GaussianNoise(3))
    assert far["0"].tolist() == [1.5, 2.0]


def test_an_update_that_is_none_gets_no_published_noise():
    """As the zero update: there is nothing that noise could be in proportion to."""

    def check(per_layer, trained):
        start = arrays([1.5, 2.0], [0.5])
        same(PublishedLaplace(5.0, per_layer).release(trained, start, GaussianNoise(3)), start)

    cases = product([False, True], [arrays([np.nan, 2.0], [1.0]), arrays([np.inf, 2.0], [1.0]), arrays([9.0, 2.0])])
    assert failures(cases, check) == []


def test_a_factor_by_hand():
    def check(norm, bound, factor):
        assert local.factor_for(norm, bound) == pytest.approx(factor, rel=1e-15)

    cases = [
        (0.0, 1.0, 1.0),
        (1.0, 1.0, 1.0 / (1 + 2.0**-30)),
        (1.0 / (1 + 2.0**-30) * (1 - 1e-12), 1.0, 1.0),
        (4.0, 1.0, 0.25 / (1 + 2.0**-30)),
        (1e300, 1e-10, 0.0),
        (2.0**900, 2.0**-99, 2.0**-999 / (1 + 2.0**-30)),
        (2.0**901, 2.0**-99, 0.0),
        (2.0**901, 2.0**-100, 0.0),
    ]
    assert failures(cases, check) == []


def test_a_norm_by_hand():
    def check(block, norm):
        with np.errstate(all="ignore"):
            found = local._norm(np.array(block))
        assert found == pytest.approx(norm, rel=1e-15) and type(found) is float

    cases = [
        ([3.0, 4.0], 5.0),
        ([0.0, 0.0], 0.0),
        ([3e-200, -4e-200], 5e-200),
        ([3e200, -4e200], 5e200),
        ([-3e200, 1.0], 3e200),
        ([1.0, 3e200], 3e200),
        ([5e-324, 0.0], 5e-324),
        ([np.inf, 1.0], np.inf),
        ([-np.inf, 1.0], np.inf),
        ([2.0**-449, 0.0], 2.0**-449),
        ([2.0**-450, 0.0], 2.0**-450),
        ([2.0**-451, 0.0], 2.0**-451),
        ([2.0**499, 0.0], 2.0**499),
        ([2.0**500, 0.0], 2.0**500),
        ([2.0**501, 0.0], 2.0**501),
    ]
    assert failures(cases, check) == []


def test_norms_of_arrays_of_several_blocks():
    rng = np.random.default_rng(1)
    trained = (rng.standard_normal(BLOCK + 3), np.zeros(0), rng.standard_normal(5))
    start = tuple(rng.standard_normal(piece.size) for piece in trained)
    expected = [float(np.linalg.norm(a - b)) for a, b in zip(trained, start, strict=True)]
    assert local._norms(trained, start) == pytest.approx(expected)


def test_what_is_told_of_an_update_that_is_none():
    told = []
    for trained in (arrays([1.0]), arrays([np.nan, 1.0])):
        LocalGaussian(1.0, 1.0).release(trained, arrays([1.0, 2.0]), GaussianNoise(1), told.append)
    assert told == [
        "the trained arrays are not those that training began with",
        "training has diverged: the update is not finite",
    ]
    LocalGaussian(1.0, 1.0).release(arrays([1.0]), arrays([1.0, 2.0]), GaussianNoise(1))
    for start, says in (
        (arrays([np.nan]), "the model that was sent has NaN or infinite numbers: nothing can be released from it"),
        ({"b": np.ones(1, np.int32)}, "array 'b' must be float16, float32 or float64 to carry noise, found int32"),
    ):
        with pytest.raises(PrivacyError) as refused:
            LocalGaussian(1.0, 1.0).release(arrays([1.0]), start, GaussianNoise(1), pytest.fail)
        assert str(refused.value) == says


def test_events_by_hand():
    laplace, gaussian = ([Unaccounted(no_noise(name))] for name in ("laplace", "gaussian"))
    for mechanism, expected in (
        (LocalLaplace(2.0, 5.0), [Pure(4.0)]),
        (LocalGaussian(2.0, 1.5), [Gaussian(1.5)]),
        (PublishedLaplace(5.0), [Laplace(4.0, 1.0)]),
        (LocalLaplace(2.0, 0.0), laplace),
        (LocalGaussian(2.0, 0.0), gaussian),
        (PublishedLaplace(0.0), laplace),
    ):
        assert mechanism.events(20) == expected
        assert mechanism.events(1)
        with pytest.raises(ConfigError, match="parameters must be > 0, got 0"):
            mechanism.events(0)


def test_caveats_and_parameters_by_hand():
    own = (
        "privacy.radius is 0: the scale of the noise follows from how far a client's own data moved its model, and "
        "tells it; what is leaked within that distance is nominal"
    )
    none = "privacy.laplace-noise-multiplier is 0: there is no noise"
    assert PublishedLaplace(5.0).caveats() == [own] and PublishedLaplace(0.0).caveats() == [none, own]
    for make, reason in ((LocalLaplace, none), (LocalGaussian, none.replace("laplace", "gaussian"))):
        assert make(1.0, 5.0).caveats() == [] and make(1.0, 0.0).caveats() == [reason]
    assert PublishedLaplace(5.0, True).parameters() == {
        "privacy.laplace-noise-multiplier": 5.0,
        "privacy.radius": 0.0,
        "privacy.per-layer": True,
    }
    assert not PublishedLaplace(5.0).per_layer and not LocalLaplace(1.0, 5.0).per_layer


def test_the_range_of_a_multiplier():
    makers = {"laplace": lambda z: LocalLaplace(1.0, z), "gaussian": lambda z: LocalGaussian(1.0, z)}
    for name, make in (*makers.items(), ("laplace", PublishedLaplace)):
        assert make(1e-6).noise_multiplier == 1e-6 and make(0.0).noise_multiplier == 0
        with pytest.raises(ConfigError) as refused:
            make(9e-7)
        assert str(refused.value) == f"{name}_noise_multiplier must be 0 or at least 1e-06, got 9e-07"
        with pytest.raises(ConfigError, match=rf"^{name}_noise_multiplier must be >= 0, got -1.0$"):
            make(-1.0)
    with pytest.raises(PrivacyError, match="noise multiplier"):
        LocalGaussian(1.0, 1.1e6)
    for make, name in ((LocalLaplace, "radius"), (LocalGaussian, "gaussian_clipping_norm")):
        with pytest.raises(ConfigError, match=f"^{name} must be > 0, got 0.0$"):
            make(0.0, 1.0)
