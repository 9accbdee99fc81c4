"""Draw the places of units, and the seeds of random layers such as dropout."""

import math
import random
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.model_state import is_seed
from cloister.core.tensors import Network, Tensor, Variable


def seeds_of(model: Network) -> list[Variable]:
    """All states of random number generators of a model; none: the model draws nothing."""
    return [variable for variable in model.non_trainable_variables if is_seed(variable)]


def seeded(model: Network, seeds: Tensor) -> list[tuple[Variable, Tensor]]:
    """Return what a `keras.StatelessScope` needs for random layers to draw from these seeds.

    Args:
        model: whose layers draw.
        seeds: shape (random layers, 2), whole numbers.
    """
    return [(state, tf.cast(seeds[number], state.dtype)) for number, state in enumerate(seeds_of(model))]


class Draws:
    """Draw places and seeds, from the operating system or from a number for tests.

    Both are as secret as the noise. Random numbers belong to a unit's place in a call, not to the unit: they depend on
    no unit's data.

    Args:
        seed: None: the operating system's entropy.
    """

    def __init__(self, seed: int | Sequence[int] | None = None) -> None:
        self._rng = random.SystemRandom() if seed is None else random.Random(repr(seed))

    def seeds(self, *shape: int) -> NDArray[np.int64]:
        """Return fresh seeds, shape (*shape, 2).

        Args:
            shape: of what needs a seed each.
        """
        words = np.frombuffer(self._rng.randbytes(8 * math.prod(shape)), np.uint32)
        return (words >> 1).astype(np.int64).reshape(*shape, 2)

    def places(self, units: int, room: int) -> list[int]:
        """Return a place for each unit: every choice of different places is as likely as any other.

        Args:
            units: at most `room`.
            room: places.
        """
        return self._rng.sample(range(room), units)
