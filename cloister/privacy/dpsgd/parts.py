"""What a layer's per-unit gradients are asked for, whatever form they are held in.

A unit is what is clipped as one: an example, or a group of examples. Tensors of a call have a row for each
example; those of one unit follow each other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.tensors import Tensor
from cloister.privacy.dpsgd.rounding import UNDERFLOW, UNIT

WIDEST = 4096
"""Squares that are added up in float32 before double precision takes over."""
PART = 512
"""The same where an axis is longer than that and is cut: each number of a sum overstates it a little more."""


@dataclass(frozen=True)
class Rows:
    """The shape of a call.

    Attributes:
        units: U > 0.
        each: rows of every unit, > 0.
    """

    units: int
    each: int = 1

    @property
    def count(self) -> int:
        """Rows in all."""
        return self.units * self.each

    def by_unit(self, tensor: Tensor) -> Tensor:
        """A tensor of shape (rows, ...) as (U, rows of a unit, ...)."""
        return tf.reshape(tensor, [self.units, self.each, *tensor.shape[1:]])

    def summed(self, tensor: Tensor) -> Tensor:
        """A tensor of shape (rows, ...), added up over the rows of each unit: (U, ...)."""
        return tensor if self.each == 1 else tf.reduce_sum(self.by_unit(tensor), axis=1)


class Sums(NamedTuple):
    """Hold the clipped sum of some units, and counts. Nothing of it is noised.

    Attributes:
        arrays: for each trainable variable.
        clipped: how many units were scaled down.
        non_finite: how many had no finite gradient, and contributed zero.
    """

    arrays: list[NDArray]
    clipped: int
    non_finite: int


class Part(Protocol):
    """The gradients of each of U units with respect to some of the variables.

    Attributes:
        kernel: the name of the form they are held in.
        held: tensors of leading size U from which everything else is computed.
    """

    kernel: str
    held: Sequence[Tensor]

    def squared_norms(self) -> Tensor:
        """Shape (U,), double: no less than each unit's squared L2 norm over these variables.

        Guarantee: √ of it also bounds what `rounding` multiplies with γ. Where a gradient is not finite, nor is this.
        """

    def weighted_sum(self, factors: Tensor, clean: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Σ factors[i]·gradient[i] for every variable, in single or double precision.

        Args:
            factors: shape (U,), double; 0 for each unit without a finite gradient.
            clean: replaces such units' rows of a tensor of leading size U by zeros, since 0·∞ is not 0.
        """


class PerUnit:
    """Gradients held one by one: tensors of shape (U, *variable.shape).

    What is bounded is what is held, so it does not matter with what roundings that was computed.

    Args:
        kernel: a name.
        gradients: for each variable those of every row, shape (rows, *variable.shape).
        rows: which rows are a unit.
    """

    def __init__(self, kernel: str, gradients: Sequence[Tensor], rows: Rows) -> None:
        self.kernel = kernel
        self.held: Sequence[Tensor] = [rows.summed(gradient) for gradient in gradients]

    def squared_norms(self) -> Tensor:
        """As `Part` says."""
        return tf.add_n([squares(gradient) for gradient in self.held])

    def weighted_sum(self, factors: Tensor, clean: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """As `Part` says.

        Args:
            factors: of each unit, shape (U,).
            clean: puts zeros where a unit's numbers are not finite.
        """
        return [_combined(clean(gradient), factors) for gradient in self.held]


def squares(tensor: Tensor) -> Tensor:
    """The sum of squares of everything in each row, in double precision, and never less than the exact one.

    Squares of float32 numbers are added up in float32, `WIDEST` at most: n of them are understated by less than 2nu,
    and by `UNDERFLOW` each where they are too small. Both are added. What overflows is infinite, so not finite.

    Returns:
        Shape (rows,).
    """
    size = math.prod(tensor.shape[1:])
    width = _width(tensor.shape[1:])
    wide = tf.cast(tensor, tf.float64) if width == 1 else tensor
    blocks = tf.reduce_sum(tf.square(tf.reshape(wide, [tensor.shape[0], -1, width])), axis=2)
    total = tf.reduce_sum(tf.cast(blocks, tf.float64), axis=1)
    return total * (1 + 2 * (width + 1) * UNIT) + size * UNDERFLOW


def _width(shape: Sequence[int]) -> int:
    """The size of as many of the last axes as `WIDEST` allows for, and of an equal part of the next one."""
    width = 1
    for axis in reversed(shape):
        if width * axis > WIDEST:
            return width * max((part for part in range(1, PART // width + 1) if axis % part == 0), default=1)
        width *= axis
    return width


def rows_times(tensor: Tensor, factors: Tensor) -> Tensor:
    """Each row of a tensor of leading size U times its factor.

    Args:
        tensor: of leading size U.
        factors: shape (U,).
    """
    return tensor * tf.reshape(tf.cast(factors, tensor.dtype), [-1] + [1] * (len(tensor.shape) - 1))


def _combined(gradient: Tensor, factors: Tensor) -> Tensor:
    factors = tf.cast(factors, gradient.dtype)
    if gradient.shape[0] == 1:
        return gradient[0] * factors[0]  # as a product of matrices it took five times as long
    rows = tf.reshape(gradient, [gradient.shape[0], -1])
    return tf.reshape(tf.linalg.matvec(rows, factors, transpose_a=True), gradient.shape[1:])
