"""The clipped sum of a microbatch, all of its units in one computation of fixed shape.

A unit's gradient must be computed the same to the last bit beside any other units. Otherwise weights that amplify
rounding errors let one joining unit change the gradients of all others, and so the sum by more than the bound. So every
call has the same shape, for a batch of any size. Within a call, processors compute the last few numbers of a
tensor by other instructions, and the last few rows of a product of matrices in another order. A trial finds that only
by chance, since few numbers come out differently: calls have room for a multiple of a number that suits the processor
(`strides`).

`isolation` proves of each graph that a row depends on one unit alone. The arithmetic of all graphs is left as it was
traced (`rewriting`): rows that are operations of their own come out alike, and a sum of several terms comes out the
same in every call. All graphs are tried as they are used; where a model draws random numbers, all examples use the same
ones in a trial (`trial_calls`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.tensors import Compiled, Tensor
from cloister.privacy.dpsgd.batches import filled
from cloister.privacy.dpsgd.draws import Seeds, seeded, seeds_of
from cloister.privacy.dpsgd.gradients import Clipped, Gradients
from cloister.privacy.dpsgd.isolation import prove
from cloister.privacy.dpsgd.losses import LossWeights, weights_of
from cloister.privacy.dpsgd.parts import Rows, Sums
from cloister.privacy.dpsgd.probe import Probe
from cloister.privacy.dpsgd.reductions import even_sums, uneven_operations
from cloister.privacy.dpsgd.rewriting import as_traced
from cloister.privacy.dpsgd.rounding import Batching
from cloister.privacy.dpsgd.strides import stride
from cloister.privacy.dpsgd.trial_calls import CallMode
from cloister.privacy.dpsgd.trial_weights import moved, other_weights, random_weights

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


class InRows:
    """Clipped sums of a model's units, a row each.

    Args:
        gradients: of the model.
        probe: x and y of a few made-up examples.
        batching: the units in a call (up to a stride less one more are left empty), and the most examples of a unit.
        loss_weights: what the loss of an example is multiplied with, from its own label alone, which nothing checks;
            None: nothing. Trials go without them: who chooses them could make examples count for nothing.

    Attributes:
        gradients: as given.
        places: units that a call has room for.
        overstatement: η, of sums in single precision.
        same_at_every_place: whether trials found a unit's gradient the same at each place.

    Guarantee: nothing that is held of a unit depends on another unit's data. It is the same at every place, as far as
        trials on made-up examples show: they do not prove it.

    Raises:
        NotIsolated: an operation of the graph is not proved to keep units apart.
        NotCapturable: layers cannot be looked at one by one.
    """

    def __init__(
        self, gradients: Gradients, probe: Probe, batching: Batching, loss_weights: LossWeights | None = None
    ) -> None:
        self.gradients, self._probe = gradients, probe
        self._cap, self._loss_weights = batching.group_cap, loss_weights
        self.overstatement = batching.overstatement
        self.places = stride() * -(-batching.at_once // stride())
        self._graphs = {self.places: self._compile(self.places)}
        self.same_at_every_place = self._is_even() and self._passes_full_trial()
        smaller = self._smaller_sizes() if self.same_at_every_place else ()
        if smaller:
            self._graphs |= {units: self._compile(units) for units in smaller}
            self.same_at_every_place = self._is_even() and self._passes_short_trial()

    def __call__(self, x: NDArray, y: NDArray, mask: NDArray, bound: float, seeds: Seeds) -> Sums:
        """Return Σ gradient·min(1, bound/‖gradient‖) over the units.

        Args:
            x, y: units·cap examples, those of a unit next to each other.
            mask: shape (units, cap), False for padding; at most `places` units.
            bound: above 0.
            seeds: of random layers.
        """
        own = seeds(len(seeds_of(self.gradients.model)))
        found = self._call(x, y, mask, bound, own, self._loss_weights)
        return Sums([np.asarray(total) for total in found.sums], int(found.clipped), int(found.non_finite))

    def _call(
        self,
        x: NDArray,
        y: NDArray,
        mask: NDArray,
        bound: float,
        seeds: NDArray,
        loss_weights: LossWeights | None = None,
        mode: CallMode = CallMode.TRAINING,
    ) -> Clipped:
        units = min(units for units in self._graphs if units >= len(mask))
        labels = tf.constant(filled(y, self.places * self._cap, self._probe[1].dtype))
        given = (
            tf.constant(filled(x, units * self._cap, self._probe[0].dtype)),
            labels,
            weights_of(labels, loss_weights),
            tf.constant(np.concatenate([mask, np.zeros((self.places - len(mask), self._cap), bool)])),
            tf.constant(seeds),
            tf.constant(bound, tf.float64),
            tf.constant(mode),
        )
        with as_traced():
            return Clipped(*self._graphs[units](*given))

    def _smaller_sizes(self) -> range:
        """The numbers of units below all places that the first layers have a graph for.

        All graphs are made at one time: what a layer or the loss reads from Python while it is traced, such as a rate
        that changes later, would differ between graphs, and a unit more would change every gradient.
        """
        if self.gradients.first_layers(Rows(self.places, self._cap)) is None:
            return range(0)
        return range(FEWER * -(-self.places // (2 * FEWER)), self.places, FEWER)

    def _compile(self, units: int) -> Compiled:
        """Return the graph for so many units, which is proved to keep them apart.

        Raises:
            NotIsolated: it is not.
        """
        x, y = self._probe
        rows = self.places * self._cap
        signature = [
            tf.TensorSpec([units * self._cap, *x.shape[1:]], x.dtype),
            tf.TensorSpec([rows, *y.shape[1:]], y.dtype),
            tf.TensorSpec([rows], tf.float64),
            tf.TensorSpec([self.places, self._cap], tf.bool),
            tf.TensorSpec([len(seeds_of(self.gradients.model)), 2], tf.int64),
            tf.TensorSpec([], tf.float64),
            tf.TensorSpec([], tf.int32),
        ]

        def traced(x: Tensor, y: Tensor, weights: Tensor, mask: Tensor, seeds: Tensor, *others: Tensor) -> Clipped:
            with even_sums(), keras.StatelessScope(seeded(self.gradients.model, seeds)):
                return self.gradients.clipped(x, y, weights, mask, *others)

        # Functions that a layer compiles itself keep the options under which they are traced.
        with as_traced():
            compiled = tf.function(traced, input_signature=signature, autograph=False).get_concrete_function()
        if units == self.places:  # smaller graphs differ in how many rows they compute, and repeat the first one
            prove(compiled.graph, self.places, compiled.graph.inputs[:4], self.gradients.held)
        return compiled

    def _is_even(self) -> bool:
        """Return whether no operation of a graph is of a kind that may compute rows differently."""
        return not any(uneven_operations(graph.graph) for graph in self._graphs.values())

    def _passes_full_trial(self) -> bool:
        """Return whether made-up examples have one gradient at every place of the largest graph."""
        x, y = self._probe
        calls = [TrialCall(one, label) for one, label in zip(x, y, strict=True)]
        # Every position of a constant is a maximum, where another example has one.
        calls.append(TrialCall(np.full_like(x[0], x[0].flat[0]), y[0]))
        calls.append(TrialCall(x[0], y[0], CallMode.RANDOM_DELTAS))
        return self._have_one_gradient(calls, random_sets=2)

    def _passes_short_trial(self) -> bool:
        """Return whether one made-up example has one gradient at every place of every graph."""
        x, y = self._probe
        return self._have_one_gradient([TrialCall(x[0], y[0])], random_sets=1)

    def _have_one_gradient(self, calls: Sequence[TrialCall], random_sets: int) -> bool:
        """Return whether examples have one gradient, under moved weights and under random ones."""
        model = self.gradients.model
        for weights in (other_weights(model, moved), *(random_weights(model, number) for number in range(random_sets))):
            with weights:
                if not self._show_one_gradient(calls):
                    return False
        return True

    def _show_one_gradient(self, calls: Sequence[TrialCall]) -> bool:
        """Return whether each example has one norm and one fingerprint at every place, and one norm is finite.

        Beside other examples too. The fingerprint shows every bit of what is held.
        """
        found = [
            np.concatenate([self._norms_and_fingerprints([call], units) for units in self._graphs]) for call in calls
        ]
        same = all(np.array_equal(rows, np.broadcast_to(rows[0], rows.shape), equal_nan=True) for rows in found)
        finite = any(np.isfinite(rows[0, 0]) for rows in found)
        return same and finite and self._are_same_beside_others(calls, [rows[0] for rows in found])

    def _are_same_beside_others(self, calls: Sequence[TrialCall], found: Sequence[NDArray]) -> bool:
        """Return whether examples in turn at the places of the largest graph have what each has among its equals.

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
        """Return norms and fingerprints of examples in turn at the places of a graph, shape (units, 2)."""
        turns = np.repeat(_turns(len(calls), units), self._cap)
        every, labels = (np.stack(one)[turns] for one in ([call.x for call in calls], [call.y for call in calls]))
        seeds = np.zeros((len(seeds_of(self.gradients.model)), 2), np.int64)
        found = self._call(every, labels, np.ones((units, self._cap), bool), 1.0, seeds, mode=calls[0].mode)
        return np.stack([np.asarray(found.norms), np.asarray(found.fingerprints, np.float64)], axis=1)[:units]


def _turns(examples: int, places: int) -> NDArray:
    """Return which example stands at each place."""
    return np.arange(places) % examples
