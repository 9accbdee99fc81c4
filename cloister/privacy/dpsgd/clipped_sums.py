"""The clipped sum of a batch of any size, by computations of fixed shape.

A unit's gradient must be computed the same to the last bit whoever else is in the batch. Otherwise weights that amplify
rounding errors let one joining unit change the gradients of all others, and so the sum by more than the bound. So every
call has the same shape, whatever the size of a batch. Within a call, processors compute the last few numbers of a
tensor by other instructions, and the last few rows of a product of matrices in another order. A trial finds that only
by chance, since few numbers come out differently: calls have room for one unit, or for a multiple of a number that
suits the processor (`strides`).

The arithmetic of all graphs is left as it was traced (`rewriting`): rows that are operations of their own come out
alike, and a sum of several terms comes out the same in every call. All graphs are tried as they are used; where a model
draws random numbers, all examples use the same ones in a trial (`trial_calls`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike, NDArray

from cloister.core.errors import ConfigError
from cloister.core.tensors import Compiled, Tensor
from cloister.privacy.dpsgd.batches import Members, pieces
from cloister.privacy.dpsgd.gradients import Clipped, Gradients
from cloister.privacy.dpsgd.graph_state import refuse_state
from cloister.privacy.dpsgd.parts import Rows
from cloister.privacy.dpsgd.precision import refuse_coarse_precision
from cloister.privacy.dpsgd.probe import Probe
from cloister.privacy.dpsgd.reductions import even_sums, uneven_operations
from cloister.privacy.dpsgd.refusals import refusing_what_cannot_be_tried
from cloister.privacy.dpsgd.rewriting import as_traced
from cloister.privacy.dpsgd.rounding import Batching, check_clipping_norm, examples_at_once
from cloister.privacy.dpsgd.running_sum import RunningSum
from cloister.privacy.dpsgd.strides import stride
from cloister.privacy.dpsgd.trial_calls import CallMode
from cloister.privacy.dpsgd.trial_weights import moved, other_weights, random_weights

LossWeights = Callable[[Tensor], Tensor]
"""What losses are multiplied with, from labels: a number for each, or one for all."""
FEWER = 2
"""Where the first layers take one example after another, there is a graph for each multiple of so many units, from half
of the places on. Each row is an operation of its own: any number would do. With 2 a step of the brain scans' network
takes 5 % less than with 4, and 10 s or more longer to compile and to try, once for a process."""


class TrialCall(NamedTuple):
    """A made-up example, and the mode of the call that computes it.

    Attributes:
        x: the example.
        y: its label.
        mode: of the call.
    """

    x: NDArray
    y: NDArray
    mode: CallMode = CallMode.SHARED_DRAWS


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
        batching: B, the units in a call (up to a stride less one more are left empty), and the most examples of a unit.
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
        UnsupportedModel: the model uses a variable that Keras does not know, may write a variable, has an operation
            with a state, calls Python, or raises an exception under other weights.
        ConfigError: `loss_weights` give something else than a number for each label, or one for all.
    """

    def __init__(
        self, gradients: Gradients, probe: Probe, batching: Batching, loss_weights: LossWeights | None = None
    ) -> None:
        self.gradients, self._probe = gradients, probe
        self._batching, self._cap, self._loss_weights = batching, batching.group_cap, loss_weights
        if loss_weights is not None:
            _check_loss_weights(loss_weights, probe[1])
        with refusing_what_cannot_be_tried():
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
        """The graphs, for as many places as suit the processor; for one if examples could mix, or depend on places."""
        at_once = self._batching.at_once
        several = at_once > 1 and not self.gradients.one_at_a_time and stride() > 1
        self.places = stride() * -(-at_once // stride()) if several else 1
        self._graphs = {self.places: self._compile(self.places)}
        suits = several and self._is_even() and self._passes_full_trial()
        self.same_at_every_place = suits or at_once == 1
        smaller = self._smaller_sizes() if self.same_at_every_place else ()
        if smaller:
            self._graphs |= {units: self._compile(units) for units in smaller}
            self.same_at_every_place = self._is_even() and self._passes_short_trial()
        if not self.same_at_every_place and self.places > 1:
            self.places = 1
            self._graphs = {1: self._compile(1)}

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
            found = self._call(_taken(x, table), _taken(y, table), mask, bound, self._loss_weights)
            yield [np.asarray(total) for total in found.sums], int(found.clipped), int(found.non_finite)
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
        mode: CallMode = CallMode.TRAINING,
    ) -> Clipped:
        units = min(units for units in self._graphs if units >= len(mask))
        labels = tf.constant(_filled(y, self.places * self._cap, self._probe[1].dtype))
        weights = tf.ones([], tf.float64) if loss_weights is None else tf.cast(loss_weights(labels), tf.float64)
        given = (
            tf.constant(_filled(x, units * self._cap, self._probe[0].dtype)),
            labels,
            tf.broadcast_to(weights, [self.places * self._cap]),
            tf.constant(np.concatenate([mask, np.zeros((self.places - len(mask), self._cap), bool)])),
            tf.constant(bound, tf.float64),
            tf.constant(mode),
        )
        with as_traced():
            return Clipped(*self._graphs[units](*given))

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
            compiled = tf.function(self._traced, input_signature=signature, autograph=False).get_concrete_function()
        refuse_state(compiled.graph, self.gradients.model)
        return compiled

    def _traced(self, *given: Tensor) -> Clipped:
        with even_sums():
            return self.gradients.clipped(*given)

    def _is_even(self) -> bool:
        """Whether no operation of a graph is of a kind that may compute rows differently."""
        return not any(uneven_operations(graph.graph) for graph in self._graphs.values())

    def _passes_full_trial(self) -> bool:
        """Whether made-up examples have one gradient at every place, for all that is tried in the largest graph."""
        x, y = self._probe
        calls = [TrialCall(one, label) for one, label in zip(x, y, strict=True)]
        # Every position of a constant is a maximum, where another example has one.
        calls.append(TrialCall(np.full_like(x[0], x[0].flat[0]), y[0]))
        if self.gradients.by_layer:
            calls.append(TrialCall(x[0], y[0], CallMode.RANDOM_DELTAS))
        return self._have_one_gradient(calls, random_sets=2)

    def _passes_short_trial(self) -> bool:
        """Whether one made-up example has one gradient at every place of every graph."""
        x, y = self._probe
        return self._have_one_gradient([TrialCall(x[0], y[0])], random_sets=1)

    def _have_one_gradient(self, calls: Sequence[TrialCall], random_sets: int) -> bool:
        """Whether examples have one gradient, under the model's weights, moved a little, and under random ones."""
        model = self.gradients.model
        for weights in (other_weights(model, moved), *(random_weights(model, number) for number in range(random_sets))):
            with weights:
                if not self._show_one_gradient(calls):
                    return False
        return True

    def _show_one_gradient(self, calls: Sequence[TrialCall]) -> bool:
        """Whether each example has one norm and one fingerprint at every place of every graph, and one norm is finite.

        Beside other examples too. The fingerprint shows every bit of what is held.
        """
        with refusing_what_cannot_be_tried():
            found = [
                np.concatenate([self._norms_and_fingerprints([call], units) for units in self._graphs])
                for call in calls
            ]
            same = all(np.array_equal(rows, np.broadcast_to(rows[0], rows.shape), equal_nan=True) for rows in found)
            finite = any(np.isfinite(rows[0, 0]) for rows in found)
            return same and finite and self._are_same_beside_others(calls, [rows[0] for rows in found])

    def _are_same_beside_others(self, calls: Sequence[TrialCall], found: Sequence[NDArray]) -> bool:
        """Whether examples in turn at the places of the largest graph have what each has among its equals.

        True where there are no two to try.

        Args:
            calls: those of `CallMode.SHARED_DRAWS` first.
            found: norm and fingerprint of each.
        """
        shared = [call for call in calls if call.mode == CallMode.SHARED_DRAWS]
        if len(shared) < 2:
            return True
        mixed = self._norms_and_fingerprints(shared, self.places)
        return np.array_equal(mixed, np.stack(found)[_turns(len(shared), self.places)], equal_nan=True)

    def _norms_and_fingerprints(self, calls: Sequence[TrialCall], units: int) -> NDArray:
        """Of examples in turn at the places of the graph for so many units: shape (units, 2). All have one mode."""
        turns = np.repeat(_turns(len(calls), units), self._cap)
        every, labels = (np.stack(one)[turns] for one in ([call.x for call in calls], [call.y for call in calls]))
        found = self._call(every, labels, np.ones((units, self._cap), bool), 1.0, mode=calls[0].mode)
        return np.stack([np.asarray(found.norms), np.asarray(found.fingerprints, np.float64)], axis=1)[:units]


def _turns(examples: int, places: int) -> NDArray:
    """Which example stands at each place."""
    return np.arange(places) % examples


def _check_loss_weights(loss_weights: LossWeights, labels: NDArray) -> None:
    """Raises ConfigError unless they give a number for each label, or one for all.

    Later an exception would be taken for a unit's own, and the unit would contribute zero.
    """
    found = tuple(tf.convert_to_tensor(loss_weights(tf.constant(labels))).shape)
    if found not in ((), (len(labels),)):
        raise ConfigError(f"loss_weights must give one number per example, shape {(len(labels),)}, or one; got {found}")


def _cast(rows: NDArray, dtype: DTypeLike) -> NDArray:
    """The rows in a type, with floats cut to the limits of unsigned or narrow integers, and NaN as 0.

    NumPy's own cast of such numbers depends on where they stand, and so on who else is there. To refuse them would tell
    about a row that decided about the type of a file.
    """
    rows, target = np.asarray(rows), np.dtype(dtype)
    if rows.dtype.kind == "f" and target.kind in "iu" and (target.itemsize < 4 or target == np.uint32):
        limits = np.iinfo(target)
        rows = np.clip(np.nan_to_num(rows.astype(np.float64)), limits.min, limits.max)
    return rows.astype(target, copy=False)


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
    rows = _cast(rows, dtype)
    if len(rows) == size:
        return rows
    filled = np.empty((size, *rows.shape[1:]), rows.dtype)
    filled[: len(rows)], filled[len(rows) :] = rows, rows[0]
    return filled
