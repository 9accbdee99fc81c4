"""Sums whose roundings do not grow with the number of units."""

import math
from fractions import Fraction

import numpy as np
import pytest

from cloister.privacy.dpsgd import one_by_one, running_sum
from cloister.privacy.dpsgd.one_by_one import noisy_sum
from cloister.privacy.dpsgd.running_sum import PLAIN, RunningSum
from cloister.privacy.mechanisms.noise import GaussianNoise

FEW = 2000


def exactly(*numbers):
    """Their sum, rounded once."""
    return float(sum(map(Fraction, numbers)))


def worst_parts():
    """Beside as much as the first units can come to, parts whose roundings all go one way, and parts that cancel."""
    start, rng = float(PLAIN), np.random.default_rng(3)
    same = np.full(FEW, 2.0**-13 / 3)
    some = rng.standard_normal(FEW) * 2.0 ** rng.integers(-60, 1, FEW)
    apart = np.where(np.arange(FEW) % 2, -1.0, 1.0) * (1 - 2.0**-30 * np.arange(FEW))
    return np.array([start, start, -start]), np.stack([same, some, apart], axis=1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_what_comes_after_many_units_is_added_exactly(dtype):
    start, parts = worst_parts()
    parts = parts.astype(dtype)
    total = RunningSum()
    total.add([start], before=0)
    for number, part in enumerate(parts):
        total.add([part], before=PLAIN + number)
    (found,) = total.value()
    wanted = [exactly(begin, *map(float, column)) for begin, column in zip(start, parts.T, strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=2.0**-52, atol=0)
    plain = start.copy()
    for part in parts:
        plain += part
    assert abs(plain[0] - wanted[0]) > 100 * math.ulp(wanted[0]), "there is something to be found"


def test_what_comes_before_is_added_as_ever():
    """Batches of the expected size give the numbers that they gave."""
    start, parts = worst_parts()
    total, plain = RunningSum([start, start[0]]), [start.copy(), start[0]]
    for number, part in enumerate(parts):
        total.add([part, part[0]], before=PLAIN - FEW + number)
        plain = [plain[0] + part, plain[1] + part[0]]
    assert all(np.array_equal(one, other) for one, other in zip(total.value(), plain, strict=True))


def test_the_first_arrays_are_kept_as_they_are():
    first = np.ones(3, np.float32)
    total = RunningSum()
    assert total.value() == ()
    total.add([first], before=0)
    assert total.value()[0] is first
    total.add([first], before=1)
    assert total.value()[0].dtype == np.float64


def test_the_bounds_that_are_stated_are_those_of_the_arithmetic():
    """u·Σ i for plain additions; then u·n for each lost part, u²·n³ for their sum, u·n for the last rounding."""
    u, n = Fraction(1, 2**53), Fraction(2**25)
    plain, lost, last = u * PLAIN * (PLAIN + 1) / 2, n**3 * u**2, u * n
    assert plain < Fraction(101, 100) / 2**20 and lost <= Fraction(1, 2**31) and last == Fraction(1, 2**28)
    assert 2 * (plain + lost + last) < Fraction(one_by_one.SLACK) / 2


def test_small_models_tell_how_many_units_were_added(monkeypatch):
    monkeypatch.setattr(running_sum, "PLAIN", 2)
    parts = [np.full(3, value) for value in (2.0**60, 1.0, 1.0, -(2.0**60), 2.0**-3)]
    (found,) = noisy_sum(
        [lambda part=part: (part,) for part in parts],
        (np.zeros(3),),
        clipping_norm=2.0**70,
        noise_multiplier=0.0,
        noise=GaussianNoise(1),
    )
    # Beside 2^60 a 1 is lost while sums are plain, for the first two units; the third is not.
    np.testing.assert_array_equal(found, np.full(3, 1.125))


def test_another_number_of_arrays_is_refused():
    for before in (0, PLAIN):
        total = RunningSum([np.zeros(3), np.zeros(2)])
        with pytest.raises(ValueError, match="zip"):
            total.add([np.ones(3)], before)
