"""The Gaussian mechanism on a cohort: the sum of bounded updates, noised, then divided by a public number."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.arrays import Row
from cloister.core.cohort import Cohort, scratch_for, weighted_sum
from cloister.core.errors import UnboundedSensitivity
from cloister.core.threads import Span, for_each_span, spans
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian, Maker
from cloister.privacy.mechanisms.grid import SHORTER, Adder, Grid
from cloister.privacy.mechanisms.noise import GaussianNoise


@dataclass(frozen=True)
class Release:
    """A model that carries noise, and what the noise was calibrated for.

    Attributes:
        model: sent + noisy mean, p parameters.
        noise_std: standard deviation that the noise on one parameter of `model` has at least, to a step of its grid.
        sensitivity: L2 distance by which one client's joining or leaving moves `model` without noise.
    """

    model: Row
    noise_std: float
    sensitivity: float


def noisy_mean(cohort: Cohort, multiplier: float, size: float, noise: GaussianNoise, widest: float = 0.0) -> Release:
    """sent + (Σ factors[i]·U[i] + noise of standard deviation z·C) / size, in whole numbers up to the division.

    Contributions are truncated toward zero onto a public grid, added up, and noised by the discrete Gaussian, all of it
    exactly: no rounding and no order of replies shows in the sum, and the law of the noise is the one that is claimed.
    The noise depends on the bound C alone, so it is right whoever drops out, and when everybody does. The way back to
    floating point and the division by a number that does not depend on the data are post-processing.

    Args:
        cohort: bounded: C is its `l2_bound`.
        multiplier: z ≥ 0.
        size: public number of contributions the mean is taken over.
        noise: where the key of the noise comes from.
        widest: the largest z that the release could have had, where z follows from what nobody may know: see `Grid.of`.

    Guarantee: one client's joining or leaving moves the un-noised sum by at most C in L2, so a round is a Gaussian
        mechanism of noise multiplier z (add-or-remove). `sensitivity` is C/size. A contribution that is longer than
        the cohort says is made shorter.

    Examples:
        Two clients, one of them clipped to C = 1:

        >>> from cloister.core.arrays import Layout
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
    check.positive(cohort_size=size)
    check.non_negative(noise_multiplier=multiplier)
    grid = Grid.of(cohort.l2_bound, multiplier, len(cohort), widest)
    source = DiscreteGaussian(grid.scale, noise) if grid.scale else None
    mean = _Mean(cohort, grid, size, source)
    weights = cohort.factors / grid.step
    squares = mean.write(weights)
    # Nothing of what was written has left: it is written anew, with the same noise.
    for share in (SHORTER, 0.0):
        if not grid.holds(squares).all():
            weights = grid.shortened(weights, squares, share)
            squares = mean.write(weights)
    return Release(mean.model, multiplier * cohort.l2_bound / size, cohort.l2_bound / size)


class _Mean:
    """The model of a release, written in one pass over the replies.

    Args:
        cohort: of n bounded updates.
        grid: of the release.
        size: that the sum is divided by.
        source: of the noise; None: there is none.

    Attributes:
        model: what was written last.
    """

    def __init__(self, cohort: Cohort, grid: Grid, size: float, source: DiscreteGaussian | None) -> None:
        self._cohort, self._grid, self._source, self._unit = cohort, grid, source, grid.step / size
        self._spans = spans(cohort.layout.sizes)
        self._places = source.places(self._spans) if source else {}
        self.model = tuple(np.empty(piece.size, cohort.layout.dtype) for piece in cohort.sent)

    def write(self, weights: NDArray) -> NDArray[np.float64]:
        """Write the model.

        Args:
            weights: that updates are multiplied with before they are truncated, shape (n,).

        Returns:
            The squares of each contribution before it was truncated, shape (n,).
        """
        rows = {span: number for number, span in enumerate(self._spans)}
        squares = np.zeros((len(rows), len(self._cohort)))

        def write(span: Span, workspace: tuple[Adder, Maker | None]) -> None:
            adder, maker = workspace
            total = adder.add_up(span, squares[rows[span]])
            if maker:
                maker.add(total, self._places[span])
            total *= self._unit
            np.add(total, span.of(self._cohort.sent), out=span.of(self.model), casting="same_kind")

        def workspace() -> tuple[Adder, Maker | None]:
            return Adder(self._cohort, self._grid, weights), self._source.maker() if self._source else None

        for_each_span(self._spans, write, workspace, cost=len(self._cohort))
        return squares.sum(axis=0)


def bounded_sum(cohort: Cohort) -> Row:
    """Σ factors[i]·U[i] in double precision, without noise: what a mechanism of another kind puts its own noise on.

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
    """sent + factors[i]·U[i] for each client: what a strategy that must see every reply is shown."""
    return [
        tuple(
            sent + (piece - sent) * sent.dtype.type(factor) if factor != 1 else piece
            for piece, sent in zip(row, cohort.sent, strict=True)
        )
        for row, factor in zip(cohort.rows, cohort.factors, strict=True)
    ]
