"""The clipped sum of some units, all of them in one computation of fixed shape.

A call has `places` rows of units. Each unit that was drawn has a place of its own, by a secret lot (`clipped_sums`);
the other places repeat one of the units and count for nothing. `isolation` proves of the graph that a row depends on
one unit alone. The arithmetic of the graph is left as it was traced (`rewriting`, `reductions`).
"""

import math

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.tensors import Compiled, Tensor
from cloister.privacy.dpsgd.batches import cast, places_of
from cloister.privacy.dpsgd.draws import Draws, seeded, seeds_of
from cloister.privacy.dpsgd.gradients import Clipped, Gradients
from cloister.privacy.dpsgd.graph_state import refuse_state
from cloister.privacy.dpsgd.isolation import prove
from cloister.privacy.dpsgd.parts import Sums
from cloister.privacy.dpsgd.probe import Probe
from cloister.privacy.dpsgd.reductions import chained_sums
from cloister.privacy.dpsgd.rewriting import as_traced
from cloister.privacy.dpsgd.rounding import most_at_once, overstatement

MEMORY = 1 << 30
"""Bytes of units that a call may be given and hold, beside what layers put out. A batch that needs more takes several
calls."""


class InRows:
    """Clipped sums of a model's units, a row each.

    Args:
        gradients: of the model.
        probe: x and y of a few examples, of which the shapes and types count.
        batch_size: B, the expected number of units of a batch.
        group_cap: the most examples of a unit.

    Attributes:
        gradients: as given.
        places: units that a call has room for.
        overstatement: η, of sums in single precision.

    Guarantee: what is held of the unit at a place is a function of the place, the unit and the random numbers of the
        call. Whether its computation raises an exception depends on the unit alone. Both assume that kernels keep rows
        apart in calls of one shape. A unit's contribution is no longer than the bound in L2.

    Raises:
        NotIsolated: an operation of the graph is not proved to keep units apart.
        NotCapturable: layers cannot be looked at one by one.
        UnsupportedModel: the graph may keep something of a unit.
    """

    def __init__(self, gradients: Gradients, probe: Probe, batch_size: int, group_cap: int) -> None:
        self.gradients, self._probe, self._cap = gradients, probe, group_cap
        room = places_of(batch_size)
        self.places = _evenly(room, most_at_once(batch_size))
        self._compiled = self._compile()
        size = sum(math.prod(held.shape) * held.dtype.size for held in (*gradients.held, *self._compiled.inputs))
        if size > MEMORY:
            self.places = _evenly(room, max(1, MEMORY * self.places // size))
            self._compiled = self._compile()
        self.overstatement = overstatement(batch_size, self.places)

    def seeds(self, draws: Draws) -> NDArray[np.int64]:
        """Return the seeds of a call: one for each random layer.

        Args:
            draws: where they come from.
        """
        return draws.seeds(len(seeds_of(self.gradients.model)))

    def __call__(self, x: NDArray, y: NDArray, mask: NDArray, bound: float, seeds: NDArray[np.int64]) -> Sums:
        """Return Σ gradient·min(1, bound/‖gradient‖) over the units.

        Args:
            x, y: places·cap examples, those of a unit next to each other.
            mask: shape (places, cap), False for padding and for empty places.
            bound: above 0.
            seeds: of random layers.
        """
        given = (
            tf.constant(cast(x, self._probe[0].dtype)),
            tf.constant(cast(y, self._probe[1].dtype)),
            tf.constant(mask),
            tf.constant(seeds),
            tf.constant(bound, tf.float64),
        )
        with as_traced():
            found = Clipped(*self._compiled(*given))
        return Sums([np.asarray(total) for total in found.sums], int(found.clipped), int(found.non_finite))

    def _compile(self) -> Compiled:
        """Return the graph of a call, which is proved to keep units apart.

        Raises:
            NotIsolated: it is not.
        """
        x, y = self._probe
        rows = self.places * self._cap
        signature = [
            tf.TensorSpec([rows, *x.shape[1:]], x.dtype),
            tf.TensorSpec([rows, *y.shape[1:]], y.dtype),
            tf.TensorSpec([self.places, self._cap], tf.bool),
            tf.TensorSpec([len(seeds_of(self.gradients.model)), 2], tf.int64),
            tf.TensorSpec([], tf.float64),
        ]

        def traced(x: Tensor, y: Tensor, mask: Tensor, seeds: Tensor, bound: Tensor) -> Clipped:
            with chained_sums(), keras.StatelessScope(seeded(self.gradients.model, seeds)):
                return self.gradients.clipped(x, y, mask, bound)

        # Functions that a layer compiles itself keep the options under which they are traced.
        with as_traced():
            compiled = tf.function(traced, input_signature=signature, autograph=False).get_concrete_function()
        refuse_state(compiled.graph, self.gradients.model)
        if self.places > 1:
            prove(compiled.graph, self.places, compiled.graph.inputs[:3], self.gradients.held)
        return compiled


def _evenly(room: int, most: int) -> int:
    """Return the places of each of the fewest calls of at most so many that have room for all."""
    calls = -(-room // most)
    return -(-room // calls)
