"""Coordinate-wise median and trimmed mean of bounded updates, with a proved sensitivity and noise.

**Sensitivity.** n clients are asked, and one that does not reply counts with a zero update. So n is public, and joining
or leaving exchanges one update for zero. An update of at most C is truncated to whole steps of a public grid before the
ranking: k with Σk² ≤ D² (`cloister.privacy.mechanisms.grid`). Consider one coordinate. Let y₁ ≤ … ≤ yₙ₋₁ be
the integers of the other clients, y₀ = -∞, yₙ = ∞, and x that of this client. Without the t smallest and the t largest
of all n, the sum is

    f(x) = yₜ₊₁ + … + yₙ₋ₜ₋₁ + min(max(x, yₜ), yₙ₋ₜ),

since x is kept if it is between yₜ and yₙ₋ₜ, and otherwise one of these two is kept. So, in integers,

    |f(x) - f(x')| ≤ |x - x'|  in every coordinate, and  ‖f(k) - f(k')‖₂ ≤ ‖k - k'‖₂  over all.

Joining or leaving moves the sum of the n - 2t values kept by at most D steps, replacing one client by 2D. The noise on
it is exact; the division by n - 2t, which is public, follows. In units of the weights the release moves by at most
C/(n - 2t), or by 2C/(n - 2t). Both are reached, to a step of the grid: if half of the other clients are at u and half
at 0, one client decides. The median keeps one value for odd n, and two for even n. Its sensitivity does not depend on
n, apart from that.

Without the zero updates, n itself would change with a client, and with it the values in the middle.

| edge case | result |
|---|---|
| zero update | it counts like any other; a missing update counts as zero |
| NaN or infinite update | screening has rejected it: it counts as zero |
| empty cohort | the model that the server sent, and the noise |
| one client asked | its bounded update is the median, with sensitivity C; no value can be cut off |
| more replies than clients asked | refused |
| an update with a norm above the cohort's bound | it is shortened before the ranking |
| an unbounded cohort, or t that leaves no value | refused |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.arrays import Row
from cloister.core.cohort import Cohort, added_up, row_squares, updates
from cloister.core.errors import PrivacyError, UnboundedSensitivity
from cloister.core.threads import Span, for_each_span, spans
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian, Maker
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.release import Release

COLUMNS = 1 << 10
"""Parameters whose values are sorted together."""


def noisy_trimmed_mean(
    cohort: Cohort, multiplier: float, asked: int, trimmed: int, noise: GaussianNoise, widest: float = 0.0
) -> Release:
    """Return sent + the noised trimmed mean of the updates, by coordinate.

    The noise has standard deviation z·C/(n - 2t).

    Values are integers in steps when they are sorted, and the noise on the sum of the kept values is exact.

    Args:
        cohort: bounded: C is its `l2_bound`.
        multiplier: z ≥ 0.
        asked: n, number of clients that were asked. It has to be public: not the size of a Poisson cohort.
        trimmed: t, number of values cut off at each end; ⌈n/2⌉ - 1 is the median.
        noise: source of the key of the noise.
        widest: the largest z that the release could have, if z depends on private data: see `Grid.of`.

    Guarantee: one client's joining or leaving moves the release without noise by at most C/(n - 2t) in L2, so that a
        round is a Gaussian mechanism with noise multiplier z (add-or-remove), and of z/2 for replacing one. A
        contribution with a norm above the cohort's bound is shortened.

    Raises:
        UnboundedSensitivity: no stage has bounded the cohort.
        PrivacyError: more clients replied than were asked.
        ConfigError: z or t is negative, or t leaves no value.

    Source: Yin et al. (2018), arXiv:1803.01498, Definitions 1 and 2; the sensitivity is ours, proved above.
    """
    if math.isinf(cohort.l2_bound):
        raise UnboundedSensitivity("noise was asked for before anything bounded a contribution; clip first")
    if len(cohort) > asked:
        raise PrivacyError(f"{len(cohort)} clients replied and {asked} were asked: that number is not public")
    kept = asked - 2 * trimmed
    check.positive(values_kept=kept)
    check.non_negative(noise_multiplier=multiplier, trimmed=trimmed)
    grid, sensitivity = Grid.of(cohort.l2_bound, multiplier, kept, widest), cohort.l2_bound / kept
    return Release(_Ranked(cohort, grid, asked, trimmed).mean(noise), multiplier * sensitivity, sensitivity)


@dataclass(frozen=True)
class _Ranked:
    """Values of a cohort in integers, sorted by coordinate, without the largest and the smallest.

    Attributes:
        cohort: bounded by the bound of the grid.
        grid: of the integers.
        asked: number of values; those of clients without a reply are 0.
        trimmed: number of values cut off at each end.
    """

    cohort: Cohort
    grid: Grid
    asked: int
    trimmed: int

    def mean(self, noise: GaussianNoise) -> Row:
        """Return sent + (sum of the kept values + noise)·step/(n - 2t)."""
        cohort, grid = self.cohort, self.grid
        source = DiscreteGaussian(grid.scale, noise) if grid.scale else None
        places = source.places(self._spans) if source else {}
        model = tuple(np.empty(piece.size, cohort.layout.dtype) for piece in cohort.sent)
        unit = grid.step / (self.asked - 2 * self.trimmed)

        def write(span: Span, sums: NDArray, maker: Maker | None) -> None:
            if maker:
                maker.add(sums, places[span])
            sums *= unit
            np.add(sums, span.of(cohort.sent), out=span.of(model), casting="same_kind")

        grid.settle(cohort.factors / grid.step, lambda weights: self._sum(weights, write, source))
        return model

    @property
    def _spans(self) -> list[Span]:
        return spans(self.cohort.layout.sizes, COLUMNS)

    def _sum(
        self, weights: NDArray, keep: Callable[[Span, NDArray, Maker | None], None], source: DiscreteGaussian | None
    ) -> NDArray[np.float64]:
        """Hand on the sum of the kept values for every span.

        Return the sum of squares of each contribution.
        """
        rows = {span: number for number, span in enumerate(self._spans)}
        squares = np.zeros((len(rows), len(self.cohort)))
        weights = weights.astype(self.cohort.layout.dtype)

        def add(span: Span, workspace: tuple[NDArray, NDArray, Maker | None]) -> None:
            scratch, whole, maker = workspace
            columns = whole[: self.asked * len(span)].reshape(self.asked, len(span))
            self._fill(columns, span, weights, squares[rows[span]], scratch)
            columns.sort(axis=0)
            keep(span, columns[self.trimmed : self.asked - self.trimmed].sum(axis=0, dtype=np.float64), maker)

        def workspace() -> tuple[NDArray, NDArray, Maker | None]:
            size = self.asked * COLUMNS
            maker = source.maker() if source else None
            return np.empty(size, self.cohort.layout.dtype), np.empty(size, self.grid.dtype), maker

        for_each_span(list(rows), add, workspace, cost=self.asked)
        return added_up(squares)

    def _fill(self, columns: NDArray, span: Span, weights: NDArray, squares: NDArray, scratch: NDArray) -> None:
        """Truncate the updates in `span`, and append zeros for missing replies."""
        replied = updates(self.cohort.rows, self.cohort.sent, span, scratch)
        with np.errstate(over="ignore", invalid="ignore"):
            replied *= weights[:, None]
            replied[weights == 0] = 0
            squares[:] = row_squares(replied)
            np.copyto(columns[: len(replied)], replied, casting="unsafe")  # toward zero
        columns[len(replied) :] = 0
