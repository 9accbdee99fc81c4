"""Private step of gradient descent in any framework: clip each unit's gradient, sum, noise, divide, descend."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cloister.privacy.dpsgd.batches import Draws
from cloister.privacy.dpsgd.clipped_sums import ClippedSum, ClippedSums
from cloister.privacy.dpsgd.local_steps import MAX_BATCH
from cloister.privacy.dpsgd.nested import Examples
from cloister.privacy.dpsgd.noise import check_clipping_norm, grid_of, noised_sum
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils import check
from cloister.utils.arrays import aligned
from cloister.utils.errors import ConfigError

COARSE_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TF_SET_ONEDNN_FPMATH_MODE")
"""Environment variables that let oneDNN compute products of float32 numbers in fewer bits."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of one step, from private data without noise: not for release.

    Attributes:
        examples, clipped, non_finite: as in `clipped_sums.ClippedSum`.
    """

    examples: int
    clipped: int
    non_finite: int


class Descent(ABC):
    """DP-SGD on a model of some framework, which is trained in place.

    A subclass sets `_clipped_sums` and `why_in_turn`, and applies the noised means.

    Args:
        variables: shape and dtype of each trainable variable.
        batch_size, noise_multiplier, clipping_norm, group_cap: as in `step.DpSgd`.

    Attributes:
        noise: source of the keys of the noise: the operating system, or a seed that is set for tests.
        why_in_turn: reason for which units are computed in turn, with the layer; empty in rows.

    Raises:
        ConfigError: a number is out of range.
    """

    _clipped_sums: ClippedSums
    why_in_turn: str

    def __init__(
        self,
        variables: Iterable[tuple[Sequence[int], DTypeLike]],
        *,
        batch_size: int,
        noise_multiplier: float,
        clipping_norm: float,
        group_cap: int,
    ) -> None:
        check.positive(batch_size=batch_size, group_cap=group_cap)
        if batch_size > MAX_BATCH:
            raise ConfigError(
                f"batch_size must be at most {MAX_BATCH}, got {batch_size}: roundings are bounded up to it"
            )
        check_clipping_norm(clipping_norm)
        # Templates: arrays of one number in memory each.
        self._like = [np.broadcast_to(np.zeros((), dtype), tuple(shape)) for shape, dtype in variables]
        self._parameters = sum(array.size for array in self._like)
        grid_of(clipping_norm, noise_multiplier, self._parameters)  # refuses the same parameters as a step
        self.batch_size = batch_size
        self.noise_multiplier = noise_multiplier
        self.clipping_norm = clipping_norm
        self.noise = GaussianNoise()

    @property
    def method(self) -> str:
        """Return `rows`, or `in turn` if units are computed one after another."""
        return self._clipped_sums.engine.method

    @property
    def kernels(self) -> dict[str, str]:
        """Return the form of the gradients of each variable in rows, by its path."""
        return self._clipped_sums.engine.kernels

    @property
    def overstatement(self) -> float:
        """Return η; contributions are clipped to S/(1 + η), see `noise`."""
        return self._clipped_sums.engine.overstatement

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
        self._apply(self._noised_mean(found.sums, grid))
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
        self._refuse_coarse_precision()
        return self._clipped_sums.of(x, y, clipping_norm, groups, shares)

    def _noised_mean(self, sums: Sequence[NDArray], grid: Grid) -> list[NDArray]:
        """Return (sums + noise)/B, in new memory for each step: an optimizer may keep a gradient."""
        means = [aligned(array.shape, array.dtype) for array in self._like]
        flat, out = (tuple(array.reshape(-1) for array in arrays) for arrays in (sums, means))
        noised_sum(flat, grid, self.noise, out, self.batch_size)
        return means

    @abstractmethod
    def _apply(self, means: Sequence[NDArray]) -> None:
        """Move the model by the optimizer, along noised mean gradients alone."""

    @abstractmethod
    def _refuse_coarse_precision(self) -> None:
        """Raise ConfigError if the framework may compute products of float32 numbers in fewer bits."""


def refuse_coarse_modes() -> None:
    """Raise ConfigError if the environment lets oneDNN compute products of float32 numbers in fewer bits."""
    for name in COARSE_MODES:
        if os.environ.get(name, "strict").lower() not in ("", "strict"):
            raise ConfigError(
                f"environment variable {name} must be unset or STRICT for DP-SGD, got {os.environ[name]!r}"
            )
