"""Tests of the kernel properties that DP-SGD assumes, on this machine and with small models.

In rows, all calls have one shape, and a unit's stored bits must not depend on the numbers in other rows. In rows and
in turn, equal calls must give equal results. Trials can refute a premise, but cannot prove it.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.audits.kernels import EXTREMES, processor, scale
from cloister.privacy.dpsgd.checks import use_single_precision
from cloister.privacy.dpsgd.clipped_sums import Call
from cloister.privacy.dpsgd.in_rows import InRows
from cloister.privacy.dpsgd.in_turn import InTurn
from cloister.privacy.dpsgd.step import engine_of
from cloister.privacy.dpsgd.tracing import as_traced, made_up, seeds_of
from cloister.utils.arrays import Layer, Network, Tensor
from cloister.utils.threads import in_threads

layers = keras.layers
TABLE = 7
"""Rows of each embedding table."""


class Trial:
    """Test cases of one model that is computed in rows, in calls of one shape.

    Args:
        engine: of the model, whose weights change from case to case.
        seed: of all random draws. None: the operating system's entropy.

    Attributes:
        engine: as given.
        cases, changed, differed, kernels, places, in_rows: as in `Tried`. Results are what is stored of a unit; equal
            calls also compare sums.
    """

    in_rows = True

    def __init__(self, engine: InRows, seed: int | None = None) -> None:
        self.engine, self._rng = engine, np.random.default_rng(seed)
        self.cases = self.changed = self.differed = 0
        self.kernels, self.places = ", ".join(sorted(set(engine.kernels.values()))) or engine.method, engine.places
        self._call = engine.with_held()
        self._specs: tuple[tf.TensorSpec, ...] = self._call.structured_input_signature[0]

    def case(self) -> None:
        """Draw weights, examples and a place, and compare calls.

        Two calls are equal. A third has extreme numbers in the other rows.
        """
        model, rng, (x, y, shares, seeds, _) = self.engine.model, self._rng, self._specs
        _amplify(model, rng)
        place = int(rng.integers(self.engine.at_once))
        own = np.repeat(np.arange(self.engine.at_once) == place, shares.shape[1])
        real = x.dtype.is_floating
        examples = rng.standard_normal(x.shape) if real else rng.integers(TABLE, size=x.shape)
        # One or two extreme numbers, in random order.
        numbers = rng.choice(EXTREMES if real else (0, TABLE - 1), rng.integers(1, 3))
        extremes = rng.choice(numbers, x.shape)
        labels, others = rng.integers(model.outputs[0].shape[-1], size=(2, *y.shape))
        extremes[own], others[own] = examples[own], labels[own]
        rest = (np.ones(shares.shape), rng.integers(1 << 31, size=seeds.shape), np.ones(shares.shape[0]))
        one, again = (self._bits(place, examples, labels, *rest) for _ in range(2))
        self.cases += 1
        self.changed += one[0] != self._bits(place, extremes, others, *rest)[0]
        self.differed += one != again

    def _bits(self, place: int, *given: NDArray | float) -> tuple[bytes, bytes]:
        """Return the stored bytes of the unit at a place, and all bytes of the result."""
        with as_traced():
            found, held = self._call(*(tf.constant(each, spec.dtype) for each, spec in zip(given, self._specs)))
        every = [np.asarray(tensor).tobytes() for tensor in tf.nest.flatten((found, held))]
        return b"".join(np.asarray(tensor)[place].tobytes() for tensor in tf.nest.flatten(held)), b"".join(every)


class TrialInTurn:
    """Test one model whose units are computed in turn. A case compares equal calls only.

    Args:
        engine: of the model, whose weights change from case to case.
        seed: of all random draws. None: the operating system's entropy.

    Attributes:
        engine, cases, differed, kernels, places: as in `Trial`.
        changed: 0.
    """

    in_rows = False

    def __init__(self, engine: InTurn, seed: int | None = None) -> None:
        self.engine, self._rng = engine, np.random.default_rng(seed)
        self.cases = self.changed = self.differed = 0
        self.kernels, self.places = ", ".join(sorted(set(engine.kernels.values()))) or engine.method, engine.places

    def case(self) -> None:
        """Draw weights and examples, and compare two equal concurrent calls."""
        model, rng, places = self.engine.model, self._rng, self.engine.places
        _amplify(model, rng)
        x = rng.standard_normal((places, *model.inputs[0].shape[1:]))
        y = rng.integers(model.outputs[0].shape[-1], size=places)
        seeds = rng.integers(1 << 31, size=(places, len(seeds_of(model)), 2))
        one, again = in_threads(self.engine, [Call(x, y, np.ones((places, 1), bool), 1.0, seeds)] * 2, 2)
        self.cases += 1
        self.differed += [each.tobytes() for each in one.arrays] != [each.tobytes() for each in again.arrays]


def _amplify(model: Network, rng: np.random.Generator) -> None:
    """Draw each variable's weights at a random scale, from 1e-38 to 1e38.

    A later layer may cancel this scale.
    """
    for variable in model.trainable_variables:
        variable.assign(np.clip(scale(rng) * rng.standard_normal(variable.shape), -3e38, 3e38))


def _stack(shape: tuple[int, ...], *inner: Layer) -> Network:
    return keras.Sequential([keras.Input(shape), *inner, layers.Flatten(), layers.Dense(5, activation="softmax")])


def _frozen(shape: tuple[int, ...], *inner: Layer) -> Network:
    """Return a model with a trained layer on both sides of frozen ones.

    So gradients pass through the frozen layers.
    """
    for layer in inner:
        layer.trainable = False
    return _stack(shape, layers.Dense(4, activation="tanh"), *inner)


def _of_words(inner: Callable[[Tensor], Tensor]) -> Network:
    words = keras.Input((9,), dtype="int32")
    pooled = layers.GlobalAveragePooling1D()(inner(layers.Embedding(TABLE, 6)(words)))
    return keras.Model(words, layers.Dense(5, activation="softmax")(pooled))


def _attention(x: Tensor) -> Tensor:
    query, key, value = (layers.Dense(6)(x) for _ in range(3))
    products = keras.ops.matmul(query, keras.ops.transpose(key, (0, 2, 1)))
    return x + keras.ops.matmul(keras.ops.softmax(products / math.sqrt(6)), value)


MODELS: Mapping[str, tuple[Callable[[], Network], int, int]] = {
    "dense, wide": (lambda: _stack((784,), layers.Dense(128, "relu"), layers.Dropout(0.5)), 96, 1),
    "dense, several positions": (lambda: _stack((6, 80), layers.Dense(96, "relu"), layers.Dense(3, "tanh")), 4, 1),
    "dense, units of three examples": (lambda: _stack((13,), layers.Dense(16, "gelu")), 2, 3),
    "embedding, pooling": (lambda: _of_words(layers.LayerNormalization()), 64, 1),
    "embedding, attention": (lambda: _of_words(_attention), 16, 1),
    "heads of attention": (lambda: _of_words(lambda x: x + layers.MultiHeadAttention(2, 3)(x, x)), 16, 1),
    "group normalization": (lambda: _stack((5, 5, 3), layers.Dense(8), layers.GroupNormalization(4)), 8, 1),
    "frozen convolution, pooling": (lambda: _frozen((12, 12, 2), layers.Conv2D(8, 3), layers.MaxPooling2D()), 32, 1),
    "frozen recurrence": (lambda: _frozen((5, 3), layers.LSTM(6, unroll=True, use_cudnn=False)), 1, 1),
    "trained convolution": (lambda: _stack((12, 12, 2), layers.Conv2D(8, 3), layers.MaxPooling2D()), 16, 1),
    "trained recurrence": (lambda: _stack((5, 3), layers.GRU(6, use_cudnn=False)), 16, 1),
}
"""By name: the model's builder, the batch size B, and the most examples in a unit. Calls have from 18 to 189 places."""


def tried(until: float) -> dict[str, Trial | TrialInTurn]:
    """Run a case of each model in turn, again and again, until the deadline.

    Each has at least one case.

    Args:
        until: deadline, a time of `time.monotonic`.
    """
    use_single_precision()
    trials: dict[str, Trial | TrialInTurn] = {}
    for name, (build, size, cap) in MODELS.items():
        model = build()
        engine, _ = engine_of(model, keras.losses.sparse_categorical_crossentropy, made_up(model), size, cap)
        trials[name] = Trial(engine) if isinstance(engine, InRows) else TrialInTurn(engine)
    for trial in itertools.cycle(trials.values()):
        if trial.cases and time.monotonic() >= until:
            break
        trial.case()
    return trials


def platform_name() -> str:
    """Return the processor, TensorFlow's version, and its device: `CPU:0`, or a GPU with its name if there is one."""
    device = tf.linalg.matmul(tf.eye(2), tf.eye(2)).device.rpartition("device:")[2]
    gpus = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    device = " ".join([device, *(gpu["device_name"] for gpu in gpus if "device_name" in gpu)])
    return f"{processor()}, TensorFlow {tf.__version__} on {device}"
