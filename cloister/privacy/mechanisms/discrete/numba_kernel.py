"""Kernels compiled by numba: the exact sampler's, and integer sums of updates.

They come with the extra `fast`. The sampler's returns the numbers of `numpy_kernel`, bit for bit. Types are
explicit: numba turns a mix of signed and unsigned integers into floating-point numbers, and every comparison here must
be one of integers.

Integer sums are those of `grid`, bit for bit, in two passes in place of six. The first pass writes
(trained - sent)·weight. Each operation is rounded like NumPy's, without fusing or reordering. NumPy computes the
squares of the written numbers. If these are within the bound, the second pass truncates the same numbers and adds them.
So the bound does not depend on the first pass, and Σk² ≤ D² follows as in `grid`.

Casting a number to an integer type that cannot hold it is undefined. That does not occur here: accepted squares are
finite and at most D², so that each number is at most D, at most 2^26 for 32 bits and below 2^53 for 64.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloister.privacy.mechanisms.discrete.numpy_kernel import OPEN, REFUSED, TAKEN
from cloister.privacy.mechanisms.discrete.tables import LEFT_OVER, LOW_BITS, Tables

NAME = "numba"
HALF, LOW, SIGN = np.uint32(LOW_BITS), np.uint32((1 << LOW_BITS) - 1), np.int32(31)
HALF_64, LOW_64, UPPER_64, ONE_64 = np.uint64(LOW_BITS), np.uint64(LOW), np.uint64(48), np.uint64(1)


def look_up(indices: NDArray, words: NDArray, tables: Tables) -> NDArray:
    """Compute the numbers of candidates that the first table decides: see `numpy_kernel.look_up`.

    Args:
        indices: 16 bits each, into the first table.
        words: 32 bits each; replaced by b·2^16 + low for each candidate that is taken.
        tables: of the scale.
    """
    return _look_up(indices, words, tables.first)


def decide(indices: NDArray, words: NDArray, slots: NDArray, tables: Tables) -> tuple[NDArray, NDArray]:
    """Decide candidates by their slots: see `numpy_kernel.decide`.

    Args:
        indices, words: of the candidates, as drawn.
        slots: three times 64 bits for each.
        tables: of the scale.
    """
    look_ups = (tables.first, tables.second, tables.thresholds, tables.blocks)
    return _decide(indices, words, slots, look_ups, np.int64(tables.low_bits), (tables.unit_floor, tables.unit_ceiling))


def onto_grid(sums: NDArray, numbers: NDArray, scale: float, unit: float, out: NDArray) -> None:
    """Write (rint(sums·scale) + numbers)·unit in one pass: see `numpy_kernel.onto_grid`.

    Args:
        sums, numbers, scale, unit, out: as in `numpy_kernel.onto_grid`.
    """
    _onto_grid(sums, numbers, np.float64(scale), np.float64(unit), out)


def compiled(function: Callable) -> Any:
    """Compile a function to machine code.

    Since compilation takes seconds, the code is cached on disk where a folder is writable.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


@compiled
def _look_up(indices: NDArray, words: NDArray, table: NDArray) -> NDArray:
    positions = np.empty(len(words), np.int64)
    found = 0
    for at in range(len(words)):
        block, word = np.int32(table[indices[at]]), words[at]
        if word >> HALF <= np.uint32(block ^ (block >> SIGN)) or block == LEFT_OVER:
            positions[found] = at
            found += 1
        else:
            words[at] = np.uint32(block) << HALF | word & LOW
    return positions[:found].copy()


@compiled
def _onto_grid(sums: NDArray, numbers: NDArray, scale: np.float64, unit: np.float64, out: NDArray) -> None:
    for at in range(len(out)):
        out[at] = (np.rint(np.float64(sums[at]) * scale) + numbers[at]) * unit


@compiled
def _decide(
    indices: NDArray, words: NDArray, slots: NDArray, look_ups: tuple, low_bits: np.int64, unit: tuple
) -> tuple[NDArray, NDArray]:
    numbers, outcome = np.empty(len(words), np.int32), np.empty(len(words), np.uint8)
    blocks = _blocks(indices, slots, look_ups[0], look_ups[1])
    _settle(blocks, slots, look_ups[2], look_ups[3])
    for at in range(len(words)):
        block, word = blocks[at], words[at]
        numbers[at] = np.int32(np.uint32(block) << HALF | word & LOW)
        if block == LEFT_OVER:
            outcome[at] = OPEN
        elif word >> HALF > np.uint32(block ^ (block >> SIGN)):
            outcome[at] = TAKEN
        else:
            # Scalar arguments: counting a reference to an array takes longer than this computation.
            outcome[at] = _outcome(block, word, slots[at, 0], slots[at, 2], low_bits, unit)
    return numbers, outcome


@compiled
def _blocks(indices: NDArray, slots: NDArray, first: NDArray, second: NDArray) -> NDArray:
    """Return the blocks in the tables, without branches for parallel cache loads."""
    blocks = np.empty(len(indices), np.int32)
    for at in range(len(indices)):
        block, other = first[indices[at]], second[slots[at, 0] & LOW_64]
        blocks[at] = other if block == LEFT_OVER else block
    return blocks


@compiled
def _settle(blocks: NDArray, slots: NDArray, thresholds: NDArray, order: NDArray) -> None:
    """Set blocks by thresholds if both tables have `LEFT_OVER` and 64 bits decide."""
    for at in range(len(blocks)):
        if blocks[at] == LEFT_OVER:
            position = np.searchsorted(thresholds, slots[at, 1], side="right")
            if position < len(thresholds) and (position == 0 or thresholds[position - 1] < slots[at, 1]):
                blocks[at] = order[position]


@compiled
def _outcome(
    block: np.int32, word: np.uint32, more: np.uint64, second: np.uint64, low_bits: np.int64, unit: tuple
) -> int:
    """Return the outcome of a candidate, by the events of probability t and t/2."""
    m, width = np.int64(block ^ (block >> SIGN)), np.int64(1) << low_bits
    low = np.int64(word & LOW) >> (np.int64(LOW_BITS) - low_bits)
    j = low if block >= 0 else width - low
    steps = np.uint64((2 * width * m + j) * j)
    least, most = steps * unit[0], steps * unit[1]
    first = np.uint64(word >> HALF) << UPPER_64 | more >> HALF_64
    if first >= most:
        return TAKEN
    return REFUSED if first < least and second >= most - (most >> ONE_64) else OPEN


@compiled
def update(trained: NDArray, sent: NDArray, weight: np.floating, out: NDArray) -> None:
    """Write (trained - sent)·weight; zeros if the weight is 0, for any trained values.

    Args:
        trained, sent: flat arrays of one dtype.
        weight: of the same dtype.
        out: receives the numbers.
    """
    if weight == 0:
        out[:] = 0
    else:
        for at in range(len(out)):
            out[at] = (trained[at] - sent[at]) * weight


@compiled
def change(numbers: NDArray, sums: NDArray, sign: int) -> None:
    """Truncate numbers toward zero, and add them to integers or subtract them.

    Args:
        numbers: floating-point numbers that the integers can hold.
        sums: int32 or int64.
        sign: 1 or -1.
    """
    whole = sums.dtype.type
    if sign > 0:
        for at in range(len(numbers)):
            sums[at] += whole(numbers[at])
    else:
        for at in range(len(numbers)):
            sums[at] -= whole(numbers[at])
