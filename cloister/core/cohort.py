"""The contributions of one round, as one matrix of updates that is never written down.

The matrix U has a row per reply and a column per parameter: U[i] = trained_i - sent. Stages bound it, measure it and
sum it. At a thousand clients and a million parameters it would take gigabytes, so it is made block by block, small
enough to stay in the processor's cache, from the arrays as they arrived.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cloister.core.arrays import Layout, Row

BLOCK = 1 << 16
"""Parameters in a block: 256 KiB of float32, and its sum in double precision fits in a core's cache beside it. Shorter
stretches of a row keep starting the memory's prefetching anew."""
DOT = 1 << 10
"""Numbers that one float32 dot product adds up before float64 takes over."""
NORM_ERROR = 2.0**-14
"""Bound on the relative error of a norm: float32 subtraction, and sums of `DOT` float32 squares in whatever order.

Each subtraction, square and addition errs by at most 2⁻²⁴ of its result; a sum of 2¹⁰ squares so by less than 2⁻¹³·⁹ of
its own, all terms being positive, and its root by half of that (Higham, 2002, §3.1).
"""
THREADS = min(4, os.cpu_count() or 1)
"""More would wait for the memory."""
WORTH_A_THREAD = 1 << 20
"""Numbers below which a thread costs more than it gains."""


@dataclass(frozen=True)
class Span:
    """The parameters `start` to `stop` of array number `layer`."""

    layer: int
    start: int
    stop: int

    def of(self, row: Row) -> NDArray:
        """The parameters themselves: a view."""
        return row[self.layer][self.start : self.stop]


@dataclass(frozen=True)
class Cohort:
    """What n clients sent back, relative to what they were sent, and what bounds it.

    Attributes:
        layout: of the model's p parameters.
        sent: the global model of this round.
        rows: each client's trained model.
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
        """The unbounded cohort of these replies."""
        empty = cls(layout, sent, rows, np.zeros(len(rows)), np.ones(len(rows)))
        return replace(empty, norms=np.sqrt(_squared_norms(empty)))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: NDArray[np.intp]) -> "Cohort":
        """The cohort of some of the replies."""
        return replace(
            self,
            rows=tuple(self.rows[i] for i in indices),
            norms=self.norms[indices],
            factors=self.factors[indices],
        )


def spans(layout: Layout, width: int = BLOCK) -> Iterator[Span]:
    """Every parameter once, array by array, in blocks of at most `width`."""
    for layer in range(len(layout.names)):
        yield from layer_spans(layout, layer, width)


def layer_spans(layout: Layout, layer: int, width: int) -> Iterator[Span]:
    """The parameters of one array, in blocks of at most `width`."""
    size = layout.offsets[layer + 1] - layout.offsets[layer]
    for start in range(0, size, width):
        yield Span(layer, start, min(start + width, size))


def updates(rows: Sequence[Row], sent: Row, span: Span, out: NDArray) -> NDArray:
    """The columns in `span` of U for these rows, unscaled, in front of the flat buffer `out`: shape (rows, span)."""
    width = span.stop - span.start
    block = out[: len(rows) * width].reshape(len(rows), width)
    base = span.of(sent)
    for row, target in zip(rows, block, strict=True):
        np.subtract(span.of(row), base, out=target)
    return block


def blocks(cohort: Cohort, span: Span, scratch: NDArray) -> Iterator[tuple[slice, NDArray]]:
    """The columns of U in `span`, a few rows at a time, as many as `scratch` holds; each block overwrites the last."""
    width = span.stop - span.start
    at_once = max(1, len(scratch) // width)
    room, base = scratch[: at_once * width].reshape(at_once, width), span.of(cohort.sent)
    for first in range(0, len(cohort), at_once):
        rows = cohort.rows[first : first + at_once]
        for row, target in zip(rows, room, strict=False):
            np.subtract(span.of(row), base, out=target)
        yield slice(first, first + at_once), room[: len(rows)]


def weighted_sum(
    cohort: Cohort, span: Span, weights: NDArray, scratch: NDArray, total: NDArray | None = None
) -> NDArray:
    """Σ weights[i] · U[i] over the columns in `span`, row after row, on top of what `total` holds, in its precision.

    A sum that noise is calibrated for has to be float64: in float32 the roundings of other clients' terms depend on
    what came before them, and over thousands of clients one can move them by more than its own update.
    """
    total = np.zeros(span.stop - span.start, scratch.dtype) if total is None else total
    for which, block in blocks(cohort, span, scratch):
        block *= weights[which, None]
        for row in block:
            total += row
    return total


def scratch_for(layout: Layout) -> NDArray:
    """Room for the rows that one block takes at a time."""
    return np.empty(BLOCK, layout.dtype)


Item = TypeVar("Item")


def share(items: Sequence[Item], work: Callable[[Iterator[Item]], None], numbers: int) -> None:
    """Have `work` go through the items: on several threads, each taking the next one, where there is enough to do.

    NumPy lets go of the interpreter's lock while it computes. The threads end with the call: what a process holds on
    to would be missing in one forked from it.

    Args:
        items: independent of each other.
        work: called once on every thread with the iterator that the threads share.
        numbers: how many the work goes over, all items together.
    """
    source, threads = iter(items), min(THREADS, len(items), numbers // WORTH_A_THREAD)
    if threads < 2:
        return work(source)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [source] * threads))


def workspaces(size: int = BLOCK, dtype: DTypeLike = np.float64) -> Iterator[NDArray]:
    """Scratch for every thread of `share`: memory that is used for one thing after another.

    The caller takes it, and always as much: what threads take outlives them in part, and what is freed fits again.
    """
    return iter(np.empty((THREADS, size), dtype))


def _squared_norms(cohort: Cohort) -> NDArray[np.float64]:
    """‖U[i]‖₂² for each i, not finite where U[i] is not. Relative error below `NORM_ERROR`."""
    places = list(enumerate(spans(cohort.layout)))
    squares = np.zeros((len(places), len(cohort)))
    memory = workspaces()

    def work(numbered: Iterator[tuple[int, Span]]) -> None:
        scratch = next(memory).view(cohort.layout.dtype)[:BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):
            for number, span in numbered:
                for which, block in blocks(cohort, span, scratch):
                    squares[number, which] = _row_squares(block)

    share(places, work, len(cohort) * cohort.layout.size)
    # Added up in the order of the spans, not in the order in which threads were done with them.
    return squares.sum(axis=0)


def _row_squares(block: NDArray) -> NDArray[np.float64]:
    """Σ_j block[i, j]² for each row i: float32 adds at most `DOT` terms, float64 the rest."""
    rows, width = block.shape
    whole = width - width % DOT
    body = block[:, :whole].reshape(rows, whole // DOT, DOT)
    squares: NDArray[np.float64] = np.add.reduce(np.vecdot(body, body), axis=1, dtype=np.float64)
    if whole < width:
        tail = block[:, whole:]
        squares += np.vecdot(tail, tail)
    return squares
