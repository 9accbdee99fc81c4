"""Look-up of blocks from uniform bits: two tables of 16 bits, and thresholds for the remaining probability.

Block b has probability q_b. Of the 2^16 indices of the first table, c_b hold b, where c_b/2^16 ≤ q_b. The R indices
without a block lead to the second table, where d_b of 2^16 hold b. If that index has no block either, a uniform number
is compared with the thresholds of the missing probability,

    T_b = (2^32·F_b - G_b) / (2^32 - G),     F_b = Σ q,     G_b = Σ (2^16·c + R·d),

summed over b and the blocks before it, and G over all. Any counts c and d that are not too large give exactly the same
law: thresholds carry the whole difference. So counts come from lower bounds of any precision, and thresholds from
bounds on both sides, to as many bits as a comparison needs.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ConfigError
from cloister.privacy.mechanisms.discrete.weights import blocks_in_order, cumulated

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
    """

    def __init__(self, rate: Fraction, given: Sequence[int]) -> None:
        self._rate, self._given = rate, given
        self._known: dict[int, tuple[list[int], list[int]]] = {}

    def bounds(self, bits: int) -> tuple[list[int], list[int]]:
        """Return bounds of every threshold that is visible in this many bits.

        Their unit is 2^-bits.
        """
        if bits not in self._known:
            rest = (1 << 32) - self._given[-1]
            low, high = cumulated(self._rate, bits)
            given = [*self._given, *[self._given[-1]] * (len(low) - len(self._given))]
            least = [((total << 32) - (part << bits)) // rest for total, part in zip(low, given)]
            most = [-(((part << bits) - (total << 32)) // rest) for total, part in zip(high, given)]
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
    # Lower bounds of each block's probability, in units of 2^-PRECISION.
    low, high = cumulated(rate, PRECISION)
    least = [max(total - before, 0) for total, before in zip(low, [0, *high])]
    first = _counts(least, 1 << PRECISION)
    left = (1 << INDEX_BITS) - sum(first)
    after = [(weight << INDEX_BITS) - (count << PRECISION) for weight, count in zip(least, first)]
    second = _counts(after, left << PRECISION)
    missing = Missing(rate, list(accumulate((a << INDEX_BITS) + left * b for a, b in zip(first, second))))
    # ⌊2^64·T⌋ of each threshold below 2^64 - 1, from ever closer bounds.
    bits, top = PRECISION, (1 << 64) - 1
    while True:
        low, high = ([min(bound >> (bits - 64), top) for bound in side] for side in missing.bounds(bits))
        if low == high:
            break
        bits *= 2
    thresholds = [floor for floor in low if floor < top]
    return Tables(
        scale,
        low_bits,
        _table(first),
        _table(second),
        missing,
        np.array(thresholds, np.uint64),
        np.array(blocks_in_order(len(least))[: len(thresholds)], np.int16),
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
    said = np.repeat(np.array(blocks_in_order(len(counts) // 2), np.int16), counts)
    table[: len(said)] = said
    return table
