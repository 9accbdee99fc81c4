"""Contributions of one round, as a matrix of updates that is computed block by block.

The matrix U has a row per reply and a column per parameter: U[i] = trained_i - sent. Stages bound it, measure it and
sum it. For a thousand clients and a million parameters it would take gigabytes. So its blocks are computed from the
replies' arrays, small enough for the processor's cache.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cloister.utils.arrays import ALIGNMENT, Layout, Row, aligned
from cloister.utils.threads import BLOCK, Span, for_each_span, spans

DOT = 1 << 10
"""Numbers per float32 dot product, whose results are summed in float64."""
NORM_ERROR = 2.0**-14
"""Bound on the relative error of a norm: float32 subtraction, and sums of `DOT` float32 squares in any order.

Each subtraction, square and addition errs by at most 2⁻²⁴ of its result. Since all terms are positive, a sum of 2¹⁰
squares errs by less than 2⁻¹³·⁹ of its own, and its root by half of that (Higham, 2002, §3.1).
"""
SQUARES_ERROR = 2.0**-13.9
"""Bound on the relative error of a sum of squares alone, as a share of the computed sum."""


@dataclass(frozen=True)
class Cohort:
    """Updates of n clients and their bounds.

    Attributes:
        layout: of the model's p parameters.
        sent: the global model of this round.
        rows: each client's trained model; empty if they were summed and dropped.
        norms: ‖U[i]‖₂ of each update before clipping, shape (n,).
        factors: factor of each update in the sum, shape (n,); 1 until a stage bounds it.
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
        """Return the unbounded cohort of these replies.

        The relative error of each norm is below `NORM_ERROR`; a norm is not finite where the update is not.

        Args:
            layout: of the model.
            sent: the global model of this round.
            rows: each client's trained model.
        """
        cohort = cls(layout, sent, rows, np.zeros(len(rows)), np.ones(len(rows)))
        places = {span: number for number, span in enumerate(spans(layout.sizes))}
        squares = np.zeros((len(places), len(rows)))

        def measure(span: Span, scratch: NDArray) -> None:
            with np.errstate(over="ignore", invalid="ignore"):
                for which, block in blocks(cohort, span, scratch):
                    squares[places[span], which] = row_squares(block)

        for_each_span(list(places), measure, lambda: scratch_for(layout), cost=len(rows))
        # Summed in the order of the spans, independently of the order in which threads finish.
        return replace(cohort, norms=np.sqrt(sum_in_order(squares)))

    def __len__(self) -> int:
        return len(self.norms)

    def take(self, indices: NDArray[np.intp]) -> "Cohort":
        """Return the cohort of some of the replies."""
        return replace(
            self, rows=tuple(self.rows[i] for i in indices), norms=self.norms[indices], factors=self.factors[indices]
        )


def updates(rows: Sequence[Row], sent: Row, span: Span, out: NDArray) -> NDArray:
    """Compute the columns in `span` of U for these rows, unscaled.

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
    """Yield the columns of U in `span`, a few rows at a time.

    Args:
        cohort: of n updates.
        span: the columns.
        scratch: flat memory; each block has as many rows as fit, and overwrites the last block.

    Yields:
        The slice of rows, and these rows.
    """
    at_once = max(1, len(scratch) // len(span))
    for first in range(0, len(cohort), at_once):
        which = slice(first, first + at_once)
        yield which, updates(cohort.rows[which], cohort.sent, span, scratch)


def weighted_sum(cohort: Cohort, span: Span, weights: NDArray, scratch: NDArray, out: NDArray) -> NDArray:
    """Compute Σ weights[i] · U[i] over the columns in `span`, row after row.

    A sum with calibrated noise must be float64. In float32 the rounding of other clients' terms depends on the terms
    before them. Over thousands of clients, one client can then move these roundings by more than its own update.

    Args:
        cohort: of n updates.
        span: the columns.
        weights: shape (n,), of the dtype of `scratch`.
        scratch: memory for a block of rows, from `scratch_for`.
        out: accumulator and result: as many numbers as the span has, of any float dtype.

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
    """Allocate memory for the rows of one block."""
    return np.empty(BLOCK, layout.dtype)


def sum_in_order(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum each column, row after row for any number of columns.

    NumPy's own sum adds up a single column in another order than several. One client's norm, and so its contribution,
    would then depend on the presence of another client.

    Args:
        squares: a row for each span and a column for each client.
    """
    total = np.zeros(squares.shape[1])
    for row in squares:
        total += row
    return total


def row_squares(block: NDArray) -> NDArray[np.float64]:
    """Compute Σ_j block[i, j]² for each row i, to `SQUARES_ERROR`.

    A float32 sum has at most `DOT` terms; float64 sums the rest. Squares of numbers below 1e-19 may vanish in float32:
    the bound is about the others. The sum of a row is bit-identical at every position in memory and beside all other
    rows. The position depends on the clients that replied earlier. An adaptive clipping norm compares each norm with a
    bound. So clients could choose norms at this bound that all change sides with the position.

    Args:
        block: n rows of float32 or float64 numbers.
    """
    if not len(block) or not alignment_matters():
        return _row_squares(block)
    squares, place = np.empty(len(block)), aligned((1, block.shape[1]), block.dtype)
    for number, row in enumerate(block):
        place[0] = row
        squares[number] = _row_squares(place)[0]
    return squares


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
def alignment_matters() -> bool:
    """Return True if dot products depend on memory position.

    They do in MKL, and in OpenBLAS on some processors without AVX.
    """
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
