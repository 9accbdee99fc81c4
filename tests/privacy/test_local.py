"""Mechanisms of a client for its own update: what noise is added to lies in the ball, whatever the server sent."""

import math
import os
from fractions import Fraction
from functools import cache
from itertools import chain, product

import numpy as np
import pytest
from scipy import stats
from statistics_of_noise import FALSE_ALARM, is_normal, std_is
from support import failures

from cloister.privacy.accounting.events import Gaussian, Laplace, Pure, Unaccounted
from cloister.privacy.mechanisms import local
from cloister.privacy.mechanisms.discrete import sampler
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, PublishedLaplace
from cloister.privacy.mechanisms.noise import BLOCK, GRID_BITS, GaussianNoise, Maker, grid_step
from cloister.utils.errors import ConfigError, PrivacyError

in_poisoned_memory = pytest.mark.usefixtures("poisoned_memory")


CASES = int(os.environ.get("CLOISTER_SENSITIVITY_CASES", "1000"))
"""Of the search over adversarial models."""
MECHANISMS = [LocalLaplace(0.7, 5.0), LocalLaplace(0.7, 5.0, per_layer=True), LocalGaussian(0.7, 1.5)]
BOTH = [LocalLaplace(0.7, 5.0), LocalGaussian(0.7, 1.5)]
STEP = Grid.of(0.7, 1.5, 1).step
"""Of the Gaussian among them."""


def arrays(*values, dtype=np.float32):
    return {str(number): np.asarray(value, dtype) for number, value in enumerate(values)}


def flat(named):
    return np.concatenate([np.asarray(array, np.float64).ravel() for array in named.values()])


def bound_of(mechanism):
    return getattr(mechanism, "radius", None) or mechanism.clipping_norm


@pytest.fixture
def overheard(monkeypatch):
    """Return the input of the noise, by its place: numbers and 1, or whole steps and the share of C that a step is."""
    heard = {}

    def listen(maker, target, std, places, *_):
        heard[places] = exact(target), 1

    def count(maker, target, places):
        # A release that is written anew adds the same noise at the same places.
        heard[places] = exact(target), maker.share

    make = local._write_whole

    def counted(update, targets, factor, grid, source, places):
        monkeypatch.setattr(sampler.Maker, "share", Fraction(grid.bound) / Fraction(grid.steps), raising=False)
        return make(update, targets, factor, grid, source, places)

    monkeypatch.setattr(Maker, "add_on_grid", listen)
    monkeypatch.setattr(sampler.Maker, "add", count)
    monkeypatch.setattr(local, "_write_whole", counted)
    return heard


# The law


def releases(mechanism, update, count, start=0.0, seed=1):
    """Shape (count, p): what leaves, less the start."""
    noise, start = GaussianNoise(seed), arrays(np.full(len(update), start), dtype=np.float64)
    trained = {"0": start["0"] + update}
    return np.array([flat(mechanism.release(trained, start, noise)) - start["0"] for _ in range(count)])


@cache
def laplace_sample(mechanism, count):
    return releases(mechanism, np.array([3.0, 0.0, 4.0]), count) - 0.7 * np.array([0.6, 0.0, 0.8])


def laplace_noise_is_right(mechanism, per_unit, count=3000):
    """Mean (the projected update) and Gamma law of the length of the noise, per_unit = ε, in three dimensions."""
    sample = laplace_sample(mechanism, count)
    centred = np.abs(sample.mean(axis=0)).max() < 6 * math.sqrt(4 / count) / per_unit
    radii = np.linalg.norm(sample, axis=1)
    return bool(centred and stats.kstest(radii, stats.gamma(3, scale=1 / per_unit).cdf).pvalue > FALSE_ALARM)


@pytest.mark.slow
def test_laplace_noise_has_the_length_that_the_radius_sets():
    mechanism = LocalLaplace(0.7, 5.0)
    assert laplace_noise_is_right(mechanism, 3 / (5.0 * 0.7))
    assert not laplace_noise_is_right(mechanism, 1.2 * 3 / (5.0 * 0.7))
    assert not laplace_noise_is_right(mechanism, 3 / (5.0 * 0.7) / 1.2)


@pytest.mark.slow
def test_every_array_has_its_own_ball_and_its_own_noise():
    mechanism, noise = LocalLaplace(0.7, 5.0, per_layer=True), GaussianNoise(3)
    start, trained = arrays([0.0, 0.0], [0.0] * 4, dtype=np.float64), arrays([3.0, 4.0], [0.0] * 4, dtype=np.float64)
    sent = [mechanism.release(trained, start, noise) for _ in range(5000)]
    one = np.array([each["0"] for each in sent]) - 0.7 * np.array([0.6, 0.8])
    other = np.array([each["1"] for each in sent])
    radii = np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1)
    for p, lengths in ((2, radii[0]), (4, radii[1])):
        assert stats.kstest(lengths, stats.gamma(p, scale=0.7 * 5 / p).cdf).pvalue > FALSE_ALARM
    assert abs(np.corrcoef(*radii)[0, 1]) < 6 / math.sqrt(5000)


def test_gaussian_noise_is_z_times_the_clip():
    def check(update):
        count = 200_000
        start = arrays(np.zeros(count))
        trained = arrays(np.full(count, update))
        sample = flat(LocalGaussian(0.7, 1.5).release(trained, start, GaussianNoise(2)))
        sample = sample - min(update, 0.7 / math.sqrt(count))
        assert std_is(sample, 1.05) and is_normal(sample, 1.05)
        assert not std_is(sample, 1.05 * 2 / 3) and not std_is(sample, 1.05 * 3 / 2)

    assert failures([0.0, 1e-3, 50.0], check) == []


@in_poisoned_memory
@pytest.mark.parametrize("mechanism", [*MECHANISMS, PublishedLaplace(5.0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_parameter_of_a_large_model_gets_noise(mechanism, dtype, monkeypatch):
    """Four threads' worth of blocks, whole and cut, in memory that held NaN."""
    monkeypatch.setattr("cloister.utils.threads.WORTH_A_THREAD", 2 * BLOCK)
    sizes = (5, 3 * BLOCK + 3, 3, BLOCK, 6 * BLOCK)
    start = arrays(*(np.zeros(size) for size in sizes), dtype=dtype)
    trained = {name: array + dtype(1e-3) for name, array in start.items()}
    sent = mechanism.release(trained, start, GaussianNoise(4))
    for size, array in zip(sizes, sent.values(), strict=True):
        assert array.dtype == dtype and np.isfinite(array).all()
        if size < BLOCK:
            continue
        for stretch in np.array_split(array.astype(np.float64), 5 if size > BLOCK else 1):
            assert is_normal((stretch - stretch.mean()) / stretch.std(), 1.0)
            assert len(np.unique(stretch)) > 0.9 * len(stretch)


# Sensitivity


def models(seed, dtype):
    """A start and what was trained from it twice, as whoever looks for a hole would choose, at all scales there are."""
    rng = np.random.default_rng(seed)
    limits = np.finfo(dtype)
    low, high = math.log10(limits.smallest_subnormal), math.log10(limits.max)

    def some(size):
        scale = 10.0 ** rng.uniform(low, high - 0.01)
        kind = rng.integers(7)
        with np.errstate(all="ignore"):
            values = [
                lambda: rng.standard_normal(size) * scale,
                lambda: np.full(size, scale),
                lambda: np.where(np.arange(size) % 2, scale, -scale),
                lambda: np.where(np.arange(size) == rng.integers(size), scale, 0.0),
                lambda: rng.choice([-1.0, 1.0], size) * float(limits.max),
                lambda: 10.0 ** rng.uniform(low, high - 0.01, size),
                lambda: np.zeros(size),
            ][kind]()
        return np.clip(np.nan_to_num(values), -limits.max, limits.max).astype(dtype)

    sizes = rng.integers(1, 9, 3)
    start = {str(number): some(size) for number, size in enumerate(sizes)}

    def trained():
        how = rng.integers(4)
        with np.errstate(all="ignore"):
            return {
                name: np.clip(
                    [some(array.size), array + some(array.size), -array, np.nextafter(array, some(array.size))][how],
                    -limits.max,
                    limits.max,
                ).astype(dtype)
                for name, array in start.items()
            }

    return start, trained(), trained()


def exact(vector):
    return [Fraction(float(number)) for number in vector]


def squared(vector):
    return sum((number * number for number in vector), Fraction(0))


def noised_vector(mechanism, trained, start, overheard):
    """Return the input of the noise: one exact vector a part, in units of the weights."""
    overheard.clear()
    sent = mechanism.release(trained, start, GaussianNoise(1))
    assert all(np.isfinite(array).all() for array in sent.values())
    pieces = [[number * unit for number in numbers] for numbers, unit in overheard.values()]
    return pieces if getattr(mechanism, "per_layer", False) else [list(chain(*pieces))]


def stays_in_the_ball(mechanism, cases, overheard, dtype=np.float32, first=0):
    """Return whether the input of the noise is within R of zero, and two of them within 2R, exactly, for all cases."""
    bound = Fraction(bound_of(mechanism))
    for case in range(first, first + cases):
        start, *both = models(case, dtype)
        one, other = (noised_vector(mechanism, trained, start, overheard) for trained in both)
        for a, b in zip(one, other, strict=True):
            apart = [x - y for x, y in zip(a, b, strict=True)]
            if not (squared(a) <= bound**2 and squared(b) <= bound**2 and squared(apart) <= 4 * bound**2):
                return False
    return True


def test_no_models_bring_the_update_out_of_the_ball(overheard):
    def check(bound, dtype, make):
        assert stays_in_the_ball(make(bound), CASES // 20, overheard, dtype)

    cases = product(
        [1e-20, 0.7, 1e20],
        [np.float32, np.float64],
        [
            lambda r: LocalLaplace(r, 5.0),
            lambda r: LocalLaplace(r, 5.0, per_layer=True),
            lambda r: LocalGaussian(r, 1.5),
        ],
    )
    assert failures(cases, check) == []


def test_the_search_over_one_mechanism_of_each_kind(overheard):
    for mechanism in BOTH:
        assert stays_in_the_ball(mechanism, CASES // 4, overheard, first=10**6)


def test_the_ball_is_reached(overheard):
    for mechanism in MECHANISMS:
        (vector, *_) = noised_vector(mechanism, arrays([3e8, 4e8]), arrays([0.0, 0.0]), overheard)
        lost = 2 * STEP if isinstance(mechanism, LocalGaussian) else 0
        assert 0.7 * (1 - 1e-8) - lost <= math.sqrt(squared(vector)) <= 0.7


def test_a_small_update_is_not_changed_but_by_the_grid(overheard):
    """Toward zero, by less than a step; under Laplace noise not at all."""
    for mechanism in MECHANISMS:
        start, trained = arrays([1.0, -2.0], [3.0]), arrays([1.25, -2.125], [3.0])
        one, other, zero = chain(*noised_vector(mechanism, trained, start, overheard))
        if isinstance(mechanism, LocalGaussian):
            assert 0 <= Fraction(1, 4) - one < STEP and 0 <= other + Fraction(1, 8) < STEP and zero == 0
            assert one > 0.2499 and other < -0.1249
        else:
            assert [one, other, zero] == [Fraction(1, 4), Fraction(-1, 8), 0]


def test_norms_hold_at_every_scale_of_a_double():
    def check(scale):
        block = np.array([3.0, -4.0] * 2) / 5 * scale
        true = math.sqrt(sum(float(x / Fraction(scale)) ** 2 for x in exact(block))) * scale
        assert math.isclose(local._norm(block), true, rel_tol=1e-12)

    assert failures([5e-324, 1e-310, 1e-200, 1e-150, 1.0, 1e150, 1e200, 8e307], check) == []


@pytest.mark.slow
def test_the_norm_of_many_numbers_is_within_its_error_bound():
    rng = np.random.default_rng(0)
    trained = (rng.standard_normal(2 * BLOCK + 1), 10.0 ** rng.uniform(-40, 38, BLOCK + 3))
    start = tuple(np.zeros_like(piece) for piece in trained)
    for norm, piece in zip(local._norms(trained, start), trained, strict=True):
        square = squared(exact(piece))
        assert Fraction(norm) ** 2 <= square * Fraction(1 + local.NORM_ERROR)
        assert square <= (Fraction(norm) * Fraction(1 + local.NORM_ERROR)) ** 2


def test_an_update_so_large_that_its_factor_would_round_up_counts_as_zero(overheard):
    """1e-20 over 1e308 is a number of few bits, which may be twice what it should be."""
    start, trained = arrays([0.0], dtype=np.float64), arrays([1.7e308], dtype=np.float64)
    (vector,) = noised_vector(LocalGaussian(1e-20, 1.0), trained, start, overheard)
    assert vector == [0]


# Broken twins


class Unprojected(LocalLaplace):
    """The ball is left out."""

    def release(self, trained, start, noise, tell=None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cloister.privacy.mechanisms.local.factor_for", lambda norm, bound: 1.0)
            return super().release(trained, start, noise, tell)


class FewDigits(LocalGaussian):
    """The norm is rounded to twelve bits."""

    verified = True

    def release(self, trained, start, noise, tell=None):
        right = local._norms

        def norms(after, before):
            parts = [math.frexp(norm) for norm in right(after, before)]
            return [math.ldexp(round(part * 2**12) / 2**12, power) for part, power in parts]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, "_norms", norms)
            if not self.verified:
                patch.setattr(Grid, "contains", lambda grid, squares: True)
            return super().release(trained, start, noise, tell)


class Unverified(FewDigits):
    """And nobody looks at the whole numbers."""

    verified = False


class OnTheModel(LocalGaussian):
    """Noise goes to the model: the start is added to the clipped update first."""

    def release(self, trained, start, noise, tell=None):
        moved = LocalGaussian(self.clipping_norm, 0.0).release(trained, start, noise)
        for array in moved.values():
            wide = array.astype(np.float64)
            noise.add_on_grid((wide,), self._std())
            array[...] = wide
        return moved


def test_the_search_finds_the_hole_of_a_twin(overheard):
    def check(twin):
        assert not stays_in_the_ball(twin, 100, overheard)

    assert failures([Unprojected(0.7, 5.0), Unverified(0.7, 1.5), OnTheModel(0.7, 1.5)], check) == []


def test_a_wrong_norm_is_found_out_in_whole_numbers(overheard):
    """For any factor: the whole numbers are verified, and written anew."""
    assert stays_in_the_ball(FewDigits(0.7, 1.5), 100, overheard)


@pytest.mark.parametrize("longer", [1 + 2.0**-40, 1 + 2.0**-20, 1.5, 1e200])
def test_a_factor_that_is_too_large(overheard, monkeypatch, longer):
    """Shortened where a little is missing, and zero otherwise."""
    monkeypatch.setattr("cloister.privacy.mechanisms.local.factor_for", lambda norm, bound: bound / norm * longer)
    start, trained = arrays(np.zeros(50), dtype=np.float64), arrays(np.linspace(-1, 1, 50), dtype=np.float64)
    (vector,) = noised_vector(LocalGaussian(0.7, 1.5), trained, start, overheard)
    length = math.sqrt(squared(vector))
    assert length <= 0.7 and (length > 0.69) == (longer < 1.5)


def test_whole_numbers_are_verified_as_such():
    """One more in one place and they are too long; sums that double precision does not hold are too long as well."""

    def check(z):
        grid = Grid.of(0.7, z, 1)
        most = math.floor(Fraction(grid.steps) ** 2)
        assert grid.contains(0.0) and grid.contains(float(most)) and most <= 2**52
        assert not any(map(grid.contains, (float(most + 1), 2.0**53, math.inf, math.nan)))

    assert failures([1e-6, 2.0**-18, 0.3, 1.5, 2.0**18, 1e6], check) == []


def test_rounding_to_the_nearest_step_is_found_out(overheard, monkeypatch):
    """The broken twin: an update of nearly C, all of it little more than half steps."""
    steps = Grid.of(1.0, 2.0**18, 1).steps
    update = np.full(int((steps / 0.52) ** 2), 0.51 / steps)
    start, trained = arrays(np.zeros(len(update)), dtype=np.float64), arrays(update, dtype=np.float64)

    def length():
        (vector,) = noised_vector(LocalGaussian(1.0, 2.0**18), trained, start, overheard)
        return math.sqrt(squared(vector))

    assert length() == 0
    monkeypatch.setattr(np, "trunc", np.rint)
    assert length() == 0, "it is verified"
    monkeypatch.setattr(Grid, "contains", lambda grid, squares: True)
    assert length() > 1.9


def told_apart(mechanism, start, one, other, seen, count=400):
    """Return the share of pairs of releases that a server tells apart by one number of what it receives."""
    noise, start = GaussianNoise(5), arrays([start])
    right = 0
    for truth, trained in ((True, arrays([one])), (False, arrays([other]))):
        for _ in range(count // 2):
            right += seen(float(mechanism.release(trained, start, noise)["0"][0])) == truth
    return right / count


def most_often_right(epsilon, count=400):
    """Above this, a pure ε-DP release is told apart with a false alarm of `FALSE_ALARM`."""
    return stats.binom.isf(FALSE_ALARM, count, 1 / (1 + math.exp(-epsilon))) / count


HUGE = float(np.float32(2.0**30))
NEXT = float(np.nextafter(np.float32(HUGE), np.float32(np.inf)))


def test_a_server_that_chooses_the_scale_does_not_tell_two_trainings_apart():
    """ν = 40 and one parameter: 2p/ν = 0.05. The Gaussian of z = 40 is weaker than that: (0.05, 0.01)."""

    def check(start, one, other, seen):
        allowed = most_often_right(0.05)
        assert told_apart(LocalLaplace(1.0, 40.0), start, one, other, seen) < allowed
        assert told_apart(LocalGaussian(1.0, 40.0), start, one, other, seen) < allowed + 0.01

    cases = [
        (0.0, 1e6, -1e6, lambda number: number > 0),
        (0.0, 1e30, 1e-30, lambda number: number > 1e6),
        (HUGE, NEXT, HUGE, lambda number: number > HUGE),
        (3e38, -3e38, 3e38, lambda number: number < 2.99e38),
    ]
    assert failures(cases, check) == []


def test_a_server_tells_trainings_apart_that_are_not_bounded():
    """The noise is that of the radius, and the server chooses how far training goes."""
    told = told_apart(Unprojected(1.0, 40.0), 0.0, 1e6, -1e6, lambda number: number > 0)
    assert told > most_often_right(0.05)


def moves_the_mean_by_more_than_its_clip(mechanism, clip, count=400):
    """Release on a start whose neighbour in float32 is 128 further, and compare at six standard errors."""
    noise, start, trained = GaussianNoise(5), arrays([HUGE]), arrays([NEXT])
    moved = [float(mechanism.release(trained, start, noise)["0"][0]) - HUGE for _ in range(count)]
    return np.mean(moved) > clip + 6 * np.std(moved) / math.sqrt(count)


def test_a_start_that_is_added_before_the_noise_doubles_the_clip():
    """A clip of 65 is more than half of 128: the start rounds it up to that."""
    assert moves_the_mean_by_more_than_its_clip(OnTheModel(65.0, 1.0), 65.0)
    assert not moves_the_mean_by_more_than_its_clip(LocalGaussian(65.0, 1.0), 65.0)


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_multiplier_that_is_off_by_two_is_seen(wrong):
    """Both ways, for both: half the noise breaks the promise, twice the noise is a waste."""
    assert not laplace_noise_is_right(LocalLaplace(0.7, 5.0 * wrong), 3 / (5.0 * 0.7), count=500)
    start = arrays(np.zeros(200_000))
    sample = flat(LocalGaussian(0.7, 1.5 * wrong).release(start, start, GaussianNoise(2)))
    assert not std_is(sample, 1.05)


# The order: noise on a public grid, then the start


@pytest.mark.parametrize("mechanism", BOTH)
def test_the_noised_update_lies_on_the_public_grid_and_the_start_comes_after(mechanism):
    std = 1.05 if isinstance(mechanism, LocalGaussian) else math.sqrt(1001) * 5 * 0.7 / 1000
    step = STEP if isinstance(mechanism, LocalGaussian) else grid_step(std)
    rng = np.random.default_rng(1)
    trained = arrays(rng.standard_normal(1000), dtype=np.float64)
    sent = flat(mechanism.release(trained, arrays(np.zeros(1000), dtype=np.float64), GaussianNoise(1)))
    assert (sent == np.rint(sent / step) * step).all() and step < std / 2 ** (GRID_BITS - 1)
    start = arrays(rng.standard_normal(1000) / 1e3, dtype=np.float64)
    later = mechanism.release({"0": start["0"] + trained["0"]}, start, GaussianNoise(1))["0"]
    assert not (later == np.rint(later / step) * step).all()


def test_what_overflows_is_saturated():
    def check(mechanism, sign):
        for dtype in (np.float16, np.float32, np.float64):
            largest = np.finfo(dtype).max
            start = arrays(np.full(50, sign * largest), dtype=dtype)
            trained = arrays(np.full(50, sign * largest * dtype(0.5)), dtype=dtype)
            sent = mechanism.release(trained, start, GaussianNoise(1))["0"]
            assert np.isfinite(sent).all() and sent.dtype == dtype

    assert failures(product([*MECHANISMS, PublishedLaplace(5.0)], [1, -1]), check) == []


# Updates that are none


def bad_updates():
    good = arrays(np.ones((2, 3)), [1.0])
    for value in (np.nan, np.inf, -np.inf):
        changed = {name: array.copy() for name, array in good.items()}
        changed["0"][1, 2] = value
        yield changed
    yield {"0": good["0"]}
    yield {**good, "2": np.ones(1, np.float32)}
    yield {**good, "1": np.ones(2, np.float32)}
    yield {**good, "0": np.ones((3, 2), np.float32)}
    yield {**good, "1": np.ones(1, np.int64)}
    yield {**good, "1": np.ones(1, np.complex64)}
    yield {**good, "1": np.array(["x"])}
    yield {}


BAD = list(bad_updates())


@in_poisoned_memory
def test_an_update_that_is_none_leaves_as_the_zero_update_does():
    """The same reply, bit for bit, under the same noise; the reason stays here."""

    def check_case(mechanism):
        start = arrays(np.full((2, 3), 7.0), [5.0])

        def check(update):
            reasons = []
            sent = mechanism.release(update, start, GaussianNoise(1), reasons.append)
            still = mechanism.release(start, start, GaussianNoise(1), reasons.append)
            assert len(reasons) == 1 and reasons[0] in (local.NOT_THE_ARRAYS, local.NOT_FINITE)
            for name, array in sent.items():
                np.testing.assert_array_equal(array, still[name])
                assert np.isfinite(array).all() and (array != start[name]).all()

        assert failures(BAD, check) == []

    assert failures(MECHANISMS, check_case) == []


def test_an_update_whose_norm_no_double_holds_counts_as_zero():
    start, trained = arrays(np.zeros(9), dtype=np.float64), arrays(np.full(9, 1.7e308), dtype=np.float64)
    reasons = []
    sent = LocalGaussian(1.0, 1e-3).release(trained, start, GaussianNoise(1), reasons.append)
    assert reasons == [local.NOT_FINITE] and np.abs(sent["0"]).max() < 0.1


def test_a_start_that_nothing_can_be_added_to_is_refused():
    def check(mechanism):
        for bad in (np.nan, np.inf):
            with pytest.raises(PrivacyError, match="NaN or infinite"):
                mechanism.release(arrays([1.0, 2.0]), arrays([1.0, bad]), GaussianNoise(1))
        for dtype in (np.int64, np.longdouble, np.complex64):
            with pytest.raises(PrivacyError, match="must be float16, float32 or float64"):
                mechanism.release(arrays([1.0]), {"0": np.ones(1, dtype)}, GaussianNoise(1))

    assert failures([*MECHANISMS, PublishedLaplace(5.0)], check) == []


# Memory


@in_poisoned_memory
def test_memory_order_and_type_of_what_was_trained_do_not_matter():
    def check(mechanism, dtype):
        rng = np.random.default_rng(0)
        values = rng.standard_normal((40, 30)).astype(np.float16)
        start = arrays(np.zeros((40, 30)))
        orders = {
            "c": values.astype(dtype),
            "fortran": np.asfortranarray(values.astype(dtype)),
            "strided": np.repeat(values.astype(dtype), 2, axis=1)[:, ::2],
            "backwards": np.ascontiguousarray(values.astype(dtype)[::-1])[::-1],
        }
        for array in orders.values():
            array.flags.writeable = False
        sent = {name: mechanism.release({"0": array}, start, GaussianNoise(1))["0"] for name, array in orders.items()}
        for array in sent.values():
            np.testing.assert_array_equal(array, sent["c"])
            assert array.shape == (40, 30) and array.dtype == np.float32 and array.flags.c_contiguous
            assert (array != values).mean() > 0.99 and array.flags.writeable

    cases = product([*MECHANISMS, PublishedLaplace(5.0)], [np.float16, np.float32, np.float64, np.longdouble])
    assert failures(cases, check) == []


def test_a_start_in_any_order_is_what_noise_is_put_on():
    values = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
    trained = {"0": values + 1}
    plain = LocalGaussian(1.0, 1.0).release(trained, {"0": values}, GaussianNoise(1))["0"]
    turned = LocalGaussian(1.0, 1.0).release(trained, {"0": np.asfortranarray(values)}, GaussianNoise(1))["0"]
    np.testing.assert_array_equal(plain, turned)


def test_what_was_trained_is_neither_changed_nor_handed_out():
    start, trained = arrays([1.0, 2.0], np.zeros((0, 3))), arrays([1.5, 2.0], np.zeros((0, 3)))
    kept = {name: array.copy() for name, array in trained.items()}
    for mechanism in (*MECHANISMS, PublishedLaplace(5.0), LocalGaussian(1.0, 0.0), LocalLaplace(1.0, 0.0)):
        sent = mechanism.release(trained, start, GaussianNoise(1))
        assert list(sent) == list(start) and sent["1"].shape == (0, 3)
        for name, array in sent.items():
            np.testing.assert_array_equal(trained[name], kept[name])
            assert not np.shares_memory(array, trained[name]) and not np.shares_memory(array, start[name])


# As published


@pytest.mark.slow
def test_the_published_noise_is_in_proportion_to_the_update():
    sample = releases(PublishedLaplace(5.0), np.array([3.0, 0.0, 4.0]), 5000) - np.array([3.0, 0.0, 4.0])
    radii = np.linalg.norm(sample, axis=1)
    assert stats.kstest(radii, stats.gamma(3, scale=5.0 * 5 / 3).cdf).pvalue > FALSE_ALARM
    assert stats.kstest(radii, stats.gamma(3, scale=1.2 * 5.0 * 5 / 3).cdf).pvalue < FALSE_ALARM


def test_a_part_that_has_no_published_noise_is_sent_as_it_came():
    def check(moved):
        start, trained = arrays([1.0] * 3, [0.0] * 3), arrays([1.5] * 3, [moved] * 3)
        sent = PublishedLaplace(5.0, per_layer=True).release(trained, start, GaussianNoise(1))
        assert (sent["0"] != trained["0"]).all() and (sent["1"] == start["1"]).all()

    assert failures([0.0, 1e-42, 3e38], check) == []


# What it costs


def test_events_and_caveats():
    assert LocalLaplace(0.7, 5.0).events(20) == [Pure(4.0)] == LocalLaplace(0.7, 5.0, per_layer=True).events(20)
    assert LocalGaussian(0.7, 1.5).events(20) == [Gaussian(1.5)]
    (published,) = PublishedLaplace(5.0).events(20)
    assert isinstance(published, Laplace) and published.leakage == 4.0
    assert not any(mechanism.caveats() for mechanism in MECHANISMS) and PublishedLaplace(5.0).caveats()
    assert PublishedLaplace(5.0).caveats()[0].endswith("what is leaked within that distance is nominal")
    for silent in (LocalLaplace(0.7, 0.0), LocalGaussian(0.7, 0.0), PublishedLaplace(0.0)):
        assert isinstance(silent.events(20)[0], Unaccounted) and "is 0" in silent.caveats()[0]


def test_parameters_have_the_names_of_the_configuration():
    assert LocalLaplace(0.7, 5.0, per_layer=True).parameters() == {
        "privacy.laplace-noise-multiplier": 5.0,
        "privacy.radius": 0.7,
        "privacy.per-layer": True,
    }
    assert LocalGaussian(0.7, 1.5).parameters() == {
        "privacy.gaussian-noise-multiplier": 1.5,
        "privacy.gaussian-clipping-norm": 0.7,
    }
    assert PublishedLaplace(5.0).parameters()["privacy.radius"] == 0


def test_a_multiplier_that_is_none_is_refused():
    def check(bad):
        for make in (lambda z: LocalLaplace(1.0, z), lambda z: LocalGaussian(1.0, z), PublishedLaplace):
            with pytest.raises(ConfigError, match=r"(laplace|gaussian)_noise_multiplier"):
                make(bad)

    assert failures([-1.0, math.nan, math.inf, 1e-7], check) == []


def test_a_ball_that_is_none_is_refused():
    def check(bad):
        with pytest.raises(ConfigError, match="radius"):
            LocalLaplace(bad, 1.0)
        with pytest.raises(ConfigError, match="gaussian_clipping_norm"):
            LocalGaussian(bad, 1.0)

    assert failures([0.0, -1.0, math.nan, math.inf], check) == []


def test_noise_beyond_the_range_of_numbers_is_refused_before_and_after_training():
    def check(bound):
        for mechanism in (LocalLaplace(bound, 5.0), LocalGaussian(bound, 5.0)):
            with pytest.raises((PrivacyError, ConfigError)):
                mechanism.events(20)
            with pytest.raises((PrivacyError, ConfigError)):
                mechanism.release(arrays([1.0]), arrays([2.0]), GaussianNoise(1))

    assert failures([1e-300, 1e-37, 1e38, 1e300], check) == []


def test_seeds_repeat_and_entropy_does_not():
    start = arrays(np.zeros(30))
    for mechanism in MECHANISMS:
        first, again = (mechanism.release(start, start, GaussianNoise(7))["0"] for _ in range(2))
        np.testing.assert_array_equal(first, again)
        noise = GaussianNoise()
        assert (mechanism.release(start, start, noise)["0"] != mechanism.release(start, start, noise)["0"]).any()
