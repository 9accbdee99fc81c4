"""Per-unit gradients of a dense layer, out of its inputs and the gradients of its outputs.

At one position a gradient is the outer product of an input a and its delta d, so its norm is ‖a‖·‖d‖ (Goodfellow, 2015,
arXiv:1510.01799). At T positions it is Σ_t a_t d_tᵀ, with squared norm Σ_{s,t} (a_s·a_t)(d_s·d_t) (Li et al., 2022,
arXiv:2110.05679, §4). Either way the clipped sum is one product of matrices, of deltas scaled first. The examples of a
group are further positions of one unit, and so are the calls of a layer that is called more than once.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from cloister.core.tensors import Tensor
from cloister.privacy.dpsgd.capture import Call, CapturedLayer, NotCapturable
from cloister.privacy.dpsgd.parts import Part, PerUnit, Rows, rows_times, squares
from cloister.privacy.dpsgd.rounding import MASS_PER_NORM, MAX_POSITIONS

GRAM_COST = 3
"""What a multiplication of the Gram form costs, in double precision, beside one of the ordinary form."""


def dense(captured: CapturedLayer, calls: Sequence[Call], rows: Rows) -> Part:
    """The cheapest form for the number of positions.

    Args:
        captured: the layer, and its trainable variables.
        calls: of the layer in one forward computation.
        rows: how many rows of a tensor belong to a unit, and how many units there are.
    """
    bias = bool(captured.layer.use_bias)
    inputs = tf.concat([_positions(call.pair[0], rows) for call in calls], axis=1)
    deltas = tf.concat([_positions(call.pair[1], rows) for call in calls], axis=1)
    positions, fan_in, fan_out = inputs.shape[1], inputs.shape[2], deltas.shape[2]
    if positions == 1:
        return Outer(inputs, deltas, bias)
    if gram_is_cheaper(positions, fan_in, fan_out):
        return Gram(inputs, deltas, bias)
    gradients = [tf.matmul(inputs, deltas, transpose_a=True)]
    if bias:
        gradients.append(tf.reduce_sum(deltas, axis=1))
    return PerUnit("dense one by one", gradients, Rows(rows.units))


def gram_is_cheaper(positions: int, fan_in: int, fan_out: int) -> bool:
    """Whether products of positions are less than the weights' gradients, and few enough for the bound to hold.

    Args:
        positions: rows of a unit.
        fan_in, fan_out: numbers that go into the layer and come out, for each.
    """
    return positions <= MAX_POSITIONS and GRAM_COST * positions * (fan_in + fan_out) < fan_in * fan_out


def _positions(tensor: Tensor, rows: Rows) -> Tensor:
    """A tensor of shape (rows, ..., features) as (U, T, features)."""
    if tensor.shape[0] != rows.count:
        raise NotCapturable("a dense layer's inputs do not have an example in each row")
    return tf.reshape(tensor, [rows.units, -1, tensor.shape[-1]])


class Outer:
    """A position per unit: nothing of the size of the weights is made for a unit.

    No positions can cancel, so the bound on the norm is that on the roundings of a sum in single precision too.
    """

    kernel = "dense"

    def __init__(self, inputs: Tensor, deltas: Tensor, bias: bool) -> None:
        self._inputs, self._deltas, self._bias = inputs, deltas, bias
        self.held: Sequence[Tensor] = (inputs, deltas)

    def squared_norms(self) -> Tensor:
        """(‖a‖² + 1)·‖d‖², the 1 being the bias."""
        return (squares(self._inputs) + float(self._bias)) * squares(self._deltas)

    def weighted_sum(self, factors: Tensor, clean: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Aᵀ(f·D): the ordinary gradient, of deltas scaled first.

        Args:
            factors: of each unit, shape (U,).
            clean: not needed: empty places and units without a finite gradient, whose factors are 0, are left out.
        """
        counted = tf.where(factors > 0)[:, 0]
        inputs, deltas, own = (tf.gather(each, counted) for each in (self._inputs, self._deltas, factors))
        inputs, deltas = _flat(inputs), _flat(rows_times(deltas, own))
        kernel = tf.matmul(inputs, deltas, transpose_a=True)
        return [kernel, tf.reduce_sum(deltas, axis=0)] if self._bias else [kernel]


class Gram(Outer):
    """Several positions per unit, fewer than the weights have rows or columns.

    Positions can cancel each other: a norm that came out too small would let a contribution pass the bound, and so
    would the roundings of a sum whose terms are longer than their total. Both are computed in double precision, in
    which products of single-precision numbers are exact, and what positions weigh together counts towards the norm.
    """

    kernel = "dense gram"

    def __init__(self, inputs: Tensor, deltas: Tensor, bias: bool) -> None:
        super().__init__(tf.cast(inputs, tf.float64), tf.cast(deltas, tf.float64), bias)

    def squared_norms(self) -> Tensor:
        """Σ_{s,t} (a_s·a_t + 1)(d_s·d_t), the 1 being the bias, and a part of (Σ_t ‖(a_t, 1)‖‖d_t‖)²."""
        return gram_squares(gram(self._inputs) + float(self._bias), gram(self._deltas))


def gram(tensor: Tensor) -> Tensor:
    """The products of all pairs of rows: (U, T, n) to (U, T, T), of numbers in double precision."""
    return tf.matmul(tensor, tensor, transpose_b=True)


def gram_squares(inputs: Tensor, deltas: Tensor) -> Tensor:
    """No less than the squared norms of Σ_t a_t d_tᵀ, nor than (Σ_t ‖a_t‖‖d_t‖ / `MASS_PER_NORM`)².

    Rounding takes at most (n + T² + 2)·2⁻⁵² of the squared mass from the sum of products, n numbers in a and d: less
    than half of what is added.

    Args:
        inputs, deltas: the Gram matrices of a and of d, shape (U, T, T), in double precision.

    Returns:
        Shape (U,).
    """
    total = tf.reduce_sum(inputs * deltas, axis=(1, 2))
    mass = tf.reduce_sum(tf.sqrt(tf.linalg.diag_part(inputs) * tf.linalg.diag_part(deltas)), axis=1)
    # Rounding may take what should be 0 below it.
    return tf.maximum(total, tf.zeros_like(total)) + tf.square(mass / MASS_PER_NORM)


def _flat(tensor: Tensor) -> Tensor:
    return tf.reshape(tensor, [-1, tensor.shape[-1]])
