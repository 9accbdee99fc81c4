"""The contributions of one round, as one matrix of updates that is never written down.

The matrix U has a row per reply and a column per parameter: U[i] = trained_i - sent. Stages bound it, measure it and
sum it. At a thousand clients and a million parameters it would take gigabytes, so it is made block by block, small
enough to stay in the processor's cache, from the arrays as they arrived.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cloister.core.arrays import ALIGNMENT, Layout, Row, aligned
from cloister.core.threads import BLOCK, Span, for_each_span, spans

DOT = 1 << 10
"""Numbers that one float32 dot product adds up before float64 takes over."""
NORM_ERROR = 2.0**-14
"""Bound on the relative error of a norm: float32 subtraction, and sums of `DOT` float32 squares in whatever order.

Each subtraction, square and addition errs by at most 2⁻²⁴ of its result; a sum of 2¹⁰ squares so by less than 2⁻¹³·⁹ of
its own, all terms being positive, and its root by half of that (Higham, 2002, §3.1).
"""
SQUARES_ERROR = 2.0**-13.9
"""Bound on the relative error of a sum of squares alone, as a share of the sum that was computed."""


@dataclass(frozen=True)
class Cohort:
    """What n clients sent back, relative to what they were sent, and what bounds it.

    Attributes:
        layout: of the model's p parameters.
        sent: the global model of this round.
        rows: each client's trained model; none of them where they were added up and dropped.
        norms: ‖U[i]‖₂ of each update as it arrived, shape (n,).
        factors: what each update counts with, shape (n,); 1 until a stage bounds it.
        l2_bound: largest L2 norm of one client's contribution `factors[i] * U[i]`; infinite until a stage bounds it.
    """

    layout: Layout
    sent: Row
    rows: tuple[Row, ...]
    norms: NDArray[np.float64]
    factors: NDArray[np.float64]
    l2_bound: float = math.inf

    @classmethod
    def of(cls, layout: Layout, sent: Row, rows: tuple[Row, ...]) -> "Cohort":
        """The unbounded cohort of these replies.

        Args:
            layout: of the model.
            sent: the global model of this round.
            rows: each client's trained model.
        """
        empty = cls(layout, sent, rows, np.zeros(len(rows)), np.ones(len(rows)))
        return replace(empty, norms=np.sqrt(_squared_norms(empty)))

    def __len__(self) -> int:
        return len(self.norms)

    def take(self, indices: NDArray[np.intp]) -> "Cohort":
        """The cohort of some of the replies."""
        return replace(
            self,
            rows=tuple(self.rows[i] for i in indices),
            norms=self.norms[indices],
            factors=self.factors[indices],
        )


def updates(rows: Sequence[Row], sent: Row, span: Span, out: NDArray) -> NDArray:
    """The columns in `span` of U for these rows, unscaled.

    Args:
        rows: n trained models.
        sent: the global model.
        span: the columns.
        out: flat memory, to whose front they are written.

    Returns:
        A view of `out`, shape (n, span).
    """
    block, base = out[: len(rows) * len(span)].reshape(len(rows), len(span)), span.of(sent)
    for row, target in zip(rows, block, strict=True):
        np.subtract(span.of(row), base, out=target)
    return block


def blocks(cohort: Cohort, span: Span, scratch: NDArray) -> Iterator[tuple[slice, NDArray]]:
    """The columns of U in `span`, a few rows at a time.

    Args:
        cohort: of n updates.
        span: the columns.
        scratch: flat memory; each block has as many rows as it holds, and overwrites the last.

    Yields:
        Which rows, and these rows.
    """
    at_once = max(1, len(scratch) // len(span))
    for first in range(0, len(cohort), at_once):
        which = slice(first, first + at_once)
        yield which, updates(cohort.rows[which], cohort.sent, span, scratch)


def weighted_sum(cohort: Cohort, span: Span, weights: NDArray, scratch: NDArray, out: NDArray) -> NDArray:
    """Σ weights[i] · U[i] over the columns in `span`, row after row.

    A sum that noise is calibrated for has to be float64: in float32 the roundings of other clients' terms depend on
    what came before them, and over thousands of clients one can move them by more than its own update.

    Args:
        cohort: of n updates.
        span: the columns.
        weights: shape (n,), of the dtype of `scratch`.
        scratch: memory for the rows that are added up at a time, from `scratch_for`.
        out: where the sum goes, and what it is added up in: as many numbers as the span has, of any float dtype.

    Returns:
        `out`.
    """
    out[:] = 0
    for which, block in blocks(cohort, span, scratch):
        block *= weights[which, None]
        for row in block:
            out += row
    return out


def scratch_for(layout: Layout) -> NDArray:
    """Room for the rows that one block takes at a time."""
    return np.empty(BLOCK, layout.dtype)


def _squared_norms(cohort: Cohort) -> NDArray[np.float64]:
    """‖U[i]‖₂² for each i, not finite where U[i] is not. Relative error below `NORM_ERROR`."""
    places = {span: number for number, span in enumerate(spans(cohort.layout.sizes))}
    squares = np.zeros((len(places), len(cohort)))

    def measure(span: Span, scratch: NDArray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            for which, block in blocks(cohort, span, scratch):
                squares[places[span], which] = row_squares(block)

    for_each_span(list(places), measure, lambda: scratch_for(cohort.layout), cost=len(cohort))
    # Added up in the order of the spans, not in the order in which threads were done with them.
    return added_up(squares)


def added_up(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of each column, row after row whatever the number of columns.

    NumPy's own sum adds up a single column in another order than several. One client's norm, and with it what that
    client contributes, would depend on whether there is another.

    Args:
        squares: a row for each span and a column for each client.
    """
    total = np.zeros(squares.shape[1])
    for row in squares:
        total += row
    return total


def row_squares(block: NDArray) -> NDArray[np.float64]:
    """Σ_j block[i, j]² for each row i, to `SQUARES_ERROR`: float32 adds at most `DOT` terms, float64 the rest.

    Squares of numbers below 1e-19 may vanish in float32: the bound is about the others. A row has the same sum, to the
    last bit, wherever it lies and whatever lies beside it. Where one lies tells who has replied before: an adaptive
    clip asks of each norm on which side of a bound it is, and clients could choose theirs so that all of them turn.

    Args:
        block: n rows of float32 or float64 numbers.
    """
    if len(block) and places_show():
        return np.concatenate([_row_squares(_in_one_place(row)) for row in block])
    return _row_squares(block)


def _row_squares(block: NDArray) -> NDArray[np.float64]:
    rows, width = block.shape
    whole = width - width % DOT
    body = block[:, :whole].reshape(rows, whole // DOT, DOT)
    squares: NDArray[np.float64] = np.add.reduce(np.vecdot(body, body), axis=1, dtype=np.float64)
    if whole < width:
        tail = block[:, whole:]
        squares += np.vecdot(tail, tail)
    return squares


@cache
def places_show() -> bool:
    """Whether dot products depend on where numbers lie, as in MKL, or in OpenBLAS for some processors without AVX."""
    memory, rng = np.empty(2 * DOT), np.random.default_rng(0)
    for dtype, width in ((dtype, width) for dtype in (np.float32, np.float64) for width in (33, DOT - 1, DOT)):
        numbers, found = rng.standard_normal(width).astype(dtype), set()
        for start in range(ALIGNMENT // numbers.itemsize):
            place = memory.view(dtype)[start : start + width]
            place[:] = numbers
            found.add(float(np.vecdot(place, place)))
        if len(found) > 1:
            return True
    return False


def _in_one_place(row: NDArray) -> NDArray:
    """A copy of a row, shape (1, p), in memory that begins as that of every other copy."""
    copy = aligned((1, len(row)), row.dtype)
    copy[0] = row
    return copy
