"""How many units a call has room for, so that this processor computes all of them alike.

Products of matrices are computed in blocks of rows. Their size depends on the processor, and the rows behind the last
whole block are computed in another order. The trial of a model shows that only where nothing hides it, such as a
maximum over positions. So products of many shapes are tried by themselves, once in a process.
"""

from functools import cache

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

STRIDES = (16, 48)
"""What is tried, from the smallest on: multiples of 16, as many numbers as registers hold at most. Without AVX-512 some
rows of 16, 32 and 64 were seen to differ, and none of a multiple of 24."""
MULTIPLES = (1, 2, 3, 4, 8)
"""Each stride is tried times these."""
POSITIONS = (1, 7, 25)
"""How many rows an example has in a product."""
KERNELS = ((13, 10), (64, 8), (33, 32))
"""Shapes (inputs, outputs) of the matrices that rows are multiplied with."""
DTYPES = (np.float32, np.float64)
"""Types of the numbers."""


@cache
def stride() -> int:
    """The smallest of `STRIDES` of which all multiples that are tried have equal rows; 1 if there is none."""
    return next((one for one in STRIDES if all(_has_equal_rows(one * multiple) for multiple in MULTIPLES)), 1)


def _has_equal_rows(examples: int) -> bool:
    """Whether so many equal examples have equal rows in all products that are tried."""
    return all(
        _same_rows(examples, positions, kernel, dtype)
        for positions in POSITIONS
        for kernel in KERNELS
        for dtype in DTYPES
    )


def _same_rows(examples: int, positions: int, kernel: tuple[int, int], dtype: DTypeLike) -> bool:
    rng = np.random.default_rng(0)
    one = rng.standard_normal((positions, kernel[0])).astype(dtype)
    rows = tf.constant(np.tile(one, (examples, 1)))
    product = tf.matmul(rows, tf.constant(rng.standard_normal(kernel).astype(dtype)))
    found = product.numpy().reshape(examples, -1)
    return bool((found == found[0]).all())
