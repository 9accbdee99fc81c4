"""Softmax regression in NumPy: a linear classifier."""

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.numpy_model import NumpyModel, flat


class SoftmaxRegression(NumpyModel):
    """Class probabilities softmax(x·W + b). W and b start at 0, as the loss is convex.

    Args:
        features: inputs per example; inputs of shape (n, ...) are flattened to (n, features).
        classes: number of classes.
    """

    def __init__(self, features: int, classes: int) -> None:
        self.weights: dict[str, NDArray] = {
            "softmax/kernel": np.zeros((features, classes), np.float32),
            "softmax/bias": np.zeros(classes, np.float32),
        }

    def initialise(self, seed: int) -> None:
        """Set all weights to zero."""
        for array in self.weights.values():
            array[:] = 0

    def predict(self, x: NDArray) -> NDArray:
        """Return class probabilities of shape (n, classes)."""
        scores = flat(x) @ self.weights["softmax/kernel"] + self.weights["softmax/bias"]
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        return scores

    def loss_and_gradients(self, x: NDArray, y: NDArray) -> tuple[float, dict[str, NDArray]]:
        """Return the mean cross-entropy of a batch in nats, and its gradient.

        Args:
            x: n inputs, shape (n, ...).
            y: their labels, shape (n,), from 0 to classes - 1.
        """
        residual = self.predict(x)
        chosen = np.maximum(residual[np.arange(len(y)), y], 1e-7)
        residual[np.arange(len(y)), y] -= 1
        residual /= len(y)
        gradients = {"softmax/kernel": flat(x).T @ residual, "softmax/bias": residual.sum(axis=0)}
        return float(-np.log(chosen).mean()), gradients
