"""Which of a model's layers draw random numbers, such as the masks of dropout, and from what."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import keras

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


def draws_otherwise(model: Network) -> bool:
    """Whether anything but `drawing_layers` draws random numbers.

    Such a layer may mix examples for some random numbers and not for those of a trial. So such a model is vectorised
    as a whole, each example a batch of its own.
    """
    states = {id(variable) for layer in drawing_layers(model) for variable in layer.variables}
    return any(id(variable) not in states for variable in seeds_of(model))


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
