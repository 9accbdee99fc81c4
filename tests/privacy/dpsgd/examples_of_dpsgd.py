"""Models to try DP-SGD on, and its sum by brute force: one example at a time, with Keras alone."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from dpsgd_frameworks import coupled, norm

from cloister.privacy.dpsgd import step as steps
from cloister.privacy.dpsgd.step import DpSgd
from cloister.privacy.dpsgd.tracing import NotCapturable

LOSS = keras.losses.sparse_categorical_crossentropy
layers = keras.layers


def gradient_of_one(model: Any, x: np.ndarray, y: np.ndarray, loss: Any = LOSS) -> list[np.ndarray]:
    """Plain Keras, double precision from here on."""
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        own = tf.reduce_sum(loss(y[None], model(x[None], training=True)))
    found = tape.gradient(own, [variable.value for variable in variables], unconnected_gradients="zero")
    return [tf.convert_to_tensor(gradient).numpy().astype(np.float64) for gradient in found]


def gradients(model: Any, x: np.ndarray, y: np.ndarray, loss: Any = LOSS) -> list[list[np.ndarray]]:
    return [gradient_of_one(model, one, label, loss) for one, label in zip(x, y, strict=True)]


def clipped_sum(each: list[list[np.ndarray]], bound: float) -> list[np.ndarray]:
    factors = [bound / max(bound, norm(gradient)) for gradient in each]
    return [sum(map(np.multiply, factors, same)) for same in zip(*each, strict=True)]


def brute_force(model: Any, x: np.ndarray, y: np.ndarray, bound: float, loss: Any = LOSS) -> list[np.ndarray]:
    nothing = [np.zeros(variable.shape) for variable in model.trainable_variables]
    return clipped_sum([nothing, *gradients(model, x, y, loss)], bound)


def dp_sgd(model: Any, **options: Any) -> DpSgd:
    defaults = {"batch_size": 8, "noise_multiplier": 1.0, "clipping_norm": 1.0, "optimizer": keras.optimizers.SGD(0.1)}
    return made(DpSgd, model, **(defaults | options))


def made(kind: type[DpSgd], model: Any, noise: Any = None, **options: Any) -> DpSgd:
    """DP-SGD, or a twin of it, with seeded draws."""
    step = kind(model, **options)
    step.noise = step.noise if noise is None else noise
    step.reseed(0)
    return step


def moved(step: DpSgd, x: np.ndarray, y: np.ndarray, bound: float = 1.0, leaving: int = 0, seed: int = 0) -> float:
    """By how much an example moves the sum of a batch, in units of S."""
    return norm([a - b for a, b in zip(*coupled(step, x, y, bound, leaving, seed), strict=True)]) / bound


def take_in_turn(monkeypatch: Any) -> None:
    """Have every model computed one unit after another."""

    def refuse(*_: Any) -> None:
        raise NotCapturable("for a test")

    monkeypatch.setattr(steps, "InRows", refuse)


def compile_nothing(monkeypatch: Any) -> None:
    """Leave loops of units in turn to TensorFlow, where a test asks which engine a model has: XLA takes seconds."""
    monkeypatch.setattr(steps, "suits_xla", lambda _: False)


def batch(model: Any, size: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of the kind that the model takes."""
    rng = np.random.default_rng(seed)
    shape, classes = (size, *model.inputs[0].shape[1:]), model.outputs[0].shape[-1]
    y = rng.integers(0, classes, size)
    if "int" in model.inputs[0].dtype:
        return rng.integers(0, 7, shape).astype(model.inputs[0].dtype), y
    return rng.standard_normal(shape).astype(np.float32), y


def perturbed(model: Any, seed: int = 1) -> Any:
    """The model with no weight left at what layers begin with."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(variable.value + 0.1 * rng.standard_normal(variable.shape).astype(variable.dtype))
    return model


def smooth(model: Any) -> Any:
    """The model, of the same shapes, with softplus for ReLU and means for maxima.

    At a kink single precision is no measure of a gradient. A number in front of it is rounded in one way in a batch and
    in another for one example, and may come out on both sides of zero: then two functions are differentiated. Inputs
    that were changed by a millionth moved the gradient of a network for 128 by 128 pixels by a thousandth.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "activation", None) is keras.activations.relu:
            layer.activation = keras.activations.softplus
        if isinstance(layer, layers.MaxPooling2D):
            layer.pool_mode = "average"
    return model


def in_double_precision(build: Callable[[], Any]) -> Any:
    """A model as it is built, kinks and all, where roundings are too small to carry anything across one."""
    usual = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    try:
        return build()
    finally:
        keras.config.set_dtype_policy(usual)


def relative_error(found: Any, expected: Any) -> float:
    """The largest difference beside the largest number, both over all arrays."""
    apart = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
    return float(apart / max(np.abs(b).max() for b in expected))


def functional(shape: tuple[int, ...], inner: Any, dtype: str = "float32") -> Any:
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, inner(inputs))


def head(tensor: Any, classes: int = 5) -> Any:
    return layers.Dense(classes, activation="softmax")(layers.Flatten()(tensor))


def group_norm() -> Any:
    def inner(x: Any) -> Any:
        x = layers.Conv2D(8, 3, strides=2, padding="same")(x)
        x = layers.Activation("relu")(layers.GroupNormalization(4)(x))
        x = layers.Conv2D(8, 3, use_bias=False, activation="tanh")(x)
        return head(layers.LayerNormalization()(x))

    return functional((13, 11, 3), inner)


def normalized() -> Any:
    """Normalizations of each example, behind a convolution that is not trained."""

    def inner(x: Any) -> Any:
        x = layers.Dense(8)(layers.Conv2D(8, 3, strides=2, trainable=False)(x))
        x = layers.Activation("relu")(layers.GroupNormalization(4)(x))
        return head(layers.LayerNormalization()(x))

    return functional((9, 8, 3), inner)


def shared() -> Any:
    """Layers that are called twice, once inside a nested model, at the same and at other shapes."""
    dense, wide = layers.Dense(12, activation="relu"), layers.Dense(8, activation="tanh")
    nested = keras.Sequential([keras.Input((12,)), layers.Dense(12, activation="tanh"), dense])

    def inner(x: Any) -> Any:
        x = wide(layers.AveragePooling2D(2)(wide(x)))
        x = dense(layers.Flatten()(x)[:, :12])
        return head(nested(x))

    return functional((8, 8, 8), inner)


def odd_convolutions() -> Any:
    def inner(x: Any) -> Any:
        x = layers.Conv2D(6, (3, 2), strides=(2, 3), padding="same", activation="relu")(x)
        x = layers.Conv2D(5, (2, 3), dilation_rate=(2, 1), padding="same", activation="relu")(x)
        x = layers.Conv2D(4, 3, strides=2, padding="valid")(x)
        return head(x)

    return functional((17, 19, 2), inner)


def causal() -> Any:
    """Convolutions over one axis, of more channels than a picture has."""

    def inner(x: Any) -> Any:
        x = layers.Conv1D(6, 3, dilation_rate=2, padding="causal", activation="relu")(x)
        return head(layers.Conv1D(20, 2, strides=2, use_bias=False)(layers.Conv1D(30, 2)(x)))

    return functional((8, 5), inner)


def sequence() -> Any:
    """Many positions of a dense layer: one that holds gradients, one that need not."""

    def inner(x: Any) -> Any:
        x = layers.Dense(96, activation="relu")(x)
        x = layers.Dense(64, activation="tanh")(x)
        return head(layers.Dense(3)(x))

    return functional((6, 80), inner)


def embedding() -> Any:
    def inner(x: Any) -> Any:
        x = layers.Embedding(7, 6)(x)
        x = layers.Add()([x, layers.Dense(6)(layers.LayerNormalization()(x))])
        return head(layers.GlobalAveragePooling1D()(x))

    return functional((9,), inner, "int32")


class Positions(layers.Layer):
    """Adds an embedding of each position."""

    def build(self, shape: Any) -> None:
        self.table = layers.Embedding(shape[1], shape[2])
        self.table.build((shape[1],))

    def call(self, x: Any) -> Any:
        return x + self.table(keras.ops.arange(x.shape[1]))


def attention() -> Any:
    def inner(x: Any) -> Any:
        x = Positions()(x)
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
        return head(layers.GlobalAveragePooling1D()(x))

    return functional((5, 6), inner)


def recurrent() -> Any:
    return functional((4, 3), lambda x: head(layers.LSTM(5)(x)))


def residuals() -> Any:
    """The gradient of the input of three branches is a sum of three terms, and of more behind them."""

    def inner(x: Any) -> Any:
        h = layers.Conv2D(4, 3, padding="same")(x)
        sums = [layers.Add()([h, layers.Conv2D(4, 3, padding="same")(h)]) for _ in range(3)]
        kinds = ("tanh", "sigmoid", "softplus")
        return head(layers.Add()([layers.Activation(kind)(each) for kind, each in zip(kinds, sums, strict=True)]))

    return functional((6, 6, 2), inner)


def depthwise() -> Any:
    def inner(x: Any) -> Any:
        x = layers.DepthwiseConv2D(3, strides=2, depth_multiplier=2, padding="same", activation="relu")(x)
        x = layers.SeparableConv2D(4, (3, 2), depth_multiplier=2, activation="tanh")(x)
        x = layers.Conv2DTranspose(3, (2, 3), strides=2, padding="same", activation="relu")(x)
        x = layers.Reshape((-1, 3))(layers.Conv2DTranspose(3, 2, use_bias=False)(x))
        x = layers.SeparableConv1D(2, 3, strides=2, padding="same")(layers.DepthwiseConv1D(2, dilation_rate=2)(x))
        return head(layers.Conv1DTranspose(2, 3, strides=2)(x))

    return functional((9, 8, 2), inner)


ROWS = (normalized, shared, sequence, embedding, attention, group_norm, odd_convolutions, causal, depthwise)
MODELS = {build.__name__: build for build in ROWS}
"""Models that are computed in rows."""
TURNS = {build.__name__: build for build in (recurrent,)}
"""Models that are computed in turn."""


class BatchMean(layers.Layer):
    """Couples examples, under a name of its own."""

    def call(self, x: Any) -> Any:
        return x - 0.1 * keras.ops.mean(x, axis=0, keepdims=True)


class Scaled(layers.Layer):
    """A weight of its own, used in an ordinary way."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.scale


class Folded(layers.Layer):
    """A dense layer that is shown positions as if they were examples."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")

    def call(self, x: Any) -> Any:
        folded = self.dense(keras.ops.reshape(x, (-1, x.shape[-1])))
        return keras.ops.reshape(folded, (-1, *x.shape[1:-1], 4))


class Reversed(layers.Layer):
    """A dense layer that is shown the examples in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")

    def call(self, x: Any) -> Any:
        return self.dense(x[::-1])[::-1]


def small(*inner: Any) -> Any:
    """A classifier of six numbers, with these layers."""

    def stack(x: Any) -> Any:
        for layer in inner:
            x = layer(x)
        return head(x)

    return functional((6,), stack)
