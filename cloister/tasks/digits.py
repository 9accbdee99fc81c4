"""Handwritten digits of 8×8 pixels: 1,797 images that ship with scikit-learn, for a first run on any machine."""

from typing import TYPE_CHECKING

import numpy as np

from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task
from cloister.tasks.partition import holdout

if TYPE_CHECKING:
    import keras

DIGITS_SPLIT_SEED = 0
"""A constant, so that every run of every strategy is scored on the same images."""


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
        train, test = holdout(examples.y, 0.2, np.random.default_rng(DIGITS_SPLIT_SEED))
        return Dataset(examples.take(train), examples.take(test))

    def build(self) -> Model:
        """Return a network with one hidden layer, or softmax regression.

        Softmax regression needs no TensorFlow.
        """
        if self.model_name == "softmax":
            from cloister.tasks.softmax import SoftmaxRegression

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
