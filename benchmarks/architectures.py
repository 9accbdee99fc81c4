"""Architectures as Keras' example pages write them: a step of DP-SGD beside a plain one, in turns, on random numbers.

python benchmarks/architectures.py [NAME ...]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import table
from dpsgd import CLIP, MULTIPLIER, RATE, compiled_step, seconds
from machine import machine
from numpy.typing import NDArray

from cloister.tasks.keras_model import import_keras
from cloister.utils.errors import ConfigError, UnsupportedModel

keras = import_keras()
layers, losses, ops = keras.layers, keras.losses, keras.ops
BATCH, REPEATS = 64, 9
RNG = np.random.default_rng(0)
softmax = partial(layers.Dense, activation="softmax")


def numbers(*shape: int, batch: int = BATCH) -> NDArray:
    """Draw from 0 to 1 for each example."""
    return RNG.random((batch, *shape), np.float32)


def classes(count: int, *shape: int, batch: int = BATCH) -> NDArray:
    """Draw from 0, ..., count - 1 for each example."""
    return RNG.integers(0, count, (batch, *shape), np.int32)


class _Positions(layers.Layer):
    """Adds an embedding of each position."""

    def build(self, shape: Any) -> None:
        self.embedding = layers.Embedding(*shape[1:])
        self.embedding.build(None)

    def call(self, x: Any) -> Any:
        return x + self.embedding(ops.arange(x.shape[1]))


class _Block(layers.Layer):
    """Attends, then applies two dense layers, each with dropout, a sum and a normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width)
        self.dense = keras.Sequential([layers.Dense(width, "relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [layers.Dropout(0.1) for _ in range(2)]

    def call(self, x: Any) -> Any:
        x = self.norms[0](x + self.dropouts[0](self.attention(x, x)))
        return self.norms[1](x + self.dropouts[1](self.dense(x)))


def _text_transformer(x: Any) -> Any:
    x = layers.GlobalAveragePooling1D()(_Block(32, 2)(_Positions()(layers.Embedding(500, 32)(x))))
    return softmax(2)(layers.Dropout(0.1)(layers.Dense(20, "relu")(layers.Dropout(0.1)(x))))


def _masked_bidirectional_lstm(x: Any) -> Any:
    x = layers.Bidirectional(layers.LSTM(32, return_sequences=True))(layers.Embedding(500, 32, mask_zero=True)(x))
    return softmax(2)(layers.Bidirectional(layers.LSTM(32))(x))


def _tabular(x: Any) -> Any:
    bins = layers.Discretization(bin_boundaries=[0.25, 0.5, 0.75])(x[:, :3])
    rest = layers.Normalization(mean=0.5, variance=0.1)(x[:, 3:])
    x = layers.Concatenate()([layers.Flatten()(layers.Embedding(4, 8)(bins)), rest])
    return softmax(2)(layers.Dropout(0.5)(layers.Dense(32, "relu")(x)))


def _mini_xception(x: Any) -> Any:
    x = layers.Conv2D(16, 3, strides=2, padding="same")(layers.Rescaling(2.0, -1.0)(x))
    x = ops.relu(layers.GroupNormalization(8)(x))
    for width in (32, 64):
        skip = layers.Conv2D(width, 1, strides=2, padding="same")(x)
        x = layers.GroupNormalization(8)(layers.SeparableConv2D(width, 3, padding="same")(ops.relu(x)))
        x = layers.Add()([layers.MaxPooling2D(3, strides=2, padding="same")(x), skip])
    return softmax(2)(layers.Dropout(0.25)(layers.GlobalAveragePooling2D()(x)))


def _frozen_mobilenet_v2(x: Any) -> Any:
    keras.utils.set_random_seed(0)  # in place of a file of weights: the body must be the same at every site
    body = keras.applications.MobileNetV2(input_shape=(64, 64, 3), include_top=False, weights=None, alpha=0.35)
    body.trainable = False
    return softmax(5)(layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(body(x, training=False))))


def _u_net(x: Any) -> Any:
    fine = layers.Conv2D(8, 3, activation="relu", padding="same")(x)
    coarse = layers.Conv2D(16, 3, activation="relu", padding="same")(layers.MaxPooling2D()(fine))
    x = layers.Concatenate()([fine, layers.UpSampling2D()(coarse)])
    x = layers.Conv2DTranspose(8, 3, activation="relu", padding="same")(x)
    return layers.Conv2D(3, 1, activation="softmax")(x)


def _conv1d(x: Any) -> Any:
    x = layers.ReLU()(layers.GroupNormalization(8)(layers.Conv1D(32, 3, padding="same")(x)))
    return softmax(3)(layers.GlobalAveragePooling1D()(layers.Conv1D(32, 3, padding="same", activation="relu")(x)))


def _autoencoder(x: Any) -> Any:
    code = layers.Dense(16, "relu")(layers.Dense(64, "relu")(layers.Flatten()(x)))
    picture = layers.Dense(28 * 28, "sigmoid")(layers.Dense(64, "relu")(code))
    return {"picture": layers.Reshape((28, 28, 1))(picture), "class": softmax(10)(code)}


def _two_inputs(x: Any) -> Any:
    x = layers.Concatenate()([x["numbers"], layers.Flatten()(layers.Embedding(20, 8)(x["categories"]))])
    return softmax(2)(layers.Dense(32, "relu")(x))


def _convolved(x: Any, width: int, size: int) -> Any:
    return layers.GroupNormalization(8)(layers.Conv2D(width, size, padding="same", use_bias=False)(x))


def _resnet(x: Any) -> Any:
    x = ops.relu(_convolved(x, 16, 3))
    for width in (16, 16, 32, 32, 64, 64):
        x = x if x.shape[-1] == width else layers.MaxPooling2D()(x)
        skip = x if x.shape[-1] == width else _convolved(x, width, 1)
        x = ops.relu(skip + _convolved(ops.relu(_convolved(x, width, 3)), width, 3))
    return softmax(10)(layers.GlobalAveragePooling2D()(x))


def _vision_transformer(x: Any) -> Any:
    x = _Positions()(layers.Dense(32)(layers.Reshape((16, 192))(ops.image.extract_patches(x, 8))))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 16, dropout=0.1)(y, y)])
        x = layers.Add()([x, layers.Dense(32)(layers.Dense(64, "gelu")(layers.LayerNormalization()(x)))])
    return softmax(10)(layers.Flatten()(layers.LayerNormalization()(x)))


class _Dense(layers.Layer):
    """Multiplies by weights of its own, with keras.ops."""

    def build(self, shape: Any) -> None:
        self.kernel, self.bias = self.add_weight(shape=(shape[-1], 64)), self.add_weight(shape=(64,))

    def call(self, x: Any) -> Any:
        return ops.relu(ops.matmul(x, self.kernel) + self.bias)


class _Residual(layers.Layer):
    """Adds two convolutions with normalizations to its input, or to a convolution of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = [layers.Conv2D(width, 3, padding="same", use_bias=False) for _ in range(2)]
        self.norms = [layers.GroupNormalization(8) for _ in range(2)]
        self.skip = layers.Conv2D(width, 1, use_bias=False)

    def call(self, x: Any) -> Any:
        y = ops.relu(self.norms[0](self.convolutions[0](x)))
        y = self.norms[1](self.convolutions[1](y))
        return ops.relu(y + (x if x.shape[-1] == y.shape[-1] else self.skip(x)))


def _own_residual(x: Any) -> Any:
    x = _Residual(16)(layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(x))
    return softmax(10)(layers.Dense(32, "relu")(layers.Flatten()(layers.MaxPooling2D()(x))))


def _own_resnet(x: Any) -> Any:
    x = _Residual(16)(_Residual(16)(ops.relu(_convolved(x, 16, 3))))
    for width in (32, 64):
        x = _Residual(width)(_Residual(width)(layers.MaxPooling2D()(x)))
    return softmax(10)(layers.GlobalAveragePooling2D()(x))


def _small_cnn(x: Any) -> Any:
    x = layers.MaxPooling2D(2, 1)(layers.Conv2D(16, 8, strides=2, padding="same", activation="tanh")(x))
    x = layers.MaxPooling2D(2, 1)(layers.Conv2D(32, 4, strides=2, activation="tanh")(x))
    return softmax(10)(layers.Dense(32, "tanh")(layers.Flatten()(x)))


def of_classes(y: Any, outputs: Any) -> Any:
    """Return the loss of each example: the cross-entropy, its mean where there are several."""
    return ops.mean(ops.reshape(losses.sparse_categorical_crossentropy(y, outputs), (y.shape[0], -1)), axis=1)


def of_autoencoder(y: Any, outputs: Any) -> Any:
    """Return the loss of each example, of both outputs."""
    missed = ops.mean(ops.square(y["picture"] - outputs["picture"]), axis=(1, 2, 3))
    return missed + 0.1 * of_classes(y["class"], outputs["class"])


of_labels = partial(losses.binary_crossentropy, from_logits=True)
PICTURES = numbers(28, 28, 1)
TEXTS = np.where(np.arange(40) <= classes(40, 1), 1 + classes(499, 40), 0)  # zeros after the end of each
ARCHITECTURES: dict[str, Any] = {
    "text_transformer": (_text_transformer, classes(500, 40), classes(2), of_classes),
    "masked_bidirectional_lstm": (_masked_bidirectional_lstm, TEXTS, classes(2), of_classes),
    "tabular": (_tabular, numbers(10), classes(2), of_classes),
    "mini_xception": (_mini_xception, numbers(48, 48, 3), classes(2), of_classes),
    "frozen_mobilenet_v2": (_frozen_mobilenet_v2, numbers(64, 64, 3), classes(5), of_classes),
    "u_net": (_u_net, numbers(32, 32, 1), classes(3, 32, 32), of_classes),
    "conv1d": (_conv1d, numbers(64, 3), classes(3), of_classes),
    "autoencoder": (_autoencoder, PICTURES, {"picture": PICTURES, "class": classes(10)}, of_autoencoder),
    "two_inputs": (_two_inputs, {"numbers": numbers(6), "categories": classes(20, 3)}, classes(2), of_classes),
    "resnet": (_resnet, numbers(32, 32, 3), classes(10), of_classes),
    "vision_transformer": (_vision_transformer, numbers(32, 32, 3), classes(10), of_classes),
    "gru": (lambda x: layers.Dense(1)(layers.GRU(32)(x)), numbers(24, 4), numbers(1), losses.mean_squared_error),
    "several_labels": (lambda x: layers.Dense(5)(layers.Dense(32)(x)), numbers(20), numbers(5).round(), of_labels),
    "own_dense": (
        lambda x: softmax(10)(_Dense()(layers.Flatten()(x))),
        numbers(28, 28, 1, batch=100),
        classes(10, batch=100),
        of_classes,
    ),
    "lstm": (
        lambda x: softmax(5)(layers.LSTM(32)(layers.Embedding(500, 32)(x))),
        classes(500, 40),
        classes(5),
        of_classes,
    ),
    "own_residual": (_own_residual, PICTURES, classes(10), of_classes),
    "own_resnet": (_own_resnet, numbers(32, 32, 3, batch=32), classes(10, batch=32), of_classes),
    "small_cnn": (_small_cnn, PICTURES, classes(10), of_classes),
    "batch_normalization": (lambda x: softmax(3)(layers.BatchNormalization()(x)), numbers(8), classes(3), of_classes),
}
"""Makers of outputs from inputs, with x, y, and the loss of each example."""


def made(name: str) -> Any:
    """Return the model of an architecture."""
    build, x, *_ = ARCHITECTURES[name]
    named = x if isinstance(x, dict) else {"x": x}
    inputs = {key: keras.Input(array.shape[1:], dtype=array.dtype.name, name=key) for key, array in named.items()}
    inputs = inputs if named is x else inputs["x"]
    return keras.Model(inputs, build(inputs))


def private(name: str, model: Any) -> Any:
    """Return DP-SGD on a model of an architecture."""
    from cloister.privacy.dpsgd.step import DpSgd

    _, x, y, loss = ARCHITECTURES[name]
    probe = keras.tree.map_structure(lambda array: array[:3], (x, y))
    batch = len(keras.tree.flatten(y)[0])
    settings = {"batch_size": batch, "noise_multiplier": MULTIPLIER, "clipping_norm": CLIP, "loss": loss}
    return DpSgd(model, optimizer=keras.optimizers.SGD(RATE), probe=probe, **settings)


def plain(name: str, model: Any) -> Callable[[], object]:
    """Return a plain step on a model of an architecture."""
    _, x, y, loss = ARCHITECTURES[name]
    return compiled_step(model, loss, x, y)


def measured(name: str) -> list[str]:
    """Return the cells of a row behind the name."""
    (_, x, y, _), model = ARCHITECTURES[name], made(name)
    start = -time.perf_counter()
    ours = private(name, model)
    counts = ours.step(x, y)
    start += time.perf_counter()
    if counts.non_finite:
        raise RuntimeError(f"{counts.non_finite} of {counts.examples} examples have no finite gradient")
    taken = seconds({"plain": plain(name, model), "DP-SGD": lambda: ours.step(x, y)}, REPEATS)
    wall, busy, our_wall, our_busy = (1e3 * statistics.median(kind) for own in taken.values() for kind in zip(*own))
    times = (f"{value:.1f}" for value in (start, busy, our_busy, wall, our_wall, our_busy / busy))
    return [ours.method, *times, *(f"{peak(name, kind):.0f}" for kind in ("plain", "private"))]


def peak(name: str, kind: str) -> float:
    """Return MB by which the start and three steps of one kind raise the peak of a process that has the model."""
    code = f"import architectures; architectures.take({name!r}, {kind!r})"
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1]) / 2**10


def take(name: str, kind: str) -> None:
    """Take three steps, and print by how many KiB they raised this process' peak of resident memory."""
    (_, x, y, _), model = ARCHITECTURES[name], made(name)
    model(keras.tree.map_structure(lambda array: array[:1], x))  # starts TensorFlow, which takes memory of its own

    def resident(field: str) -> int:
        return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    if kind == "plain":
        step = plain(name, model)
    else:
        ours = private(name, model)
        step = lambda: ours.step(x, y)  # noqa: E731
    for _ in range(3):
        step()
    print(resident("VmHWM") - before)


def main() -> None:
    """Print a row for each architecture, then what refusals say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(ARCHITECTURES)}")
    names = parser.parse_args().names or ARCHITECTURES
    machine()
    rows, refusals = [], ""
    for name in names:
        try:
            cells = measured(name)
        except (UnsupportedModel, ConfigError) as refusal:
            cells, refusals = ["refused"], f"{refusals}{name}: {refusal}\n"
        except Exception:
            cells = ["failed"]
            traceback.print_exc()
        rows.append([name, *cells, *[""] * (9 - len(cells))])
    times = [f"{name}, {kind} ms" for kind in ("processor", "wall") for name in ("plain", "DP-SGD")]
    peaks = [f"{name}, peak MB" for name in ("plain", "DP-SGD")]
    table(["", "way", "start, s", *times, "ratio", *peaks], rows)
    print(refusals, end="")


if __name__ == "__main__":
    main()
