"""Private step of gradient descent: clip each unit's gradient, sum, noise, divide, descend."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import keras
import tensorflow as tf
from numpy.typing import NDArray

from cloister.privacy.dpsgd import batches
from cloister.privacy.dpsgd.batches import Draws
from cloister.privacy.dpsgd.checks import use_single_precision
from cloister.privacy.dpsgd.clipped_sums import ClippedSum, ClippedSums
from cloister.privacy.dpsgd.local_steps import MAX_BATCH
from cloister.privacy.dpsgd.noise import check_clipping_norm, grid_of, noised_sum
from cloister.privacy.dpsgd.tracing import Examples, Loss, Probe, as_probed, made_up, take
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils import check
from cloister.utils.arrays import Compiled, Network, Optimizer, Tensor, Variable, aligned
from cloister.utils.errors import ConfigError

WORTH_COMPILING = 1 << 18
"""Least number of parameters for a compiled optimizer: below it, compiling (0.3 s) saves under 0.3 ms a step."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of one step, from private data without noise: not for release.

    Attributes:
        examples, clipped, non_finite: as in `clipped_sums.ClippedSum`.
    """

    examples: int
    clipped: int
    non_finite: int


class DpSgd:
    """DP-SGD on a Keras model, which is trained in place.

    Args:
        model: built; its state other than weights must not come from data.
        batch_size: B > 0, public: the divisor of a noised sum, and the expected number of units in a batch.
        noise_multiplier: σ ≥ 0.
        clipping_norm: S, from `noise.MINIMUM_CLIPPING_NORM` to `MAXIMUM_CLIPPING_NORM`; the default of each step.
        optimizer: any Keras optimizer; it receives the noised mean alone, so its update is post-processing.
        loss: (labels, outputs) -> (batch,), each of its own example alone.
        probe: x and y of three dummy examples, for their structure, shapes and types. A model of several inputs or
            outputs takes tuples or dicts of arrays. Required if the loss is not a classifier's.
        group_cap: largest number of examples of a unit, > 0. At 1 a unit is an example. Above, it is a group of
            examples: its gradient is the mean of their gradients, and is clipped to S.

    Attributes:
        noise: source of the keys of the noise: the operating system, or a seed that is set for tests.
        overstatement: η; contributions are clipped to S/(1 + η), see `noise`.

    Guarantee: take a step on a batch from `batches.poisson`, of at most B units on average. It costs as much as a
        Poisson-sampled Gaussian mechanism of noise multiplier σ, for add-or-remove of a unit, with δ larger by
        `vocabulary.OVERFLOW`. It rests on the guarantee of `ClippedSums` and on `noise`. Other batches cost as much as
        a Gaussian mechanism without sampling, if at most `batches.places_of(B)` units take part.

    Raises:
        UnsupportedModel: as in `checks.refuse`.
        ConfigError: a number is out of range, a probe is needed, or the processor is set to coarser products.

    Source: Abadi et al. (2016), arXiv:1607.00133, Algorithm 1, with the configured batch size as the divisor.
    """

    def __init__(
        self,
        model: Network,
        *,
        batch_size: int,
        noise_multiplier: float,
        clipping_norm: float,
        optimizer: Optimizer,
        loss: Loss = keras.losses.sparse_categorical_crossentropy,
        probe: Probe | None = None,
        group_cap: int = 1,
    ) -> None:
        check.positive(batch_size=batch_size, group_cap=group_cap)
        if batch_size > MAX_BATCH:
            raise ConfigError(
                f"batch_size must be at most {MAX_BATCH}, got {batch_size}: roundings are bounded up to it"
            )
        check_clipping_norm(clipping_norm)
        self._parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
        grid_of(clipping_norm, noise_multiplier, self._parameters)  # refuses the same parameters as a step
        if probe is None and loss is not keras.losses.sparse_categorical_crossentropy:
            raise ConfigError("probe must be given with a loss of your own: x and y of three made-up examples")
        use_single_precision()
        self.model = model
        self.batch_size = batch_size
        self.noise_multiplier = noise_multiplier
        self.clipping_norm = clipping_norm
        self.noise = GaussianNoise()
        optimizer.build(model.trainable_variables)
        self.probe = made_up(model) if probe is None else probe
        self._clipped_sums = ClippedSums(model, loss, self.probe, batch_size, group_cap)
        self.overstatement = self._clipped_sums.engine.overstatement
        self._descend = _descent(optimizer, model.trainable_variables)

    @property
    def method(self) -> str:
        """Return `rows`, or `in turn` if units are computed one after another."""
        return self._clipped_sums.engine.method

    @property
    def why_in_turn(self) -> str:
        """Return the reason for which units are computed in turn, with the layer; empty in rows."""
        return self._clipped_sums.why_in_turn

    @property
    def kernels(self) -> dict[str, str]:
        """Return the form of each layer's gradients in rows, by its path."""
        return self._clipped_sums.engine.kernels

    def reseed(self, seed: int | Sequence[int] | None = None) -> None:
        """Replace the source of places and of random layers' numbers from now on.

        Args:
            seed: for tests and papers; None: from the operating system's entropy.
        """
        self._clipped_sums.draws = Draws(seed)

    def step(
        self,
        x: Examples,
        y: Examples,
        clipping_norm: float | None = None,
        groups: NDArray | None = None,
        shares: NDArray | None = None,
    ) -> StepCounts:
        """Take one step on a batch, which may be empty; noise is released in either case.

        Args:
            x, y: the examples that take part, any number of them, as arrays or in the structure of the probe.
            clipping_norm: S of this step.
            groups: of each example; examples with the same value are one unit, of which at most `group_cap` count. See
                `batches.rows_of`.
            shares: of each example, from 0 to 1: a unit is clipped to S times the mean share of its examples. A share
                must depend on its own example alone. None: 1. See `clipped_sums`.
        """
        bound = self.clipping_norm if clipping_norm is None else clipping_norm
        grid = grid_of(bound, self.noise_multiplier, self._parameters)
        found = self.clipped_sum(x, y, bound, groups, shares)
        self._descend(*[_shared(mean) for mean in self._noised_mean(found.sums, grid)])
        return StepCounts(found.examples, found.clipped, found.non_finite)

    def clipped_sum(
        self,
        x: Examples,
        y: Examples,
        clipping_norm: float,
        groups: NDArray | None = None,
        shares: NDArray | None = None,
    ) -> ClippedSum:
        """Return Σ gradient·min(1, c·S/‖gradient‖) over the units, without noise; see `ClippedSums.of`."""
        return self._clipped_sums.of(x, y, clipping_norm, groups, shares)

    def _noised_mean(self, sums: Sequence[NDArray], grid: Grid) -> list[NDArray]:
        """Return (sums + noise)/B, in new memory for each step: an optimizer may keep a gradient."""
        means = [aligned(variable.shape, variable.dtype) for variable in self.model.trainable_variables]
        flat, out = (tuple(array.reshape(-1) for array in arrays) for arrays in (sums, means))
        noised_sum(flat, grid, self.noise, out, self.batch_size)
        return means


def _shared(array: NDArray) -> Tensor:
    """Return a tensor over an array's own memory."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _descent(optimizer: Optimizer, variables: Sequence[Variable]) -> Compiled:
    """Return the function that applies the optimizer to the mean gradients.

    TensorFlow runs an optimizer as a dozen operations, each a pass over all parameters; for large models XLA fuses
    them to one. It is post-processing, so the guarantee does not depend on its computation.
    """

    def apply(*means: Tensor) -> None:
        optimizer.apply(list(means), variables)

    if sum(math.prod(variable.shape) for variable in variables) >= WORTH_COMPILING:
        fused = tf.function(apply, autograph=False, jit_compile=True)
        with suppress(Exception):  # XLA and TensorFlow raise exceptions of many kinds for missing support
            fused.experimental_get_compiler_ir(*[tf.TensorSpec(each.shape, each.dtype) for each in variables])()
            return fused
    return tf.function(apply, autograph=False)


def train(
    dp_sgd: DpSgd, x: Examples, y: Examples, *, steps: int, sampling: str = "poisson", seed: int | None = None
) -> Iterator[StepCounts]:
    """Take private steps on batches of these examples, and yield their counts.

    Steps are taken on iteration: write `for counts in train(...)`.

    Args:
        dp_sgd: holds the model, and B, the expected size of a batch.
        x, y: n ≥ B examples.
        steps: number of steps. Each costs a Gaussian event, drawn by `Sampling("bounded-poisson", B/n)`.
        sampling: `poisson`: each example takes part with probability B/n. `shuffle`: equal parts of a random order, for
            comparison; no amplification may be claimed for it.
        seed: of the batches, for tests; the operating system by default.

    Raises:
        ConfigError: the sampling is unknown, or there are fewer examples than a batch is expected to have.
    """
    check.one_of(("poisson", "shuffle"), sampling=sampling)
    x, y, count = as_probed(x, y, dp_sgd.probe)
    if sampling == "poisson":
        drawn = batches.poisson(count, dp_sgd.batch_size / count, steps, seed)
    else:
        drawn = batches.shuffle(count, dp_sgd.batch_size, steps, seed)
    return (dp_sgd.step(take(x, batch), take(y, batch)) for batch in drawn)
