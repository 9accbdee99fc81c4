"""The losses of examples, each by itself."""

from collections.abc import Callable

import tensorflow as tf

from cloister.core.errors import ConfigError
from cloister.core.tensors import Network, Tensor

LossWeights = Callable[[Tensor], Tensor]
"""Factors of the losses, from labels: a number for each, or one for all."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Losses of shape (rows,) from labels and the model's outputs, each of its own example alone."""


def losses_of(model: Network, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """Return the losses of examples as in training, shape (rows,).

    Args:
        model: built.
        loss: of each example by itself.
        x, y: examples and labels, a row each.

    Raises:
        ConfigError: the loss function gives something else.
    """
    return checked_losses(loss, model(x, training=True), y)


def checked_losses(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the losses of a model's outputs, shape (rows,).

    Args:
        loss: of each example by itself.
        outputs: of the model.
        y: a label in each row.

    Raises:
        ConfigError: the loss function gives something else.
    """
    losses = loss(y, outputs)
    if losses.shape != y.shape[:1]:
        raise ConfigError(f"loss must give one number per example, shape {tuple(y.shape[:1])}; got {losses.shape}")
    return losses


def weights_of(labels: Tensor, loss_weights: LossWeights | None) -> Tensor:
    """Return what each example's loss is multiplied with, in double precision.

    Args:
        labels: a label in each row.
        loss_weights: as `LossWeights`; None: 1.
    """
    weights = tf.ones([], tf.float64) if loss_weights is None else tf.cast(loss_weights(labels), tf.float64)
    return tf.broadcast_to(weights, [labels.shape[0]])
