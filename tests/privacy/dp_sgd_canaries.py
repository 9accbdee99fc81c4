"""Canary audit of DP-SGD: synthetic examples whose coins determine their presence in the data.

    coins ──▶ batches of the canaries present ──▶ [clip, sum, noise] ──▶ descent ──▶ a score for every canary

The gradient of a canary is longer than the clipping norm, in a random direction of its own. If a network is one linear
layer and its loss is its output, its gradient is its input. So canaries pass every step that examples pass.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.server.canaries import LENGTH, Canaries, sign_in
from cloister.utils.arrays import Network, Tensor

if TYPE_CHECKING:
    from cloister.privacy.dpsgd.step import DpSgd

Step = Callable[[NDArray[np.float32]], NDArray]
"""Function from a batch's gradients, shape (k, p), to their released noised sum, shape (p,)."""


def steps_with_canaries(
    step: Step, canaries: Canaries, steps: LocalSteps, *, size: int, clipping_norm: float, seed: int | None = None
) -> Canaries:
    """Train on the present canaries alone, and score all canaries by every step.

    Args:
        step: audited step.
        canaries: m of them.
        steps: draws the batches; `examples` is m for all coins.
        size: p, numbers in a gradient: many more than canaries, or they interfere with each other.
        clipping_norm: S.
        seed: of the batches, for tests; None: the operating system's entropy.

    Returns:
        The canaries with their scores, for `canaries.OneRun`. The claim of the steps is `steps.event(σ)`.
    """
    present = np.flatnonzero(canaries.coins)
    for number, batch in enumerate(steps.batches(seed, present=len(present)), start=1):
        length = sign_in(number) * LENGTH * clipping_norm / math.sqrt(size)
        gradients = np.empty((len(batch), size), np.float32)
        for row, canary in zip(gradients, present[batch], strict=True):
            row[:] = length * canaries.directions.signs(int(canary), 0, 0, size)
        released = np.asarray(step(gradients), np.float64)
        canaries = canaries.seen((released,), clipping_norm, number)
    return canaries


def linear_network(size: int) -> Network:
    """Build a network whose output is the inner product of its input and its only weights.

    Args:
        size: p.
    """
    import keras  # takes seconds, and an audit of coins and scores does not need it

    return keras.Sequential([keras.Input((size,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])


def linear_loss(labels: Tensor, outputs: Tensor) -> Tensor:
    """Return the output as the loss: the gradient of an example is the example.

    Args:
        labels: ignored.
        outputs: of a `linear_network`, shape (batch, 1).
    """
    return outputs[:, 0]


def on_linear_network(dp_sgd: "DpSgd") -> Step:
    """Return steps of DP-SGD whose release is their change of the weights.

    Args:
        dp_sgd: on a `linear_network`, with `linear_loss`, plain SGD and a learning rate of 1. Another optimizer
            transforms the release, which can only weaken the evidence.
    """
    (weights,) = dp_sgd.model.trainable_variables

    def step(gradients: NDArray[np.float32]) -> NDArray:
        before = np.array(weights, np.float64)
        dp_sgd.step(gradients, np.zeros(len(gradients), np.int64))
        return dp_sgd.batch_size * (before - np.array(weights, np.float64)).ravel()

    return step
