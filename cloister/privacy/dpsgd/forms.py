"""Representations of per-unit gradients with respect to variables, from inputs and deltas of their uses (`uses`).

A unit is an example, or a group of examples that are clipped together. Examples of a group, and uses of a variable
that is used more than once, are further positions of one unit.

If a variable multiplies inputs, its gradient at one position is the outer product of an input a and its delta d, so its
norm is ‖a‖·‖d‖ (Goodfellow, 2015, arXiv:1510.01799). At T positions it is Σ_t a_t d_tᵀ, with squared norm
Σ_{s,t} (a_s·a_t)(d_s·d_t) (Li et al., 2022, arXiv:2110.05679, §4). Either way the clipped sum is one product of
matrices, of deltas scaled first. A table has inputs that are one-hot: a_s·a_t is 1 where two indices are equal. The
kernel of a convolution has an input at each position of its output: the patch of numbers that it covers there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.privacy.dpsgd.noise import MASS_PER_NORM, MAX_POSITIONS, UNDERFLOW, UNIT
from cloister.privacy.dpsgd.tracing import NotCapturable
from cloister.utils.arrays import Tensor

WHOLE = "whole"
"""Name of the form of gradients that are held."""
WIDEST = 4096
"""Most squares that are summed in float32 before double precision takes over."""
PART = 512
"""Most squares if an axis is longer than `WIDEST` and is cut: each summand increases the overstatement a little."""
GRAM_COST = 3
"""Cost of a multiplication of the Gram form, in double precision, relative to one of the ordinary form."""
MAX_PAIRS = 1 << 24
"""Most pairs of positions in a choice from a table: each takes some 25 bytes."""


class Origins(NamedTuple):
    """Place in a variable of each number that an operation takes. No place occurs twice.

    Attributes:
        shape: of the variable.
        places: of each number in the variable, in the order of its entries; None: all of them, in this order.
    """

    shape: tuple[int, ...]
    places: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Part:
    """Gradients of each of U units with respect to one variable.

    Attributes:
        kernel: the name of their form.
        held: tensors of leading size U from which all results are computed.
        squares: upper bounds of the units' squared L2 norms, shape (U,), double. A root also bounds the factor of γ in
            `noise`. If a gradient is not finite, neither is this.
        summed: (held tensors of n units, their factors above 0) -> Σ factors[i]·gradient[i] of what operations take.
        origins: of the numbers that operations take, in the variable. Norms are the same there.
    """

    kernel: str
    held: Sequence[Tensor]
    squares: Tensor
    summed: Callable[[Sequence[Tensor], Tensor], Tensor]
    origins: Origins | None = None

    @property
    def holds_gradients(self) -> bool:
        """Return whether `held` are the gradients, so usually larger than a sum of them."""
        return self.kernel == WHOLE

    def weighted_sum(self, held: Sequence[Tensor], factors: Tensor) -> Tensor:
        """Return Σ factors[i]·gradient[i], in single or double precision.

        Leave out units of factor 0, since 0·∞ is not 0. If there are none, nothing is copied.

        Args:
            held: of one or several calls: as `held`, but of any number n of units.
            factors: shape (n,), double; 0 for each unit without a finite gradient.
        """
        counted, every = tf.where(factors > 0)[:, 0], [*held, factors]
        *kept, own = tf.cond(
            tf.size(counted) == tf.size(factors), lambda: every, lambda: [tf.gather(each, counted) for each in every]
        )
        found = self.summed(kept, own)
        return found if self.origins is None else back(found, self.origins)


def whole(gradients: Tensor) -> Part:
    """Return the form of gradients that are held separately: a tensor of shape (U, *variable.shape).

    The bound applies to the held gradients, so it holds for any rounding in their computation.
    """
    shape = gradients.shape[1:]

    def summed(held: Sequence[Tensor], factors: Tensor) -> Tensor:
        rows = tf.reshape(held[0], [-1, math.prod(shape)])
        return tf.reshape(tf.matmul(tf.cast(factors, rows.dtype)[None], rows), shape)

    return Part(WHOLE, [gradients], squares(gradients), summed)


def squares(tensor: Tensor) -> Tensor:
    """Return upper bounds of the sum of squares in each row, in double precision.

    Squares of float32 numbers are summed in float32, `WIDEST` at most: n of them are understated by less than 2nu,
    and by `UNDERFLOW` each if they are too small. Both errors are added. An overflow is infinite, so not finite.

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
    """Return how many trailing entries `WIDEST` allows for: whole last axes, and an equal part of the next one."""
    width = 1
    for axis in reversed(shape):
        if width * axis > WIDEST:
            return width * max((part for part in range(1, PART // width + 1) if axis % part == 0), default=1)
        width *= axis
    return width


def of_positions(inputs: Tensor, deltas: Tensor) -> Part:
    """Return the cheapest form for Σ_t a_t d_tᵀ.

    Args:
        inputs, deltas: shapes (U, T, numbers in) and (U, T, numbers out).
    """
    positions, fan_in, fan_out = inputs.shape[1], inputs.shape[2], deltas.shape[2]
    if positions == 1:
        return outer(inputs, deltas)
    # The Gram form's bound holds up to `MAX_POSITIONS`.
    if positions <= MAX_POSITIONS and GRAM_COST * positions * (fan_in + fan_out) < fan_in * fan_out:
        return pairs(inputs, deltas)
    return whole(product(inputs, deltas))


def product(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return Σ_t a_t d_tᵀ of each unit, shape (U, numbers in, numbers out)."""
    return tf.matmul(inputs, deltas, transpose_a=True)


def outer(inputs: Tensor, deltas: Tensor) -> Part:
    """Return the form for one position per unit, of norm ‖a‖·‖d‖, without any per-unit tensor of the weights' size.

    No positions can cancel, so the bound on the norm is that on the roundings of a sum in single precision too.
    """
    return Part("outer", [inputs, deltas], squares(inputs) * squares(deltas), _products)


def _products(held: Sequence[Tensor], factors: Tensor) -> Tensor:
    """Return Aᵀ(f·D), the ordinary gradient of scaled deltas."""
    inputs, deltas = held
    return tf.matmul(_flat(inputs), _scaled(deltas, factors), transpose_a=True)


def pairs(inputs: Tensor, deltas: Tensor) -> Part:
    """Return the form for several positions per unit, fewer than the weights have rows or columns.

    Positions can cancel each other. Then an underestimated norm would let a contribution exceed the bound, and so
    would the roundings of a sum whose terms are longer than their total. Both are computed in double precision, in
    which products of single-precision numbers are exact, and the total norm of the positions is added to the norm.
    """
    held = [tf.cast(inputs, tf.float64), tf.cast(deltas, tf.float64)]
    return Part("gram", held, gram_squares(*map(gram, held)), _products)


def gram(tensor: Tensor) -> Tensor:
    """Return the products of all pairs of rows: (U, T, n) to (U, T, T), double."""
    return tf.matmul(tensor, tensor, transpose_b=True)


def gram_squares(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return upper bounds of the squared norms of Σ_t a_t d_tᵀ.

    They are also upper bounds of (Σ_t ‖a_t‖‖d_t‖ / `MASS_PER_NORM`)².

    Rounding reduces the sum of products by at most (n + T² + 2)·2⁻⁵² of the squared mass, n numbers in a and d: less
    than half of the added part.

    Args:
        inputs, deltas: the Gram matrices of a and of d, shape (U, T, T), in double precision.

    Returns:
        Shape (U,).
    """
    total = tf.reduce_sum(inputs * deltas, axis=(1, 2))
    mass = tf.reduce_sum(tf.sqrt(tf.linalg.diag_part(inputs) * tf.linalg.diag_part(deltas)), axis=1)
    # Rounding may make a zero negative.
    return tf.maximum(total, tf.zeros_like(total)) + tf.square(mass / MASS_PER_NORM)


def _flat(tensor: Tensor) -> Tensor:
    return tf.reshape(tensor, [-1, tensor.shape[-1]])


def _scaled(deltas: Tensor, factors: Tensor) -> Tensor:
    """Return each position of units' deltas times the factor of the unit, shape (n·T, numbers)."""
    return _flat(deltas * tf.cast(factors, deltas.dtype)[:, None, None])


def table(indices: Tensor, deltas: Tensor, size: int) -> Part:
    """Return the form of a table's gradients by unit, held as indices and deltas.

    Positions of one index can cancel, like positions of a product. So norms and sums are in double precision.

    Args:
        indices: shape (U, T), from 0.
        deltas: shape (U, T, numbers).
        size: rows of the table.

    Raises:
        NotCapturable: there are more than `MAX_PAIRS` pairs of positions. This limit keeps positions below
            `MAX_POSITIONS`.
    """
    if indices.shape[0] * indices.shape[1] ** 2 > MAX_PAIRS:
        raise NotCapturable(f"looked up at {indices.shape[1]} positions, whose pairs take too much memory")
    exact, same = tf.cast(deltas, tf.float64), indices[:, :, None] == indices[:, None, :]

    def summed(held: Sequence[Tensor], factors: Tensor) -> Tensor:
        return tf.math.unsorted_segment_sum(_scaled(held[1], factors), tf.reshape(held[0], [-1]), size)

    return Part("embedding", [indices, exact], gram_squares(tf.cast(same, tf.float64), gram(exact)), summed)


def back(tensor: Tensor, origins: Origins, units: Sequence[int] = ()) -> Tensor:
    """Scatter gradients of numbers taken from a variable into its shape; the rest is 0.

    Args:
        tensor: shape (*units, ...), a number of each unit for each origin.
        origins: of these numbers.
        units: shape of the axes in front, which stay.
    """
    if origins.places is not None:
        count, entries = len(origins.places), np.arange(math.prod(origins.shape))
        taken = np.full(len(entries), count, np.int32)  # the number behind all others, which is 0
        taken[origins.places] = np.arange(count)
        flat = tf.reshape(tensor, [*units, count])
        tensor = tf.gather(tf.pad(flat, [*[(0, 0)] * len(units), (0, 1)]), taken, axis=-1)
    shape = [*units, *origins.shape]
    return tensor if tensor.shape == shape else tf.reshape(tensor, shape)
