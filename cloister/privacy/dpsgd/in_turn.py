"""Clipped sum of a batch, one unit after another in one compiled loop.

It suits any model: with one unit an iteration, no layer can combine two of them, and a unit is computed in the same
shape in any batch. The body of the loop reads the unit's rows, its random numbers and the weights. It only adds to a
running sum, and a graph that could keep further data is refused (`tracing`).

The gradient of a matrix that multiplies one vector is the outer product of this input and its delta. For a wide matrix
these two are kept for each unit, the delta scaled by the unit's factor, and multiplied once after the loop.
"""

import math
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike, NDArray

from cloister.privacy.dpsgd.batches import Draws, places_of
from cloister.privacy.dpsgd.clipped_sums import Call, Sums
from cloister.privacy.dpsgd.nested import Probe
from cloister.privacy.dpsgd.noise import AT_ONCE, DOUBLE_UNDERFLOW, ROUNDED, SLACK
from cloister.privacy.dpsgd.tracing import (
    Loss,
    as_traced,
    chained_sums,
    losses_of,
    refuse_effects,
    seeded,
    seeds_of,
    specs_of,
    with_functions,
)
from cloister.privacy.dpsgd.uses import Use, is_overridden, uses_of
from cloister.utils.arrays import Compiled, Network, Tensor
from cloister.utils.rows import cast
from cloister.utils.threads import THREADS

WIDE = 1 << 14
"""Least size of a matrix whose gradient is not computed for each unit."""
CONVOLUTION = ("Conv", "DepthwiseConv")
"""Prefixes of operations for which XLA has slower code than TensorFlow, and compiles for a minute."""


def suits_xla(graph: tf.Graph) -> bool:
    """Return whether XLA has code for a graph of losses that is as fast as TensorFlow's."""
    every = (operation for own in with_functions(graph) for operation in own.get_operations())
    return not any(operation.type.startswith(CONVOLUTION) for operation in every)


_Unit: TypeAlias = tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]
"""A unit: its bound, the gradients of variables but the wide ones, then inputs and deltas of the wide ones."""
_Found: TypeAlias = tuple[list[Tensor], list[tf.TensorArray], list[tf.TensorArray], Tensor, Tensor]
"""Sums in double precision, inputs and scaled deltas of each unit, and the counts of `Sums`."""


class InTurn:
    """Clipped sums of a model's units, one after another.

    Args:
        model, loss, probe, batch_size, group_cap: as in `step.DpSgd`.
        fused: whether XLA compiles the loop, if it can; `suits_xla` says for which graphs it is worth it.

    Attributes:
        model: as given. Further ones are those of `clipped_sums.Engine`.

    Guarantee: a unit's contribution is a function of the unit, its random numbers and the weights. Its L2 norm is at
        most the bound. This assumes that equal inputs give equal results, and nothing about rows of a batch.

    Raises:
        UnsupportedModel: the graph may keep data of a unit.
    """

    method = "in turn"
    in_fixed_places = False

    def __init__(
        self, model: Network, loss: Loss, probe: Probe, batch_size: int, group_cap: int, fused: bool = True
    ) -> None:
        self.kernels: dict[str, str] = {}
        self.model, self._cap, self.places = model, group_cap, min(places_of(batch_size), AT_ONCE)
        self._loss, self._probe = loss, probe
        self._variables = model.trainable_variables
        self._size = sum(math.prod(variable.shape) for variable in self._variables)
        self.overstatement = SLACK
        self._wide: list[int] = []
        with as_traced():
            self._compiled = self._compile(fused)

    def seeds(self, draws: Draws) -> NDArray[np.int64]:
        """Return the seeds of a call, separate ones for each unit."""
        return draws.seeds(self.places, len(seeds_of(self.model)))

    def __call__(self, call: Call) -> Sums:
        """Return the clipped sum of at most `places` units, in double precision, as `clipped_sums.Engine`."""
        x, y, mask, bound, seeds, _ = call

        def padded(rows: NDArray, dtype: DTypeLike = np.float64) -> Tensor:
            table = np.zeros((self.places, *rows.shape[1:]), dtype)
            table[: len(rows)] = rows
            return tf.constant(table)

        def by_unit(like: NDArray, rows: NDArray) -> Tensor:
            own = cast(rows, like.dtype)
            return padded(own.reshape(len(mask), self._cap, *rows.shape[1:]), like.dtype)

        examples = (tf.nest.map_structure(by_unit, *pair) for pair in zip(self._probe, (x, y), strict=True))
        bounds = np.broadcast_to(bound, len(mask))
        given = (*examples, padded(call.shares), padded(seeds, np.int64), padded(bounds), tf.constant(len(mask)))
        with as_traced():
            return Sums.of(*self._compiled(*given))

    def _compile(self, fused: bool) -> Compiled:
        """Return the compiled loop.

        XLA compiles it to one program, which uses one core. So several calls of fewer places run concurrently. With
        wide layers there is one call at a time, since each call multiplies all kept inputs and deltas. A call without
        units compiles the program, and computes no unit. Where XLA has no support, TensorFlow runs the loop.
        """
        whole = self.places
        values = [tf.TensorSpec(variable.shape, variable.dtype) for variable in self._variables]
        of_unit = tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), self._signature()[:-1])
        try:
            # TensorFlow traces the gradient of a loop otherwise if XLA compiles it, and so may a layer.
            unit = tf.function(self._unit, input_signature=[values, *of_unit], autograph=False, jit_compile=fused)
            self._traced_unit = unit.get_concrete_function()
            self.threads = THREADS if fused and not self._wide else 1
            self.places = -(-whole // self.threads)
            signature = self._signature()
            loop = tf.function(self._sums, input_signature=signature, autograph=False, jit_compile=fused)
            compiled = loop.get_concrete_function()
            if fused:
                compiled(*tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), signature))
        except Exception:  # XLA and TensorFlow raise exceptions of many kinds for missing support
            if not fused:
                raise
            self.places = whole
            return self._compile(fused=False)
        for graph in (self._traced_unit.graph, compiled.graph):
            refuse_effects(graph, self.model)
        return compiled

    def _signature(self) -> list[tf.TensorSpec]:
        rows = [self.places, self._cap]
        return [
            *(specs_of(rows, examples) for examples in self._probe),
            tf.TensorSpec(rows, tf.float64),
            tf.TensorSpec([self.places, len(seeds_of(self.model)), 2], tf.int64),
            tf.TensorSpec([self.places], tf.float64),
            tf.TensorSpec([], tf.int32),
        ]

    def _sums(
        self, x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor, bounds: Tensor, count: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        values = [tf.convert_to_tensor(variable.value) for variable in self._variables]

        def step(number: Tensor, pending: _Unit, found: _Found) -> tuple[Tensor, _Unit, _Found]:
            given = tf.nest.map_structure(lambda every: every[number], (x, y, shares, seeds, bounds))
            return number + 1, self._traced_unit(values, *given), self._added(number, pending, found)

        def array(like: tf.TensorSpec) -> tf.TensorArray:
            return tf.TensorArray(tf.float64, self.places + 1, element_shape=like.shape)

        _, gradients, inputs, deltas = self._traced_unit.structured_outputs
        zeros = [[tf.zeros(own.shape, own.dtype) for own in kind] for kind in (gradients, inputs, deltas)]
        unit = (tf.ones([], tf.float64), *zeros)
        totals = [tf.zeros(own.shape, tf.float64) for own in gradients]
        nothing = (totals, list(map(array, inputs)), list(map(array, deltas)), tf.constant(0), tf.constant(0))
        with chained_sums():
            start = (tf.constant(0), unit, nothing)
            last, pending, found = tf.while_loop(lambda number, *_: number < count, step, start)
            totals, inputs, deltas, clipped, non_finite = self._added(last, pending, found)
            pairs = zip(inputs, deltas, strict=True)
            products = iter([tf.matmul(ins.stack(), outs.stack(), transpose_a=True) for ins, outs in pairs])
            rest = iter(totals)
            in_order = [next(products if number in self._wide else rest) for number in range(len(self._variables))]
            return in_order, clipped, non_finite

    def _added(self, number: Tensor, pending: _Unit, found: _Found) -> _Found:
        """Add a unit's gradient, clipped to its bound.

        The gradient is a result in memory of the previous iteration. XLA could compute a gradient of this iteration
        twice, with different roundings for its norm and for the sum.
        """
        bound, gradients, *pair = tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.float64), pending)
        totals, *arrays, clipped, non_finite = found
        squares = [tf.reduce_sum(tf.square(gradient)) for gradient in gradients]
        for both in zip(*pair, strict=True):
            of_input, of_delta = (tf.reduce_sum(tf.square(each)) + DOUBLE_UNDERFLOW * each.shape[0] for each in both)
            squares.append(of_input * of_delta)
        norm = tf.sqrt(tf.add_n(squares) * (1 + ROUNDED * self._size))
        is_finite = tf.math.is_finite(norm)
        factor = tf.where(is_finite, bound / tf.maximum(norm, bound), tf.zeros_like(norm))
        # A factor of 0 gives 0, for non-finite numbers too.
        inputs, deltas = (
            [kept.write(number, tf.math.multiply_no_nan(each, by)) for kept, each in zip(*both, strict=True)]
            for *both, by in zip(arrays, pair, (tf.cast(is_finite, tf.float64), factor), strict=True)
        )
        return (
            [total + tf.math.multiply_no_nan(own, factor) for total, own in zip(totals, gradients, strict=True)],
            inputs,
            deltas,
            clipped + tf.cast(is_finite & (norm > bound), tf.int32),
            non_finite + tf.cast(~is_finite, tf.int32),
        )

    def _unit(self, values: list[Tensor], x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor, bound: Tensor) -> _Unit:
        """Return one unit, with its gradients, and note which variables are wide."""
        with chained_sums():
            with keras.StatelessScope([*zip(self._variables, values, strict=True), *seeded(self.model, seeds)]):
                losses = losses_of(self.model, self._loss, x, y)
            total = tf.reduce_sum(losses * tf.cast(shares, losses.dtype))
            uses = uses_of(total, values)
            self._wide = [number for number, own in enumerate(uses) if _is_wide(own)]
            others = [value for number, value in enumerate(values) if number not in self._wide]
            products = [uses[number][0].operation for number in self._wide]
            sources = [*others, *(product.outputs[0] for product in products)]
            found = list(map(tf.convert_to_tensor, tf.gradients(total, sources, unconnected_gradients="zero")))
        inputs = [product.inputs[0][0] for product in products]
        return bound, found[: len(others)], inputs, [delta[0] for delta in found[len(others) :]]


def _is_wide(uses: list[Use]) -> bool:
    """Return whether a variable is a large matrix whose only use is a product with one vector from the left."""
    operation = uses[0].operation if len(uses) == 1 and not uses[0].views and uses[0].place == 1 else None
    if operation is None or operation.type != "MatMul" or is_overridden(operation):
        return False
    vector, matrix = operation.inputs
    is_turned = operation.get_attr("transpose_a") or operation.get_attr("transpose_b")
    return not is_turned and vector.shape == (1, matrix.shape[0]) and math.prod(matrix.shape) >= WIDE
