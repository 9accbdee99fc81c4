"""The sum of a round in whole numbers: contributions are added a few at a time and need not be kept."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cloister.core.arrays import Layout, Row
from cloister.core.cohort import Cohort, added_up
from cloister.core.threads import Span, for_each_span, spans
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian, Maker
from cloister.privacy.mechanisms.grid import Adder, Grid
from cloister.privacy.mechanisms.noise import GaussianNoise

Keep = Callable[[Span, NDArray[np.float64], Maker | None], None]
"""Does something with the sums of a span, and with what makes noise on this thread."""


class Total:
    """Σ trunc(factors[i]·U[i]/step) over the contributions so far.

    Those that came last are kept until others come: they are added in the same pass in which the release is made.

    Args:
        grid: what is counted in.
        layout: of the model.
        sent: the global model of this round.

    Guarantee: the sum is exact, whatever the order; one client's joining or leaving moves it by at most D.
    """

    def __init__(self, grid: Grid, layout: Layout, sent: Row) -> None:
        self.grid = grid
        self._spans = spans(layout.sizes)
        self._last = Cohort.of(layout, sent, ())
        # What was added before, and where the next sum is made: an addition can be taken back until it is verified.
        self._sums: Row | None = None
        self._next: Row | None = None
        self._made: list[Adder] = []

    def add(self, cohort: Cohort) -> None:
        """Add contributions.

        Args:
            cohort: bounded by C, relative to the same model.
        """
        if len(self._last):
            made = self._next or self._new(np.float64)
            self._write(lambda span, sums, _: np.copyto(span.of(made), sums))
            self._sums, self._next = made, self._sums
        self._last = cohort

    def whole(self) -> NDArray[np.int64]:
        """The sum itself, without noise: whole numbers of steps, all arrays after one another, shape (p,)."""
        offsets = self._last.layout.offsets
        flat = np.empty(offsets[-1], np.int64)
        row = tuple(flat[start:end] for start, end in pairwise(offsets))
        self._write(lambda span, sums, _: np.copyto(span.of(row), sums, casting="unsafe"))
        return flat

    def mean(self, size: float, noise: GaussianNoise) -> Row:
        """sent + (sum + noise)·step/size: the model of the release.

        Args:
            size: public number that the sum is divided by, > 0.
            noise: where the key of the noise comes from.
        """
        source = DiscreteGaussian(self.grid.scale, noise) if self.grid.scale else None
        places = source.places(self._spans) if source else {}
        model, unit, sent = self._new(self._last.layout.dtype), self.grid.step / size, self._last.sent

        def write(span: Span, sums: NDArray, maker: Maker | None) -> None:
            if maker:
                maker.add(sums, places[span])
            sums *= unit
            np.add(sums, span.of(sent), out=span.of(model), casting="same_kind")

        self._write(write, source)
        return model

    def _adders(self) -> Iterator[Adder]:
        """Those there are, and then new ones: memory that was used before is faster than new memory."""
        yield from self._made
        while True:
            self._made.append(Adder(self.grid, self._last.layout.dtype))
            yield self._made[-1]

    def _new(self, dtype: DTypeLike) -> Row:
        return tuple(np.empty(piece.size, dtype) for piece in self._last.sent)

    def _write(self, keep: Keep, source: DiscreteGaussian | None = None) -> None:
        """Make the sums, of contributions that are within the bound."""
        weights = self._last.factors / self.grid.step
        self.grid.settle(weights, lambda weights: self._sum(weights, keep, source))

    def _sum(self, weights: NDArray, keep: Keep, source: DiscreteGaussian | None) -> NDArray[np.float64]:
        """Hand on the sums of every span.

        Returns:
            The squares of each of the last contributions before it was truncated, shape (n,).
        """
        rows = {span: number for number, span in enumerate(self._spans)}
        squares = np.zeros((len(rows), len(self._last)))

        def add(span: Span, workspace: tuple[Adder, Maker | None]) -> None:
            adder, maker = workspace
            start = 0.0 if self._sums is None else span.of(self._sums)
            keep(span, adder.add_up(self._last, span, weights, squares[rows[span]], start), maker)

        adders = self._adders()

        def workspace() -> tuple[Adder, Maker | None]:
            return next(adders), source.maker() if source else None

        for_each_span(self._spans, add, workspace, cost=len(self._last))
        return added_up(squares)


@dataclass(frozen=True)
class Intake:
    """Takes the contributions of a round a few at a time, and keeps their sum.

    Attributes:
        total: the sum.
        bounded: bounds contributions, each by itself; given them and the example counts of their clients.
    """

    total: Total
    bounded: Callable[[Cohort, tuple[float, ...]], Cohort]

    def take(self, cohort: Cohort, examples: tuple[float, ...]) -> None:
        """Add some contributions.

        Args:
            cohort: that nothing has bounded.
            examples: the example count that each client reports, shape (n,).
        """
        self.total.add(self.bounded(cohort, examples))
