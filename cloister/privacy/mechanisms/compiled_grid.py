"""Integer sums of updates, compiled by numba: bit for bit those of `grid`, in two passes in place of six.

The first pass writes (trained - sent)·weight. Each operation is rounded like NumPy's, without fusing or reordering.
NumPy computes the squares of the written numbers. If these are within the bound, the second pass truncates the same
numbers and adds them. So the bound does not depend on the first pass, and Σk² ≤ D² follows as in `grid`.

Casting a number to an integer type that cannot hold it is undefined. That does not occur here: accepted squares are
finite and at most D², so that each number is at most D, at most 2^26 for 32 bits and below 2^53 for 64.
"""

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.mechanisms.discrete.numba_kernel import compiled


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
