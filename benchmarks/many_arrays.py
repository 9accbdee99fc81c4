"""A task for `light.py`: softmax regression of digits, whose weights are cut into as many arrays as are asked for."""

import os

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.datasets.characters import Digits
from cloister.tasks.numpy_models import SoftmaxRegression

ARRAYS = "CLOISTER_BENCHMARK_ARRAYS"
"""The environment variable with the number of arrays, two at least."""


class Cut(SoftmaxRegression):
    """Softmax regression; each array but the last holds some rows of the kernel, and the last one the bias."""

    def __init__(self, features: int, classes: int, arrays: int) -> None:
        """Cut the weights."""
        super().__init__(features, classes)
        pieces = np.array_split(self.weights["softmax/kernel"], arrays - 1)
        self.weights = {f"{number:03d}": piece.copy() for number, piece in enumerate([*pieces, np.zeros(classes)])}
        self.weights = {name: array.astype(np.float32) for name, array in self.weights.items()}

    def predict(self, x: NDArray) -> NDArray:
        """Class probabilities of shape (n, classes)."""
        whole, self.weights = self.weights, self._joined(self.weights)
        try:
            return super().predict(x)
        finally:
            self.weights = whole

    def loss_and_gradients(self, x: NDArray, y: NDArray) -> tuple[float, dict[str, NDArray]]:
        """Mean cross-entropy of a batch, and its gradient with respect to each array."""
        loss, found = super().loss_and_gradients(x, y)
        ends = np.cumsum([len(array) for array in list(self.weights.values())[:-1]])[:-1]
        return loss, dict(zip(self.weights, [*np.split(found["softmax/kernel"], ends), found["softmax/bias"]]))

    @staticmethod
    def _joined(weights: dict[str, NDArray]) -> dict[str, NDArray]:
        if "softmax/bias" in weights:
            return weights
        *rows, bias = weights.values()
        return {"softmax/kernel": np.concatenate(rows), "softmax/bias": bias}


class ManyArrays(Digits):
    """Digits with a model of so many arrays."""

    models = ("softmax",)

    def build(self) -> Cut:
        """The model."""
        return Cut(64, 10, int(os.environ[ARRAYS]))
