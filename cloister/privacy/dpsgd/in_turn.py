"""Clipped sum of a batch, one unit after another in one compiled loop.

It suits any model: with one unit an iteration, no layer can combine two of them, and a unit is computed in the same
shape in any batch. The body of the loop reads the unit's rows, its random numbers and the weights. It only adds to a
running sum, and a graph that could keep further data is refused (`tracing`).

The gradient of a matrix that multiplies one vector is the outer product of this input and its delta. For a wide matrix
these two are kept for each unit, the delta scaled by the unit's factor, and multiplied once after the loop.
"""

import math
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

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


class _Unit(NamedTuple):
    """One unit.

    Attributes:
        bound: largest norm of its contribution.
        gradients: with respect to variables but the wide ones.
        inputs, deltas: of each wide variable.
    """

    bound: Tensor
    gradients: list[Tensor]
    inputs: list[Tensor]
    deltas: list[Tensor]


class _Found(NamedTuple):
    """Running sums over units.

    Attributes:
        totals: of all variables but the wide ones, in double precision.
        inputs, deltas: of each wide variable, a `tf.TensorArray` with an element for each unit, the deltas scaled.
        clipped, non_finite: as in `Sums`.
    """

    totals: list[Tensor]
    inputs: list[tf.TensorArray]
    deltas: list[tf.TensorArray]
    clipped: Tensor
    non_finite: Tensor


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
        bounds = np.ones(self.places)
        bounds[: len(mask)] = bound
        shares = np.zeros((self.places, self._cap))
        shares[: len(mask)] = call.shares
        given = (
            *(tf.nest.map_structure(self._by_unit, *pair) for pair in zip(self._probe, (x, y), strict=True)),
            tf.constant(shares),
            tf.constant(np.concatenate([seeds, np.zeros((self.places - len(seeds), *seeds.shape[1:]), np.int64)])),
            tf.constant(bounds),
            tf.constant(len(mask)),
        )
        with as_traced():
            return Sums.of(*self._compiled(*given))

    def _by_unit(self, like: NDArray, rows: NDArray) -> Tensor:
        """Return the examples of each unit, in the dtype of `like`, padded by zeros."""
        table = np.zeros((self.places * self._cap, *rows.shape[1:]), like.dtype)
        table[: len(rows)] = cast(rows, like.dtype)
        return tf.constant(table.reshape(self.places, self._cap, *rows.shape[1:]))

    def _compile(self, fused: bool) -> Compiled:
        """Return the compiled loop.

        XLA compiles it to one program, which uses one core. So several calls of fewer places run concurrently. With
        wide layers there is one call at a time, since each call multiplies all kept inputs and deltas. A call without
        units compiles the program, and computes no unit. Where XLA has no support, TensorFlow runs the loop.
        """
        whole = self.places
        try:
            self._traced_unit = self._trace_unit(fused)
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

    def _trace_unit(self, fused: bool) -> Compiled:
        """Return the graph of one unit's gradients, from the weights and its part of a call.

        TensorFlow traces the gradient of a loop otherwise if XLA compiles it (`fused`), and so may a layer.
        """
        values = [tf.TensorSpec(variable.shape, variable.dtype) for variable in self._variables]
        *of_units, _ = self._signature()
        of_unit = tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), of_units)
        signature = [values, *of_unit]
        traced = tf.function(self._unit, input_signature=signature, autograph=False, jit_compile=fused)
        return traced.get_concrete_function()

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

        others = [variable for number, variable in enumerate(self._variables) if number not in self._wide]
        kernels = [self._variables[number] for number in self._wide]
        unit = _Unit(
            tf.ones([], tf.float64),
            [tf.zeros(variable.shape, variable.dtype) for variable in others],
            [tf.zeros(kernel.shape[0], kernel.dtype) for kernel in kernels],
            [tf.zeros(kernel.shape[1], kernel.dtype) for kernel in kernels],
        )
        inputs, deltas = (
            [
                tf.TensorArray(tf.float64, self.places + 1, element_shape=kernel.shape[axis : axis + 1])
                for kernel in kernels
            ]
            for axis in (0, 1)
        )
        totals = [tf.zeros(variable.shape, tf.float64) for variable in others]
        nothing = _Found(totals, inputs, deltas, tf.constant(0), tf.constant(0))
        with chained_sums():
            start = (tf.constant(0), unit, nothing)
            last, pending, found = tf.while_loop(lambda number, *_: number < count, step, start)
            found = self._added(last, pending, found)
            pairs = zip(found.inputs, found.deltas, strict=True)
            products = iter([tf.matmul(ins.stack(), outs.stack(), transpose_a=True) for ins, outs in pairs])
            rest = iter(found.totals)
            in_order = [next(products if number in self._wide else rest) for number in range(len(self._variables))]
            return in_order, found.clipped, found.non_finite

    def _added(self, number: Tensor, pending: _Unit, found: _Found) -> _Found:
        """Add a unit's gradient, clipped to its bound.

        The gradient is a result in memory of the previous iteration. XLA could compute a gradient of this iteration
        twice, with different roundings for its norm and for the sum.
        """
        unit = tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.float64), pending)
        squares = [tf.reduce_sum(tf.square(gradient)) for gradient in unit.gradients]
        for pair in zip(unit.inputs, unit.deltas, strict=True):
            of_input, of_delta = (tf.reduce_sum(tf.square(each)) + DOUBLE_UNDERFLOW * each.shape[0] for each in pair)
            squares.append(of_input * of_delta)
        norm = tf.sqrt(tf.add_n(squares) * (1 + ROUNDED * self._size))
        is_finite = tf.math.is_finite(norm)
        factor = tf.where(is_finite, unit.bound / tf.maximum(norm, unit.bound), tf.zeros_like(norm))

        def scaled(tensors: list[Tensor], by: Tensor) -> list[Tensor]:
            # A factor of 0 gives 0, for non-finite numbers too.
            return [tf.math.multiply_no_nan(tensor, by) for tensor in tensors]

        inputs = scaled(unit.inputs, tf.cast(is_finite, tf.float64))
        return _Found(
            [total + part for total, part in zip(found.totals, scaled(unit.gradients, factor), strict=True)],
            [kept.write(number, each) for kept, each in zip(found.inputs, inputs, strict=True)],
            [kept.write(number, each) for kept, each in zip(found.deltas, scaled(unit.deltas, factor), strict=True)],
            found.clipped + tf.cast(is_finite & (norm > unit.bound), tf.int32),
            found.non_finite + tf.cast(~is_finite, tf.int32),
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
        return _Unit(bound, found[: len(others)], inputs, [delta[0] for delta in found[len(others) :]])


def _is_wide(uses: list[Use]) -> bool:
    """Return whether a variable is a large matrix whose only use is a product with one vector from the left."""
    if len(uses) != 1 or uses[0].views or uses[0].operation.type != "MatMul" or uses[0].place != 1:
        return False
    operation = uses[0].operation
    is_turned = operation.get_attr("transpose_a") or operation.get_attr("transpose_b")
    is_plain = not is_turned and not is_overridden(operation)
    return is_plain and operation.inputs[0].shape[0] == 1 and math.prod(uses[0].given.shape) >= WIDE
