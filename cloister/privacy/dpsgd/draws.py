"""Which of a model's layers draw random numbers, such as the masks of dropout, and from what."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.model_state import is_seed
from cloister.core.tensors import Layer, Network, Tensor, Variable

RANDOM_BY_EXAMPLE = (
    keras.layers.Dropout,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
    keras.layers.AlphaDropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
)
"""Layers that draw random numbers and do nothing with them across examples; no subclass of them, and none with a
`noise_shape` that gives the examples of a call one mask together."""


def seeds_of(model: Network) -> list[Variable]:
    """All states of random number generators of a model; none: the model draws nothing."""
    return [variable for variable in model.non_trainable_variables if is_seed(variable)]


def drawing_layers(model: Network) -> list[Layer]:
    """The layers that are known to draw for each example by itself.

    The law is then the same however examples are cut into calls. If the examples of a call shared a mask, one example
    more would move others into the next call, and change their masks.
    """
    return [layer for layer in model._flatten_layers() if _draws_by_example(layer)]


def _draws_by_example(layer: Layer) -> bool:
    shape = getattr(layer, "noise_shape", None)
    return type(layer) in RANDOM_BY_EXAMPLE and (shape is None or tuple(shape)[:1] == (None,))


def seeded(model: Network, seeds: Tensor) -> list[tuple[Variable, Tensor]]:
    """Return what a `keras.StatelessScope` needs for random layers to draw from these seeds.

    Args:
        model: whose layers draw.
        seeds: shape (random layers, 2), whole numbers.
    """
    return [(state, tf.cast(seeds[number], state.dtype)) for number, state in enumerate(seeds_of(model))]


class Seeds:
    """Where random layers' seeds come from: the operating system, or a number for tests.

    Masks of dropout are as secret as the noise. A mask belongs to a unit's place: one unit more shifts those of all
    behind it. As long as masks are independent and secret, their laws are the same.

    Args:
        seed: None: the operating system's entropy.
    """

    def __init__(self, seed: int | Sequence[int] | None = None) -> None:
        self._rng = None if seed is None else np.random.default_rng(seed)

    def __call__(self, *shape: int) -> NDArray[np.int64]:
        """Return fresh seeds, shape (*shape, 2).

        Args:
            shape: of what needs a seed each.
        """
        count = 2 * math.prod(shape)
        words = os.urandom(4 * count) if self._rng is None else self._rng.bytes(4 * count)
        return (np.frombuffer(words, np.uint32) >> 1).astype(np.int64).reshape(*shape, 2)


@contextmanager
def replaced_call(layer: Layer, call: Callable[..., Tensor]) -> Iterator[None]:
    """Replace a layer's `call` while the block runs.

    Args:
        layer: of a model.
        call: the replacement.
    """
    replaced = vars(layer).get("call")
    # Past Keras' own bookkeeping of attributes, which would take a function for a part of the layer.
    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")
        if replaced is not None:
            object.__setattr__(layer, "call", replaced)
