"""Releases of a round on the server: exact sums in integers, the noised mean, and the noised median or trimmed mean.

Contributions to a sum are added as they arrive and need not be kept.

**Sensitivity of the median and trimmed mean.** They are computed in each coordinate of bounded updates. n clients are
asked, and one that does not reply counts with a zero update. So n is public, and joining or leaving exchanges one
update for zero. An update of at most C is truncated to whole steps of a public grid before the ranking: k with Σk² ≤ D²
(`cloister.privacy.mechanisms.grid`). Consider one coordinate. Let y₁ ≤ … ≤ yₙ₋₁ be the integers of the other clients,
y₀ = -∞, yₙ = ∞, and x that of this client. Without the t smallest and the t largest of all n, the sum is

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
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian, Maker
from cloister.privacy.mechanisms.grid import Adder, Grid, IntegerSums
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils import check
from cloister.utils.arrays import Layout, Row
from cloister.utils.cohort import Cohort, row_squares, scratch_for, sum_in_order, updates, weighted_sum
from cloister.utils.errors import PrivacyError, UnboundedSensitivity
from cloister.utils.threads import Span, for_each_span, spans

Keep = Callable[[Span, NDArray[np.float64], Maker | None], None]
"""Consumer of the sums of a span, and of this thread's maker of noise."""
Add = Callable[[Span, NDArray[np.float64], Adder, Maker | None], None]
"""Adds contributions over the columns of a span, and writes their sums of squares to the array."""


class Total:
    """Running sum Σ trunc(factors[i]·U[i]/step) of contributions.

    The first cohort is kept: if no other arrives, it is added in the same pass as the release. With the second cohort,
    sums are allocated, and all contributions are added to them in place.

    Args:
        grid: of the integers.
        layout: of the model.
        sent: the global model of this round.

    Guarantee: the sum is exact, in any order; one client's joining or leaving moves it by at most D.
    """

    def __init__(self, grid: Grid, layout: Layout, sent: Row) -> None:
        self.grid = grid
        self._spans = spans(layout.sizes)
        self._none = self._first = Cohort.of(layout, sent, ())
        self._sums: dict[Span, IntegerSums] = {}
        self._made: list[Adder] = []

    def add(self, cohort: Cohort) -> None:
        """Add contributions to the sum.

        Args:
            cohort: bounded by C, relative to the same model.
        """
        if not self._sums and not len(self._first):
            self._first = cohort
            return
        if not self._sums:
            self._sums = {span: IntegerSums(self.grid, len(span)) for span in self._spans}
            self._add(self._first)
            self._first = self._none
        self._add(cohort)

    def whole(self) -> NDArray[np.int64]:
        """Return the sum without noise, in whole steps, concatenated, shape (p,)."""
        offsets = self._none.layout.offsets
        flat = np.empty(offsets[-1], np.int64)
        row = tuple(flat[start:end] for start, end in pairwise(offsets))
        self._write(lambda span, sums, _: np.copyto(span.of(row), sums, casting="unsafe"))
        return flat

    def mean(self, size: float, noise: GaussianNoise) -> Row:
        """Return sent + (sum + noise)·step/size, the model of the release.

        Args:
            size: public divisor of the sum, > 0.
            noise: source of the key of the noise.
        """
        source = DiscreteGaussian(self.grid.scale, noise) if self.grid.scale else None
        places = source.places(self._spans) if source else {}
        sent, unit = self._none.sent, self.grid.step / size
        model = tuple(np.empty(piece.size, self._none.layout.dtype) for piece in sent)

        def write(span: Span, sums: NDArray, maker: Maker | None) -> None:
            if maker:
                maker.add(sums, places[span])
            sums *= unit
            np.add(sums, span.of(sent), out=span.of(model), casting="same_kind")

        self._write(write, source)
        return model

    def _add(self, cohort: Cohort) -> None:
        """Add contributions in place, shortened if not verified to be bounded."""
        added: list[NDArray] = []

        def change(weights: NDArray, sign: int) -> NDArray[np.float64]:
            def add(span: Span, squares: NDArray, adder: Adder, _: Maker | None) -> None:
                adder.add_up(cohort, span, weights, squares, self._sums[span], sign)

            return self._each(cohort, add)

        def write(weights: NDArray) -> NDArray[np.float64]:
            if added:
                change(added.pop(), -1)
            added.append(weights)
            return change(weights, 1)

        self.grid.settle(cohort.factors / self.grid.step, write)

    def _write(self, keep: Keep, source: DiscreteGaussian | None = None) -> None:
        """Pass the sums of every span to `keep`.

        It does so again, with the same noise, if a contribution is not shown to be bounded.
        """
        first = self._first

        def write(weights: NDArray) -> NDArray[np.float64]:
            def add(span: Span, squares: NDArray, adder: Adder, maker: Maker | None) -> None:
                whole, sums = self._sums.get(span, adder.whole), adder.sums[: len(span)]
                if whole is adder.whole:
                    whole.clear()
                    adder.add_up(first, span, weights, squares, whole)
                whole.write(sums)
                keep(span, sums, maker)

            return self._each(first, add, source)

        self.grid.settle(first.factors / self.grid.step, write)

    def _each(self, cohort: Cohort, add: Add, source: DiscreteGaussian | None = None) -> NDArray[np.float64]:
        """Process every span.

        Returns:
            Sum of squares of each contribution before truncation, shape (n,).
        """
        rows = {span: number for number, span in enumerate(self._spans)}
        squares = np.zeros((len(rows), len(cohort)))
        made = iter([*self._made])

        def work(span: Span, workspace: tuple[Adder, Maker | None]) -> None:
            add(span, squares[rows[span]], *workspace)

        def workspace() -> tuple[Adder, Maker | None]:
            adder = next(made, None)  # reused memory is faster than new memory
            if adder is None:
                adder = Adder(self.grid, self._none.layout.dtype)
                self._made.append(adder)
            return adder, source.maker() if source else None

        for_each_span(self._spans, work, workspace, cost=len(cohort))
        return sum_in_order(squares)


@dataclass(frozen=True)
class StreamingAggregator:
    """Sum of a round's contributions that arrive a few at a time.

    Attributes:
        total: the sum.
        bounded: bounds contributions independently, from the cohort and the example counts of its clients.
    """

    total: Total
    bounded: Callable[[Cohort, tuple[float, ...]], Cohort]

    def take(self, cohort: Cohort, examples: tuple[float, ...]) -> None:
        """Add some contributions.

        Args:
            cohort: of unbounded updates.
            examples: the example count that each client reports, shape (n,).
        """
        self.total.add(self.bounded(cohort, examples))


@dataclass(frozen=True)
class Release:
    """Model with noise, and the calibration of this noise.

    Attributes:
        model: sent + noisy mean, p parameters.
        noise_std: least standard deviation of the noise on one parameter of `model`, to a step of its grid.
        sensitivity: L2 distance by which one client's joining or leaving moves `model` without noise.
    """

    model: Row
    noise_std: float
    sensitivity: float


def noisy_mean(cohort: Cohort, multiplier: float, size: float, noise: GaussianNoise, widest: float = 0.0) -> Release:
    """Return sent + (Σ factors[i]·U[i] + noise of deviation z·C) / size.

    Contributions are truncated toward zero onto a public grid, summed, and noised by the discrete Gaussian, exactly.
    The sum does not depend on rounding or on the order of replies, and the law of the noise is the claimed one. The
    noise depends on the bound C alone, so it stays correct for any dropouts, and without replies. The cast to floating
    point and the division by a number that is independent of the data are post-processing.

    Args:
        cohort: bounded: C is its `l2_bound`.
        multiplier: z ≥ 0.
        size: public number of contributions the mean is taken over.
        noise: source of the key of the noise.
        widest: the largest z that the release could have, if z depends on private data: see `Grid.of`.

    Guarantee: one client's joining or leaving moves the un-noised sum by at most C in L2, so a round is a Gaussian
        mechanism of noise multiplier z (add-or-remove). `sensitivity` is C/size. A contribution with a norm above the
        cohort's bound is shortened.

    Examples:
        Two clients, one of them clipped to C = 1:

        >>> from cloister.utils.arrays import Layout
        >>> from cloister.privacy.mechanisms.clipping import clip
        >>> sent, one, other = {"w": np.zeros(2)}, {"w": np.array([0.3, 0.4])}, {"w": np.array([3.0, 4.0])}
        >>> layout = Layout.of(sent)
        >>> cohort = clip(Cohort.of(layout, layout.rows(sent), (layout.rows(one), layout.rows(other))), 1.0)
        >>> release = noisy_mean(cohort, multiplier=0.0, size=2, noise=GaussianNoise())
        >>> release.model[0].round(3).tolist(), release.sensitivity
        ([0.45, 0.6], 0.5)
        >>> noisy_mean(cohort, multiplier=3.0, size=2, noise=GaussianNoise()).noise_std
        1.5

    Raises:
        UnboundedSensitivity: no stage has bounded the cohort.
    """
    if math.isinf(cohort.l2_bound):
        raise UnboundedSensitivity("noise was asked for before anything bounded a contribution; clip first")
    check.non_negative(noise_multiplier=multiplier)
    total = Total(Grid.of(cohort.l2_bound, multiplier, len(cohort), widest), cohort.layout, cohort.sent)
    total.add(cohort)
    return noisy_total(total, multiplier, size, noise)


def noisy_total(total: Total, multiplier: float, size: float, noise: GaussianNoise) -> Release:
    """Return the release of an existing sum: see `noisy_mean`.

    Args:
        total: of contributions that are bounded by the C of its grid.
        multiplier: z ≥ 0; the grid must cover it.
        size: public number of contributions the mean is taken over.
        noise: source of the key of the noise.

    Raises:
        ConfigError: the size is not above 0.
        PrivacyError: the grid has less noise.
    """
    check.positive(cohort_size=size)
    if not total.grid.covers(multiplier):
        raise PrivacyError("more noise was asked for than the sum was made for: its grid has less")
    bound = total.grid.bound
    return Release(total.mean(size, noise), multiplier * bound / size, bound / size)


def bounded_sum(cohort: Cohort) -> Row:
    """Return Σ factors[i]·U[i] in double precision, without noise.

    It is the input of other kinds of mechanisms.

    Args:
        cohort: bounded: C is its `l2_bound`.

    Guarantee: one client's joining or leaving moves the sum by at most C in L2.

    Raises:
        UnboundedSensitivity: no stage has bounded the cohort.
    """
    if math.isinf(cohort.l2_bound):
        raise UnboundedSensitivity("a sum was asked for before anything bounded a contribution; clip first")
    factors, scratch = cohort.factors.astype(cohort.layout.dtype), scratch_for(cohort.layout)
    total = tuple(np.empty(piece.size) for piece in cohort.sent)
    for span in spans(cohort.layout.sizes):
        weighted_sum(cohort, span, factors, scratch, out=span.of(total))
    return total


def bounded_models(cohort: Cohort) -> list[Row]:
    """Return sent + factors[i]·U[i] of each client, for strategies on all replies."""
    return [
        tuple(
            sent + (piece - sent) * sent.dtype.type(factor) if factor != 1 else piece
            for piece, sent in zip(row, cohort.sent, strict=True)
        )
        for row, factor in zip(cohort.rows, cohort.factors, strict=True)
    ]


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
        """Pass the sum of the kept values of every span to `keep`.

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
        return sum_in_order(squares)

    def _fill(self, columns: NDArray, span: Span, weights: NDArray, squares: NDArray, scratch: NDArray) -> None:
        """Truncate the updates in `span`, and append zeros for missing replies."""
        replied = updates(self.cohort.rows, self.cohort.sent, span, scratch)
        with np.errstate(over="ignore", invalid="ignore"):
            replied *= weights[:, None]
            replied[weights == 0] = 0
            squares[:] = row_squares(replied)
            np.copyto(columns[: len(replied)], replied, casting="unsafe")  # toward zero
        columns[len(replied) :] = 0
