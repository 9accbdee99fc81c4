"""What a model's layers draw at random, such as the masks of dropout, and what they draw in a trial.

A mask of dropout differs from place to place in a batch, and so does what comes out for an example. To see whether
anything else depends on the place, all examples are given the same random numbers in a trial.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import keras
import tensorflow as tf

from cloister.core.tensors import Layer, Network, Tensor, Variable

AS_TRAINED, ALIKE, DENSE = range(3)
"""Kinds of a call of a graph. `ALIKE`: all examples draw the same random numbers. `DENSE`: besides, gradients of what
comes out of layers are random numbers. In a trial a maximum over positions, say, leaves a layer's gradient one term of
many, and one term has no order in which it could be added up."""
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


def is_seed(variable: Variable) -> bool:
    """Whether a variable is what random layers draw from."""
    return bool(variable.path.endswith("seed_generator_state"))


def seeds_of(model: Network) -> list[Variable]:
    """All variables of a model that random layers draw from; none: the model draws nothing."""
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

    It may mix examples for some random numbers and not for those of a trial. So such a model is computed one example at
    a time.
    """
    states = {id(variable) for layer in drawing_layers(model) for variable in layer.variables}
    return any(id(variable) not in states for variable in seeds_of(model))


@contextmanager
def drawing(model: Network, kind: Tensor) -> Iterator[None]:
    """Have the layers that draw multiply all examples with the same numbers while the block runs, but for `AS_TRAINED`.

    Args:
        model: whose gradients are computed layer by layer. For others see `vectorised.whole_model`.
        kind: of the call, a scalar, of a graph too: the same graph is tried that is used.
    """
    with ExitStack() as patches:
        for layer in drawing_layers(model):
            patches.enter_context(replaced_call(layer, _alike_unless_trained(kind, layer.call)))
        yield


def _alike_unless_trained(kind: Tensor, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer's call that multiplies all examples with the same numbers in a trial."""

    def call(inputs: Tensor, *args: object, **kwargs: object) -> Tensor:
        # 0, 1 or 2: products are exact at every place.
        shared = tf.round(2 * tf.random.stateless_uniform(tf.shape(inputs)[1:], seed=(0, 0), dtype=inputs.dtype))
        return tf.where(kind == AS_TRAINED, original(inputs, *args, **kwargs), inputs * shared)

    return call


def densely(delta: Tensor, kind: Tensor, seed: int) -> Tensor:
    """A gradient of what comes out of a layer, or in its place random numbers, the same for each row, if `DENSE`.

    Args:
        delta: shape (rows, ...).
        kind: of the call.
        seed: of the random numbers.
    """

    def dense() -> Tensor:
        row = tf.random.stateless_normal(tf.shape(delta)[1:], seed=(seed, 1), dtype=delta.dtype)
        return tf.broadcast_to(row, tf.shape(delta))

    return tf.cond(kind == DENSE, dense, lambda: delta)


@contextmanager
def replaced_call(layer: Layer, call: Callable[..., Tensor]) -> Iterator[None]:
    """Have a layer compute something else while the block runs.

    Args:
        layer: of a model.
        call: in the place of its own.
    """
    # Past Keras' own bookkeeping of attributes, which would take a function for a part of the layer.
    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")
