"""Digits 5 to 9, which are private, by a network whose first layer was trained on the public digits 0 to 4."""

from pathlib import Path

import numpy as np

from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task
from cloister.tasks.keras_model import KerasModel
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.tasks.partition import holdout

WEIGHTS = Path(__file__).with_name("backbone.npz")
"""Written by `python -m frozen_digits.pretrain`, and part of the package: every site has the same."""
FEATURES = 32
PUBLIC = 5
"""Digits below this one are public."""


class FrozenDigits(Task):
    """Five classes of 8×8 images.

    `frozen` trains a head of 165 numbers, `scratch` the whole network of 2,245, `softmax` a linear classifier of 325.
    """

    recipe = Recipe(local_epochs=1, batch_size=32, learning_rate=0.5)
    classes = 5
    class_names = ("5", "6", "7", "8", "9")
    input_shape = (64,)
    image_shape = (8, 8)
    models = ("frozen", "scratch", "softmax")
    public = True

    def load(self) -> Dataset:
        """The images of 5 to 9: four fifths to train on, one fifth to score models with."""
        x, y = digits()
        private = Examples(x[y >= PUBLIC], y[y >= PUBLIC] - PUBLIC)
        train, test = holdout(private.y, 0.2, np.random.default_rng(0))
        return Dataset(private.take(train), private.take(test))

    def build(self) -> Model:
        """The network; its first layer comes from the file where it is frozen."""
        if self.model_name == "softmax":
            return SoftmaxRegression(features=64, classes=5)
        return KerasModel(frozen if self.model_name == "frozen" else network)


def digits():
    """All 1,797 images, pixels from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).astype(np.float32), labels.astype(np.int64)


def network():
    """Two layers, both with new weights."""
    import keras

    return keras.Sequential(
        [
            keras.Input((64,), name="pixels"),
            keras.layers.Dense(FEATURES, activation="tanh", name="backbone"),
            keras.layers.Dense(5, activation="softmax", name="head"),
        ],
        name="network",
    )


def frozen():
    """The same with the public backbone, which is neither trained nor sent."""
    model = network()
    backbone = model.get_layer("backbone")
    with np.load(WEIGHTS) as arrays:
        backbone.set_weights([arrays["kernel"], arrays["bias"]])
    backbone.trainable = False
    return model
