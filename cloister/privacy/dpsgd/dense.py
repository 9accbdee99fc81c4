"""Per-example gradients of a dense layer, out of its inputs and the gradients of its outputs.

At one position an example's gradient is the outer product of its input a and its delta d, so its norm is ‖a‖·‖d‖
(Goodfellow, 2015, arXiv:1510.01799). At T positions it is Σ_t a_t d_tᵀ, with squared norm Σ_{s,t} (a_s·a_t)(d_s·d_t)
(Li et al., 2022, arXiv:2110.05679, §4). Either way the clipped sum is one product of matrices, of deltas scaled first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cloister.privacy.dpsgd.capture import Call, NotCapturable, Unit
from cloister.privacy.dpsgd.parts import Part, PerExample, row_squares, rows_times

GRAM_COST = 3
"""What a multiplication of the Gram form costs, in double precision, beside one of the ordinary form."""


def dense(unit: Unit, calls: Sequence[Call], batch: int) -> Part:
    """The cheapest form for the number of positions: several calls of one layer are further positions."""
    bias = bool(unit.layer.use_bias)
    inputs = tf.concat([_positions(call.pair[0], batch) for call in calls], axis=1)
    deltas = tf.concat([_positions(call.pair[1], batch) for call in calls], axis=1)
    positions, fan_in, fan_out = inputs.shape[1], inputs.shape[2], deltas.shape[2]
    if positions == 1:
        return Outer(inputs, deltas, bias)
    if GRAM_COST * positions * (fan_in + fan_out) < fan_in * fan_out:
        return Gram(inputs, deltas, bias)
    gradients = [tf.matmul(inputs, deltas, transpose_a=True)]
    return PerExample("dense one by one", [*gradients, tf.reduce_sum(deltas, axis=1)] if bias else gradients)


def _positions(tensor: Any, batch: int) -> Any:
    """A tensor of shape (B, ..., features) as (B, T, features)."""
    if tensor.shape[0] != batch:
        raise NotCapturable("a dense layer's inputs do not have an example in each row")
    return tf.reshape(tensor, [batch, -1, tensor.shape[-1]])


class Outer:
    """A position per example: nothing of the size of the weights is made for an example."""

    kernel = "dense"

    def __init__(self, inputs: Any, deltas: Any, bias: bool) -> None:
        self._inputs, self._deltas, self._bias = inputs, deltas, bias

    def squared_norms(self) -> Any:
        """(‖a‖² + 1)·‖d‖², the 1 being the bias."""
        return (row_squares(self._inputs) + float(self._bias)) * row_squares(self._deltas)

    def weighted_sum(self, factors: Any, clean: Callable[[Any], Any]) -> list[Any]:
        """Aᵀ(f·D): the ordinary gradient, of deltas scaled first."""
        inputs = _flat(clean(self._inputs))
        deltas = _flat(rows_times(clean(self._deltas), factors))
        kernel = tf.matmul(inputs, deltas, transpose_a=True)
        return [kernel, tf.reduce_sum(deltas, axis=0)] if self._bias else [kernel]


class Gram(Outer):
    """Several positions per example, fewer than the weights have rows or columns.

    Positions can cancel each other, and a norm that comes out too small would let a contribution pass the bound: so the
    products are added in double precision, in which those of single-precision numbers are exact.
    """

    kernel = "dense gram"

    def squared_norms(self) -> Any:
        """Σ_{s,t} (a_s·a_t + 1)(d_s·d_t), the 1 being the bias."""
        inputs, deltas = (gram(tensor) for tensor in (self._inputs, self._deltas))
        squares = tf.reduce_sum((inputs + float(self._bias)) * deltas, axis=(1, 2))
        # Rounding may take what should be 0 below it.
        return tf.cast(tf.maximum(squares, tf.zeros([], squares.dtype)), self._inputs.dtype)


def gram(tensor: Any) -> Any:
    """The products of all pairs of rows: (B, T, n) to (B, T, T), in double precision."""
    wide = tf.cast(tensor, tf.float64)
    return tf.matmul(wide, wide, transpose_b=True)


def _flat(tensor: Any) -> Any:
    return tf.reshape(tensor, [-1, tensor.shape[-1]])
