"""A private step of gradient descent: clip each unit's gradient, sum, noise, divide, descend."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.arrays import aligned
from cloister.core.errors import ConfigError
from cloister.core.tensors import Compiled, Network, Optimizer, Tensor, Variable
from cloister.privacy.dpsgd import batches
from cloister.privacy.dpsgd.batches import Draws
from cloister.privacy.dpsgd.checks import use_single_precision
from cloister.privacy.dpsgd.clipped_sums import ClippedSum, ClippedSums
from cloister.privacy.dpsgd.exact_noise import grid_of, noised_sum
from cloister.privacy.dpsgd.graphs import is_known_to_xla
from cloister.privacy.dpsgd.local_steps import MAX_BATCH
from cloister.privacy.dpsgd.losses import Examples, Loss, Probe, as_probed, made_up, take
from cloister.privacy.dpsgd.rounding import check_clipping_norm
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise

WORTH_COMPILING = 1 << 18
"""Numbers of a model below which a compiled optimizer gains less than 0.3 ms a step, and compiling takes 0.3 s."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of one step. They are computed from private data without noise: not for release.

    Attributes:
        examples: how many units took part: examples, or groups of them.
        clipped: how many were scaled down to the bound.
        non_finite: how many had no finite gradient, or none at all, and contributed zero.
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
        clipping_norm: S, from `rounding.MINIMUM_CLIPPING_NORM` to `MAXIMUM_CLIPPING_NORM`; a step may be given
            another.
        optimizer: any Keras optimizer; it sees the noised mean alone, so what it does is post-processing.
        loss: (labels, outputs) -> (batch,), each of its own example alone.
        probe: x and y of three made-up examples, of which the structure, shapes and types count. A model of several
            inputs or outputs takes tuples or dicts of arrays. Needed where the loss is not a classifier's.
        group_cap: the most examples of a unit, > 0. At 1 a unit is an example. Above, it is a group of examples: its
            gradient is the mean of theirs, and is clipped to S as one.

    Attributes:
        method: `rows`, or `in turn` where units are computed one after another.
        kernels: how each layer's gradients are held in rows, by its path.
        noise: where the keys of the noise come from: the operating system, or a seed that is set for tests.
        overstatement: η; contributions are clipped to S/(1 + η), see `rounding`.

    Guarantee: a step on a batch from `batches.poisson`, of at most B units on average, costs what a Poisson-sampled
        Gaussian mechanism of noise multiplier σ does, for add-or-remove of a unit, with δ larger by
        `vocabulary.OVERFLOW`. One unit moves the un-noised sum, as it is computed, by at most S in L2, for any weights
        and inputs, and no other unit's part of it. Exact noise of standard deviation σS, and a little more, is added
        on a public grid (`exact_noise`). In turn this assumes that an operation gives equal results for equal inputs.
        In rows it assumes too that kernels keep rows apart in calls of one shape. Other batches cost what a Gaussian
        mechanism without sampling does, if at most `batches.places_of(B)` units take part.

    Raises:
        UnsupportedModel: examples of this model have no gradients of their own, with the reason and the replacement.
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
        grid_of(clipping_norm, noise_multiplier, self._parameters)  # refuses what a step would refuse
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
        """`rows`, or `in turn` where units are computed one after another."""
        return self._clipped_sums.engine.method

    @property
    def kernels(self) -> dict[str, str]:
        """Return how each layer's gradients are held in rows."""
        return self._clipped_sums.engine.kernels

    def reseed(self, seed: int | Sequence[int] | None = None) -> None:
        """Draw places and the random numbers of random layers afresh from here on.

        Args:
            seed: for tests and papers; None: from the operating system's entropy.
        """
        self._clipped_sums.draws = Draws(seed)

    def step(
        self, x: Examples, y: Examples, clipping_norm: float | None = None, groups: NDArray | None = None
    ) -> StepCounts:
        """One step on a batch, which may be empty: noise is released all the same.

        Args:
            x, y: the examples that take part, any number of them, as arrays or in the structure of the probe.
            clipping_norm: S of this step.
            groups: of each example; those with the same value are one unit, of which at most `group_cap` examples
                count. `batches.rows_of` gives them.
        """
        bound = self.clipping_norm if clipping_norm is None else clipping_norm
        grid = grid_of(bound, self.noise_multiplier, self._parameters)
        found = self.clipped_sum(x, y, bound, groups)
        self._descend(*[_shared(mean) for mean in self._noised_mean(found.sums, grid)])
        return StepCounts(found.examples, found.clipped, found.non_finite)

    def clipped_sum(self, x: Examples, y: Examples, clipping_norm: float, groups: NDArray | None = None) -> ClippedSum:
        """Σ gradient·min(1, S/‖gradient‖) over the units, a little shorter: what noise is added to.

        A unit whose gradient is not finite, or whose computation raises an exception, contributes zero and changes
        nothing for the others.

        Args:
            x, y: the examples that take part, any number of them.
            clipping_norm: S.
            groups: as in `step`.

        Raises:
            ConfigError: S is out of range, x, y and groups are not of one length, or groups are missing.
        """
        return self._clipped_sums.of(x, y, clipping_norm, groups)

    def _noised_mean(self, sums: Sequence[NDArray], grid: Grid) -> list[NDArray]:
        """(sums + noise)/B, in memory that the optimizer reads.

        It is new for each step: an optimizer may keep a gradient, and with it its memory.
        """
        means = [aligned(variable.shape, variable.dtype) for variable in self.model.trainable_variables]
        flat, out = (tuple(array.reshape(-1) for array in arrays) for arrays in (sums, means))
        noised_sum(flat, grid, self.noise, out, self.batch_size)
        return means


def _shared(array: NDArray) -> Tensor:
    """A tensor over an array's own memory."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _descent(optimizer: Optimizer, variables: Sequence[Variable]) -> Compiled:
    """Return the function that takes the mean gradient of each variable and applies the optimizer to it.

    TensorFlow runs an optimizer as a dozen operations, each of which goes over all numbers of a model; XLA makes one of
    them, for large models. It is post-processing: nothing about privacy depends on how it is computed.

    Args:
        optimizer: built for the variables.
        variables: of a model.
    """

    def apply(*means: Tensor) -> None:
        optimizer.apply(list(means), variables)

    if sum(math.prod(variable.shape) for variable in variables) >= WORTH_COMPILING:
        fused = tf.function(apply, autograph=False, jit_compile=True)
        if is_known_to_xla(fused, [tf.TensorSpec(each.shape, each.dtype) for each in variables]):
            return fused
    return tf.function(apply, autograph=False)


def train(
    dp_sgd: DpSgd, x: Examples, y: Examples, *, steps: int, sampling: str = "poisson", seed: int | None = None
) -> Iterator[StepCounts]:
    """Take private steps on batches of these examples, and give what each one counted, so that a caller can look on.

    Nothing happens until the steps are asked for: write `for counts in train(...)`.

    Args:
        dp_sgd: holds the model, and says how large a batch is expected to be: B.
        x, y: n ≥ B examples.
        steps: how many to take. Each costs a Gaussian event, drawn by `Sampling("bounded-poisson", B/n)`.
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
