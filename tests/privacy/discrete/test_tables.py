"""Bounds, tables and thresholds of the discrete Gaussian against decimal arithmetic of 110 digits."""

from dataclasses import replace
from fractions import Fraction
from itertools import islice, product

import numpy as np
import pytest
from discrete_reference import blocks_up_to, decimal, given_to, rate_of, thresholds_of
from support import failures

from cloister.privacy.mechanisms.discrete.tables import (
    DEPTH,
    LEFT_OVER,
    PRECISION,
    Missing,
    blocks_in_order,
    cumulated,
    exponential,
    falling,
    tables_of,
)
from cloister.utils.errors import ConfigError

SCALES = [Fraction(1 << 24), Fraction(1000, 3), Fraction(33 * 10**12 + 39, 10**6 + 3)]


def test_an_exponential_lies_between_its_bounds():
    def check(rate, bits):
        low, high = exponential(rate, bits)
        exact = (-decimal(rate)).exp() * 2**bits
        assert low <= exact <= high <= low + 3

    cases = product([Fraction(1), Fraction(1, 3), Fraction(1, 1 << 17), Fraction(10**9 + 7, 10**15)], [64, 192, 320])
    assert failures(cases, check) == []


def test_every_step_of_a_bound_rounds_to_its_side():
    """In eight bits, where a single rounding to the wrong side shows: q^(m²) for all q."""
    wrong = [
        (ratio, m)
        for ratio in range(1, 256)
        for m, (low, high) in enumerate(zip(*(islice(falling(ratio, 8, sign), 6) for sign in (1, -1)), strict=True))
        if not low <= Fraction(ratio, 256) ** (m**2) * 256 <= high
    ]
    assert wrong == []


def test_sums_of_weights_lie_between_their_bounds():
    def check(bits, rate):
        low, high = cumulated(rate, bits)
        exact = blocks_up_to(rate)[1]
        assert len(low) == len(high) <= 2 * DEPTH and low == sorted(low) and high == sorted(high)
        assert high[-1] <= 1 << bits, "no probability is above 1"
        for at in [*range(8), *range(8, min(len(low), len(exact)), 97)]:
            assert low[at] <= exact[at] * 2**bits <= high[at] < low[at] + 2**40, at

    assert failures(product([96, 192], [Fraction(1, 1 << 17), Fraction(9, 2_000_000)]), check) == []


def test_bounds_reach_as_far_as_their_bits():
    """With 192 bits almost as far as weights of 2^-192, at √(2·192·ln 2) = 16.3 deviations."""
    low, _ = cumulated(Fraction(1, 1 << 17), 192)
    assert 16.1 < len(low) / 2 / 256 < 16.31 and low[-1] < 1 << 192


def test_blocks_go_from_the_middle_outward():
    assert blocks_in_order(3) == [0, -1, 1, -2, 2, -3]


def law_of(tables):
    """The probability of each block, from the middle outward, as the tables and 64 bits of the thresholds make it."""
    order = blocks_in_order(len(blocks_up_to(rate_of(tables))[0]) // 2)
    given = given_to(order, tables)
    rest = (1 << 32) - sum(given)
    ends = [int(threshold) for threshold in tables.thresholds] + [1 << 64] * (len(order) - len(tables.thresholds))
    widths = [end - start for start, end in zip([0, *ends], ends)]
    return [decimal(Fraction((part << 64) + rest * width, 1 << 96)) for part, width in zip(given, widths)]


def is_exact(tables):
    """Return whether the law is the discrete Gaussian's to 64 bits of the tables' remainder, a 2^-11 of the whole."""
    exact = blocks_up_to(rate_of(tables))[0]
    return max(abs(made - wanted) for made, wanted in zip(law_of(tables), exact)) < 2 ** decimal(Fraction(-72))


@pytest.mark.parametrize("scale", SCALES)
class TestTables:
    def test_they_make_the_law_of_blocks(self, scale):
        assert is_exact(tables_of(scale))

    def test_no_table_gives_a_block_more_than_it_has(self, scale):
        tables = tables_of(scale)
        exact = dict(zip(blocks_in_order(DEPTH), blocks_up_to(rate_of(tables))[0]))
        blocks, counts = np.unique(tables.first[tables.first != LEFT_OVER], return_counts=True)
        given = dict(zip(blocks.tolist(), counts.tolist()))
        assert all(given[block] <= exact[block] * 2**16 < given[block] + 1 for block in given)
        left = (1 << 16) - counts.sum()
        for block, count in zip(*np.unique(tables.second[tables.second != LEFT_OVER], return_counts=True)):
            rest = exact[int(block)] * 2**16 - given.get(int(block), 0)
            assert int(count) <= rest * 2**16 / int(left) < int(count) + 1

    def test_thresholds_are_right_to_their_last_bit(self, scale):
        """A floor that is one too large or too small is found."""
        tables = tables_of(scale)
        exact = thresholds_of(tables)
        for at in [*range(4), *range(4, len(tables.thresholds), 61), len(tables.thresholds) - 1]:
            assert int(tables.thresholds[at]) == int(exact[at] * 2**64), at
        assert int(exact[len(tables.thresholds)] * 2**64) == 2**64 - 1, "where the list ends"

    def test_the_unit_of_the_exponent(self, scale):
        tables = tables_of(scale)
        assert tables.unit == 2**64 / (2 * scale**2)
        assert int(tables.unit_floor) <= tables.unit <= int(tables.unit_ceiling) <= int(tables.unit_floor) + 1
        assert 256 <= scale / 2**tables.low_bits < 512 and 0 <= tables.low_bits <= 16


@pytest.mark.parametrize("name", ["first", "second"])
def test_one_index_of_65536_that_says_the_next_block_is_found(name):
    tables = tables_of(SCALES[0])
    wrong = getattr(tables, name).copy()
    wrong[5_000] -= 1
    assert not is_exact(replace(tables, **{name: wrong}))


def test_thresholds_that_begin_at_the_next_block_are_found():
    tables = tables_of(SCALES[0])
    assert not is_exact(replace(tables, thresholds=tables.thresholds[1:]))


def test_a_scale_that_is_too_small_or_too_large_is_refused():
    def check(scale):
        with pytest.raises(ConfigError, match=r"from 2\^8 up to 2\^25 steps of the grid, got"):
            tables_of(Fraction(scale))

    assert failures([255, Fraction(511, 2), 1 << 25, 0, -300], check) == []


def test_tables_are_made_once():
    assert tables_of(Fraction(256)) is tables_of(Fraction(256))


def test_a_position_is_told_only_where_the_bits_decide():
    tables = tables_of(Fraction(256))
    threshold = int(tables.thresholds[10])
    assert tables.missing.position(threshold, 64) is None
    assert tables.missing.position(threshold - 1, 64) == 10 and tables.missing.position(threshold + 1, 64) == 11
    assert tables.missing.position((1 << 64) - 1, 64) is None, "beyond the last threshold that shows"


def test_a_number_between_the_bounds_of_a_threshold_is_undecided(monkeypatch):
    """Bounds of two thresholds at 1/4 ± 1/64 and 1/2 ± 1/64, in units of 2^-6."""
    missing = Missing(Fraction(1, 1 << 17), [0], ([], []))
    monkeypatch.setattr(
        missing, "bounds", lambda bits: ([15 << bits - 6, 31 << bits - 6], [17 << bits - 6, 33 << bits - 6])
    )
    found = [missing.position(drawn, 6) for drawn in (14, 15, 16, 17, 30, 31, 32, 33)]
    assert found == [0, None, None, 1, 1, None, None, None]


@pytest.mark.parametrize("given", [[5_000_000, 11_000_000], [6_000_000, 6_000_000, 12_500_000]])
@pytest.mark.parametrize("bits", [PRECISION, 160])
def test_thresholds_of_any_counts_lie_between_their_bounds(given, bits):
    """Also where the last block that the tables know gets something of them."""
    rate = Fraction(1, 1 << 17)
    upto, rest = blocks_up_to(rate)[1], 2**32 - given[-1]
    low, high = Missing(rate, given, cumulated(rate, PRECISION)).bounds(bits)
    for at in [*range(6), *range(6, len(low), 501)]:
        threshold = (2**32 * upto[at] - given[min(at, len(given) - 1)]) / rest * 2**bits
        assert low[at] <= threshold <= high[at] < low[at] + 2**50, at


def test_floors_that_the_first_bounds_leave_open_are_narrowed(monkeypatch):
    """Bounds as wide as 2^-60 in the beginning: the floors are the same in the end."""
    wide, bounds = [], Missing.bounds

    def shaken(self, bits):
        low, high = bounds(self, bits)
        if bits > 192:
            return low, high
        wide.append(bits)
        return [max(0, x - (1 << 132)) for x in low], [x + (1 << 132) for x in high]

    expected = tables_of(Fraction(300)).thresholds
    monkeypatch.setattr(Missing, "bounds", shaken)
    np.testing.assert_array_equal(tables_of.__wrapped__(Fraction(300)).thresholds, expected)
    assert wide
