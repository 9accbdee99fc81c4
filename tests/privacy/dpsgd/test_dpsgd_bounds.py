"""What roundings are allowed to cost: the bound that makes up for them, and the sizes that keep it."""

from fractions import Fraction

import numpy as np
import pytest

from cloister.core.errors import ConfigError
from cloister.privacy.dpsgd.rounding import (
    DEFAULT_OVERSTATEMENT,
    EXTRA,
    MAXIMUM_CLIPPING_NORM,
    MAXIMUM_OVERSTATEMENT,
    MINIMUM_CLIPPING_NORM,
    Batching,
    check_clipping_norm,
    check_microbatch_size,
    examples_at_once,
    largest_batch,
    largest_microbatch,
    overstatement,
)

SIZES = (1, 4, 10, 100, 600, 5000, 50_000, 207_861)


def exactly(batch_size, microbatch_size):
    """η = 2·γ·n_max and the slack, as fractions."""
    u = Fraction(1, 2**24)
    gamma = (microbatch_size + EXTRA) * u / (1 - (microbatch_size + EXTRA) * u)
    return 2 * gamma * largest_batch(batch_size) + Fraction(1, 2**16)


@pytest.mark.parametrize(
    ("batch_size", "largest"), [(1, 9), (4, 16), (8, 24), (9, 25), (10, 27), (100, 144), (600, 702), (5000, 5287)]
)
def test_the_largest_batch_is_four_deviations_above_the_expected_size(batch_size, largest):
    assert largest_batch(batch_size) == largest


@pytest.mark.parametrize("batch_size", SIZES)
def test_what_is_taken_off_the_bound_is_what_roundings_can_add(batch_size):
    for size in (1, 2, 64, 5000):
        assert overstatement(batch_size, size) == pytest.approx(float(exactly(batch_size, size)), rel=1e-14)


@pytest.mark.parametrize("batch_size", SIZES)
def test_the_largest_microbatch_keeps_the_limit_and_one_more_example_does_not(batch_size):
    for limit, size in (
        (MAXIMUM_OVERSTATEMENT, largest_microbatch(batch_size)),
        (DEFAULT_OVERSTATEMENT, largest_microbatch(batch_size, DEFAULT_OVERSTATEMENT)),
    ):
        assert exactly(batch_size, size) <= limit < exactly(batch_size, size + 1)


@pytest.mark.parametrize("batch_size", SIZES)
def test_the_bound_holds_for_batches_of_any_size(batch_size):
    """Roundings of a call times examples never exceed what η was computed for, but with one example a call."""
    size = largest_microbatch(batch_size)
    allowed = largest_batch(batch_size) * (size + EXTRA)
    for count in (1, batch_size, largest_batch(batch_size), 3 * batch_size, 100 * batch_size):
        once = examples_at_once(count, batch_size, size)
        assert 1 <= once <= size and (once == 1 or count * (once + EXTRA) <= allowed)


@pytest.mark.parametrize(
    ("count", "at_once"),
    [(0, 64), (1, 64), (144, 64), (145, 63), (146, 63), (147, 62), (1000, 5), (1632, 2), (1633, 1), (10**6, 1)],
)
def test_of_a_larger_batch_as_many_fewer_go_into_a_call(count, at_once):
    """Of 100 expected examples 144 at most are computed 64 at a time: 144·(64 + 4) = 9792."""
    found = examples_at_once(count, 100, 64)
    assert found == at_once and type(found) is int


class TestBatching:
    def test_a_microbatch_is_the_batch_or_what_costs_a_sixteenth_of_the_bound(self):
        assert Batching(100).at_once == 100 and Batching(600, 7).at_once == 7
        assert Batching(5000).at_once == largest_microbatch(5000, 1 / 16) == 95 and Batching(200_000).at_once == 1
        assert Batching(5000).overstatement == overstatement(5000, 95) <= 1 / 16

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"batch_size": 0}, "batch_size must be > 0, got 0"),
            ({"batch_size": 4, "group_cap": 0}, "group_cap must be > 0, got 0"),
            ({"batch_size": 4, "microbatch_size": 0}, "microbatch_size must be > 0, got 0"),
            (
                {"batch_size": 5000, "microbatch_size": 195},
                "microbatch_size must be <= 194 for batch_size = 5000, got 195: roundings of a sum over more examples "
                "could move it by more than the clipping norm allows for",
            ),
            (
                {"batch_size": 207_862, "microbatch_size": 1},
                "batch_size = 207862 is too large for sums in single precision to be bounded",
            ),
        ],
    )
    def test_sizes_that_are_not_bounded_are_refused(self, options, says):
        with pytest.raises(ConfigError) as refused:
            Batching(**options)
        assert str(refused.value) == says

    @pytest.mark.parametrize(("batch_size", "microbatch_size"), [(5000, 194), (207_861, 1), (173_072, 2), (1, 115_686)])
    def test_the_largest_sizes_are_taken(self, batch_size, microbatch_size):
        check_microbatch_size(batch_size, microbatch_size)
        assert Batching(batch_size, microbatch_size).overstatement <= MAXIMUM_OVERSTATEMENT


@pytest.mark.parametrize(
    ("bound", "says"),
    [
        (0.0, "clipping_norm must be > 0, got 0.0"),
        (float("nan"), "clipping_norm must be > 0, got nan"),
        (9.99e-13, "clipping_norm must be >= 1e-12, got 9.99e-13"),
        (1.01e30, "clipping_norm must be <= 1e+30, got 1.01e+30"),
    ],
)
def test_a_bound_on_which_underflow_or_overflow_would_have_a_say_is_refused(bound, says):
    with pytest.raises(ConfigError) as refused:
        check_clipping_norm(bound)
    assert str(refused.value) == says


def test_the_ends_of_the_range_of_bounds_are_taken():
    """Two contributions of 2·10³⁸ are finite, and their sum is not: it would leave without noise."""
    check_clipping_norm(MINIMUM_CLIPPING_NORM)
    check_clipping_norm(MAXIMUM_CLIPPING_NORM)
    assert np.isfinite(np.float32(1e8 * MAXIMUM_CLIPPING_NORM))
