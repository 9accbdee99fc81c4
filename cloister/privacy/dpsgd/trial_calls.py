"""What is different in a trial call of a graph: random layers and gradients of outputs, inside the graph that is used.

A mask of dropout differs from place to place in a batch, and so does the gradient of an example. To see whether
anything else depends on the place, all examples use the same random numbers in a trial.
"""

import enum
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import tensorflow as tf

from cloister.core.tensors import Network, Tensor
from cloister.privacy.dpsgd.draws import drawing_layers, replaced_call


class CallMode(enum.IntEnum):
    """What a call of a graph is for.

    Attributes:
        TRAINING: everything as the model says.
        SHARED_DRAWS: each random layer multiplies all examples by the same random numbers. What the layer itself
            computes is not tried.
        RANDOM_DELTAS: besides, the gradients of layers' outputs are random numbers. Otherwise a maximum over positions,
            say, leaves one term in each sum of a layer's gradient, and the order of addition does not show. Only for
            gradients that are computed layer by layer.
    """

    TRAINING = 0
    SHARED_DRAWS = 1
    RANDOM_DELTAS = 2


@contextmanager
def shared_draws(model: Network, mode: Tensor) -> Iterator[None]:
    """Unless `mode` is `TRAINING`, replace each random layer by a multiplication by 0, 1 or 2, alike for all examples.

    Args:
        model: whose gradients are computed layer by layer.
        mode: a `CallMode`, scalar: the graph that is tried is the one that is used.
    """
    with ExitStack() as patches:
        for layer in drawing_layers(model):
            patches.enter_context(replaced_call(layer, _shared_unless_trained(mode, layer.call)))
        yield


def _shared_unless_trained(mode: Tensor, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(inputs: Tensor, *args: object, **kwargs: object) -> Tensor:
        # Products with 0, 1 or 2 are exact at every place.
        shared = tf.constant(np.random.default_rng(0).integers(0, 3, inputs.shape[1:]), inputs.dtype)
        return tf.where(mode == CallMode.TRAINING, original(inputs, *args, **kwargs), inputs * shared)

    return call


def with_random_deltas(delta: Tensor, mode: Tensor, seed: int) -> Tensor:
    """The gradient of a layer's output, or if `mode` is `RANDOM_DELTAS` random numbers, the same in each row.

    Args:
        delta: shape (rows, ...).
        mode: a `CallMode`, scalar.
        seed: of the random numbers.
    """

    def replacement() -> Tensor:
        row = tf.constant(np.random.default_rng(seed).standard_normal(delta.shape[1:]), delta.dtype)
        return tf.broadcast_to(row, delta.shape)

    return tf.cond(mode == CallMode.RANDOM_DELTAS, replacement, lambda: delta)
