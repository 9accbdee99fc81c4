"""What roundings are allowed to cost: the bound that makes up for them, and the sizes that keep it."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from support import failures

from cloister.privacy.accounting.vocabulary import OVERFLOW
from cloister.privacy.dpsgd.batches import places_of
from cloister.privacy.dpsgd.noise import (
    EXTRA,
    MAXIMUM_CLIPPING_NORM,
    MAXIMUM_OVERSTATEMENT,
    MINIMUM_CLIPPING_NORM,
    check_clipping_norm,
    most_at_once,
    overstatement,
)
from cloister.utils.errors import ConfigError

SIZES = (1, 4, 10, 100, 600, 5000, 1 << 16)


def exactly(batch_size, at_once):
    """η = 2·γ·M and the slack, as fractions."""
    u = Fraction(1, 2**24)
    gamma = (at_once + EXTRA) * u / (1 - (at_once + EXTRA) * u)
    return 2 * gamma * places_of(batch_size) + Fraction(1, 2**16)


def test_what_is_taken_off_the_bound_is_what_roundings_can_add():
    def check(batch_size, size):
        assert overstatement(batch_size, size) == pytest.approx(float(exactly(batch_size, size)), rel=1e-14)

    assert failures(itertools.product(SIZES, (1, 2, 64, 5000)), check) == []


def test_the_most_units_at_once_keep_the_limit_and_one_more_does_not():
    for batch_size in SIZES:
        most = most_at_once(batch_size)
        assert most >= 1
        assert exactly(batch_size, most) <= MAXIMUM_OVERSTATEMENT < exactly(batch_size, most + 1), batch_size


def test_a_poisson_batch_fills_all_places_as_seldom_as_delta_has_room_for():
    """It does so for every number of units with this mean; a tenth fewer places would not do."""
    for size in (1, 8, 100, 600):
        room = places_of(size)
        assert stats.poisson.sf(room - 1, size) <= OVERFLOW < stats.poisson.sf(int(0.9 * room) - 1, size), size
        for population in (size, 2 * size, 1000 * size):
            assert stats.binom.sf(room - 1, population, size / population) <= OVERFLOW, size


def test_a_bound_on_which_underflow_or_overflow_would_have_a_say_is_refused():
    for bound, says in (
        (0.0, "clipping_norm must be > 0, got 0.0"),
        (float("nan"), "clipping_norm must be > 0, got nan"),
        (9.99e-13, "clipping_norm must be >= 1e-12, got 9.99e-13"),
        (1.01e30, "clipping_norm must be <= 1e+30, got 1.01e+30"),
    ):
        with pytest.raises(ConfigError) as refused:
            check_clipping_norm(bound)
        assert str(refused.value) == says


def test_the_ends_of_the_range_of_bounds_are_taken():
    """Two contributions of 2·10³⁸ are finite, and their sum is not: it would leave without noise."""
    check_clipping_norm(MINIMUM_CLIPPING_NORM)
    check_clipping_norm(MAXIMUM_CLIPPING_NORM)
    assert np.isfinite(np.float32(1e8 * MAXIMUM_CLIPPING_NORM))
