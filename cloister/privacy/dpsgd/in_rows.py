"""Clipped sum of several units in one computation of fixed shape.

A call has `places` rows of units, by the lot of `clipped_sums`; empty places repeat one of the units and have factor 0.
`isolation` proves that each row of the graph depends on one unit alone. It is executed as it was traced (`tracing`).
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.privacy.dpsgd.batches import Draws, places_of
from cloister.privacy.dpsgd.clipped_sums import Sums
from cloister.privacy.dpsgd.forms import Form, Part, Rows, form_of
from cloister.privacy.dpsgd.isolation import prove
from cloister.privacy.dpsgd.nested import Examples, Probe
from cloister.privacy.dpsgd.noise import SMALLEST_FACTOR, most_at_once, overstatement
from cloister.privacy.dpsgd.tracing import (
    Loss,
    NotCapturable,
    as_traced,
    chained_sums,
    losses_of,
    named,
    record,
    refuse_effects,
    seeded,
    seeds_of,
    specs_of,
)
from cloister.utils.arrays import Compiled, Layer, Network, Tensor, Variable
from cloister.utils.rows import cast

MEMORY = 1 << 30
"""Most bytes of units in the inputs and held tensors of a call, without outputs of layers. A larger batch takes several
calls."""
ROOT = 1 + 2.0**-40
"""Factor that covers the roundings of a root, and of the sum of a few squares under it, in double precision."""


class InRows:
    """Clipped sums of a model's units, a row each.

    Args:
        model, loss, probe, batch_size, group_cap: as in `step.DpSgd`.

    Attributes:
        model: as given.
        kernels: form of each layer's gradients, by its path.
        held: tensors of the graph with the units' data, of leading size `places`. All further results are computed
            from them, by operations on rows and by sums of rows times factors.
        places: number of units in a call.
        overstatement: η, of sums in single precision.

    Guarantee: the held data of the unit at a place are a function of the place, the unit and the random numbers of the
        call. Whether its computation raises an exception depends on the unit alone. Both assume that kernels keep rows
        apart in calls of one shape. The L2 norm of a unit's contribution is at most the bound.

    Raises:
        NotIsolated: an operation of the graph is not proved to keep units apart.
        NotCapturable: layers cannot be captured separately.
        UnsupportedModel: the graph may keep data of a unit.
    """

    method = "rows"
    in_fixed_places = True
    threads = 1  # TensorFlow uses all cores for one call

    def __init__(self, model: Network, loss: Loss, probe: Probe, batch_size: int, group_cap: int) -> None:
        self.model, self._loss, self._probe, self._cap = model, loss, probe, group_cap
        self._forms = list(_walk(model, set()))
        claimed = [id(variable) for layer, _ in self._forms for variable in layer.trainable_variables]
        if sorted(claimed) != sorted(id(variable) for variable in model.trainable_variables):
            shared = [variable.path for variable in model.trainable_variables if claimed.count(id(variable)) != 1]
            raise NotCapturable(f"weight {shared[0]!r} belongs to two layers, or to none")
        self.kernels: dict[str, str] = {}
        self.held: list[Tensor] = []
        room = places_of(batch_size)
        self.places = _evenly(room, most_at_once(batch_size))
        self._compiled = self._compile()
        size = sum(math.prod(held.shape) * held.dtype.size for held in (*self.held, *self._compiled.inputs))
        if size > MEMORY:
            self.places = _evenly(room, max(1, MEMORY * self.places // size))
            self._compiled = self._compile()
        self.overstatement = overstatement(batch_size, self.places)

    def seeds(self, draws: Draws) -> NDArray[np.int64]:
        """Return the seeds of a call: one for each random layer."""
        return draws.seeds(len(seeds_of(self.model)))

    def __call__(
        self, x: Examples, y: Examples, mask: NDArray, bound: NDArray | float, seeds: NDArray[np.int64]
    ) -> Sums:
        """Return Σ gradient·min(1, bound/‖gradient‖) over the units.

        Args:
            x, y: places·cap examples, adjacent for each unit.
            mask: shape (places, cap), False for padding and for empty places.
            bound: above 0, for each unit or for all.
            seeds: of random layers.
        """
        bounds = np.broadcast_to(np.asarray(bound, np.float64), self.places)
        pairs = zip(self._probe, (x, y), strict=True)
        x, y = (tf.nest.map_structure(lambda like, rows: tf.constant(cast(rows, like.dtype)), *pair) for pair in pairs)
        with as_traced():
            return Sums.of(*self._compiled(x, y, tf.constant(mask), tf.constant(seeds), tf.constant(bounds)))

    def with_held(self) -> Compiled:
        """Return the graph of a call that also returns `held`, for `audits.keras_kernels`."""
        return self._traced(lambda *given: (self._sums(*given), self.held))

    def _compile(self) -> Compiled:
        """Return the graph of a call, after proving that it keeps units apart."""
        compiled = self._traced(self._sums)
        refuse_effects(compiled.graph, self.model)
        if self.places > 1:
            of_units = len(tf.nest.flatten(self._probe)) + 1
            prove(compiled.graph, self.places, compiled.graph.inputs[:of_units], self.held)
        return compiled

    def _traced(self, computed: Callable[..., object]) -> Compiled:
        signature = [
            *(specs_of([self.places * self._cap], examples) for examples in self._probe),
            tf.TensorSpec([self.places, self._cap], tf.bool),
            tf.TensorSpec([len(seeds_of(self.model)), 2], tf.int64),
            tf.TensorSpec([self.places], tf.float64),
        ]
        # Functions compiled by a layer keep the options under which they are traced.
        with as_traced():
            return tf.function(computed, input_signature=signature, autograph=False).get_concrete_function()

    def _sums(
        self, x: Tensor, y: Tensor, mask: Tensor, seeds: Tensor, bound: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the sum for each variable, and counts."""
        variables, rows, shares = self.model.trainable_variables, Rows(self.places, self._cap), _shares(mask)

        def losses() -> Tensor:
            found = losses_of(self.model, self._loss, x, y)
            return found if rows.each == 1 else found * tf.cast(shares, found.dtype)

        with chained_sums():
            values, states = [tf.convert_to_tensor(each.value) for each in variables], seeded(self.model, seeds)
            recorded = record(self.model, [layer for layer, _ in self._forms], values, states, losses)
            owners: list[list[Variable]] = []
            parts: list[Part] = []
            for (layer, form), calls in zip(self._forms, recorded.calls, strict=True):
                if needed := [call for call in calls if call.delta is not None]:
                    try:
                        parts.append(form(layer, needed, rows))
                    except NotCapturable as error:
                        raise NotCapturable(f"{named(layer)} is {error}") from error
                    owners.append(layer.trainable_variables)
                    self.kernels[layer.path] = parts[-1].kernel
            added, clipped, non_finite, squares = clip(parts, tf.reduce_any(mask, axis=1), bound)
            self.held = [*(tensor for part in parts for tensor in part.held), squares]
            sums = {
                id(variable): total
                for own, totals in zip(owners, added, strict=True)
                for variable, total in zip(own, totals, strict=True)
            }
            for variable in variables:  # a variable without a sum has no effect on the loss
                sums.setdefault(id(variable), tf.zeros(variable.shape, variable.dtype))
            return [sums[id(variable)] for variable in variables], clipped, non_finite


def _walk(layer: Layer, seen: set[int]) -> Iterator[tuple[Layer, Form]]:
    """Yield the layers that own the trainable variables of a model, with their forms.

    Raises:
        NotCapturable: a layer that owns a variable has no form.
    """
    if id(layer) in seen or not layer.trainable_variables:
        return
    seen.add(id(layer))
    form = form_of(layer)
    if form:
        yield layer, form
    elif any(variable.trainable for variable in layer._trainable_variables):
        what = f"layer {layer.path!r} ({type(layer).__name__})"
        raise NotCapturable(f"{what} has weights, and no form for the gradients of several examples at once")
    else:
        for sublayer in layer._layers:
            yield from _walk(sublayer, seen)


def clip(parts: Sequence[Part], real: Tensor, bound: Tensor) -> tuple[list[list[Tensor]], Tensor, Tensor, Tensor]:
    """Return Σ gradient·min(1, bound/‖gradient‖), counts, and squared norms.

    A unit whose gradient, or the square of its norm, is not finite contributes zero.

    Args:
        parts: gradients of U units with respect to some of the variables each.
        real: shape (U,), False for an empty place, which gets factor 0.
        bound: above 0, of shape (U,), or one for all; double.

    Returns:
        Sums for each part; number of clipped units; number of non-finite units; squared norms, shape (U,).
    """
    total = tf.add_n([part.squared_norms() for part in parts])
    finite = tf.math.is_finite(total)
    all_finite = tf.reduce_all(finite)
    norms = tf.sqrt(total) * ROOT
    # Divided by the larger of the two, so never by a norm of 0.
    factors = tf.where(finite & real, bound / tf.maximum(norms, bound), tf.zeros_like(norms))
    factors = tf.where(factors < SMALLEST_FACTOR, tf.zeros_like(factors), factors)

    def clean(tensor: Tensor) -> Tensor:
        """Put zeros in non-finite rows, with a pass over memory only if needed."""
        rows = tf.reshape(finite, [-1] + [1] * (len(tensor.shape) - 1))
        return tf.cond(all_finite, lambda: tensor, lambda: tf.where(rows, tensor, tf.zeros_like(tensor)))

    sums = [part.weighted_sum(factors, clean) for part in parts]
    clipped = tf.math.count_nonzero(finite & real & (norms > bound))
    return sums, clipped, tf.math.count_nonzero(real & ~finite), total


def _shares(mask: Tensor) -> Tensor:
    """Return each example's share in its unit's loss, shape (U·cap,), double."""
    counted = tf.cast(mask, tf.float64)
    # An empty unit has no examples to divide by; its share is 0.
    return tf.reshape(counted / tf.maximum(tf.reduce_sum(counted, axis=1, keepdims=True), 1.0), [-1])


def _evenly(room: int, most: int) -> int:
    """Return places per call that fit `room` units in the fewest calls."""
    calls = -(-room // most)
    return -(-room // calls)
