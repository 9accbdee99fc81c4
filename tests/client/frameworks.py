"""One small problem as a task of each framework: the softmax regression of six numbers to three classes."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task
from cloister.tasks.making import model_of
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.tasks.sklearn_models import SklearnModel
from cloister.training.trainers import TRAINERS, Trainer

FRAMEWORKS = ["numpy", "sklearn", "keras", pytest.param("torch", marks=pytest.mark.torch)]
MINIBATCHED = [each for each in FRAMEWORKS if each != "sklearn"]
"""Frameworks whose steps are those of minibatches; scikit-learn steps on each example."""
SGD = Recipe(local_epochs=1, batch_size=8, learning_rate=0.1)
RNG = np.random.default_rng(0)
DATA = Examples(RNG.random((41, 6)).astype(np.float32), RNG.integers(0, 3, 41))


def keras_network() -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax", name="out")], name="net")


def torch_network() -> Any:
    from torch import nn

    return nn.Linear(6, 3)


def sklearn_model() -> SklearnModel:
    from sklearn.linear_model import SGDClassifier

    return SklearnModel(SGDClassifier(loss="log_loss", penalty=None), 6, 3)


BUILDS = {
    "numpy": lambda: SoftmaxRegression(6, 3),
    "sklearn": sklearn_model,
    "keras": keras_network,
    "torch": torch_network,
}


class Softmax(Task):
    """Its model is of the framework that `task.model` names, as `build` of a user returns it.

    That of scikit-learn has a logistic function for each class, whose values are divided by their sum.
    """

    recipe, classes, input_shape, models = SGD, 3, (6,), tuple(BUILDS)

    def load(self) -> Dataset:
        return Dataset(DATA, DATA)

    def build(self) -> Any:
        return BUILDS[self.model_name]()


def task(framework: str) -> Softmax:
    return Softmax(TaskConfig(model=framework))


@cache
def shared(framework: str) -> tuple[Model, Trainer]:
    """Return a model and its trainer; Keras compiles it once for all tests."""
    model = model_of(task(framework))
    return model, TRAINERS.load(model.kind)(model, SGD)


def trainer_of(model: Model, recipe: Recipe) -> Trainer:
    return TRAINERS.load(model.kind)(model, recipe)


def as_weights(model: Model) -> list[np.ndarray]:
    """Return the kernel of shape (6, 3) and the bias of shape (3,), in double precision."""
    kernel, bias = model.arrays().values()
    return [(kernel.T if kernel.shape == (3, 6) else kernel).astype(np.float64), bias.astype(np.float64)]


def by_hand(framework: str, weights: list[np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of each class before they are divided by their sum, and the probabilities, in double precision.

    Both have the shape (n, 3).
    """
    scores = x.astype(np.float64) @ weights[0] + weights[1]
    if framework == "sklearn":
        values = 1 / (1 + np.exp(-scores))
        return values, values / values.sum(axis=1, keepdims=True)
    values = np.exp(scores - scores.max(axis=1, keepdims=True))
    return values, values / values.sum(axis=1, keepdims=True)


def slopes(framework: str, weights: list[np.ndarray], rows: Examples, factors: np.ndarray) -> list[np.ndarray]:
    """Return the gradient of the weighted mean cross-entropy of some rows, by hand.

    That of scikit-learn is the sum of the classes' own cross-entropies.
    """
    values, probabilities = by_hand(framework, weights, rows.x)
    residual = (values if framework == "sklearn" else probabilities) - np.eye(3)[rows.y]
    residual *= factors[:, None] / len(rows)
    return [rows.x.T @ residual, residual.sum(axis=0)]
