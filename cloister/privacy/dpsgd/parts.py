"""What one layer's per-example gradients are asked for, whatever form they are held in."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf


class Part(Protocol):
    """The gradients of each of B examples with respect to some of the variables.

    Attributes:
        kernel: the name of the form they are held in.
    """

    kernel: str

    def squared_norms(self) -> Any:
        """Shape (B,): each example's squared L2 norm over these variables; not finite where a gradient is not."""

    def weighted_sum(self, factors: Any, clean: Callable[[Any], Any]) -> list[Any]:
        """Σ factors[i]·gradient[i] for every variable.

        Args:
            factors: shape (B,), 0 for each example without a finite gradient.
            clean: replaces such examples' rows of a tensor of leading size B by zeros, since 0·∞ is not 0.
        """


class PerExample:
    """Gradients held one by one: tensors of shape (B, *variable.shape)."""

    def __init__(self, kernel: str, gradients: Sequence[Any]) -> None:
        self.kernel = kernel
        self._gradients = gradients

    def squared_norms(self) -> Any:
        """As `Part` says."""
        return tf.add_n([row_squares(gradient) for gradient in self._gradients])

    def weighted_sum(self, factors: Any, clean: Callable[[Any], Any]) -> list[Any]:
        """As `Part` says."""
        return [_combined(clean(gradient), factors) for gradient in self._gradients]


def row_squares(tensor: Any) -> Any:
    """Shape (B,): the sum of squares of everything in each row."""
    return tf.reduce_sum(tf.square(tf.reshape(tensor, [tensor.shape[0], -1])), axis=1)


def rows_times(tensor: Any, factors: Any) -> Any:
    """Each row of a tensor of leading size B times its factor."""
    return tensor * tf.reshape(factors, [-1] + [1] * (len(tensor.shape) - 1))


def _combined(gradient: Any, factors: Any) -> Any:
    rows = tf.reshape(gradient, [gradient.shape[0], -1])
    return tf.reshape(tf.linalg.matvec(rows, factors, transpose_a=True), gradient.shape[1:])
