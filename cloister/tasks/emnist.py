"""EMNIST ByClass: digits and letters of both cases, 62 classes, read from a local file and never downloaded."""

import numpy as np

from cloister.core.errors import DataError
from cloister.core.files import expanded
from cloister.tasks.base import Dataset, Model, Recipe, Task
from cloister.tasks.images import SHAPE, characters, read_arrays, two_convolutions
from cloister.tasks.partition import holdout

EMNIST_FILE = "emnist_byclass_test.npz"
EMNIST_SPLIT_SEED = 0
"""A constant, so that every run of every strategy is scored on the same images."""


class Emnist(Task):
    """Digits 0 to 9, capitals 10 to 35, small letters 36 to 61. x is float32 of shape (n, 28, 28, 1), from 0 to 1."""

    recipe = Recipe(local_epochs=1, batch_size=32, learning_rate=0.05)
    classes = 62
    input_shape = SHAPE
    image_shape = SHAPE[:2]
    models = ("cnn", "softmax")
    public = True

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
            train, test = holdout(labels, 0.2, np.random.default_rng(EMNIST_SPLIT_SEED))
            return Dataset(
                characters(images[train], labels[train], self.classes),
                characters(images[test], labels[test], self.classes),
            )
        except (ValueError, IndexError):
            raise DataError(
                f"task.data-path: {path} must hold x, images of 28 by 28 bytes, and y, labels from 0 to 61"
            ) from None

    def build(self) -> Model:
        """Return the network of two convolutions, or softmax regression.

        The network has 1,206,590 parameters. Softmax regression needs no TensorFlow.
        """
        if self.model_name == "cnn":
            return two_convolutions(self.classes)
        from cloister.tasks.softmax import SoftmaxRegression

        return SoftmaxRegression(features=28 * 28, classes=self.classes)
