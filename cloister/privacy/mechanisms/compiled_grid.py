"""Updates to whole numbers in two passes in place of six, compiled by numba: the sums of `grid`, bit for bit.

The first pass writes (trained - sent)·weight, each operation rounded as NumPy rounds it: nothing is fused, no order is
changed. NumPy measures what was written. The second pass truncates these very numbers and adds them, if they hold.
So the bound does not rest on the first pass, and Σk² ≤ D² follows as in `grid`.

Machine code does not define what becomes of a number that no integer has room for. None comes here: squares that hold
are finite and at most D², so that each number is at most D, below 2^26 for 32 bits and below 2^53 for 64.
"""

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.mechanisms.discrete.numba_kernel import compiled


@compiled
def update(trained: NDArray, sent: NDArray, weight: np.floating, out: NDArray) -> None:
    """Write (trained - sent)·weight; zeros for the weight 0, whatever was trained.

    Args:
        trained, sent: flat arrays of one dtype.
        weight: of the same dtype.
        out: takes the numbers.
    """
    if weight == 0:
        out[:] = 0
    else:
        for at in range(len(out)):
            out[at] = (trained[at] - sent[at]) * weight


@compiled
def change(numbers: NDArray, sums: NDArray, sign: int) -> None:
    """Truncate numbers toward zero and add them to integers, or take them off.

    Args:
        numbers: floating-point numbers that these integers have room for.
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
