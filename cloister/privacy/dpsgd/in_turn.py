"""The clipped sum of a batch, one unit after another in one compiled loop.

It suits any model: with one unit an iteration, no layer can mix two of them, and a unit is computed in one shape,
beside any other units. The body of the loop reads the unit's rows, its random numbers and the weights. It adds to
a running sum that it does not read otherwise, and a graph that could keep anything else is refused (`graphs`).

The gradient of a dense layer is the outer product of its input and its delta. Of a wide one these two are kept for each
unit, the delta scaled by the unit's factor, and multiplied once behind the loop.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.tensors import Compiled, Layer, Network, Tensor, Variable
from cloister.core.threads import THREADS
from cloister.privacy.dpsgd.batches import Draws, cast, places_of
from cloister.privacy.dpsgd.capture import Call, NotCapturable, is_plain_dense, record
from cloister.privacy.dpsgd.graphs import as_traced, chained_sums, refuse_effects, with_functions
from cloister.privacy.dpsgd.in_rows import Sums
from cloister.privacy.dpsgd.losses import Examples, Loss, Probe, losses_of, seeded, seeds_of, specs_of
from cloister.privacy.dpsgd.rounding import SLACK

AT_ONCE = 1024
"""Units of a call at most: their sum in double precision is within 2⁻²⁰·S of the exact one for 2¹⁷ units in all."""
ROUNDED = 2.0**-51
"""By how much a sum of squares is overstated for each of them: no order of additions in double loses more than half."""
UNDERFLOW = 2.0**-1021
"""Bound on what a square of a double loses where it is too small. The other number of a product may be large."""
WIDE = 1 << 14
"""Numbers of a dense kernel from which on its gradient is not made for each unit."""
CONVOLUTION = ("Conv", "DepthwiseConv")
"""Beginnings of the names of operations for which XLA has slower code than TensorFlow, and compiles for a minute."""


class _Unit(NamedTuple):
    """Hold one unit's gradients.

    Attributes:
        gradients: of the variables that are no wide layer's.
        inputs, deltas: of each wide layer, whose outer product is the gradient of its kernel.
    """

    gradients: list[Tensor]
    inputs: list[Tensor]
    deltas: list[Tensor]


class _Found(NamedTuple):
    """Hold what units have added up to.

    Attributes:
        totals: of the variables that are no wide layer's, in double precision.
        inputs, deltas: of each wide layer, a `tf.TensorArray` with an element for each unit, the deltas scaled.
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
        model: built.
        loss: (labels, outputs) -> (rows,), of each example by itself.
        probe: examples of the shapes and types that the model takes.
        batch_size: B, the expected number of units of a batch.
        group_cap: the most examples of a unit.

    Attributes:
        model: as given.
        places: units that a call has room for.
        threads: calls at the same time.
        overstatement: η, of sums in double precision.
        graph: of a call, as it was traced.

    Guarantee: a unit's contribution is a function of the unit, its random numbers and the weights. It is no longer than
        the bound in L2. It assumes that equal inputs give equal results, not how rows of a batch are computed.

    Raises:
        UnsupportedModel: the graph may keep something of a unit.
    """

    method = "in turn"
    in_fixed_places = False

    def __init__(self, model: Network, loss: Loss, probe: Probe, batch_size: int, group_cap: int) -> None:
        self.kernels: dict[str, str] = {}
        self.model, self._cap, self.places = model, group_cap, min(places_of(batch_size), AT_ONCE)
        self._loss, self._probe = loss, probe
        self._variables = model.trainable_variables
        self._size = sum(math.prod(variable.shape) for variable in self._variables)
        self.overstatement = SLACK
        self.threads = 1
        self._wide = _wide_layers(model) if group_cap == 1 else []
        try:
            self._compiled = self._compile()
        except NotCapturable:
            self._wide = []
            self._compiled = self._compile()

    def seeds(self, draws: Draws) -> NDArray[np.int64]:
        """Return the seeds of a call: of each unit its own.

        Args:
            draws: where they come from.
        """
        return draws.seeds(self.places, len(seeds_of(self.model)))

    def __call__(self, x: Examples, y: Examples, mask: NDArray, bound: float, seeds: NDArray[np.int64]) -> Sums:
        """Return Σ gradient·min(1, bound/‖gradient‖) over the units, in double precision.

        Args:
            x, y: units·cap examples, those of a unit next to each other.
            mask: shape (units, cap), False for padding; at most `places` units.
            bound: above 0.
            seeds: of random layers, of each unit.
        """
        shares = np.zeros((self.places, self._cap))
        shares[: len(mask)] = mask / np.maximum(mask.sum(axis=1, keepdims=True), 1)
        given = (
            *(tf.nest.map_structure(self._by_unit, *pair) for pair in zip(self._probe, (x, y), strict=True)),
            tf.constant(shares),
            tf.constant(np.concatenate([seeds, np.zeros((self.places - len(seeds), *seeds.shape[1:]), np.int64)])),
            tf.constant(len(mask)),
            tf.constant(bound, tf.float64),
        )
        with as_traced():
            return Sums.of(*self._compiled(*given))

    def _by_unit(self, like: NDArray, rows: NDArray) -> Tensor:
        """Return the examples of each unit, in the type of others; the loop reads nothing behind the last unit."""
        table = np.zeros((self.places * self._cap, *rows.shape[1:]), like.dtype)
        table[: len(rows)] = cast(rows, like.dtype)
        return tf.constant(table.reshape(self.places, self._cap, *rows.shape[1:]))

    def _compile(self) -> Compiled:
        """Return the compiled loop.

        XLA makes one program of it, which computes on one core. So several calls of fewer places run at the same time,
        but for wide layers, of which each call multiplies all that is kept. The program is compiled by a call without
        units, of which nothing is computed.
        """
        with as_traced():
            plain = tf.function(self._sums, input_signature=self._signature(), autograph=False).get_concrete_function()
            self.graph = plain.graph
            refuse_effects(self.graph, self.model)
            if _has_convolutions(self.graph):
                return plain
            whole, self.threads = self.places, 1 if self._wide else THREADS
            self.places = -(-whole // self.threads)
            signature = self._signature()
            fused = tf.function(self._sums, input_signature=signature, autograph=False, jit_compile=True)
            try:
                fused(*tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), signature))
            except Exception:  # XLA says what it lacks, and TensorFlow that it has no XLA, in exceptions of many kinds
                self.places, self.threads = whole, 1
                return plain
            return fused

    def _signature(self) -> list[tf.TensorSpec]:
        rows = [self.places, self._cap]
        return [
            *(specs_of(rows, examples) for examples in self._probe),
            tf.TensorSpec(rows, tf.float64),
            tf.TensorSpec([self.places, len(seeds_of(self.model)), 2], tf.int64),
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([], tf.float64),
        ]

    def _sums(
        self, x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor, count: Tensor, bound: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        values = [tf.convert_to_tensor(variable.value) for variable in self._variables]

        def step(number: Tensor, pending: _Unit, found: _Found) -> tuple[Tensor, _Unit, _Found]:
            unit = self._unit(values, *(_at(number, given) for given in (x, y, shares, seeds)))
            return number + 1, unit, self._added(number, pending, bound, found)

        with chained_sums():
            start = (tf.constant(0), *self._nothing())
            last, pending, found = tf.while_loop(lambda number, *_: number < count, step, start)
            found = self._added(last, pending, bound, found)
            return self._in_order(found), found.clipped, found.non_finite

    def _nothing(self) -> tuple[_Unit, _Found]:
        """Return the gradients of no unit, and what no units add up to."""
        others = [variable for variable in self._variables if not self._is_wide(variable)]
        kernels = [layer.kernel for layer in self._wide]
        unit = _Unit(
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
        return unit, _Found(totals, inputs, deltas, tf.constant(0), tf.constant(0))

    def _added(self, number: Tensor, pending: _Unit, bound: Tensor, found: _Found) -> _Found:
        """Add a unit's gradient, cut to the bound.

        The gradient comes out of the loop's last iteration, as numbers in memory. XLA could compute one that is made
        here twice, with other roundings for its norm than for the sum.
        """
        unit = tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.float64), pending)
        squares = [tf.reduce_sum(tf.square(gradient)) for gradient in unit.gradients]
        for layer, *pair in zip(self._wide, unit.inputs, unit.deltas, strict=True):
            of_input, of_delta = (tf.reduce_sum(tf.square(each)) + UNDERFLOW * each.shape[0] for each in pair)
            squares.append((of_input + float(layer.use_bias)) * of_delta)
        norm = tf.sqrt(tf.add_n(squares) * (1 + ROUNDED * self._size))
        is_finite = tf.math.is_finite(norm)
        factor = tf.where(is_finite, bound / tf.maximum(norm, bound), tf.zeros_like(norm))

        def scaled(tensors: list[Tensor], by: Tensor) -> list[Tensor]:
            # A factor of 0 gives 0, also for numbers that are not finite.
            return [tf.math.multiply_no_nan(tensor, by) for tensor in tensors]

        inputs = scaled(unit.inputs, tf.cast(is_finite, tf.float64))
        return _Found(
            [total + part for total, part in zip(found.totals, scaled(unit.gradients, factor), strict=True)],
            [kept.write(number, each) for kept, each in zip(found.inputs, inputs, strict=True)],
            [kept.write(number, each) for kept, each in zip(found.deltas, scaled(unit.deltas, factor), strict=True)],
            found.clipped + tf.cast(is_finite & (norm > bound), tf.int32),
            found.non_finite + tf.cast(~is_finite, tf.int32),
        )

    def _in_order(self, found: _Found) -> list[Tensor]:
        """Return the sum for each variable."""
        sums = {}
        for layer, inputs, deltas in zip(self._wide, found.inputs, found.deltas, strict=True):
            every = deltas.stack()
            kernel = tf.matmul(inputs.stack(), every, transpose_a=True)
            for variable, total in zip(layer.trainable_variables, (kernel, tf.reduce_sum(every, axis=0)), strict=False):
                sums[id(variable)] = total
        others = iter(found.totals)
        return [sums[id(variable)] if self._is_wide(variable) else next(others) for variable in self._variables]

    def _is_wide(self, variable: Variable) -> bool:
        return any(variable is own for layer in self._wide for own in layer.trainable_variables)

    def _unit(self, values: list[Tensor], x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor) -> _Unit:
        """Return one unit's gradients.

        Raises:
            NotCapturable: a wide layer is called otherwise than once, for one position, or its weights are used by
                something else.
        """

        def losses() -> Tensor:
            found = losses_of(self.model, self._loss, x, y)
            return found * tf.cast(shares, found.dtype)

        recorded = record(self.model, self._wide, values, seeded(self.model, seeds), losses)
        gradients = [
            tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)
            for variable, value, gradient in zip(self._variables, values, recorded.gradients, strict=True)
            if not self._is_wide(variable)
        ]
        pairs = [_only_pair(layer, calls) for layer, calls in zip(self._wide, recorded.calls, strict=True)]
        return _Unit(gradients, [each for each, _ in pairs], [each for _, each in pairs])


def _wide_layers(model: Network) -> list[Layer]:
    """Return the dense layers whose gradients are too large to be made for each unit."""
    layers = {id(layer): layer for layer in model._flatten_layers() if is_plain_dense(layer)}.values()
    return [layer for layer in layers if math.prod(layer.kernel.shape) >= WIDE]


def _only_pair(layer: Layer, calls: Sequence[Call]) -> tuple[Tensor, Tensor]:
    """Return the input and the delta of a wide layer.

    Raises:
        NotCapturable: the layer is called otherwise than once, for one position.
    """
    shapes = [[list(call.first_input.shape), list(call.output.shape)] for call in calls]
    if shapes != [[[1, size] for size in layer.kernel.shape]]:
        raise NotCapturable("a wide layer is called otherwise than once, for one position")
    (call,) = calls
    call.delta = tf.zeros_like(call.output) if call.delta is None else call.delta
    inputs, deltas = call.pair
    return inputs[0], deltas[0]


def _at(number: Tensor, examples: Tensor) -> Tensor:
    """Return what stands at a place along the first axis."""
    return tf.nest.map_structure(lambda tensor: tensor[number], examples)


def _has_convolutions(graph: tf.Graph) -> bool:
    return any(
        operation.type.startswith(CONVOLUTION) for own in with_functions(graph) for operation in own.get_operations()
    )
