"""Tables of the exact sampler: bounds for the weights of blocks, and the look-up of blocks from uniform bits.

**Bounds.** The weights of blocks are exp(-m²/2s₀²). They and their sums are bounded by integers, to any number of bits.
All numbers are in units of 2^-bits. Operations for a lower bound round down, and the same operations for an upper
bound round up. All numbers are in [0, 1] and are only multiplied and added, so each bound holds after any rounding.

**Look-up.** There are two tables of 16 bits, and thresholds for the remaining probability. Block b has probability q_b.
Of the 2^16 indices of the first table, c_b hold b, where c_b/2^16 ≤ q_b. The R indices without a block lead to the
second table, where d_b of 2^16 hold b. If that index has no block either, a uniform number is compared with the
thresholds of the missing probability,

    T_b = (2^32·F_b - G_b) / (2^32 - G),     F_b = Σ q,     G_b = Σ (2^16·c + R·d),

summed over b and the blocks before it, and G over all. Any counts c and d that are not too large give exactly the same
law: thresholds carry the whole difference. So counts come from lower bounds of any precision, and thresholds from
bounds on both sides, to as many bits as a comparison needs.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, chain, takewhile

import numpy as np
from numpy.typing import NDArray

from cloister.utils.errors import ConfigError

DEPTH = (1 << 15) - 1
"""Blocks on each side of zero, m = 0 … DEPTH - 1. The numbers of all blocks fit 32 bits, and at least 63 deviations."""


def blocks_in_order(depth: int) -> list[int]:
    """Return the blocks of m = 0 … depth - 1 from the middle outward: 0, -1, 1, -2, 2, …"""
    return [block for m in range(depth) for block in (m, -m - 1)]


def cumulated(rate: Fraction, bits: int) -> tuple[list[int], list[int]]:
    """Return bounds for the probability of each block and all before it.

    Blocks are in the order of `blocks_in_order`.

    The lists end before the first block whose weight is 0 in this many bits.

    Args:
        rate: 1/2s₀², at most 1.
        bits: of precision, at least 64.

    Returns:
        Lower bounds and upper bounds, in units of 2^-bits.
    """
    # Bounds for exp(-rate·m²), m = 0, 1, …, with positive lower bounds.
    low, high = [], []
    below, above = exponential(rate, bits)
    for _, smaller, larger in zip(range(DEPTH), falling(below, bits, 1), falling(above, bits, -1)):
        if not smaller:
            break
        low.append(smaller)
        high.append(larger)
    # Each omitted weight is below the last upper bound, since weights fall with m.
    beyond = (DEPTH - len(high)) * high[-1]
    least, most = 2 * sum(low), 2 * (sum(high) + beyond)
    twice = [[weight for weight in side for _ in range(2)] for side in (low, high)]
    # Multiply by rounded reciprocals: a division of each total takes longer.
    reach, whole = 2 * bits + 2 * DEPTH.bit_length(), 1 << bits
    shorter, longer, shift = (1 << reach) // most, -(-(1 << reach) // least), reach - bits
    return (
        [total * shorter >> shift for total in accumulate(twice[0])],
        [min(-(-total * longer >> shift), whole) for total in accumulate(twice[1])],
    )


def falling(first: int, bits: int, sign: int) -> Iterator[int]:
    """Yield 1, q, q⁴, q⁹, … for the bound q, in units of 2^-bits.

    Args:
        first: q.
        bits: of precision.
        sign: 1 rounds everything down; -1 rounds it up, as it mirrors ⌊x⌋ to ⌈x⌉.
    """
    weight, ratio, square = 1 << bits, first, sign * (sign * first * first >> bits)
    while True:
        yield weight
        weight = sign * (sign * weight * ratio >> bits)
        ratio = sign * (sign * ratio * square >> bits)


def exponential(rate: Fraction, bits: int) -> tuple[int, int]:
    """Return bounds for exp(-rate) in units of 2^-bits.

    The series alternates, so that two successive partial sums enclose it.

    Args:
        rate: above 0 and at most 1, so that the terms fall.
        bits: of precision.
    """
    total, term, order = Fraction(1), Fraction(1), 0
    before = total
    while abs(term) * (1 << bits) > 1:
        order += 1
        term *= -rate / order
        before, total = total, total + term
    lower, upper = sorted((before, total))
    return math.floor(lower * (1 << bits)), math.ceil(upper * (1 << bits))


LEFT_OVER = -(1 << 15)
"""Entry of a table at an index that has no block."""
INDEX_BITS = LOW_BITS = 16
SMALLEST, LARGEST = 1 << 8, 1 << 25
PRECISION = 192
"""Bits of the first bounds: 64-bit floors of thresholds are then certain except with probability about 2^-80."""


class Missing:
    """Thresholds of the probability that the tables leave over, to any number of bits.

    Args:
        rate: 1/2s₀².
        given: G_b: the tables' share, of 2^32, of each block and the preceding ones. Further blocks have none.
        first: `cumulated` of this rate in `PRECISION` bits.
    """

    def __init__(self, rate: Fraction, given: Sequence[int], first: tuple[list[int], list[int]]) -> None:
        self._rate, self._given, self._first = rate, given, first
        self._known: dict[int, tuple[list[int], list[int]]] = {}

    def bounds(self, bits: int) -> tuple[list[int], list[int]]:
        """Return bounds of every threshold that is visible in this many bits.

        Their unit is 2^-bits.
        """
        if bits not in self._known:
            rest = (1 << 32) - self._given[-1]
            low, high = self._first if bits == PRECISION else cumulated(self._rate, bits)
            given = [part << bits for part in self._given]
            given += given[-1:] * (len(low) - len(given))
            least = [((total << 32) - part) // rest for total, part in zip(low, given)]
            most = [-((part - (total << 32)) // rest) for total, part in zip(high, given)]
            # Sorted like the thresholds: bounds of two almost equal thresholds need not be in order.
            self._known[bits] = least, list(accumulate(most, max))
        return self._known[bits]

    def position(self, drawn: int, bits: int) -> int | None:
        """Return the position of a uniform number's block; None if undecided.

        Positions are in the order of blocks.

        Args:
            drawn: the leading bits of the number, which is in [drawn, drawn + 1) · 2^-bits.
            bits: their number.
        """
        precision = PRECISION
        while precision < bits + 128:
            precision *= 2
        low, high = self.bounds(precision)
        least, end = drawn << (precision - bits), (drawn + 1) << (precision - bits)
        position = bisect_right(high, least)
        return position if position < len(low) and end <= low[position] else None


@dataclass(frozen=True, eq=False)
class Tables:
    """Tables for numbers of one scale.

    Attributes:
        scale: s.
        low_bits: L.
        first, second: 2^16 blocks each, or `LEFT_OVER`.
        missing: exact thresholds of the probability that both tables leave over.
        thresholds: ⌊2^64·T⌋ as far as that is below 2^64 - 1. A 64-bit number that is equal to one is undecided.
        blocks: the block of each threshold.
        unit: 2^64/2s², so that 2^64·t = unit · (2m·2^L + j)·j.
        unit_floor, unit_ceiling: the integers around it.
    """

    scale: Fraction
    low_bits: int
    first: NDArray[np.int16]
    second: NDArray[np.int16]
    missing: Missing
    thresholds: NDArray[np.uint64]
    blocks: NDArray[np.int16]
    unit: Fraction
    unit_floor: np.uint64
    unit_ceiling: np.uint64


COMPUTED: deque[Fraction] = deque(maxlen=8)
"""Scales whose tables this process computed last."""


@lru_cache(maxsize=64)
def tables_of(scale: Fraction) -> Tables:
    """Return the tables of a scale, computed once.

    Args:
        scale: s, from 2^8 up to 2^25.

    Raises:
        ConfigError: the scale is outside this range.
    """
    if not SMALLEST <= scale < LARGEST:
        raise ConfigError(f"the scale of exact noise must be from 2^8 up to 2^25 steps of the grid, got {scale}")
    low_bits = math.floor(scale).bit_length() - SMALLEST.bit_length()
    rate = Fraction(4**low_bits) / (2 * scale**2)
    # Lower bounds of each block's probability, in units of 2^-PRECISION. Blocks below 2^-32 have no index.
    low, high = bounds = cumulated(rate, PRECISION)
    weights = (total - before for total, before in zip(low, chain([0], high)))
    least = list(takewhile(lambda weight: weight >> PRECISION - 2 * INDEX_BITS, weights))
    first = _counts(least, 1 << PRECISION)
    left = (1 << INDEX_BITS) - sum(first)
    after = [(weight << INDEX_BITS) - (count << PRECISION) for weight, count in zip(least, first)]
    second = _counts(after, left << PRECISION)
    given = list(accumulate((a << INDEX_BITS) + left * b for a, b in zip(first, second)))
    missing = Missing(rate, given, bounds)
    # ⌊2^64·T⌋ of each threshold below 2^64 - 1, from ever closer bounds.
    bits, top = PRECISION, (1 << 64) - 1
    while True:
        low, high = ([min(bound >> (bits - 64), top) for bound in side] for side in missing.bounds(bits))
        if low == high:
            break
        bits *= 2
    thresholds = [floor for floor in low if floor < top]
    COMPUTED.append(scale)
    return Tables(
        scale,
        low_bits,
        _table(first),
        _table(second),
        missing,
        np.array(thresholds, np.uint64),
        _blocks(len(thresholds)),
        unit := Fraction(1 << 64) / (2 * scale**2),
        np.uint64(math.floor(unit)),
        np.uint64(math.ceil(unit)),
    )


def _counts(least: Sequence[int], whole: int) -> list[int]:
    """Return each block's number of indices, the most within its weight.

    Args:
        least: lower bounds for the weights of blocks.
        whole: the sum of all weights.
    """
    return [(weight << INDEX_BITS) // whole for weight in least]


def _table(counts: Sequence[int]) -> NDArray[np.int16]:
    """Return a table with each block, from the middle outward, at its number of indices."""
    table = np.full(1 << INDEX_BITS, LEFT_OVER, np.int16)
    said = np.repeat(_blocks(len(counts)), counts)
    table[: len(said)] = said
    return table


def _blocks(count: int) -> NDArray[np.int16]:
    """Return the first blocks from the middle outward."""
    return np.array(blocks_in_order(-(-count // 2))[:count], np.int16)
