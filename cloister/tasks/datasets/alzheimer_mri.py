"""MRI classification of Alzheimer's disease: the task of the metric-aware federation.

Source: Sáinz-Pardo Díaz et al. (2026), §7.1 (data), §7.2 (model), tables 1, 2, 3 and 9.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Model, Recipe
from cloister.tasks.partition import SPLIT_SEED, table
from cloister.tasks.pictures.sources import Source, labels_of
from cloister.tasks.pictures.task import PictureTask, parts_of
from cloister.tasks.scores import macro_figures
from cloister.tasks.splits import halves

if TYPE_CHECKING:
    import keras

CLASSES = ("Mild_Demented", "Moderate_Demented", "Non_Demented", "Very_Mild_Demented")
"""In the order of their class numbers."""
PUBLISHED, PUBLISHED_TEST = (896, 64, 3200, 2240), (172, 15, 634, 459)
"""Images of each class in the published set, and in its test part (table 1)."""
TABLES = {
    "table-2": ((181, 12, 641, 446), (181, 12, 642, 445), (181, 12, 642, 445), (181, 13, 641, 445)),
    "table-3": ((280, 16, 881, 615), (107, 13, 368, 280), (257, 17, 1054, 720), (80, 3, 263, 166)),
    "table-9": ((120, 9, 1122, 496), (180, 11, 894, 506), (524, 29, 550, 779)),
}
"""Images of each class for each client: homogeneous, non-i.i.d., and of the client inference attack."""
SOFTMAX_RATE = 50.0
"""Learning rate of softmax regression, times the number of pixels.
The curvature of the loss grows with the sum of their squares.
"""
PREDICT_BATCH = 64
"""Images per prediction batch. The first convolution needs two megabytes for an image of 128 by 128."""


class AlzheimerMri(PictureTask):
    """Four classes. x is float32 of shape (n, size, size, 1), from 0 to 1, memory-mapped from a cache on disk."""

    recipe = Recipe(local_epochs=5, batch_size=32, learning_rate=0.001, optimizer="adam")
    classes = len(CLASSES)
    class_names = CLASSES
    models = ("cnn", "softmax")
    usual_size, smallest_size = 128, 18
    tables = TABLES
    public = True

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        if self.model_name == "softmax":
            self.recipe = Recipe(local_epochs=20, batch_size=16, learning_rate=SOFTMAX_RATE / self.size**2)

    def dataset(self, source: Source) -> Dataset:
        """Return the published split, or a random one of the same sizes.

        The split is random if the images come without one. Half of the test part becomes the validation set. For images
        of other counts per class without a split, the test part is a fifth of each class.

        Args:
            source: of all images.
        """
        train, validation, test = self.undamaged(source, self.parts(source))
        return Dataset(train, test, validation=validation, groups=self.groups_of(train))

    def parts(self, source: Source) -> tuple[NDArray[np.intp], ...]:
        """Return the indices of the training, validation and test images.

        Args:
            source: of the images.

        Raises:
            DataError: some images lie outside the folders of a split, or half of the split is missing.
        """
        train, test = parts_of(source, self.drawn_test)
        ours, others = halves(labels_of(source)[test])
        return train, test[ours], test[others]

    def drawn_test(self, labels: NDArray[np.int64], groups: NDArray[np.str_] | None) -> NDArray[np.intp]:
        """Return the indices of a random test part.

        For the published images it has the published size; otherwise it is a fifth of each class.

        Args:
            labels: of all images, shape (n,).
            groups: of all images, shape (n,), or None.
        """
        if tuple(np.bincount(labels, minlength=len(CLASSES))) != PUBLISHED:
            return super().drawn_test(labels, groups)
        return table(labels, np.array([PUBLISHED_TEST]), np.random.default_rng(SPLIT_SEED))[0]

    def build(self) -> Model:
        """Return the published network, or softmax regression in NumPy.

        The network has 6,517,476 parameters for 128 by 128 pixels.
        """
        if self.model_name == "cnn":
            from cloister.tasks.keras_model import KerasModel

            return KerasModel(lambda: mri_network(self.input_shapes[""]), predict_batch=PREDICT_BATCH)
        from cloister.tasks.numpy_models import SoftmaxRegression

        return SoftmaxRegression(features=self.size**2, classes=self.classes)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Return loss, accuracy, and the other figures that the paper reports.

        Args:
            y: shape (n,).
            scores: class probabilities that the model predicts, shape (n, 4).
        """
        return super().metrics(y, scores) | macro_figures(y, scores)


def mri_network(shape: tuple[int, ...]) -> "keras.Model":
    """Return the published network, for images of this shape."""
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
