"""Whole numbers modulo 2³² or 2⁶⁴: what is masked and added up."""

import numpy as np
from numpy.typing import NDArray

from cloister.core import check

RINGS: dict[int, np.dtype] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}
"""Bits of a number -> how it is kept, and sent: the lowest byte first."""
SIGNED: dict[int, np.dtype] = {32: np.dtype("<i4"), 64: np.dtype("<i8")}


def into_ring(numbers: NDArray, bits: int) -> NDArray:
    """Take whole numbers into the ring, negative ones too.

    Args:
        numbers: (p,) int64.
        bits: 32 or 64.

    Returns:
        (p,) unsigned, a new array.
    """
    check.one_of({"32", "64"}, bits=str(bits))
    return numbers.astype(RINGS[bits])


def out_of_ring(values: NDArray) -> NDArray:
    """Read a sum in the ring as the number of least size that it can be.

    The caller sees to it that no sum has a size of 2³¹ (2⁶³) or more: such a sum is read as another number.

    Args:
        values: (p,) unsigned.

    Returns:
        (p,) int64.
    """
    return values.view(SIGNED[8 * values.itemsize]).astype(np.int64)
