"""Softmax regression in NumPy: a linear classifier for tables, and for everything that should start in a second."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import FederationError
from cloister.core.files import atomic_path
from cloister.tasks.base import NamedArrays


class SoftmaxRegression:
    """Class probabilities softmax(x·W + b); both start at 0, where the loss is convex anyway.

    Args:
        features: inputs per example; inputs of shape (n, ...) are flattened to (n, features).
        classes: number of classes.
    """

    kind = "numpy"
    suffix = ".npz"

    def __init__(self, features: int, classes: int) -> None:
        self.weights: dict[str, NDArray] = {
            "softmax/kernel": np.zeros((features, classes), np.float32),
            "softmax/bias": np.zeros(classes, np.float32),
        }

    def initialise(self, seed: int) -> None:
        """Back to zero."""
        for array in self.weights.values():
            array[:] = 0

    def arrays(self) -> dict[str, NDArray]:
        """A copy of both weights."""
        return {name: array.copy() for name, array in self.weights.items()}

    def assign(self, arrays: NamedArrays) -> None:
        """Replace both weights.

        Raises:
            FederationError: names or shapes are not this model's.
        """
        check_same(arrays, self.weights)
        for name, array in self.weights.items():
            array[:] = arrays[name]

    def predict(self, x: NDArray) -> NDArray:
        """Class probabilities of shape (n, classes)."""
        scores = _flat(x) @ self.weights["softmax/kernel"] + self.weights["softmax/bias"]
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        return scores

    def loss_and_gradients(self, x: NDArray, y: NDArray) -> tuple[float, dict[str, NDArray]]:
        """Mean cross-entropy of a batch in nats, and its gradient with respect to both weights."""
        residual = self.predict(x)
        chosen = np.maximum(residual[np.arange(len(y)), y], 1e-7)
        residual[np.arange(len(y)), y] -= 1
        residual /= len(y)
        gradients = {"softmax/kernel": _flat(x).T @ residual, "softmax/bias": residual.sum(axis=0)}
        return float(-np.log(chosen).mean()), gradients

    def save(self, path: Path) -> None:
        """Write both weights to an `.npz` file."""
        with atomic_path(path) as partial, partial.open("wb") as file:
            np.savez(file, **self.weights)  # type: ignore[arg-type]


def check_same(arrays: NamedArrays, own: NamedArrays) -> None:
    """Refuse arrays whose names or shapes are not those of the model.

    Raises:
        FederationError: naming the first difference.
    """
    if set(arrays) != set(own):
        odd = sorted(set(arrays) ^ set(own))[0]
        raise FederationError(
            f"array {odd!r} is in only one of the model sent and the model here; are the tasks the same?"
        )
    for name, array in own.items():
        if arrays[name].shape != array.shape:
            raise FederationError(f"array {name!r} must have shape {array.shape}, found {arrays[name].shape}")


def _flat(x: NDArray) -> NDArray:
    return x.reshape(len(x), -1)
