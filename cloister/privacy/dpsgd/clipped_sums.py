"""The clipped sum of a batch of any size, by computations of fixed shape.

What is computed for a unit must be the same to the last bit whoever else is in the batch. Otherwise a model whose
weights blow up roundings would turn everybody's gradient around when one unit joins, and everybody would move the sum.
So there is one shape, whatever the size of a batch. Within it processors compute the last few numbers of a tensor in
other ways than the others, unless their count suits the width of their registers. Few numbers come out differently, so
trying finds that only by luck: calls have a multiple of 16 places (or one), and of those sizes are tried until an
example has one gradient at every place.

The arithmetic of all graphs is left as it was traced (`rewriting`): rows that are operations of their own come out
alike, and a sum of several terms comes out the same in every call. All graphs are tried besides. Where a model draws
random numbers, all examples draw alike in the trial (`draws`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike, NDArray

from cloister.core.errors import ConfigError, UnsupportedModel
from cloister.core.tensors import Compiled, Tensor
from cloister.privacy.dpsgd.batches import Members, pieces
from cloister.privacy.dpsgd.checks import Probe, refusing_what_cannot_be_tried
from cloister.privacy.dpsgd.draws import ALIKE, AS_TRAINED, DENSE
from cloister.privacy.dpsgd.gradients import Gradients
from cloister.privacy.dpsgd.parts import Rows
from cloister.privacy.dpsgd.precision import refuse_coarse_precision
from cloister.privacy.dpsgd.rewriting import as_traced
from cloister.privacy.dpsgd.rounding import Batching, check_clipping_norm, examples_at_once
from cloister.privacy.dpsgd.running_sum import RunningSum
from cloister.privacy.dpsgd.trial_weights import moved, other_weights, random_weights

LossWeights = Callable[[Tensor], Tensor]
"""What losses are multiplied with, from labels: a number for each, or one for all."""
Trial = tuple[NDArray, NDArray, int]
"""A made-up example, its label, and the kind of a call."""
STRIDES = (16, 32, 64)
"""Multiples of these are tried as the number of units in a call: processors handle up to 16 numbers at a time."""
FEWER = 2
"""Where the first layers take one example after another, there is a graph for each multiple of so many units, from half
of the places on. Each row is an operation of its own: any number would do. With 2 a step of the brain scans' network
takes 5 % less than with 4, and 10 s or more longer to compile and to try, once for a process."""


@dataclass(frozen=True)
class ClippedSum:
    """Un-noised, and so not for release.

    Attributes:
        sums: a float array for each trainable variable, in the model's order.
        examples: how many units took part: examples, or groups of them.
        clipped: how many were scaled down to the bound.
        non_finite: how many had no finite gradient, or none at all, and contributed zero.
    """

    sums: tuple[NDArray, ...]
    examples: int
    clipped: int
    non_finite: int


class ClippedSums:
    """Clipped sums of batches of a model's examples.

    Args:
        gradients: of the model.
        probe: x and y of a few made-up examples.
        batching: B, the units in a call (a few places more may be left empty), and the most examples of a unit.
        loss_weights: what the loss of an example is multiplied with, from its own label alone, which nothing checks;
            None: nothing. Trials go without them: who chooses them could make examples count for nothing.

    Attributes:
        gradients: those in use. First layers whose rows come out differently are not computed row by row.
        places: units that a call has room for.
        same_at_every_place: whether a unit's gradient is the same at each. If not, one unit is computed at a time.

    Guarantee: one unit's joining or leaving a batch moves the sum by at most S in L2, for any weights and inputs, as
        `rounding` proves, provided that an example's gradient is the same at every place: trials on made-up examples
        check that and do not prove it. For models that draw random numbers, given the numbers that each unit draws.

    Raises:
        UnsupportedModel: the model uses a variable that Keras does not know to be its own, or raises an exception
            under other weights.
        ConfigError: `loss_weights` give something else than a number for each label, or one for all.
    """

    def __init__(
        self, gradients: Gradients, probe: Probe, batching: Batching, loss_weights: LossWeights | None = None
    ) -> None:
        self.gradients, self._probe = gradients, probe
        self._batching, self._cap, self._loss_weights = batching, batching.group_cap, loss_weights
        if loss_weights is not None:
            _check_loss_weights(loss_weights, probe[1])
        self._make()
        if self.gradients.by_row and not self.same_at_every_place:
            self.gradients = gradients.without_rows()
            self._make()

    def of(self, x: NDArray, y: NDArray, clipping_norm: float, groups: NDArray | None = None) -> ClippedSum:
        """Σ gradient·min(1, S/‖gradient‖) over the units of a batch, with S/(1 + η) in the place of S.

        Args:
            x, y: n examples.
            clipping_norm: S.
            groups: shape (n,): examples with the same value are one unit. None: each is one.

        Raises:
            ConfigError: S is out of range, lengths differ, groups are missing, or products became coarser than float32.
        """
        check_clipping_norm(clipping_norm)
        refuse_coarse_precision()
        units = self._units(x, y, groups)
        total = RunningSum()
        clipped, non_finite, bound = 0, 0, clipping_norm / (1 + self._batching.overstatement)
        for piece in pieces(len(units), self._units_at_once(len(units))):
            for sums, some_clipped, some_non_finite in self._computed(
                x, y, *units.table(piece, self._batching.group_cap), bound
            ):
                total.add(sums, before=piece.start)
                clipped, non_finite = clipped + some_clipped, non_finite + some_non_finite
        return ClippedSum(total.value() or tuple(self._nothing()), len(units), clipped, non_finite)

    def _make(self) -> None:
        """The graphs, for the smallest number of places at which an example has one gradient at every place of them."""
        strides = (1,) if self._batching.at_once == 1 else STRIDES
        for places in sorted({stride * -(-self._batching.at_once // stride) for stride in strides}):
            self.places = places
            self._graphs = {places: self._compile(places)}
            self._refuse_foreign_state()
            self.same_at_every_place = places == 1 or self._is_same_at_every_place()
            if self.same_at_every_place:
                break
        smaller = self._smaller_sizes() if self.same_at_every_place else ()
        if smaller:
            self._graphs |= {units: self._compile(units) for units in smaller}
            self.same_at_every_place = self._is_same_at_every_place(examples=1)

    def _nothing(self) -> list[NDArray]:
        variables = self.gradients.model.trainable_variables
        return [np.zeros(variable.shape, variable.dtype) for variable in variables]

    def _units(self, x: NDArray, y: NDArray, groups: NDArray | None) -> Members:
        if len(x) != len(y) or (groups is not None and len(groups) != len(x)):
            raise ConfigError(f"x, y and groups must have one length, got {len(x)} and {len(y)}")
        if groups is None and self._cap > 1:
            raise ConfigError(f"groups must be given where group_cap is {self._cap}")
        return Members(np.arange(len(x)) if groups is None else groups)

    def _units_at_once(self, count: int) -> int:
        if not self.same_at_every_place:
            return 1
        return examples_at_once(count, self._batching.batch_size, self._batching.at_once)

    def _computed(
        self, x: NDArray, y: NDArray, table: NDArray, mask: NDArray, bound: float
    ) -> Iterator[tuple[list[NDArray], int, int]]:
        """Sums and counts. Where a unit's computation raises an exception, the others contribute all the same."""
        try:
            yield self._call(_taken(x, table), _taken(y, table), mask, bound, self._loss_weights)[:3]
        except Exception:  # whatever it is, it must not tell the others' sum that it happened
            if len(table) == 1:
                yield self._nothing(), 0, 1
                return
            for half in pieces(len(table), -(-len(table) // 2)):
                yield from self._computed(x, y, table[half], mask[half], bound)

    def _call(
        self,
        x: NDArray,
        y: NDArray,
        mask: NDArray,
        bound: float,
        loss_weights: LossWeights | None = None,
        kind: int = AS_TRAINED,
    ) -> tuple[list[NDArray], int, int, NDArray, NDArray]:
        units = min(units for units in self._graphs if units >= len(mask))
        labels = tf.constant(_filled(y, self.places * self._cap, self._probe[1].dtype))
        weights = tf.ones([], tf.float64) if loss_weights is None else tf.cast(loss_weights(labels), tf.float64)
        given = (
            tf.constant(_filled(x, units * self._cap, self._probe[0].dtype)),
            labels,
            tf.broadcast_to(weights, [self.places * self._cap]),
            tf.constant(np.concatenate([mask, np.zeros((self.places - len(mask), self._cap), bool)])),
            tf.constant(bound, tf.float64),
            tf.constant(kind),
        )
        with as_traced():
            sums, clipped, non_finite, norms, traces = self._graphs[units](*given)
        arrays = [np.asarray(total) for total in sums]
        return arrays, int(clipped), int(non_finite), np.asarray(norms), np.asarray(traces)

    def _smaller_sizes(self) -> range:
        """The numbers of units below all places that the first layers have a graph for.

        All graphs are made at one time: what a layer or the loss reads from Python while it is traced, such as a rate
        that somebody changes later, would be one thing in this graph and another in that, and a unit more would change
        everybody's gradient.
        """
        if self.gradients.first_layers(Rows(self.places, self._cap)) is None:
            return range(0)
        return range(FEWER * -(-self.places // (2 * FEWER)), self.places, FEWER)

    def _compile(self, units: int) -> Compiled:
        x, y = self._probe
        signature = [
            tf.TensorSpec([units * self._cap, *x.shape[1:]], x.dtype),
            tf.TensorSpec([self.places * self._cap, *y.shape[1:]], y.dtype),
            tf.TensorSpec([self.places * self._cap], tf.float64),
            tf.TensorSpec([self.places, self._cap], tf.bool),
            tf.TensorSpec([], tf.float64),
            tf.TensorSpec([], tf.int32),
        ]
        # Functions that a layer compiles itself keep the options under which they are traced.
        with as_traced():
            clipped = tf.function(self.gradients.clipped, input_signature=signature, autograph=False)
            return clipped.get_concrete_function()

    def _refuse_foreign_state(self) -> None:
        """Raises UnsupportedModel if the model reads or writes a variable that Keras does not know to be its own."""
        known = {id(variable.value) for variable in self.gradients.model.variables}
        used = self._graphs[self.places].graph.variables
        foreign = [variable.name for variable in used if id(variable) not in known]
        if foreign:
            raise UnsupportedModel(f"the model uses {foreign[0]}, a variable that Keras does not know; use add_weight")

    def _is_same_at_every_place(self, examples: int | None = None) -> bool:
        """Whether each made-up example has the same gradient, to the last bit, at every place of every graph.

        Where a model draws random numbers, all examples draw the same ones here.

        Args:
            examples: how many are tried; None: all, and what else there is to be tried in one graph.
        """
        x, y = self._probe
        tried = [(one, label, ALIKE) for one, label in zip(x[:examples], y[:examples], strict=True)]
        if examples is None:
            # Every position of a constant is a maximum, where one example has one.
            tried += [(np.full_like(x[0], x[0].flat[0]), y[0], ALIKE), (x[0], y[0], DENSE)]
        return all(self._has_one_gradient(tried, weights) for weights in self._trial_weights(examples))

    def _trial_weights(self, examples: int | None) -> Iterator[AbstractContextManager[None]]:
        """The model's weights, a little off, and a random set; where all is tried, another one."""
        model = self.gradients.model
        yield other_weights(model, moved)
        for number in range(1 if examples else 2):
            yield random_weights(model, number)

    def _has_one_gradient(self, tried: Sequence[Trial], weights: AbstractContextManager[None]) -> bool:
        """Whether each of some examples has one gradient at every place of every graph, and one a finite one."""
        with weights, refusing_what_cannot_be_tried():
            found = [np.concatenate([self._norms_of(*one, units) for units in self._graphs]) for one in tried]
        same = all(np.array_equal(rows, np.broadcast_to(rows[0], rows.shape), equal_nan=True) for rows in found)
        return same and any(np.isfinite(rows[0, 0]) for rows in found)

    def _norms_of(self, x: NDArray, y: NDArray, kind: int, units: int) -> NDArray:
        """The norm of one example and a fingerprint of its gradient, at every place of the graph for so many units.

        Returns:
            Shape (units, 2).
        """
        every, labels = (np.repeat(one[None], units * self._cap, axis=0) for one in (x, y))
        *_, norms, traces = self._call(every, labels, np.ones((units, self._cap), bool), 1.0, kind=kind)
        return np.stack([norms, traces.astype(np.float64)], axis=1)[:units]


def _check_loss_weights(loss_weights: LossWeights, labels: NDArray) -> None:
    """Raises ConfigError unless they give a number for each label, or one for all.

    Later an exception would be taken for a unit's own, and the unit would contribute zero.
    """
    found = tuple(tf.convert_to_tensor(loss_weights(tf.constant(labels))).shape)
    if found not in ((), (len(labels),)):
        raise ConfigError(f"loss_weights must give one number per example, shape {(len(labels),)}, or one; got {found}")


def _taken(rows: NDArray, table: NDArray) -> NDArray:
    """The rows of a table's numbers, without a copy if they follow each other."""
    numbers = table.ravel()
    if np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers))):
        return rows[numbers[0] : numbers[0] + len(numbers)]
    return rows[numbers]


def _filled(rows: NDArray, size: int, dtype: DTypeLike) -> NDArray:
    """The rows, with the first one again behind them up to `size`.

    What is computed of an example that nobody has, such as of zeros, could raise an exception that none of the others
    does: whether a place is empty would decide about all.
    """
    rows = np.asarray(rows, dtype)
    if len(rows) == size:
        return rows
    filled = np.empty((size, *rows.shape[1:]), dtype)
    filled[: len(rows)], filled[len(rows) :] = rows, rows[0]
    return filled
