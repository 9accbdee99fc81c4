"""Brain scans of people with and without Alzheimer's disease: the task of the metric-aware federation.

Source: J. Sáinz-Pardo Díaz et al., metric-privacy for federated learning: §7.1 (data), §7.2 (model), tables 1, 2, 3, 9.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.config.run import TaskConfig
from cloister.core.errors import DataError
from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task
from cloister.tasks.partition import holdout, table
from cloister.tasks.pictures.cache import decoded
from cloister.tasks.pictures.find import find_pictures
from cloister.tasks.pictures.picture import Source, class_named, labels_of
from cloister.tasks.scores import macro_figures
from cloister.tasks.validation import halves

if TYPE_CHECKING:
    import keras

CLASSES = ("Mild_Demented", "Moderate_Demented", "Non_Demented", "Very_Mild_Demented")
"""In the order of their numbers."""
IMAGE_SIZE = 128
SPLIT_SEED = 0
"""Fixed here, not configured: every run of every strategy is scored on the same images."""
PUBLISHED, PUBLISHED_TEST = (896, 64, 3200, 2240), (172, 15, 634, 459)
"""Images of each class in the published set, and in its test part (table 1)."""
TABLES = {
    "table-2": ((181, 12, 641, 446), (181, 12, 642, 445), (181, 12, 642, 445), (181, 13, 641, 445)),
    "table-3": ((280, 16, 881, 615), (107, 13, 368, 280), (257, 17, 1054, 720), (80, 3, 263, 166)),
    "table-9": ((120, 9, 1122, 496), (180, 11, 894, 506), (524, 29, 550, 779)),
}
"""Images of each class for each client: homogeneous, non-i.i.d., and of the client inference attack."""
PREDICT_BATCH = 64
"""The first convolution makes two megabytes of an image of 128 by 128."""
NAMED = 10
"""Damaged files that a message names."""
logger = logging.getLogger("cloister.tasks")


class AlzheimerMri(Task):
    """Four classes; x is float32 of shape (n, size, size, 1), from 0 to 1, mapped from a cache on the disk."""

    recipe = Recipe(local_epochs=5, batch_size=32, learning_rate=0.001, optimizer="adam")
    classes = len(CLASSES)
    class_names = CLASSES
    models = ("cnn",)
    tables = TABLES
    decodes = True
    public = True

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        self.size = IMAGE_SIZE if config.image_size == "auto" else config.image_size
        self.input_shape = (self.size, self.size, 1)
        self.image_shape = (self.size, self.size)

    def load(self) -> Dataset:
        """The published split, or where there is none one of the same sizes; half of its test part is for validation.

        Of a set of other sizes without a split, a fifth of each class is the test part.
        """
        path = self.config.data_path
        if not path:
            raise DataError("task.data-path = '' must be a folder of images, or a parquet file, of the four classes")
        try:
            source = find_pictures(Path(path).expanduser(), CLASSES)
            self.checked_targets(labels_of(source), source.root)
            train, validation, test = self._sound(source, _split(source))
        except DataError as error:
            raise DataError(f"task.data-path: {str(error).removeprefix('data-path: ')}") from None
        return Dataset(train, test, validation=validation)

    def read(self, path: Path) -> Examples:
        """A node's own data, as `rows` reads it; damaged images are left out where `task.skip-damaged` says so.

        Raises:
            DataError: there are no such images, or damaged ones.
        """
        if path.suffix.lower() == ".npz":
            return super().read(path)
        source = self._own(path)
        (examples,) = self._sound(source, [np.arange(len(source.pictures))])
        return self.checked(examples, path)

    def rows(self, path: Path) -> Examples:
        """A node's own data: a folder with a folder per class, parquet files, or an `.npz` file in the units above.

        A damaged image is NaN.

        Raises:
            DataError: there are no such images.
        """
        if path.suffix.lower() == ".npz":
            return super().rows(path)
        source = self._own(path)
        return Examples(decoded(source, self.size, range(len(source.pictures))), labels_of(source))

    def label_of_folder(self, name: str) -> int | None:
        """The class of the images in a folder of this name: that of the task, however it is written."""
        return class_named(name, CLASSES)

    def build(self) -> Model:
        """The published network: three convolutions and two hidden layers, 6,517,476 parameters for 128 by 128."""
        from cloister.tasks.keras_model import KerasModel

        return KerasModel(lambda: _cnn(self.input_shape), predict_batch=PREDICT_BATCH)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Loss, accuracy, and the figures that the paper reports beside them.

        Args:
            y: shape (n,).
            scores: what the model predicts, class probabilities, shape (n, 4).
        """
        return super().metrics(y, scores) | macro_figures(y, scores)

    def _own(self, path: Path) -> Source:
        self.refuse_groups(path)
        try:
            return find_pictures(path, CLASSES)
        except DataError as error:
            raise DataError(f"data-path: {error}") from None

    def _sound(self, source: Source, parts: Sequence[NDArray[np.intp]]) -> list[Examples]:
        """The images of each part, as far as they can be decoded.

        Raises:
            DataError: one cannot, and `task.skip-damaged` does not say to leave it out.
        """
        order = np.concatenate(parts)
        pixels, labels = decoded(source, self.size, order), labels_of(source)[order]
        damaged = np.isnan(pixels[:, 0, 0, 0])
        if damaged.any():
            self._tell([source.pictures[number].name for number in np.sort(order[damaged])], source)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        pieces = zip(np.split(pixels, ends), np.split(labels, ends), np.split(~damaged, ends), strict=True)
        # What is whole stays mapped; taking rows copies them.
        return [Examples(x, y) if good.all() else Examples(x, y).take(np.flatnonzero(good)) for x, y, good in pieces]

    def _tell(self, names: list[str], source: Source) -> None:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        what = f"{source.root} holds {len(names)} damaged images: {', '.join(names[:NAMED])}{more}"
        if not self.config.skip_damaged:
            raise DataError(f"data-path: {what}; remove them, or set task.skip-damaged = true")
        logger.warning("%s; they are left out", what)


def _split(source: Source) -> tuple[NDArray[np.intp], ...]:
    """Which images are to train on, for the server's validation, and to test on."""
    labels, parts = labels_of(source), np.array([picture.part for picture in source.pictures])
    match sorted(set(parts.tolist())):
        case ["test", "train"]:
            test = np.flatnonzero(parts == "test")
        case [""]:
            test = _drawn(labels)
        case found:
            raise DataError(
                f"{source.root} must hold images to train on and to test on, or all of them together; found "
                f"{' and '.join(part or 'some beside them' for part in reversed(found))}"
            )
    ours, others = halves(labels[test])
    return np.setdiff1d(np.arange(len(labels)), test), test[ours], test[others]


def _drawn(labels: NDArray[np.int64]) -> NDArray[np.intp]:
    """A test part: as large as the published one of the published images, or else a fifth of each class."""
    rng = np.random.default_rng(SPLIT_SEED)
    if tuple(np.bincount(labels, minlength=len(CLASSES))) == PUBLISHED:
        return table(labels, np.array([PUBLISHED_TEST]), rng)[0]
    return holdout(labels, 0.2, rng)[1]


def _cnn(shape: tuple[int, ...]) -> "keras.Model":
    import keras

    return keras.Sequential(
        [
            keras.Input(shape, name="pixels"),
            keras.layers.Conv2D(32, 3, activation="relu", name="conv1"),
            keras.layers.MaxPooling2D(2, name="pool1"),
            keras.layers.Conv2D(64, 3, activation="relu", name="conv2"),
            keras.layers.MaxPooling2D(2, name="pool2"),
            keras.layers.Conv2D(128, 3, activation="relu", name="conv3"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(64, activation="relu", name="hidden1"),
            keras.layers.Dropout(0.1, name="dropout1"),
            keras.layers.Dense(32, activation="relu", name="hidden2"),
            keras.layers.Dropout(0.1, name="dropout2"),
            keras.layers.Dense(len(CLASSES), activation="softmax", name="output"),
        ],
        name="cnn",
    )
