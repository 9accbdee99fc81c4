"""Clipped sum of several units in computations of fixed shape.

A call has places for units, by the lot of `clipped_sums`. It is computed in rounds of P rows: place s in row s mod P.
There are as few rounds as the units of the fullest row. Free rows repeat one of the units and have factor 0.

All rounds are one graph of one shape. `isolation` proves that each row of it depends on one unit alone. The graph is
executed as it was traced (`tracing`). So the result held of unit x at place s is g(s mod P, x, ω): a unit that joins
changes the row of no other unit. It may change their rounds, which differ in the seeds of random layers alone. Each row
of each round has its own random numbers ω, independent and of one law: `isolation_rules` refuses draws that rows share.
So the units' numbers are independent of places and rounds, and the proof of `clipped_sums` can give each other unit the
same numbers with and without x.
"""

import math
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.privacy.dpsgd.batches import Draws, evenly, fitting, places_in_memory, places_of, resized, rounds
from cloister.privacy.dpsgd.clipped_sums import Call, Sums
from cloister.privacy.dpsgd.forms import Part
from cloister.privacy.dpsgd.isolation import labels, prove
from cloister.privacy.dpsgd.labels import Label, Rows
from cloister.privacy.dpsgd.nested import Probe
from cloister.privacy.dpsgd.noise import ROOT, SMALLEST_FACTOR, most_at_once, overstatement
from cloister.privacy.dpsgd.tracing import (
    Loss,
    NotCapturable,
    as_traced,
    chained_sums,
    losses_of,
    refuse_effects,
    seeded,
    seeds_of,
    specs_of,
)
from cloister.privacy.dpsgd.uses import COPIES, Gradient, Use, UseByUnits, part_of, uses_of
from cloister.utils.arrays import Compiled, Network, Tensor
from cloister.utils.rows import cast

USUAL = 8
"""Units in a round if half or twice as many would not suit the cache better. Rounds of more units have more free rows:
for 100 units in 195 places, rounds of 8 compute 128 rows on average, and rounds of 16 compute 149."""
PARALLEL = 2
"""Rounds that may be computed concurrently."""


class InRows:
    """Clipped sums of a model's units, a row each.

    Args:
        model, loss, probe, batch_size, group_cap: as in `step.DpSgd`.

    Attributes:
        model: as given. Further ones are those of `clipped_sums.Engine`.
        at_once: P, number of units in a round of a call.

    Guarantee: the held data of the unit at a place are a function of the place, the unit and random numbers. Whether
        its computation raises an exception depends on the unit alone. Both assume that kernels keep rows apart in
        rounds of one shape. The L2 norm of a unit's contribution is at most the bound.

    Raises:
        NotIsolated: an operation of the graph is not proved to keep units apart.
        NotCapturable: a variable is used in a way that has no form, or units are so large that rows are of no use: two
            fill the cache, and a pass over the weights for each unit costs less than one over its largest tensor.
        UnsupportedModel: the graph may keep data of a unit.
    """

    method = "rows"
    in_fixed_places = True
    threads = 1  # TensorFlow uses all cores for one call

    def __init__(self, model: Network, loss: Loss, probe: Probe, batch_size: int, group_cap: int) -> None:
        self.model, self._loss, self._probe, self._cap = model, loss, probe, group_cap
        self.kernels: dict[str, str] = {}
        self._of_units = len(tf.nest.flatten(probe)) + 1
        """Number of inputs of a round that hold units."""
        self._whole: dict[int, Part] = {}
        self._kept: dict[int, Part] = {}
        room = places_of(batch_size)
        self.places = max(2, evenly(room, most_at_once(batch_size)))  # of two rows there is a proof
        weights = sum(_bytes(variable) for variable in model.trainable_variables)
        usual = min(self.places, USUAL)
        # One round of a small model has room for all places. A guess that is wrong costs a second trace.
        self.at_once = self.places if fitting(max(1, weights), 1) >= self.places else usual
        self._rows = self._round()
        _, kept, _ = self._rows.structured_outputs
        size = sum(map(_bytes, [*self._rows.inputs[: self._of_units], *tf.nest.flatten(kept)]))
        self.places = places_in_memory(self.places, room, -(-size // self.at_once))
        whole = (self.at_once, self.at_once * group_cap)
        every = (tensor for operation in self._rows.graph.get_operations() for tensor in operation.outputs)
        largest = max(_bytes(tensor) for tensor in every if tensor.shape.rank and tensor.shape[0] in whole)
        fit = fitting(largest, self.at_once)
        if fit < 2 and weights < largest // self.at_once:
            raise NotCapturable("one example takes more memory than all weights: in turn is as fast as in rows")
        at_once = resized(usual, fit, self.places)
        if at_once != self.at_once:
            self.at_once = at_once
            self._rows = self._round()
        prove(self._rows.graph, self.at_once, self._rows.inputs[: self._of_units], self._rows.outputs)
        self._compiled = self._traced(self._sums, self._signature(None))
        for traced in (self._rows, self._compiled):
            refuse_effects(traced.graph, model)
        self.overstatement = overstatement(batch_size, self.places)

    def seeds(self, draws: Draws) -> NDArray[np.int64]:
        """Return the seeds of a call: one for each round and random layer."""
        return draws.seeds(-(-self.places // self.at_once), len(seeds_of(self.model)))

    def __call__(self, call: Call) -> Sums:
        """Return the clipped sum of the units in places, as `clipped_sums.Engine`."""
        x, y, mask, bound, seeds, taken = call
        taken = np.flatnonzero(mask.any(axis=1)) if taken is None else taken
        table, real = rounds(taken, self.at_once)
        # A round without a unit would add zero.
        used = np.flatnonzero((mask[table].any(axis=2) & real).any(axis=1))
        table, real, seeds = table[used], real[used], seeds[used]
        examples = (table[:, :, None] * self._cap + np.arange(self._cap)).reshape(len(table), -1)
        pairs = zip(self._probe, (x, y), strict=True)
        given = (
            *(
                tf.nest.map_structure(lambda like, own: tf.constant(cast(own[examples], like.dtype)), *pair)
                for pair in pairs
            ),
            tf.constant(np.where(real[:, :, None], call.shares[table], 0.0)),
            tf.constant(seeds),
            tf.constant(np.broadcast_to(np.asarray(bound, np.float64), self.places)[table]),
        )
        with as_traced():
            return Sums.of(*self._compiled(*given))

    def with_held(self) -> Compiled:
        """Return the graph of one round that also returns its held tensors, for `audits.keras_kernels`."""

        def both(x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor, bound: Tensor) -> tuple[object, list[Tensor]]:
            found = self._sums(*tf.nest.map_structure(lambda tensor: tensor[None], (x, y, shares, seeds, bound)))
            return found, self._rows(x, y, shares, seeds, self._values())

        return self._traced(both, self._signature())

    def _values(self) -> list[Tensor]:
        return [tf.convert_to_tensor(variable.value) for variable in self.model.trainable_variables]

    def _signature(self, *outer: int | None) -> list[object]:
        return [
            *(specs_of([*outer, self.at_once * self._cap], examples) for examples in self._probe),
            tf.TensorSpec([*outer, self.at_once, self._cap], tf.float64),
            tf.TensorSpec([*outer, len(seeds_of(self.model)), 2], tf.int64),
            tf.TensorSpec([*outer, self.at_once], tf.float64),
        ]

    def _traced(self, computed: Callable[..., object], signature: list[object]) -> Compiled:
        # Functions compiled by a layer keep the options under which they are traced.
        with as_traced():
            return tf.function(computed, input_signature=signature, autograph=False).get_concrete_function()

    def _round(self) -> Compiled:
        """Return the graph of a round, from its examples, shares and seeds, and the weights."""
        values = [tf.TensorSpec(each.shape, each.dtype) for each in self.model.trainable_variables]
        return self._traced(self._held, [*self._signature()[:-1], values])

    def _held(
        self, x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor, values: list[Tensor]
    ) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
        """Return gradients that are held, the held tensors of other parts, and the squared norms, shape (P,)."""
        variables = self.model.trainable_variables
        with chained_sums():
            with keras.StatelessScope([*zip(variables, values, strict=True), *seeded(self.model, seeds)]):
                losses = losses_of(self.model, self._loss, x, y)
            total = tf.reduce_sum(losses * tf.cast(tf.reshape(shares, [-1]), losses.dtype))
            parts = self._parts(total, values, tf.nest.flatten((x, y, shares)))
            self._whole = {number: part for number, part in parts.items() if part.holds_gradients}
            self._kept = {number: part for number, part in parts.items() if not part.holds_gradients}
            self.kernels = {variables[number].path: part.kernel for number, part in parts.items()}
            squares = tf.add_n([part.squares for part in parts.values()])
            gradients = [part.held[0] for part in self._whole.values()]
            return gradients, [list(part.held) for part in self._kept.values()], squares

    def _parts(self, total: Tensor, values: list[Tensor], inputs: list[Tensor]) -> dict[int, Part]:
        """Return the form of the gradients of units with respect to each variable that is used, by its number.

        Args:
            total: sum of the losses.
            values: of the variables.
            inputs: of units, in the same graph.
        """
        placed = {id(tensor): Rows(0, tensor.shape[0] // self.at_once) for tensor in inputs}

        def labels_of(tensors: list[Tensor]) -> list[Label]:
            return labels(total.graph, self.at_once, placed, tensors)

        uses = uses_of(total, values)
        outputs = [use.output for own in uses for use in own]
        found = zip(tf.gradients(total, outputs), labels_of(outputs), strict=True)
        of_output = dict(zip((output.name for output in outputs), found, strict=True))

        def gradients(own: list[Use]) -> Iterator[Gradient]:
            for use in own:
                use.refuse_unknown()  # also if the loss depends on another output of the operation alone
                operation, place, views = use.operation, use.place, use.views
                delta, label = of_output[use.output.name]
                if delta is None:
                    continue
                delta = tf.convert_to_tensor(delta)
                if label is None and operation.type in COPIES:
                    (label,) = labels_of([delta])  # of units by what meets the copies
                if not isinstance(label, Rows):
                    raise NotCapturable(f"changed by {operation.type} before it meets an example")
                yield UseByUnits(operation, place, views, delta, label.axis, label.inner, self.at_once).gradient()

        parts: dict[int, Part] = {}
        for number, own in enumerate(uses):
            try:
                if counted := list(gradients(own)):
                    parts[number] = part_of(counted)
            except NotCapturable as error:
                raise NotCapturable(f"weight {self.model.trainable_variables[number].path!r} is {error}") from error
        return parts

    def _sums(
        self, x: Tensor, y: Tensor, shares: Tensor, seeds: Tensor, bound: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the sum for each variable, and counts.

        Gradients are added up in double precision, a round at a time. Other tensors are kept: their weighted sum for
        all rounds is one product of matrices.

        Args:
            x, y, shares, seeds, bound: of each round.
        """
        count, values, real = tf.shape(shares)[0], self._values(), tf.reduce_any(shares > 0, axis=2)

        def array(like: tf.TensorSpec) -> tf.TensorArray:
            return tf.TensorArray(like.dtype, count, element_shape=like.shape)

        def step(
            number: Tensor, totals: list[Tensor], arrays: list[object]
        ) -> tuple[Tensor, list[Tensor], list[object]]:
            given = tf.nest.map_structure(lambda every: every[number], (x, y, shares, seeds))
            gradients, *kept = self._rows(*given, values)
            factors, *_ = clip(kept[-1], real[number], bound[number])
            pairs = zip(self._whole.values(), gradients, strict=True)
            new = [part.weighted_sum([own], factors) for part, own in pairs]
            return (
                number + 1,
                [total + tf.cast(each, tf.float64) for total, each in zip(totals, new, strict=True)],
                tf.nest.map_structure(lambda array, each: array.write(number, each), arrays, kept),
            )

        with chained_sums():
            _, *kept = self._rows.structured_outputs
            variables = self.model.trainable_variables
            totals = [tf.zeros(variables[place].shape, tf.float64) for place in self._whole]
            start = (tf.constant(0), totals, tf.nest.map_structure(array, kept))
            _, totals, arrays = tf.while_loop(
                lambda number, *_: number < count, step, start, parallel_iterations=PARALLEL
            )
            held, squares = tf.nest.map_structure(lambda array: array.concat(), arrays)
            factors, *counts = clip(squares, tf.reshape(real, [-1]), tf.reshape(bound, [-1]))
            sums = dict(zip(self._whole, totals, strict=True))
            pairs = zip(self._kept.items(), held, strict=True)
            sums |= {place: part.weighted_sum(own, factors) for (place, part), own in pairs}
            in_order = [sums.get(place, tf.zeros(own.shape, own.dtype)) for place, own in enumerate(variables)]
            return in_order, *counts


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tf.as_dtype(tensor.dtype).size


def clip(squares: Tensor, real: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors that clip gradients of U units, shape (U,), double, and the counts of `Sums`.

    A factor is min(1, bound/‖gradient‖), and 0 for non-finite units and empty places.

    Args:
        squares: upper bounds of squared norms, shape (U,), double.
        real: shape (U,), False for an empty place.
        bound: above 0, of shape (U,), or one for all; double.
    """
    finite = tf.math.is_finite(squares)
    norms = tf.sqrt(squares) * ROOT
    # Divided by the larger of the two, so never by a norm of 0.
    factors = tf.where(finite & real, bound / tf.maximum(norms, bound), tf.zeros_like(norms))
    factors = tf.where(factors < SMALLEST_FACTOR, tf.zeros_like(factors), factors)
    clipped = tf.math.count_nonzero(finite & real & (norms > bound))
    return factors, clipped, tf.math.count_nonzero(real & ~finite)
