"""A Keras model as the federation sees it. Importing this module does not import Keras; making a model does."""

import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError, FederationError
from cloister.core.files import atomic_path
from cloister.core.model_state import is_seed, sent_weights
from cloister.core.tensors import Compiled, Network, Tensor, Variable
from cloister.tasks.backend import import_keras
from cloister.tasks.base import Loss, NamedArrays
from cloister.tasks.numpy_model import check_same

PREDICT_BATCH = 1024
WEIGHTS = "model.weights.h5"
"""The part of a `.keras` file that holds the weights."""


class KerasModel:
    """A model whose weights travel by Keras' variable paths, not by position.

    The weights of layers with `trainable = False` are frozen: they do not travel, and are what `build` makes them.

    Args:
        build: makes the uncompiled model; its last layer gives class probabilities, or one number for a regression.
        loss: what training makes small.
        predict_batch: examples that `predict` scores at once: what layers make of them has to fit into memory.

    Attributes:
        keras: the Keras model.
        variables: its weights by path, in Keras' order, but for the frozen ones. Some may not be trained, such as the
            statistics of batch normalisation.

    Raises:
        FederationError: two weights have the same path.
    """

    kind = "keras"
    suffix = ".keras"

    def __init__(
        self, build: Callable[[], Network], loss: Loss = "cross-entropy", predict_batch: int = PREDICT_BATCH
    ) -> None:
        self._build = build
        self.loss: Loss = loss
        self._predict_batch = predict_batch
        self.keras = _fresh(build)
        if len({weight.path for weight in self.keras.weights}) != len(self.keras.weights):
            raise FederationError("two weights of the model have the same path; give its layers different names")
        self.variables = {weight.path: weight for weight in sent_weights(self.keras)}
        self._frozen = {weight.path: weight for weight in self.keras.weights if weight.path not in self.variables}
        self._forward: Compiled | None = None
        self._forward_alone: Compiled | None = None

    def initialise(self, seed: int) -> None:
        """New initial weights, the same for the same seed; frozen ones stay."""
        import_keras().utils.set_random_seed(seed)
        fresh = {weight.path: weight for weight in _fresh(self._build).weights}
        for path, variable in self.variables.items():
            variable.assign(fresh[path])

    def arrays(self) -> dict[str, NDArray]:
        """A copy of every weight that is sent, by path."""
        return _copied(self.variables)

    def frozen(self) -> dict[str, NDArray]:
        """A copy of every weight of a frozen layer, by path."""
        return _copied(self._frozen)

    def assign(self, arrays: NamedArrays) -> None:
        """Replace every weight that is sent.

        Raises:
            FederationError: names or shapes are not this model's.
        """
        check_same(arrays, self.variables)
        for path, variable in self.variables.items():
            variable.assign(arrays[path])

    def reseed(self, seed: int) -> None:
        """Set what dropout and its like draw from, so that a round does not depend on the rounds before it."""
        weights = {id(weight) for weight in self.keras.weights}
        states = [variable for variable in self.keras.variables if id(variable) not in weights]
        for number, state in enumerate(filter(is_seed, states)):
            state.assign(np.array([(seed + number) % 2**31, 0], state.dtype))

    def predict(self, x: NDArray) -> NDArray:
        """Class probabilities of shape (n, classes), or the predicted numbers of a regression, of shape (n,)."""
        if self._forward is None:
            self._forward = self._compile(self._at_once)
        size = self._predict_batch
        pieces = [self._forward(x[start : start + size]).numpy() for start in range(0, len(x), size)]
        return self._shaped(np.concatenate(pieces))

    def predict_alone(self, x: NDArray) -> NDArray:
        """As `predict`, for n > 0; what a row gets depends, to the last bit, on that row and the weights alone."""
        if self._forward_alone is None:
            self._forward_alone = self._compile(self._one_by_one)
        return self._shaped(self._forward_alone(x).numpy())

    def _shaped(self, outputs: NDArray) -> NDArray:
        return outputs if self.loss == "cross-entropy" else outputs.reshape(len(outputs))

    def _at_once(self, x: Tensor) -> Tensor:
        return self.keras(x, training=False)

    def _one_by_one(self, x: Tensor) -> Tensor:
        """A loop of calls of one row: in a graph, as a call from Python takes eight times as long as a small model."""
        import tensorflow as tf

        (output,) = self.keras.outputs
        like = tf.TensorSpec(output.shape[1:], output.dtype)
        return tf.map_fn(lambda row: self._at_once(row[None])[0], x, parallel_iterations=1, fn_output_signature=like)

    def _compile(self, forward: Compiled) -> Compiled:
        import tensorflow as tf

        (spec,) = self.keras.inputs
        shape = tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        return tf.function(forward, input_signature=[shape])

    def save(self, path: Path) -> None:
        """Write the model in Keras' own format."""
        with atomic_path(path) as partial:
            self.keras.save(partial)

    def load(self, path: Path) -> None:
        """Replace every weight by what `save` wrote. Only weights are read: nothing in the file is run.

        Raises:
            DataError: the file holds no model of this architecture, or weights that are larger than the file.
        """
        try:
            _refuse_larger(path)
            self.keras.load_weights(path)
        except (ValueError, TypeError, KeyError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error):
            raise DataError(f"{path} holds no model of this task: a .keras file of it was expected") from None


def _refuse_larger(path: Path) -> None:
    """Raises ValueError if weights are larger than their file: those that `save` wrote are not compressed."""
    import h5py  # Keras' own reader

    sizes = [0]

    def note(_: str, item: h5py.Dataset | h5py.Group) -> None:
        sizes.append(item.nbytes if isinstance(item, h5py.Dataset) else 0)

    with zipfile.ZipFile(path) as archive, archive.open(WEIGHTS) as member, h5py.File(member, "r") as weights:
        weights.visititems(note)
    if max(sizes) > path.stat().st_size:
        raise ValueError("the weights are larger than the file")


def _fresh(build: Callable[[], Network]) -> Network:
    """A new model whose automatic names do not depend on what this process built before."""
    import_keras().utils.clear_session(free_memory=False)
    return build()


def _copied(variables: Mapping[str, Variable]) -> dict[str, NDArray]:
    return {path: np.array(variable.numpy()) for path, variable in variables.items()}
