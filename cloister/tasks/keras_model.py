"""Keras models for the federation. Keras is imported when a model is made, not when this module is imported."""

import logging
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Loss, NamedArrays
from cloister.tasks.numpy_models import check_same
from cloister.utils.arrays import Compiled, Network, Tensor, Variable, is_seed, sent_weights
from cloister.utils.errors import DataError, FederationError
from cloister.utils.files import atomic_path, quiet_libraries


def import_keras() -> ModuleType:
    """Import and return `keras` with the TensorFlow backend."""
    if "keras" not in sys.modules:
        with quiet_libraries():
            import tensorflow  # noqa: F401
    import keras

    log = logging.getLogger("tensorflow")
    if log.level == logging.NOTSET:  # else its user has chosen what it shows
        log.setLevel(logging.ERROR)
    return keras


PREDICT_BATCH = 1024
WEIGHTS = "model.weights.h5"
"""Member of a `.keras` file that contains the weights."""


class KerasModel:
    """Model whose weights are identified by Keras' variable paths, not by position.

    The weights of layers with `trainable = False` are frozen: they are not sent and keep the values that `build` gives.

    Args:
        build: makes the uncompiled model; its last layer returns class probabilities, or one number for a regression.
        loss: of training.
        predict_batch: examples that `predict` scores at once; the activations of a batch must fit into memory.

    Attributes:
        keras: the Keras model.
        variables: the weights that are sent, by path, in Keras' order. Some may not be trained, such as the statistics
            of batch normalisation.

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
        """Draw new initial weights; equal seeds give equal weights. Frozen weights stay."""
        import_keras().utils.set_random_seed(seed)
        fresh = {weight.path: weight for weight in _fresh(self._build).weights}
        for path, variable in self.variables.items():
            variable.assign(fresh[path])

    def arrays(self) -> dict[str, NDArray]:
        """Return a copy of every weight that is sent, by path."""
        return _copied(self.variables)

    def frozen(self) -> dict[str, NDArray]:
        """Return a copy of every weight of a frozen layer, by path."""
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
        """Set the seeds of dropout and similar layers.

        So a round is independent of earlier rounds.
        """
        weights = {id(weight) for weight in self.keras.weights}
        states = [variable for variable in self.keras.variables if id(variable) not in weights]
        for number, state in enumerate(filter(is_seed, states)):
            state.assign(np.array([(seed + number) % 2**31, 0], state.dtype))

    def predict(self, x: NDArray) -> NDArray:
        """Return the predictions for inputs.

        They are class probabilities of shape (n, classes), or the numbers of a regression, of shape (n,).
        """
        if self._forward is None:
            self._forward = self._compile(self._at_once)
        size = self._predict_batch
        pieces = [self._forward(x[start : start + size]).numpy() for start in range(0, len(x), size)]
        return self._shaped(np.concatenate(pieces))

    def predict_alone(self, x: NDArray) -> NDArray:
        """Return the predictions for n > 0 inputs, each independent of the others.

        To the last bit, the output for a row depends on that row and the weights only.
        """

        def one_by_one(x: Tensor) -> Tensor:
            # Inside the graph: for a small model, calls from Python take eight times as long.
            import tensorflow as tf

            (output,) = self.keras.outputs
            like = tf.TensorSpec(output.shape[1:], output.dtype)
            return tf.map_fn(
                lambda row: self._at_once(row[None])[0], x, parallel_iterations=1, fn_output_signature=like
            )

        if self._forward_alone is None:
            self._forward_alone = self._compile(one_by_one)
        return self._shaped(self._forward_alone(x).numpy())

    def _shaped(self, outputs: NDArray) -> NDArray:
        return outputs if self.loss == "cross-entropy" else outputs.reshape(len(outputs))

    def _at_once(self, x: Tensor) -> Tensor:
        return self.keras(x, training=False)

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
        """Replace every weight by those in a file that `save` wrote.

        Only weights are read: no code of the file is run.

        Raises:
            DataError: the file contains no model of this architecture, or weights that are larger than the file.
        """
        import h5py  # Keras' own reader

        sizes = [0]

        def note(_: str, item: h5py.Dataset | h5py.Group) -> None:
            sizes.append(item.nbytes if isinstance(item, h5py.Dataset) else 0)

        try:
            # `save` writes weights uncompressed.
            with zipfile.ZipFile(path) as archive, archive.open(WEIGHTS) as member, h5py.File(member, "r") as weights:
                weights.visititems(note)
            if max(sizes) > path.stat().st_size:
                raise ValueError("the weights are larger than the file")
            self.keras.load_weights(path)
        except (ValueError, TypeError, KeyError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error):
            raise DataError(f"{path} holds no model of this task: a .keras file of it was expected") from None


def _fresh(build: Callable[[], Network]) -> Network:
    """Return a new model with reproducible automatic names.

    They are independent of models built earlier in this process.
    """
    import_keras().utils.clear_session(free_memory=False)
    return build()


def _copied(variables: Mapping[str, Variable]) -> dict[str, NDArray]:
    return {path: np.array(variable.numpy()) for path, variable in variables.items()}
