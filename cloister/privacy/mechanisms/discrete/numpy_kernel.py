"""Decision of candidates from their bits: one in Python integers, the reference; thousands at a time in NumPy.

The reference is also the fallback of the fast kernels, for candidates that they mark as undecided.

A candidate has 48 bits, and a slot of 192 more for the comparisons that need them. If these leave a comparison open,
further bits are drawn until it is decided. All comparisons are made in integers.

The pair of a block and low bits is taken with probability exp(-t), 0 ≤ t ≤ 1, without computing an exponential: events
of probability t/1, t/2, t/3, … are drawn until one fails, and the pair is taken if the failing event is number one,
three, five, … (von Neumann; Canonne, Kamath, Steinke, 2020, Algorithm 1). Each is one comparison with a fraction.

The kernel in NumPy decides in 64-bit integers.
"""

from collections.abc import Callable, Sequence
from itertools import chain, count

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.mechanisms.discrete.tables import LEFT_OVER, LOW_BITS, Tables

Draw = Callable[[], int]
"""Draws 64 further bits."""


class Uniform:
    """Uniform number in [0, 1) with known leading bits; further bits are drawn on demand.

    Args:
        drawn: the known bits, the most significant first.
        bits: their number.
        draw: draws 64 more.
    """

    def __init__(self, drawn: int, bits: int, draw: Draw) -> None:
        self._drawn, self._bits, self._draw = drawn, bits, draw

    def is_below(self, numerator: int, denominator: int) -> bool:
        """Return whether the number is below a fraction: true with exactly that probability.

        Args:
            numerator, denominator: of the fraction, ≥ 0 and > 0.
        """
        while True:
            limit = numerator << self._bits
            if (self._drawn + 1) * denominator <= limit:
                return True
            if self._drawn * denominator >= limit:
                return False
            self._extend()

    def block(self, tables: Tables) -> int:
        """Return the block whose two thresholds enclose the number."""
        while (position := tables.missing.position(self._drawn, self._bits)) is None:
            self._extend()
        return position // 2 if position % 2 == 0 else -(position // 2) - 1

    def _extend(self) -> None:
        self._drawn, self._bits = self._drawn << 64 | self._draw(), self._bits + 64


def number_of(index: int, word: int, slot: Sequence[int], tables: Tables, draw: Draw) -> int | None:
    """Return the number of a candidate's bits, as b·2^16 + low; None if it is refused.

    Args:
        index: 16 bits, into the first table.
        word: 32 bits: the upper half decides whether the pair is taken, the lower half gives the low bits.
        slot: three times 64 bits. The first: an index into the second table in its low 16 bits, and 48 bits that go on
            after the word's upper half. The second: for the thresholds. The third: for the event of probability t/2.
        tables: of the scale.
        draw: draws 64 further bits.
    """
    more, threshold, second = map(int, slot)
    block = int(tables.first[index])
    if block == LEFT_OVER:
        block = int(tables.second[more % (1 << LOW_BITS)])
    if block == LEFT_OVER:
        block = Uniform(threshold, 64, draw).block(tables)
    low = word % (1 << LOW_BITS)
    uniforms = chain(
        (Uniform((word >> LOW_BITS) << 48 | more >> LOW_BITS, 64, draw), Uniform(second, 64, draw)),
        (Uniform(0, 0, draw) for _ in count()),
    )
    m, width, bits = max(block, -block - 1), 1 << tables.low_bits, low >> (LOW_BITS - tables.low_bits)
    j = bits if block >= 0 else width - bits
    # 0 ≤ t = numerator/denominator ≤ 1; the pair is taken if the first failing event is number one, three, five, …
    numerator, denominator = (2 * m * width + j) * j * tables.unit.numerator, tables.unit.denominator << 64
    order = 1
    while next(uniforms).is_below(numerator, order * denominator):
        order += 1
    return block << LOW_BITS | low if order % 2 == 1 else None


NAME = "numpy"
TAKEN, REFUSED, OPEN = 0, 1, 2
"""Outcomes of a candidate; `OPEN`: its bits, or 64-bit integers, do not decide it."""
LOW = np.uint64((1 << LOW_BITS) - 1)
HALF, ONE = np.uint64(LOW_BITS), np.uint64(1)


def look_up(indices: NDArray, words: NDArray, tables: Tables) -> NDArray:
    """Compute the numbers of candidates that the first table decides, in place of their words.

    A candidate is taken at once if its block is in the first table and the upper half of its word is above m:
    t ≤ (2m + 1)/2s₀² ≤ (m + ½)/2^16, since s₀ ≥ 2^8.

    Args:
        indices: 16 bits each, into the first table.
        words: 32 bits each; replaced by b·2^16 + low for each candidate that is taken.
        tables: of the scale.

    Returns:
        The positions of the undecided candidates, in order; their words are unchanged.
    """
    blocks = np.empty(len(indices), np.int16)
    # Every index is in the table: other modes would check that first, or make a copy.
    tables.first.take(indices, out=blocks, mode="wrap")
    m = blocks >> 15
    m ^= blocks
    undecided = (words >> LOW_BITS).astype(np.uint16) <= m.view(np.uint16)
    undecided |= blocks == LEFT_OVER
    positions = np.flatnonzero(undecided)
    kept = words[positions]
    words.view(np.uint16)[1::2] = blocks.view(np.uint16)
    words[positions] = kept
    return positions


def decide(indices: NDArray, words: NDArray, slots: NDArray, tables: Tables) -> tuple[NDArray, NDArray]:
    """Decide candidates by their slots.

    Args:
        indices, words: of the candidates, as drawn.
        slots: three times 64 bits for each: see `number_of`.
        tables: of the scale.

    Returns:
        The numbers b·2^16 + low, and the outcome of each candidate.
    """
    found = tables.first.take(indices)
    left = np.flatnonzero(found == LEFT_OVER)
    found[left] = tables.second[slots[left, 0] & LOW]
    left = left[found[left] == LEFT_OVER]
    drawn = slots[left, 1]
    position = np.searchsorted(tables.thresholds, drawn, side="right")
    # Beyond the last threshold, or equal to the preceding one: the number may be on either side of it.
    undecided = (position == len(tables.thresholds)) | (tables.thresholds[np.maximum(position - 1, 0)] == drawn)
    found[left] = tables.blocks[np.minimum(position, len(tables.thresholds) - 1)]
    blocks = found.astype(np.int32)

    # Most candidates here lack only their block, and need no outcome by the events of probability t and t/2.
    close = np.flatnonzero(words >> LOW_BITS <= (blocks ^ (blocks >> 31)).view(np.uint32))
    block, word, slot = blocks[close], words[close], slots[close]
    m, width = (block ^ (block >> 31)).astype(np.int64), 1 << tables.low_bits
    low = (word & np.uint32(LOW)) >> (LOW_BITS - tables.low_bits)
    j = np.where(block < 0, width - low.astype(np.int64), low)
    # Below 2^48, and less than 2^64 when multiplied by 2^64/2s² rounded up: t is at most a half.
    steps = ((2 * width * m + j) * j).view(np.uint64)
    least, most = steps * tables.unit_floor, steps * tables.unit_ceiling
    first = (word >> LOW_BITS).astype(np.uint64) << np.uint64(48) | slot[:, 0] >> HALF
    refused = (first < least) & (slot[:, 2] >= most - (most >> ONE))
    outcome = np.zeros(len(words), np.uint8)
    outcome[close] = np.where(first >= most, TAKEN, np.where(refused, REFUSED, OPEN))
    outcome[left[undecided]] = OPEN
    return blocks << LOW_BITS | (words & np.uint32(LOW)).view(np.int32), outcome


def onto_grid(sums: NDArray, numbers: NDArray, scale: float, unit: float, out: NDArray) -> None:
    """Write (rint(sums·scale) + numbers)·unit, each operation in double precision.

    Args:
        sums: flat, float32 or float64.
        numbers: int32, of the same length.
        scale, unit: factors before rounding, and of the result.
        out: float32 or float64; it may be `sums`. Numbers beyond its range become infinite.
    """
    whole = np.multiply(sums, scale, dtype=np.float64)
    np.rint(whole, out=whole)
    whole += numbers
    np.multiply(whole, unit, out=out, casting="same_kind")
