"""FEMNIST: handwritten characters of 62 classes by writer, as LEAF writes them (Caldas et al., 2018), or as arrays.

Files are local and never downloaded. LEAF makes them from NIST's Special Database 19.
"""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Dataset, Model, Recipe, Task
from cloister.tasks.datasets.characters import SHAPE, characters, read_arrays, rotated_writers, two_convolutions
from cloister.tasks.partition import SPLIT_SEED, numbered
from cloister.utils.errors import DataError
from cloister.utils.files import expanded

ARRAYS = "femnist.npz"
HELD_OUT = 0.1
"""Share of the writers that only test (Galli et al., 2023, §5.3)."""


class Femnist(Task):
    """Digits 0 to 9, capitals 10 to 35, small letters 36 to 61. x is float32 of shape (n, 28, 28, 1), from 0 to 1."""

    recipe = Recipe(local_epochs=1, batch_size=10, learning_rate=0.03)
    partition = "natural"
    classes = 62
    input_shape = SHAPE
    image_shape = SHAPE[:2]
    models = ("cnn", "softmax")
    rotates = True
    public = True

    def load(self) -> Dataset:
        """Return nine tenths of the writers as training data, and one tenth as test data.

        A split of LEAF's own is ignored: in one by sample, test writers train too. Images of the chosen writers are
        rotated: a writer's name decides this, and no other writer.

        Raises:
            DataError: no file is at `task.data-path`, or one has another layout.
        """
        given = expanded(self.config.data_path)
        arrays = given / ARRAYS if given.is_dir() else given
        files = sorted(given.glob("*.json")) or sorted([*given.glob("train/*.json"), *given.glob("test/*.json")])
        if not self.config.data_path or not (files or arrays.is_file()):
            raise DataError(
                f"task.data-path = {self.config.data_path!r} must be a folder with LEAF's .json files, there or in "
                f"train and test, or with {ARRAYS}: x, images of 28 by 28 bytes, y, labels from 0 to 61, and writer"
            )
        images, labels, writers = _leaf(files) if files else _arrays(arrays)
        try:
            examples = characters(images, labels, self.classes)
        except ValueError:
            raise DataError(f"task.data-path: {given} must hold images of 28 by 28 and labels from 0 to 61") from None
        names, places = np.unique(writers, return_inverse=True)
        if len(names) < 2:
            raise DataError(f"task.data-path: {given} has images of {len(names)} writers; a federation needs two")
        ids = np.array([zlib.crc32(str(name).encode()) for name in names])[places]
        turned = np.isin(ids, rotated_writers(ids, self.config.rotated_fraction))
        examples.x[turned] = np.rot90(examples.x[turned], axes=(1, 2))
        numbers, held = numbered(places, np.random.default_rng(SPLIT_SEED)), max(1, round(HELD_OUT * len(names)))
        train, test = np.flatnonzero(numbers >= held), np.flatnonzero(numbers < held)
        return Dataset(
            examples.take(train),
            examples.take(test),
            owners=numbers[train] - held,
            test_owners=numbers[test],
            groups={"writer": writers[train]},
        )

    def build(self) -> Model:
        """Return the network of two convolutions (1,206,590 parameters), or softmax regression without TensorFlow."""
        if self.model_name == "cnn":
            return two_convolutions(self.classes)
        from cloister.tasks.numpy_models import SoftmaxRegression

        return SoftmaxRegression(features=28 * 28, classes=self.classes)


def _leaf(files: Sequence[Path]) -> tuple[NDArray, NDArray, NDArray]:
    """Read images, labels and writers of files of LEAF: `{"user_data": {name: {"x": [[784 numbers]], "y": [class]}}}`.

    LEAF divides bytes by 255. This makes bytes of them again.

    Raises:
        DataError: a file has another layout.
    """
    images, labels, writers = [], [], []
    for path in files:
        try:
            for name, own in json.loads(path.read_text(encoding="utf-8"))["user_data"].items():
                shares, classes = np.array(own["x"], float).reshape(-1, 28, 28), np.array(own["y"])
                if len(shares) != len(classes) or not ((shares >= 0) & (shares <= 1)).all():
                    raise ValueError
                images.append(np.rint(255 * shares).astype(np.uint8))
                labels.append(classes.astype(np.int64, casting="safe") if len(classes) else np.empty(0, np.int64))
                writers += [name] * len(classes)
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            raise DataError(
                f"task.data-path: {path} must be LEAF's JSON: user_data has for each writer x, lists of 784 numbers "
                "from 0 to 1, and y, as many labels"
            ) from None
    if not images:
        return np.empty((0, 28, 28), np.uint8), np.empty(0, np.int64), np.empty(0, str)
    return np.concatenate(images), np.concatenate(labels), np.array(writers, str)


def _arrays(path: Path) -> tuple[NDArray, NDArray, NDArray]:
    """Read images, labels and writers of an `.npz` file.

    Raises:
        DataError: an array is missing, or there is not one writer for each image.
    """
    found = read_arrays(path, ("x", "y", "writer"))
    writers = found["writer"]
    if not writers.shape == found["y"].shape == found["x"].shape[:1] or writers.dtype.kind not in "iuU":
        raise DataError(f"task.data-path: {path} must hold a label y and a writer, number or text, for each image of x")
    return found["x"], found["y"], writers
