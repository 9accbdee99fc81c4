"""Kernel in NumPy: decides thousands of candidates at a time in 64-bit integers, and marks undecided ones."""

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.mechanisms.discrete.tables import LEFT_OVER, LOW_BITS, Tables

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
