"""Small tasks of every kind that is not a classifier of one array, with models that learn them in an epoch."""

from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples, Recipe, Task
from cloister.tasks.keras_model import KerasModel, import_keras
from cloister.tasks.targets import Target

ROWS = 64


class Kind(Task):
    """A task whose model is `network(layers)` and whose data is `examples(rng, n)`."""

    recipe = Recipe(local_epochs=4, batch_size=16, learning_rate=0.05, optimizer="adam")
    models, public = ("network",), True
    input_shape: ClassVar[Any] = (6,)

    def load(self) -> Dataset:
        rng = np.random.default_rng(0)
        return Dataset(self.examples(rng, ROWS), self.examples(rng, ROWS))

    def build(self) -> KerasModel:
        return KerasModel(lambda: self.network(import_keras()))

    def examples(self, rng: np.random.Generator, count: int) -> Examples:
        raise NotImplementedError

    def network(self, keras: ModuleType) -> Any:
        raise NotImplementedError


def dense(keras, units, activation=None):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, activation)])


class Findings(Kind):
    """Several labels for one example."""

    target = Target("binary-cross-entropy", shape=(3,))

    def examples(self, rng, count):
        x = rng.random((count, 6), np.float32)
        return Examples(x, (x[:, :3] > 0.5).astype(np.int8))

    def network(self, keras):
        return dense(keras, 3, "sigmoid")


class Masks(Kind):
    """A class for each pixel."""

    input_shape, target = (4, 4, 1), Target("cross-entropy", shape=(4, 4), classes=3)

    def examples(self, rng, count):
        x = rng.random((count, 4, 4, 1), np.float32)
        return Examples(x, np.floor(3 * x[..., 0]).astype(np.int64))

    def network(self, keras):
        hidden, last = keras.layers.Conv2D(8, 1, activation="relu"), keras.layers.Conv2D(3, 1, activation="softmax")
        return keras.Sequential([keras.Input((4, 4, 1)), hidden, last])


class Lesions(Kind):
    """A foreground and a background, with one channel more than the mask has."""

    input_shape, target = (4, 4, 1), Target("binary-cross-entropy", shape=(4, 4))

    def examples(self, rng, count):
        x = rng.random((count, 4, 4, 1), np.float32)
        return Examples(x, x[..., 0] > 0.5)

    def network(self, keras):
        return keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Conv2D(1, 1, activation="sigmoid")])


class Autoencoder(Kind):
    target = Target("mse", shape=(6,))

    def examples(self, rng, count):
        x = rng.random((count, 6), np.float32)
        return Examples(x, x)

    def network(self, keras):
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dense(6)])


class Measures(Kind):
    """A regression of two numbers."""

    target = Target("mae", shape=(2,))

    def examples(self, rng, count):
        x = rng.random((count, 6), np.float32)
        return Examples(x, 3 * x[:, :2])

    def network(self, keras):
        return dense(keras, 2)


class Rooted(Kind):
    """A regression of one number on the root of the mean squared error."""

    target = Target("rmse")

    def examples(self, rng, count):
        x = rng.random((count, 6), np.float32)
        return Examples(x, x @ np.arange(6, dtype=np.float32))

    def network(self, keras):
        return dense(keras, 1)


class Words(Kind):
    """A label for each token of a sentence; tokens are whole numbers."""

    input_shape, target, dtype = (5,), Target("cross-entropy", shape=(5,), classes=2), "int32"

    def examples(self, rng, count):
        x = rng.integers(1, 50, (count, 5))
        return Examples(x, x % 2)

    def network(self, keras):
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((5,), dtype=self.dtype), layers.Embedding(50, 4), layers.Dense(2, "softmax")]
        )


class WordsAsFloats(Words):
    dtype = "float32"


class Scans(Kind):
    """Two inputs by name, and two outputs by name with losses and weights of their own."""

    input_shape: ClassVar[Any] = {"picture": (4, 4, 1), "age": (1,)}
    target: ClassVar[Any] = {"stage": Target(classes=3), "volume": Target("mse", weight=0.5)}

    def examples(self, rng, count):
        picture, age = rng.random((count, 4, 4, 1), np.float32), rng.random((count, 1))
        volume = picture.sum(axis=(1, 2, 3))
        return Examples(
            {"picture": picture, "age": age}, {"stage": np.floor(3 * age[:, 0]).astype(int), "volume": volume}
        )

    def network(self, keras):
        layers = keras.layers
        age, picture = keras.Input((1,), name="age"), keras.Input((4, 4, 1), name="picture")
        both = layers.Concatenate()([layers.Flatten()(picture), age])
        outputs = {"volume": layers.Dense(1)(both), "stage": layers.Dense(3, "softmax")(both)}
        return keras.Model([age, picture], outputs)


class Pairs(Kind):
    """Two inputs in order."""

    input_shape: ClassVar[Any] = ((4,), (2,))
    classes = 2

    def examples(self, rng, count):
        one, other = rng.random((count, 4)), rng.random((count, 2))
        return Examples((one, other), (one[:, 0] > other[:, 0]).astype(int))

    def network(self, keras):
        layers = keras.layers
        inputs = keras.Input((4,)), keras.Input((2,))
        return keras.Model(inputs, layers.Dense(2, "softmax")(layers.Concatenate()(list(inputs))))


class Subclassed(Kind):
    """A model that has weights once it is called."""

    classes = 2

    def examples(self, rng, count):
        x = rng.random((count, 6), np.float32)
        return Examples(x, (x[:, 0] > 0.5).astype(int))

    def network(self, keras):
        return _subclass(keras)()


class NoInput(Subclassed):
    """A `Sequential` that does not name its input."""

    def network(self, keras):
        return keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(2, "softmax")])


def _subclass(keras):
    class Small(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.last = keras.layers.Dense(4, "relu"), keras.layers.Dense(2, "softmax")

        def call(self, x):
            return self.last(self.hidden(x))

    return Small


def huber(y, predicted):
    """A loss of a user's own."""
    import keras

    return keras.losses.huber(y, predicted)


class Robust(Measures):
    target = Target(huber, shape=(2,))


KINDS: list[type[Kind]] = [Findings, Masks, Lesions, Autoencoder, Measures, Rooted, Words, WordsAsFloats]
KINDS += [Scans, Pairs, Subclassed, NoInput, Robust]


def made(kind: type[Kind], **config: Any) -> Kind:
    return kind(TaskConfig(**config))
