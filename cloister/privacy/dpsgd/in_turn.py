"""The clipped sum of a batch, one unit after another in one compiled loop.

It suits any model: with one unit an iteration, no layer can mix two of them, and a unit is computed in one shape,
beside any other units. The body of the loop reads the unit's rows, its random numbers and the weights. It adds to
a running sum that it does not read otherwise, and a graph that could keep anything else is refused (`graph_state`).
"""

import math

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.errors import UnsupportedModel
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
from cloister.privacy.dpsgd.rounding import SLACK, Batching

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
        overstatement: η, of sums in double precision.
        graph: of a call, as it was traced.

    Guarantee: a unit's contribution is a function of the unit, its random numbers and the weights. It is no longer than
        the bound in L2. It assumes that equal inputs give equal results, not how rows of a batch are computed.

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
        self.overstatement = SLACK
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
        shares = np.zeros((self.places, self._cap))
        shares[: len(mask)] = mask / np.maximum(mask.sum(axis=1, keepdims=True), 1)
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
            self.graph = plain.graph
            refuse_state(self.graph, self._model)
            self._refuse_hidden_weights()
            if _has_convolutions(self.graph):
                return plain
            fused = tf.function(self._sums, input_signature=signature, autograph=False, jit_compile=True)
            return fused if is_known_to_xla(fused, signature) else plain

    def _refuse_hidden_weights(self) -> None:
        """Refuse a graph that reads weights past `_sums`: their gradient would be taken for zero.

        Raises:
            UnsupportedModel: a function that was traced before reads a weight.
        """
        weights = {id(variable.value.handle): variable.path for variable in self._variables}
        for handle, inside in self.graph.captures:
            if id(handle) in weights and len(inside.consumers()) > 1:
                raise UnsupportedModel(
                    f"{weights[id(handle)]} is read by a function that was traced before, past DP-SGD; leave "
                    "tf.function and custom gradients over weights out of its layer"
                )

    def _sums(
        self, x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor, count: Tensor, bound: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        values = [tf.convert_to_tensor(variable.value) for variable in self._variables]

        def step(number: Tensor, pending: list[Tensor], *found: Tensor) -> tuple[Tensor, ...]:
            gradients = self._gradients(values, x[number], y[number], shares[number], seeds[number])
            return number + 1, gradients, *self._added(pending, bound, *found)

        zeros = [tf.zeros_like(value) for value in values]
        totals = [tf.zeros(value.shape, tf.float64) for value in values]
        start = (tf.constant(0), zeros, totals, tf.constant(0), tf.constant(0))
        with chained_sums():
            _, pending, *found = tf.while_loop(lambda number, *_: number < count, step, start)
            return self._added(pending, bound, *found)

    def _added(
        self, pending: list[Tensor], bound: Tensor, totals: list[Tensor], clipped: Tensor, non_finite: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Add a unit's gradient, cut to the bound.

        The gradient comes out of the loop's last iteration, as numbers in memory. XLA could compute one that is made
        here twice, with other roundings for its norm than for the sum.
        """
        gradients = [tf.cast(gradient, tf.float64) for gradient in pending]
        squares = tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients])
        norm = tf.sqrt(squares * (1 + ROUNDED * self._size))
        is_finite = tf.math.is_finite(norm)
        factor = tf.where(is_finite, bound / tf.maximum(norm, bound), tf.zeros_like(norm))
        # A factor of 0 gives 0, also for numbers that are not finite.
        contribution = [tf.math.multiply_no_nan(gradient, factor) for gradient in gradients]
        return (
            [total + part for total, part in zip(totals, contribution, strict=True)],
            clipped + tf.cast(is_finite & (norm > bound), tf.int32),
            non_finite + tf.cast(~is_finite, tf.int32),
        )

    def _gradients(self, values: list[Tensor], x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor) -> list[Tensor]:
        """Return one unit's gradient with respect to each variable."""
        own = list(zip(self._variables, values, strict=True))
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            keras.StatelessScope([*own, *seeded(self._model, seeds)]),
        ):
            tape.watch(values)
            losses = losses_of(self._model, self._loss, x, y)
            total = tf.reduce_sum(losses * tf.cast(shares * weights_of(y, self._loss_weights), losses.dtype))
        found = tape.gradient(total, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in found]


def _has_convolutions(graph: tf.Graph) -> bool:
    return any(
        operation.type.startswith(CONVOLUTION) for own in with_functions(graph) for operation in own.get_operations()
    )
