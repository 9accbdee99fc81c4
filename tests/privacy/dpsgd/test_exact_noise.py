"""Exact noise on a sum of floats: how far one unit moves whole numbers, what is added to them, what comes out."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from statistics_of_noise import is_normal, std_is
from support import failures

from cloister import DiscreteGaussian
from cloister.privacy.dpsgd import noise
from cloister.privacy.dpsgd.noise import (
    MAXIMUM_CLIPPING_NORM,
    MINIMUM_CLIPPING_NORM,
    SCALING,
    grid_of,
    noised_sum,
    noisy_sum,
    rounding_steps,
)
from cloister.privacy.mechanisms.discrete.sampler import MAX_EXACT, REACH, Maker
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils import threads
from cloister.utils.errors import ConfigError
from cloister.utils.threads import BLOCK

S, SIGMA = 0.7, 1.3
LARGEST_BATCH = 2**25
"""Units for which `noise` bounds how far one of them moves the sum."""

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def coarse(parameters):
    """A multiplier whose grid has hardly more steps than rounding takes up."""
    return 2.0**23 / (rounding_steps(parameters) * 1.001)


@pytest.fixture
def no_noise(monkeypatch):
    """Zeros in the place of noise; sums are rounded as if there were some."""
    monkeypatch.setattr(Maker, "integers", lambda maker, number, count: np.zeros(count, np.int32))


@pytest.fixture
def whole(no_noise):
    """What noise is added to: whole numbers, in steps."""

    def of(sums, grid):
        out = tuple(np.empty(piece.size) for piece in sums)
        noised_sum(sums, grid, GaussianNoise(1), out, size=grid.step)
        found = np.concatenate(out)
        assert (found == np.rint(found)).all()
        return found

    return of


def squared(numbers):
    """Σ of squares of whole numbers, as Python's integers."""
    return sum(int(number) ** 2 for number in numbers)


class TestTheGrid:
    def test_noise_covers_the_sum_its_roundings_and_theirs(self):
        """w·S + √p + ½ + 2⁻⁸ ≤ D and s² ≥ (σ·D)² + 25, for the double w that sums are multiplied with."""

        def check(multiplier, bound, parameters):
            grid = grid_of(bound, multiplier, parameters)
            steps, root = Fraction(grid.steps), Fraction(math.isqrt(parameters << 80) + 1, 1 << 40)
            assert Fraction(1 / grid.step) * Fraction(bound) + root + Fraction(129, 256) <= steps
            assert grid.scale**2 >= (Fraction(multiplier) * steps) ** 2 + 25

        multipliers, bounds = (
            (2.0**-18, 0.003, 0.1, 0.49999999, 1.0, 7.3, 400.0),
            (MINIMUM_CLIPPING_NORM, S, MAXIMUM_CLIPPING_NORM),
        )
        assert failures(itertools.product(multipliers, bounds, (1, 250, 795_010, 10**8)), check) == []

    def test_noise_is_hardly_more_than_that(self):
        def check(multiplier, parameters):
            grid = grid_of(S, multiplier, parameters)
            more = grid.scale * grid.step / (multiplier * S) - 1
            assert 0 <= more < 1.1 * rounding_steps(parameters) / grid.steps + 1e-9

        assert failures(itertools.product((0.003, 1.0, 7.3, 400.0), (250, 795_010)), check) == []

    def test_few_tables_serve_all_steps(self):
        scales = {grid_of(bound, z, 1000).scale for z in np.geomspace(1e-6, 1e3, 60) for bound in (0.1, S, 1e6)}
        assert scales <= {2**power for power in range(8, 25)}

    def test_no_more_than_half_of_it_goes_to_roundings(self):
        for parameters in (1, 250, 795_010):
            assert grid_of(S, coarse(parameters), parameters).steps >= 2 * rounding_steps(parameters)
            with pytest.raises(ConfigError, match="noise_multiplier") as refused:
                grid_of(S, 1.01 * coarse(parameters), parameters)
            largest = float(str(refused.value).split("<= ")[1].split(" for")[0])
            assert largest == pytest.approx(2**23 / rounding_steps(parameters), rel=1e-2)
            assert grid_of(S, largest, parameters).scale, "what the error recommends is taken"

    def test_what_is_too_much_noise_is_said_in_full(self):
        with pytest.raises(ConfigError) as refused:
            grid_of(S, 600_000.0, 250)
        # 2^23 steps of noise, of which √250 + 1 are half.
        assert str(refused.value) == "noise_multiplier must be <= 498983 for 250 parameters, got 600000"

    def test_what_is_no_multiplier_is_refused(self):
        for multiplier in (-1.0, math.nan, math.inf):
            with pytest.raises(ConfigError, match="noise_multiplier"):
                grid_of(S, multiplier, 10)

    def test_roundings_of_the_scaling_are_within_what_is_charged(self):
        """Of v·w by 2⁻⁵³, for sums over the largest batch on the finest grid, on both sides; of w by 2⁻⁵⁰ of D."""
        longest = Fraction(LARGEST_BATCH + 1) * 2**26
        assert 2 * longest / 2**53 < Fraction(129, 256) and Fraction(2**26, 2**50) < Fraction(1, 256)
        assert Fraction(131, 256) < SCALING and longest + REACH < MAX_EXACT


class TestOneUnit:
    @pytest.mark.parametrize("parameters", [4, 100, 10_000])
    def test_moves_the_whole_numbers_by_the_bound_at_most_where_all_of_them_are_just_below_a_half(
        self, parameters, whole
    ):
        """The worst there is: a contribution of little more than a step moves each number by two."""
        least = 0.99 * math.sqrt(parameters) / rounding_steps(parameters)
        assert least < self.moved_from_halves(parameters, coarse(parameters), whole) <= 1

    @pytest.mark.parametrize("parameters", [100, 10_000])
    def test_or_more_where_roundings_are_not_charged(self, parameters, whole, monkeypatch):
        multiplier = coarse(parameters)
        monkeypatch.setattr(noise, "rounding_steps", lambda _: 0.0)
        assert self.moved_from_halves(parameters, multiplier, whole) > 1.3

    def moved_from_halves(self, parameters, multiplier, whole):
        """The move beside D, where sums are S apart."""
        grid = grid_of(S, multiplier, parameters)
        others = np.full(parameters, (0.5 - 1e-9) * grid.step)
        moved = whole((others + S / math.sqrt(parameters) * (1 - 1e-12),), grid) - whole((others,), grid)
        return math.sqrt(squared(moved)) / grid.steps

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_nor_in_many_cases(self, dtype, whole):
        """Sums of any length, on coarse grids and on fine ones; in steps of 1/64 that both precisions hold."""
        rng, worst = np.random.default_rng(5), 0.0
        for _ in range(200):
            parameters = int(rng.integers(1, 40))
            grid = grid_of(S, coarse(parameters) * 10.0 ** rng.choice([0.0, -0.5, -2.0, -6.0]), parameters)
            others = rng.standard_normal(parameters) * S * 10.0 ** rng.uniform(-6, 4)
            mine = others + self.direction(rng, parameters) * S
            others, mine = others.astype(dtype), mine.astype(dtype)
            length = math.sqrt(sum((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(mine, others)))
            moved = math.sqrt(squared(whole((mine,), grid) - whole((others,), grid)))
            # Rounded to their precision the sums may be further apart than S: they are given a bound that they keep.
            worst = max(worst, moved / (grid.steps + max(0.0, length - S) / grid.step))
        assert 0.9 < worst <= 1

    @staticmethod
    def direction(rng, parameters):
        drawn = rng.standard_normal(parameters) * (rng.random(parameters) < rng.uniform(0.1, 1))
        length = np.linalg.norm(drawn)
        return drawn / length if length else drawn

    def test_in_the_longest_sum_on_the_finest_grid(self, whole):
        rng, grid = np.random.default_rng(6), grid_of(S, 2.0**-18, 50)
        assert 2**26 - 2**14 < grid.steps <= 2**26
        for _ in range(50):
            others = self.direction(rng, 50) * (LARGEST_BATCH * S)
            # On multiples of the last bit of the longest sum both are what they are, in double precision.
            others, apart = (np.round(part * 2.0**26) / 2**26 for part in (others, self.direction(rng, 50) * S))
            apart *= 1 - 2.0**-20
            moved = squared(whole((others + apart,), grid) - whole((others,), grid))
            assert 0.99 < math.sqrt(moved) / grid.steps <= 1

    def test_of_the_small_models(self, no_noise):
        """The sums of `noisy_sum` themselves: what the others make just below halves, and one unit lifts."""
        parameters = 400
        multiplier = coarse(parameters)
        grid = grid_of(S, multiplier, parameters)
        half, apart = (np.full(parameters, steps * grid.step) for steps in (0.5 - 1e-3, S / grid.step / 20))

        def of(*gradients):
            units = [lambda gradient=gradient: (gradient,) for gradient in gradients]
            like = (np.zeros(parameters),)
            (found,) = noisy_sum(units, like, clipping_norm=S, noise_multiplier=multiplier, noise=GaussianNoise(1))
            steps = found / grid.step
            assert np.abs(steps - np.rint(steps)).max() < 1e-6, "on the grid"
            return np.rint(steps)

        moved = math.sqrt(squared(of(half, 10 * apart) - of(half))) / grid.steps
        assert 0.9 < moved <= 1


class TestTheNoise:
    SIZES = (BLOCK + 7, 3, 40_001)

    def sums(self, dtype):
        rng = np.random.default_rng(2)
        return tuple((100 * rng.standard_normal(size)).astype(dtype) for size in self.SIZES)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_is_exactly_what_the_sampler_makes_on_the_rounded_sum(self, dtype):
        sums, grid = self.sums(dtype), grid_of(S, SIGMA, sum(self.SIZES))
        out = tuple(np.empty(size, dtype) for size in self.SIZES)
        noised_sum(sums, grid, GaussianNoise(4), out, size=7)
        source = DiscreteGaussian(grid.scale, GaussianNoise(4))
        for piece, part in zip(out, sums, strict=True):
            steps = np.rint(part.astype(np.float64) * (1 / grid.step)) + source.integers(len(part))
            assert np.array_equal(piece, (steps * (grid.step / 7)).astype(dtype))

    @pytest.mark.parametrize("multiplier", [0.02, SIGMA, 300.0])
    def test_is_as_large_as_it_should_be(self, multiplier):
        assert std_is(self.noise(multiplier), multiplier * S, tolerance=0.015)

    @pytest.mark.parametrize("wrong", [2 / 3, 3 / 2])
    def test_the_test_sees_too_little_and_too_much(self, wrong):
        assert not std_is(self.noise(wrong * SIGMA), SIGMA * S, tolerance=0.015)

    def test_is_normal_and_never_the_same_twice(self):
        source = GaussianNoise(8)
        first, second = self.noise(SIGMA, source), self.noise(SIGMA, source)
        assert is_normal(first, SIGMA * S)
        assert abs(np.corrcoef(first, second)[0, 1]) < 6 / np.sqrt(first.size)

    def noise(self, multiplier, source=None):
        sums = tuple(np.zeros(size, np.float32) for size in self.SIZES)
        out = tuple(np.empty(size) for size in self.SIZES)
        noised_sum(sums, grid_of(S, multiplier, sum(self.SIZES)), source or GaussianNoise(9), out)
        return np.concatenate(out)

    def test_nothing_of_the_sum_comes_out_but_its_whole_numbers(self):
        grid = grid_of(S, SIGMA, 2000)
        steps = np.arange(-1000.0, 1000.0)
        found = []
        for apart in (-0.49, 0.0, 1e-9, 0.49):
            out = np.empty(2000)
            noised_sum(((steps + apart) * grid.step,), grid, GaussianNoise(5), (out,))
            found.append(out.tobytes())
        assert len(set(found)) == 1

    def test_it_may_take_the_place_of_the_sum_on_any_number_of_threads(self, monkeypatch):
        grid = grid_of(S, SIGMA, sum(self.SIZES))
        found = []
        for worth in (threads.WORTH_A_THREAD, 1):
            monkeypatch.setattr(threads, "WORTH_A_THREAD", worth)
            sums = self.sums(np.float64)
            noised_sum(sums, grid, GaussianNoise(5), sums)
            found.append(np.concatenate(sums).tobytes())
        assert found[0] == found[1]

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_without_it_nothing_is_rounded(self, dtype):
        out = tuple(np.empty(size, dtype) for size in self.SIZES)
        noised_sum(self.sums(dtype), grid_of(S, 0.0, sum(self.SIZES)), GaussianNoise(), out, size=7)
        assert all(np.array_equal(piece, part / dtype(7)) for piece, part in zip(out, self.sums(dtype), strict=True))
