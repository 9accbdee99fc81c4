"""The losses of examples, each by itself."""

from collections.abc import Callable

from cloister.core.errors import ConfigError
from cloister.core.tensors import Network, Tensor

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
    losses = loss(y, model(x, training=True))
    if losses.shape != y.shape[:1]:
        raise ConfigError(f"loss must give one number per example, shape {tuple(y.shape[:1])}; got {losses.shape}")
    return losses
