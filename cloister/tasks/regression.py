"""Regression in NumPy: a linear map, and a network with one hidden layer. The loss is the mean squared error."""

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.numpy_model import NumpyModel


class LinearRegression(NumpyModel):
    """Predictions x·θ without an intercept; θ starts from N(0, 1) (Galli et al., 2023, §5.1).

    Args:
        features: inputs per example.
    """

    def __init__(self, features: int) -> None:
        self.weights: dict[str, NDArray] = {"linear/kernel": np.zeros(features, np.float32)}

    def initialise(self, seed: int) -> None:
        """Draw new weights from N(0, 1)."""
        theta = self.weights["linear/kernel"]
        theta[:] = np.random.default_rng(seed).standard_normal(theta.shape)

    def predict(self, x: NDArray) -> NDArray:
        """Return predictions of shape (n,)."""
        return x @ self.weights["linear/kernel"]

    def loss_and_gradients(self, x: NDArray, y: NDArray) -> tuple[float, dict[str, NDArray]]:
        """Return the mean squared error of a batch, and its gradient with respect to θ.

        Args:
            x: n inputs, shape (n, features).
            y: their targets, shape (n,).
        """
        residual = self.predict(x) - y
        return float(np.square(residual).mean()), {"linear/kernel": 2 / len(y) * (x.T @ residual)}


class HiddenLayerRegression(NumpyModel):
    """Predictions relu(x·V + a)·w + b: a network with one hidden layer.

    Args:
        features: inputs per example.
        hidden: units of the hidden layer.
    """

    def __init__(self, features: int, hidden: int) -> None:
        self.weights: dict[str, NDArray] = {
            "hidden/kernel": np.zeros((features, hidden), np.float32),
            "hidden/bias": np.zeros(hidden, np.float32),
            "output/kernel": np.zeros(hidden, np.float32),
            "output/bias": np.zeros(1, np.float32),
        }

    def initialise(self, seed: int) -> None:
        """Draw weights and biases uniformly within ±1/√(inputs of the unit)."""
        rng = np.random.default_rng(seed)
        features, hidden = self.weights["hidden/kernel"].shape
        for name, array in self.weights.items():
            limit = (features if name.startswith("hidden") else hidden) ** -0.5
            array[:] = rng.uniform(-limit, limit, array.shape)

    def predict(self, x: NDArray) -> NDArray:
        """Return predictions of shape (n,)."""
        return self._activity(x) @ self.weights["output/kernel"] + self.weights["output/bias"]

    def loss_and_gradients(self, x: NDArray, y: NDArray) -> tuple[float, dict[str, NDArray]]:
        """Return the mean squared error of a batch, and its gradient."""
        active = self._activity(x)
        residual = active @ self.weights["output/kernel"] + self.weights["output/bias"] - y
        slope = residual * np.float32(2 / len(y))
        back = np.where(active > 0, slope[:, None] * self.weights["output/kernel"], np.float32(0))
        gradients = {
            "hidden/kernel": x.T @ back,
            "hidden/bias": back.sum(axis=0),
            "output/kernel": slope @ active,
            "output/bias": slope.sum(keepdims=True),
        }
        return float(np.square(residual).mean()), gradients

    def _activity(self, x: NDArray) -> NDArray:
        """Return the outputs of the hidden units, shape (n, hidden)."""
        return np.maximum(x @ self.weights["hidden/kernel"] + self.weights["hidden/bias"], 0)
