"""Integers modulo 2³² or 2⁶⁴: the numbers that are masked and summed."""

import numpy as np
from numpy.typing import NDArray

from cloister.core import check

RINGS: dict[int, np.dtype] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}
"""Bits of a number -> dtype in memory and in messages: little-endian."""
SIGNED: dict[int, np.dtype] = {32: np.dtype("<i4"), 64: np.dtype("<i8")}


def into_ring(numbers: NDArray, bits: int) -> NDArray:
    """Convert integers, including negative ones, to the ring.

    Args:
        numbers: (p,) int64.
        bits: 32 or 64.

    Returns:
        (p,) unsigned, a new array.
    """
    check.one_of({"32", "64"}, bits=str(bits))
    return numbers.astype(RINGS[bits])


def out_of_ring(values: NDArray) -> NDArray:
    """Convert a sum in the ring to the integer of least absolute value.

    The caller ensures that every sum is below 2³¹ (2⁶³) in absolute value. A larger one is read as another number.

    Args:
        values: (p,) unsigned.

    Returns:
        (p,) int64.
    """
    return values.view(SIGNED[8 * values.itemsize]).astype(np.int64)
