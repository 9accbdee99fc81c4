"""Models in NumPy, which start without TensorFlow: softmax regression, linear regression, one hidden layer."""

import zipfile
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import NamedArrays
from cloister.utils.errors import DataError, FederationError
from cloister.utils.files import read_npz, write_npz


class NumpyModel(ABC):
    """Model that starts without TensorFlow, for tables and quick runs.

    Attributes:
        weights: float32 arrays by name, changed in place by training.
    """

    kind = "numpy"
    suffix = ".npz"
    weights: dict[str, NDArray]

    @abstractmethod
    def initialise(self, seed: int) -> None:
        """Draw new initial weights; equal seeds give equal weights."""

    @abstractmethod
    def predict(self, x: NDArray) -> NDArray:
        """Return the predictions for inputs.

        They are class probabilities of shape (n, classes), or the numbers of a regression, of shape (n,).
        """

    def predict_alone(self, x: NDArray) -> NDArray:
        """Return the predictions for n > 0 inputs, each computed by itself.

        To the last bit, the output for a row depends on that row and the weights only.
        """
        # One row per call, always in the same memory: kernels depend on the number of rows, and may on alignment.
        row, outputs = np.empty((1, *x.shape[1:]), x.dtype), []
        for values in x:
            row[0] = values
            outputs.append(np.array(self.predict(row)))
        return np.concatenate(outputs)

    @abstractmethod
    def loss_and_gradients(self, x: NDArray, y: NDArray) -> tuple[float, dict[str, NDArray]]:
        """Return the mean loss of a batch, and its gradient with respect to every weight.

        Args:
            x: a batch of n inputs, shape (n, ...).
            y: its targets, shape (n,).

        Returns:
            The loss, and for each weight by name an array of its shape.
        """

    def arrays(self) -> dict[str, NDArray]:
        """Return a copy of every weight."""
        return {name: array.copy() for name, array in self.weights.items()}

    def frozen(self) -> dict[str, NDArray]:
        """Return copies of the frozen weights, by default none. They are neither trained nor sent."""
        return {}

    def assign(self, arrays: NamedArrays) -> None:
        """Replace every weight.

        Raises:
            FederationError: names or shapes are not this model's.
        """
        check_same(arrays, self.weights)
        for name, array in self.weights.items():
            array[:] = arrays[name]

    def save(self, path: Path) -> None:
        """Write the weights to an `.npz` file."""
        write_npz(path, self.weights)

    def load(self, path: Path) -> None:
        """Replace every weight by those in a file that `save` wrote.

        Reading loads no pickles.

        Raises:
            DataError: the file is no archive of arrays.
            FederationError: names or shapes are not this model's.
        """
        try:
            arrays = read_npz(path)
        except (ValueError, TypeError, AttributeError, EOFError, OSError, zipfile.BadZipFile):
            raise DataError(f"{path} holds no model: an .npz file of its weights was expected") from None
        try:
            self.assign(arrays)
        except FederationError as error:
            raise FederationError(f"{path}: {error}") from None


def check_same(arrays: NamedArrays, own: NamedArrays) -> None:
    """Refuse arrays whose names or shapes differ from the model's.

    Args:
        arrays: to be assigned.
        own: the model's.

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


def flat(x: NDArray) -> NDArray:
    """Reshape inputs of shape (n, ...) to (n, features)."""
    return x.reshape(len(x), -1)


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

    def factors_alone(self, x: NDArray, y: NDArray) -> tuple[NDArray, NDArray]:
        """Return the factors a and e of each example's gradient: a·eᵀ for the kernel, e for the bias.

        Args:
            x: n inputs, shape (n, ...).
            y: their labels, shape (n,).

        Returns:
            The inputs, shape (n, features), and probabilities less the label's indicator, shape (n, classes). To the
            last bit, a row depends on that example and the weights only. A label that is no class has NaN.
        """
        features, classes = self.weights["softmax/kernel"].shape
        errors = self.predict_alone(x) if len(x) else np.empty((0, classes), np.float32)
        known = (y >= 0) & (y < classes)
        errors[np.arange(len(y)), np.where(known, y, 0).astype(np.intp)] -= 1
        errors[~known] = np.nan
        return x.reshape(len(x), features), errors


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
