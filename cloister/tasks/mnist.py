"""MNIST: 70,000 handwritten digits of 28×28 pixels, read from a local file and never downloaded."""

import os
import zipfile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.core.files import expanded
from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task

if TYPE_CHECKING:
    import keras

REMEDY = (
    "set task.data-path to an mnist.npz file in Keras' layout or to its folder, or run "
    "keras.datasets.mnist.load_data() once on a machine with a network"
)


class Mnist(Task):
    """Ten classes. x is float32 of shape (n, 28, 28, 1), grey values from 0 to 1."""

    recipe = Recipe(local_epochs=10, batch_size=10, learning_rate=0.03)
    classes = 10
    input_shape = (28, 28, 1)
    image_shape = (28, 28)
    models = ("mlp", "cnn", "softmax")
    public = True

    def load(self) -> Dataset:
        """Return the published split: 60,000 training images and 10,000 test images.

        The file is at `task.data-path`; if that is empty, in Keras' cache.
        """
        if self.config.data_path:
            given = expanded(self.config.data_path)
            path = given / "mnist.npz" if given.is_dir() else given
        else:
            path = expanded(os.environ.get("KERAS_HOME") or "~/.keras") / "datasets" / "mnist.npz"
        if not path.is_file():
            raise DataError(f"task.data-path = {self.config.data_path!r}: no file at {path}; {REMEDY}")
        try:
            with np.load(path, allow_pickle=False) as archive:
                train = _mnist_examples(archive["x_train"], archive["y_train"])
                return Dataset(train, _mnist_examples(archive["x_test"], archive["y_test"]))
        except (KeyError, ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"task.data-path: {path} must be an .npz file with x_train, y_train, x_test and y_test as Keras "
                "publishes them: images of 28 by 28 bytes, labels from 0 to 9"
            ) from error

    def build(self) -> Model:
        """Return the network that `task.model` names.

        `mlp` has 1,000 hidden units (795,010 parameters), `cnn` two convolutions (1,663,370), `softmax` 7,850
        parameters.
        """
        if self.model_name == "softmax":
            from cloister.tasks.softmax import SoftmaxRegression

            return SoftmaxRegression(features=28 * 28, classes=10)
        from cloister.tasks.keras_model import KerasModel

        return KerasModel(mnist_cnn if self.model_name == "cnn" else mnist_mlp)


def _mnist_examples(images: NDArray, labels: NDArray) -> Examples:
    """Convert images and labels; raise ValueError for another shape, dtype or range."""
    if images.shape[1:] != (28, 28) or images.dtype != np.uint8 or not np.isin(labels, range(10)).all():
        raise ValueError("not MNIST")
    return Examples(images[..., None].astype(np.float32) / np.float32(255), labels.astype(np.int64))


def mnist_mlp() -> "keras.Model":
    """Return a network with 1,000 hidden units."""
    import keras

    return keras.Sequential(
        [
            keras.Input((28, 28, 1), name="pixels"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(1000, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", name="output"),
        ],
        name="mlp",
    )


def mnist_cnn() -> "keras.Model":
    """Return a network of two convolutions."""
    import keras

    return keras.Sequential(
        [
            keras.Input((28, 28, 1), name="pixels"),
            keras.layers.Conv2D(32, 5, padding="same", activation="relu", name="conv1"),
            keras.layers.MaxPooling2D(2, name="pool1"),
            keras.layers.Conv2D(64, 5, padding="same", activation="relu", name="conv2"),
            keras.layers.MaxPooling2D(2, name="pool2"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(512, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", name="output"),
        ],
        name="cnn",
    )
