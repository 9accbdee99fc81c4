"""A private step of gradient descent: clip each example's gradient, sum, noise, divide, descend."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.cohort import rooms, share
from cloister.core.errors import ConfigError, UnsupportedModel
from cloister.privacy.dpsgd.batches import pieces, small
from cloister.privacy.dpsgd.vectorised import Loss, is_seed
from cloister.privacy.dpsgd.vetting import Probe, made_up, vetted
from cloister.privacy.noise import BLOCK, ROOM, GaussianNoise
from cloister.privacy.release import put_on_grid

NOISE_COST = 8
"""What a normal number in double precision costs, in additions: how soon a second thread is worth it."""
ALIGNMENT = 64
"""Bytes."""


@dataclass(frozen=True)
class ClippedSum:
    """Un-noised, and so not for release.

    Attributes:
        sums: a float array for each trainable variable, in the model's order.
        examples: how many took part.
        clipped: how many were scaled down to the bound.
        non_finite: how many had no finite gradient, and contributed zero.
    """

    sums: tuple[NDArray, ...]
    examples: int
    clipped: int
    non_finite: int


@dataclass(frozen=True)
class StepCounts:
    """Counts of one step. They are computed from private data without noise: not for release.

    Attributes:
        examples: how many took part.
        clipped: how many were scaled down to the bound.
        non_finite: how many had no finite gradient, and contributed zero.
    """

    examples: int
    clipped: int
    non_finite: int


class DpSgd:
    """DP-SGD on a Keras model, which is trained in place.

    Args:
        model: built, of one input and one output; its state other than weights must not come from data.
        batch_size: B > 0, public: what a noised sum is divided by, and the expected size of a batch. How many examples
            a step really has changes nothing but the time that it takes.
        noise_multiplier: σ ≥ 0.
        clipping_norm: S > 0, unless a step is given another.
        optimizer: any Keras optimizer; it sees the noised mean alone, so what it does is post-processing.
        loss: (labels, outputs) -> (batch,), each of its own example alone.
        microbatch_size: examples computed at a time, where a batch would take too much memory; `batch_size` by
            default. It changes neither sums nor noise, but for the order of additions.
        noise: where normal numbers come from; the operating system by default.
        probe: x and y of three made-up examples, to check the model with. Needed where the loss is not a classifier's.

    Attributes:
        method: `layers`, or `model` where the layers of this model cannot be looked at one by one.
        kernels: how each layer's gradients are held, by its path; known after the first step.

    Guarantee: one example's joining or leaving a batch moves the un-noised sum by at most S in L2, and N(0, σ²S²) is
        added to it, in double precision on a public grid, once for a step: a Gaussian mechanism of noise multiplier σ
        for add-or-remove of an example. Amplification by sampling is for batches from `batches.poisson` alone.

    Raises:
        UnsupportedModel: examples of this model have no gradients of their own, with the reason and the replacement.
        ConfigError: a number is out of range, or a probe is needed.

    Source: Abadi et al. (2016), arXiv:1607.00133, Algorithm 1, with the configured batch size as the divisor.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int,
        noise_multiplier: float,
        clipping_norm: float,
        optimizer: Any,
        loss: Loss = keras.losses.sparse_categorical_crossentropy,
        microbatch_size: int | None = None,
        noise: GaussianNoise | None = None,
        probe: Probe | None = None,
    ) -> None:
        microbatch_size = batch_size if microbatch_size is None else microbatch_size
        check.positive(batch_size=batch_size, microbatch_size=microbatch_size, clipping_norm=clipping_norm)
        check.non_negative(noise_multiplier=noise_multiplier)
        if probe is None and loss is not keras.losses.sparse_categorical_crossentropy:
            raise ConfigError("probe must be given with a loss of your own: x and y of three made-up examples")
        self.model = model
        self.batch_size = batch_size
        self.noise_multiplier = noise_multiplier
        self.clipping_norm = clipping_norm
        self.microbatch_size = microbatch_size
        self.noise = GaussianNoise() if noise is None else noise
        self._optimizer = optimizer
        self._optimizer.build(model.trainable_variables)
        self._probe = made_up(model) if probe is None else probe
        self._gradients = vetted(model, loss, self._probe)
        self._compiled = {size: self._compile(size) for size in {microbatch_size, small(microbatch_size)}}
        self._refuse_foreign_state(self._compiled[microbatch_size])
        self._descend = tf.function(self._apply, autograph=False)
        self._outs = tuple(_aligned(variable.shape, variable.dtype) for variable in model.trainable_variables)
        self._rooms = list(rooms(ROOM))
        self.reseed()

    @property
    def method(self) -> str:
        """`layers` or `model`."""
        return "layers" if self._gradients.by_layer else "model"

    @property
    def kernels(self) -> dict[str, str]:
        """How each layer's gradients are held."""
        return self._gradients.kernels

    def reseed(self) -> None:
        """Let random layers draw from the operating system's entropy from here on, unless the noise is seeded too.

        A mask of dropout belongs to a place in the batch: one example more shifts those of all behind it. As long as
        masks are independent and secret that is no difference (their laws are the same, and the bound holds for each);
        known to somebody, they would tell who was drawn, and let one example move the sum by more than S.
        """
        for variable in self.model.non_trainable_variables if not self.noise.seeded else ():
            if is_seed(variable):
                words = np.frombuffer(os.urandom(4 * variable.shape[0]), np.uint32)
                variable.assign((words >> 1).astype(variable.dtype))

    def step(self, x: NDArray, y: NDArray, clipping_norm: float | None = None) -> StepCounts:
        """One step on a batch, which may be empty: noise is released all the same.

        Args:
            x, y: the examples that take part, any number of them.
            clipping_norm: S of this step.
        """
        bound = self.clipping_norm if clipping_norm is None else clipping_norm
        found = self.clipped_sum(x, y, bound)
        noised = self._noised(found.sums, self.noise_multiplier * bound)
        self._descend([_shared(total) for total in noised], tf.constant(self.batch_size, tf.float32))
        return StepCounts(found.examples, found.clipped, found.non_finite)

    def clipped_sum(self, x: NDArray, y: NDArray, clipping_norm: float) -> ClippedSum:
        """Σ gradient·min(1, S/‖gradient‖) over the examples: what noise is added to.

        Raises:
            ConfigError: S is not a finite number above 0, or x and y are not of one length.
        """
        check.positive(clipping_norm=clipping_norm)
        if len(x) != len(y):
            raise ConfigError(f"x and y must have one length, got {len(x)} and {len(y)}")
        sums, clipped, non_finite, start = None, 0, 0, 0
        for size in pieces(len(x), self.microbatch_size):
            piece = slice(start, start + size)
            some, some_clipped, some_non_finite = self._microbatch(x[piece], y[piece], size, clipping_norm)
            sums = some if sums is None else [a + b for a, b in zip(sums, some, strict=True)]
            clipped, non_finite, start = clipped + int(some_clipped), non_finite + int(some_non_finite), start + size
        if sums is None:
            return ClippedSum(tuple(np.zeros_like(out) for out in self._outs), 0, 0, 0)
        return ClippedSum(tuple(np.asarray(total) for total in sums), len(x), clipped, non_finite)

    def _microbatch(self, x: Any, y: Any, size: int, bound: float) -> Any:
        return self._compiled[size](
            tf.constant(_padded(x, size, self._probe[0].dtype)),
            tf.constant(_padded(y, size, self._probe[1].dtype)),
            tf.constant(np.arange(size) < len(x)),
            tf.constant(bound, tf.float32),
        )

    def _compile(self, size: int) -> Any:
        """The clipped sum of a microbatch: its shapes are fixed, so that no batch ever makes it compile again."""
        x, y = self._probe
        signature = [
            tf.TensorSpec([size, *x.shape[1:]], x.dtype),
            tf.TensorSpec([size, *y.shape[1:]], y.dtype),
            tf.TensorSpec([size], tf.bool),
            tf.TensorSpec([], tf.float32),
        ]
        return tf.function(self._gradients.clipped, input_signature=signature, autograph=False)

    def _refuse_foreign_state(self, compiled: Any) -> None:
        """Raises UnsupportedModel if the model reads or writes a variable that Keras does not know to be its own."""
        known = {id(variable.value) for variable in self.model.variables}
        foreign = [v.name for v in compiled.get_concrete_function().graph.variables if id(v) not in known]
        if foreign:
            raise UnsupportedModel(f"the model uses {foreign[0]}, a variable that Keras does not know; use add_weight")

    def _noised(self, sums: Sequence[NDArray], std: float) -> tuple[NDArray, ...]:
        """The sums + N(0, std²), in memory that the next step uses again."""
        places = [
            (number, total.reshape(-1)[start : start + len(block)], block)
            for total, out in zip(sums, self._outs, strict=True)
            for start, (number, block) in zip(
                range(0, out.size, BLOCK), self.noise.blocks(out.reshape(-1)), strict=True
            )
        ]
        memory = iter(self._rooms)
        share(
            places,
            lambda mine: put_on_grid(mine, std, self.noise.maker(next(memory))),
            NOISE_COST * sum(out.size for out in self._outs),
        )
        return self._outs

    def _apply(self, noised: Sequence[Any], size: Any) -> None:
        # Divided here, so that nothing the optimizer keeps lies in memory that the next step writes to.
        means = [total / tf.cast(size, total.dtype) for total in noised]
        self._optimizer.apply(means, self.model.trainable_variables)


def _aligned(shape: Sequence[int], dtype: str) -> NDArray:
    """Zeros where TensorFlow can read them without a copy: it wants them at a multiple of 64 bytes."""
    length = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(length + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + length].view(dtype).reshape(shape)


def _shared(array: NDArray) -> Any:
    """A tensor over an array's own memory."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _padded(rows: Any, size: int, dtype: Any) -> NDArray:
    """The rows, with zeros behind them up to `size`."""
    rows = np.asarray(rows, dtype)
    if len(rows) == size:
        return rows
    padded = np.zeros((size, *rows.shape[1:]), dtype)
    padded[: len(rows)] = rows
    return padded
