"""Handwritten characters: digits of scikit-learn, MNIST with and without its writers, EMNIST ByClass, FEMNIST.

Files are local and never downloaded. Rotating the images of some writers by 90° makes two populations, which two
models fit better than one (Galli et al., 2023, §5.3; Ghosh et al., 2020).

LEAF makes the files of FEMNIST from NIST's Special Database 19 (Caldas et al., 2018).
"""

import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task
from cloister.tasks.partition import SPLIT_SEED, holdout, numbered
from cloister.utils.errors import DataError
from cloister.utils.files import expanded

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


class Digits(Task):
    """Ten classes. x is float32 of shape (n, 64), grey values from 0 to 1."""

    recipe = Recipe(local_epochs=5, batch_size=16, learning_rate=0.3)
    classes = 10
    input_shape = (64,)
    image_shape = (8, 8)
    models = ("mlp", "softmax")
    public = True
    bundled = True

    def load(self) -> Dataset:
        """Return four fifths of each class as training data and one fifth as test data."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        examples = Examples((pixels / 16).astype(np.float32), labels.astype(np.int64))
        train, test = holdout(examples.y, 0.2, np.random.default_rng(SPLIT_SEED))
        return Dataset(examples.take(train), examples.take(test))

    def build(self) -> Model:
        """Return a network with one hidden layer, or softmax regression.

        Softmax regression needs no TensorFlow.
        """
        if self.model_name == "softmax":
            from cloister.tasks.numpy_models import SoftmaxRegression

            return SoftmaxRegression(features=64, classes=10)
        from cloister.tasks.keras_model import KerasModel

        return KerasModel(digits_mlp)


def digits_mlp() -> "keras.Model":
    """Return a network with one hidden layer."""
    import keras

    return keras.Sequential(
        [
            keras.Input((64,), name="pixels"),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", name="output"),
        ],
        name="mlp",
    )


class Characters(Task):
    """Images of 28 by 28: x is float32 of shape (n, 28, 28, 1), grey values from 0 to 1."""

    classes = 10
    input_shape = SHAPE
    image_shape = SHAPE[:2]
    models: ClassVar[tuple[str, ...]] = ("cnn", "softmax")

    def build(self) -> Model:
        """Return softmax regression, which needs no TensorFlow, or the network of two convolutions.

        The network has `classes` outputs, or 62 as in the paper.
        """
        if self.model_name == "softmax":
            from cloister.tasks.numpy_models import SoftmaxRegression

            return SoftmaxRegression(features=28 * 28, classes=self.classes)
        return two_convolutions(62 if self.model_name == "cnn-62" else self.classes)


REMEDY = (
    "set task.data-path to an mnist.npz file in Keras' layout or to its folder, or run "
    "keras.datasets.mnist.load_data() once on a machine with a network"
)


class Mnist(Characters):
    """Ten digits."""

    recipe = Recipe(local_epochs=10, batch_size=10, learning_rate=0.03)
    public = True
    models = ("mlp", "cnn", "softmax")

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
                train = characters(archive["x_train"], archive["y_train"], self.classes)
                return Dataset(train, characters(archive["x_test"], archive["y_test"], self.classes))
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
            return super().build()
        from cloister.tasks.keras_model import KerasModel

        return KerasModel(mnist_cnn if self.model_name == "cnn" else mnist_mlp)


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


EMNIST_FILE = "emnist_byclass_test.npz"


class Emnist(Characters):
    """Digits 0 to 9, capitals 10 to 35, small letters 36 to 61."""

    recipe = Recipe(local_epochs=1, batch_size=32, learning_rate=0.05)
    public = True
    classes = 62

    def load(self) -> Dataset:
        """Return four fifths of each class as training data and one fifth as test data.

        The images are those of the published ByClass test split.
        """
        given = expanded(self.config.data_path)
        path = given / EMNIST_FILE if given.is_dir() else given
        if not self.config.data_path or not path.is_file():
            raise DataError(
                f"task.data-path = {self.config.data_path!r} must be an .npz file, or a folder with {EMNIST_FILE}, "
                "that holds the ByClass test split of EMNIST: upright images x of shape (n, 28, 28) in bytes, and "
                "labels y from 0 to 61"
            )
        arrays = read_arrays(path, ("x", "y"))
        images, labels = arrays["x"], arrays["y"]
        try:
            train, test = holdout(labels, 0.2, np.random.default_rng(SPLIT_SEED))
            return Dataset(
                characters(images[train], labels[train], self.classes),
                characters(images[test], labels[test], self.classes),
            )
        except (ValueError, IndexError):
            raise DataError(
                f"task.data-path: {path} must hold x, images of 28 by 28 bytes, and y, labels from 0 to 61"
            ) from None


IMAGES = "mnist.npz"
WRITERS = "mnist_writer_ids.npz"
ORDER_SEED, TURN_SEED = 0, 0
"""Constants, so that a writer has the same number and rotation in every run."""


class MnistWriters(Characters):
    """Ten digits. The writers of the test images train nothing."""

    recipe = Recipe(local_epochs=1, batch_size=10, learning_rate=0.03)
    public = True
    partition = "natural"
    models = ("cnn", "cnn-62", "softmax")
    rotates = True

    def load(self) -> Dataset:
        """Return 60,000 training images of 539 writers and 10,000 test images of 297."""
        images, writers = _below(self.config.data_path, IMAGES), _below(self.config.data_path, WRITERS)
        train, owners = self._part(images, writers, "train")
        test, test_owners = self._part(images, writers, "test")
        return Dataset(train, test, owners, test_owners, groups={"writer": owners})

    def _part(self, images: Path, writers: Path, part: str) -> tuple[Examples, NDArray]:
        """Return one half of the published split, and the writer of each image.

        Images of the chosen writers are rotated.
        """
        arrays = read_arrays(images, (f"x_{part}", f"y_{part}"))
        owners = read_arrays(writers, (f"{part}_writer",))[f"{part}_writer"]
        try:
            examples = characters(arrays[f"x_{part}"], arrays[f"y_{part}"], self.classes)
        except (ValueError, DataError):
            raise DataError(
                f"task.data-path: {images} must hold images of 28 by 28 bytes and labels from 0 to 9"
            ) from None
        if owners.shape != examples.y.shape or owners.dtype.kind not in "iu" or (owners < 0).any():
            raise DataError(f"task.data-path: {writers} must name the writer of each of {len(examples)} {part} images")
        turned = np.isin(owners, rotated_writers(owners, self.config.rotated_fraction))
        examples.x[turned] = np.rot90(examples.x[turned], axes=(1, 2))
        return examples, numbered(owners, np.random.default_rng(ORDER_SEED))


def rotated_writers(owners: NDArray, fraction: float) -> NDArray:
    """Draw the writers whose images are rotated by 90° counter-clockwise.

    Each writer is drawn independently, with probability `fraction`. A writer who is drawn at one fraction is drawn at
    every larger one.

    Args:
        owners: the writer of each of n images, shape (n,).
        fraction: from 0 to 1.

    Returns:
        The numbers of the drawn writers, in rising order.
    """
    return np.array([w for w in np.unique(owners) if np.random.default_rng([TURN_SEED, w]).random() < fraction], int)


def _below(data_path: str, name: str) -> Path:
    """Find a file in the folder `task.data-path`, or one folder below."""
    folder = expanded(data_path)
    found = [*folder.glob(name), *sorted(folder.glob(f"*/{name}"))] if data_path else []
    if not found:
        raise DataError(
            f"task.data-path = {data_path!r} must be a folder with {IMAGES}, in Keras' layout, and {WRITERS}, with "
            f"train_writer and test_writer in MNIST's order (from QMNIST), there or one folder below; found no {name}"
        )
    return found[0]


ARRAYS = "femnist.npz"
HELD_OUT = 0.1
"""Share of the writers that only test (Galli et al., 2023, §5.3)."""


class Femnist(Characters):
    """Digits 0 to 9, capitals 10 to 35, small letters 36 to 61."""

    recipe = Recipe(local_epochs=1, batch_size=10, learning_rate=0.03)
    public = True
    partition = "natural"
    classes = 62
    rotates = True

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
