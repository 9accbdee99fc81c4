"""The clipped sum of a batch, one unit after another in one compiled loop.

It suits any model: with one unit an iteration, no layer can mix two of them, and a unit is computed in one shape,
whoever else is in the batch. The body of the loop reads the unit's rows, its random numbers and the weights. It adds to
a running sum that it does not read otherwise, and a graph that could keep anything else is refused (`graph_state`).
"""

import math

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.tensors import Compiled, Network, Tensor
from cloister.privacy.dpsgd.batches import filled
from cloister.privacy.dpsgd.draws import Seeds, seeded, seeds_of
from cloister.privacy.dpsgd.graph_state import refuse_state
from cloister.privacy.dpsgd.graphs import is_known_to_xla, with_functions
from cloister.privacy.dpsgd.losses import Loss, LossWeights, losses_of, weights_of
from cloister.privacy.dpsgd.parts import Sums
from cloister.privacy.dpsgd.probe import Probe
from cloister.privacy.dpsgd.reductions import chained_sums
from cloister.privacy.dpsgd.rewriting import as_traced
from cloister.privacy.dpsgd.rounding import Batching

AT_ONCE = 1024
"""Units of a call at most: their sum in double precision is within 2⁻¹⁸·S of the exact one for 2²⁵ units in all."""
ROUNDED = 2.0**-51
"""By how much a sum of squares is overstated for each of them: no order of additions in double loses more than half."""
CONVOLUTION = ("Conv", "DepthwiseConv")
"""Beginnings of the names of operations for which XLA has slower code than TensorFlow, and compiles for a minute."""


class InTurn:
    """Clipped sums of a model's units, one after another.

    Args:
        model: built.
        loss: (labels, outputs) -> (rows,), of each example by itself.
        probe: examples of the shapes and types that the model takes.
        batching: the units in a call, and the most examples of a unit.
        loss_weights: what the loss of an example is multiplied with, from its own label alone; None: nothing.

    Attributes:
        places: units that a call has room for.

    Guarantee: a unit's contribution is a function of the unit, its random numbers and the weights. It is no longer than
        the bound in L2. This needs no assumption on how rows of a batch are computed.

    Raises:
        UnsupportedModel: the graph may keep something of a unit.
    """

    def __init__(
        self, model: Network, loss: Loss, probe: Probe, batching: Batching, loss_weights: LossWeights | None = None
    ) -> None:
        self._model, self._cap, self.places = model, batching.group_cap, min(batching.at_once, AT_ONCE)
        self._loss, self._loss_weights, self._probe = loss, loss_weights, probe
        self._variables = model.trainable_variables
        self._size = sum(math.prod(variable.shape) for variable in self._variables)
        self._compiled = self._compile()

    def __call__(self, x: NDArray, y: NDArray, mask: NDArray, bound: float, seeds: Seeds) -> Sums:
        """Return Σ gradient·min(1, bound/‖gradient‖) over the units, in double precision.

        Args:
            x, y: units·cap examples, those of a unit next to each other.
            mask: shape (units, cap), False for padding; at most `places` units.
            bound: above 0.
            seeds: of random layers.
        """
        x, y = (
            filled(array, self.places * self._cap, made_up.dtype)
            for array, made_up in zip((x, y), self._probe, strict=True)
        )
        weights = np.asarray(weights_of(tf.constant(y), self._loss_weights)).reshape(self.places, self._cap)
        shares = np.zeros_like(weights)
        shares[: len(mask)] = weights[: len(mask)] * mask / np.maximum(mask.sum(axis=1, keepdims=True), 1)
        given = (
            tf.constant(self._by_unit(x)),
            tf.constant(self._by_unit(y)),
            tf.constant(shares),
            tf.constant(seeds(self.places, len(seeds_of(self._model)))),
            tf.constant(len(mask)),
            tf.constant(bound, tf.float64),
        )
        with as_traced():
            arrays, clipped, non_finite = self._compiled(*given)
        return Sums([np.asarray(array) for array in arrays], int(clipped), int(non_finite))

    def _by_unit(self, rows: NDArray) -> NDArray:
        return rows.reshape(self.places, self._cap, *rows.shape[1:])

    def _compile(self) -> Compiled:
        x, y = self._probe
        rows = [self.places, self._cap]
        signature = [
            tf.TensorSpec([*rows, *x.shape[1:]], x.dtype),
            tf.TensorSpec([*rows, *y.shape[1:]], y.dtype),
            tf.TensorSpec(rows, tf.float64),
            tf.TensorSpec([self.places, len(seeds_of(self._model)), 2], tf.int64),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float64),
        ]
        with as_traced():
            plain = tf.function(self._sums, input_signature=signature, autograph=False).get_concrete_function()
            refuse_state(plain.graph, self._model)
            if _has_convolutions(plain.graph):
                return plain
            fused = tf.function(self._sums, input_signature=signature, autograph=False, jit_compile=True)
            return fused if is_known_to_xla(fused, signature) else plain

    def _sums(
        self, x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor, count: Tensor, bound: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        values = [tf.convert_to_tensor(variable.value) for variable in self._variables]

        def add(number: Tensor, totals: list[Tensor], clipped: Tensor, non_finite: Tensor) -> tuple[object, ...]:
            gradients = self._gradients(values, x[number], y[number], shares[number], seeds[number])
            squares = tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients])
            norm = tf.sqrt(squares * (1 + ROUNDED * self._size))
            is_finite = tf.math.is_finite(norm)
            factor = tf.where(is_finite, bound / tf.maximum(norm, bound), tf.zeros_like(norm))
            return (
                number + 1,
                # A factor of 0 gives 0, also for numbers that are not finite.
                [
                    total + tf.math.multiply_no_nan(gradient, factor)
                    for total, gradient in zip(totals, gradients, strict=True)
                ],
                clipped + tf.cast(is_finite & (norm > bound), tf.int32),
                non_finite + tf.cast(~is_finite, tf.int32),
            )

        zeros = [tf.zeros(variable.shape, tf.float64) for variable in self._variables]
        with chained_sums():
            _, sums, clipped, non_finite = tf.while_loop(
                lambda number, *_: number < count, add, (tf.constant(0), zeros, tf.constant(0), tf.constant(0))
            )
        return sums, clipped, non_finite

    def _gradients(self, values: list[Tensor], x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor) -> list[Tensor]:
        """Return one unit's gradient with respect to each variable, in double precision."""
        own = list(zip(self._variables, values, strict=True))
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            keras.StatelessScope([*own, *seeded(self._model, seeds)]),
        ):
            tape.watch(values)
            losses = losses_of(self._model, self._loss, x, y)
            total = tf.reduce_sum(losses * tf.cast(shares, losses.dtype))
        found = tape.gradient(total, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.cast(gradient, tf.float64) for gradient in found]


def _has_convolutions(graph: tf.Graph) -> bool:
    return any(
        operation.type.startswith(CONVOLUTION) for own in with_functions(graph) for operation in own.get_operations()
    )
