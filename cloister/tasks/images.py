"""Shared parts of the tasks on handwritten characters: pixels, and a network of two convolutions."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.tasks.base import Examples, Model

if TYPE_CHECKING:
    import keras

SHAPE = (28, 28, 1)


def characters(images: NDArray, labels: NDArray, classes: int) -> Examples:
    """Convert images to float32 from 0 to 1, and pair them with labels.

    Args:
        images: shape (n, 28, 28), uint8.
        labels: shape (n,), whole numbers from 0 to `classes` - 1.
        classes: number of classes.

    Returns:
        Examples with inputs of shape (n, 28, 28, 1).

    Raises:
        ValueError: images or labels have another shape, dtype or range.
    """
    if images.shape[1:] != SHAPE[:2] or images.dtype != np.uint8 or labels.dtype.kind not in "iu":
        raise ValueError("not images of 28 by 28 bytes")
    if labels.ndim != 1 or (len(labels) and not (labels.min() >= 0 and labels.max() < classes)):
        raise ValueError("not labels of these classes")
    return Examples(images[..., None].astype(np.float32) / np.float32(255), labels.astype(np.int64))


def read_arrays(path: Path, names: tuple[str, ...]) -> Mapping[str, NDArray]:
    """Read arrays from an `.npz` file, without pickles.

    Args:
        path: of the file.
        names: of the arrays.

    Raises:
        DataError: the file lacks one of these arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in names}
    except (KeyError, ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile):
        raise DataError(f"task.data-path: {path} must be an .npz file with {', '.join(names)}") from None


def two_convolutions(classes: int) -> Model:
    """Return the network 3×3×32, 3×3×64, pool 2, Dense 128.

    It has 1,206,590 parameters with 62 classes (Galli et al., 2023, Table 3). The paper prints kernels of 2×2, but its
    number of parameters implies 3×3.
    """
    from cloister.tasks.keras_model import KerasModel

    return KerasModel(lambda: convolutional_network(classes))


def convolutional_network(classes: int) -> "keras.Model":
    """Return the Keras network of `two_convolutions`."""
    import keras

    return keras.Sequential(
        [
            keras.Input(SHAPE, name="pixels"),
            keras.layers.Conv2D(32, 3, activation="relu", name="conv1"),
            keras.layers.Conv2D(64, 3, activation="relu", name="conv2"),
            keras.layers.MaxPooling2D(2, name="pool"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(128, activation="relu", name="hidden"),
            keras.layers.Dense(classes, activation="softmax", name="output"),
        ],
        name="cnn",
    )
