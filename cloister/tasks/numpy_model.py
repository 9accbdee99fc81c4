"""Base class of models in NumPy: named weights with explicit gradients."""

import zipfile
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError, FederationError
from cloister.core.files import read_npz, write_npz
from cloister.tasks.base import NamedArrays


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
        """Return the predictions for n > 0 inputs, each independent of the others.

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
        """Return a copy of every weight that is neither trained nor sent; none by default."""
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

        The file is read without pickles, and in no more memory than its size.

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
