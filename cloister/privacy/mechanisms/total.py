"""Sum of a round in integers: contributions are added as they arrive and need not be kept."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cloister.core.arrays import Layout, Row
from cloister.core.cohort import Cohort, added_up
from cloister.core.threads import Span, for_each_span, spans
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian, Maker
from cloister.privacy.mechanisms.grid import Adder, Grid, WholeSums
from cloister.privacy.mechanisms.noise import GaussianNoise

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
        self._sums: dict[Span, WholeSums] = {}
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
            self._sums = {span: WholeSums(self.grid, len(span)) for span in self._spans}
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
        """Hand on the sums of every span, the last time from bounded contributions."""
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
        return added_up(squares)


@dataclass(frozen=True)
class Intake:
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
