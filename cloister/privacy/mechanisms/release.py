"""The Gaussian mechanism on a cohort: the sum of bounded updates, noised, then divided by a public number."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.arrays import Row
from cloister.core.cohort import BLOCK, Cohort, Span, scratch_for, share, spans, weighted_sum, workspaces
from cloister.core.errors import PrivacyError, UnboundedSensitivity
from cloister.privacy.mechanisms.noise import WORKSPACE, GaussianNoise, Maker, NumberedBlock

GRID_BITS = 20
"""Releases are multiples of the power of two this many bits below the standard deviation of their noise."""

HEADROOM = 64
"""Deviations of the noise that a number's dtype must hold."""

NoisedBlock = tuple[int, NDArray, NDArray]
"""A place in the stream of noise, numbers, and where they go with noise on them."""


@dataclass(frozen=True)
class Release:
    """A model that carries noise, and what the noise was calibrated for.

    Attributes:
        model: sent + noisy mean, p parameters.
        noise_std: standard deviation of the noise on one parameter of `model`.
        sensitivity: L2 distance by which one client's joining or leaving moves `model` without noise.
    """

    model: Row
    noise_std: float
    sensitivity: float


def noisy_mean(cohort: Cohort, multiplier: float, size: float, noise: GaussianNoise) -> Release:
    """sent + (Σ factors[i]·U[i] + N(0, (z·C)²)) / size, in one pass over the replies, added up in double precision.

    The noise is on the sum and depends on the bound C alone, so it is right whoever drops out, and when everybody
    does; the division by a number that does not depend on the data is post-processing.

    Args:
        cohort: bounded: C is its `l2_bound`.
        multiplier: z ≥ 0.
        size: public number of contributions the mean is taken over.
        noise: where the normal numbers come from.

    Guarantee: one client's joining or leaving moves the un-noised sum by at most C in L2, so a round is a Gaussian
        mechanism of noise multiplier z (add-or-remove). `sensitivity` is C/size.

    Raises:
        UnboundedSensitivity: no stage has bounded the cohort.
    """
    if math.isinf(cohort.l2_bound):
        raise UnboundedSensitivity("noise was asked for before anything bounded a contribution; clip first")
    check.positive(cohort_size=size)
    check.non_negative(noise_multiplier=multiplier)
    factors = cohort.factors.astype(cohort.layout.dtype)
    model = tuple(np.empty(piece.size, cohort.layout.dtype) for piece in cohort.sent)
    # Noise is numbered here and made there: which thread takes which span must not decide who gets which number.
    places = [(span, noise.blocks(span.of(model))) for span in spans(cohort.layout)]
    memory, sums = workspaces(), workspaces()

    def work(mine: Iterator[tuple[Span, list[NumberedBlock]]]) -> None:
        # The same memory serves the updates of a span and then its noise.
        workspace, total = next(memory), next(sums)
        scratch, maker = workspace.view(cohort.layout.dtype)[:BLOCK], noise.maker(workspace)
        for span, blocks in mine:
            here = total[: span.stop - span.start]
            here[:] = 0
            weighted_sum(cohort, span, factors, scratch, here)
            add_on_grid(moved(blocks, here), multiplier * cohort.l2_bound, maker)
            here /= size
            np.add(here, span.of(cohort.sent), out=span.of(model), casting="same_kind")

    share(places, work, len(cohort) * cohort.layout.size)
    return Release(model, multiplier * cohort.l2_bound / size, cohort.l2_bound / size)


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
    total = tuple(np.zeros(piece.size) for piece in cohort.sent)
    for span in spans(cohort.layout):
        weighted_sum(cohort, span, factors, scratch, span.of(total))
    return total


def moved(blocks: Iterable[NumberedBlock], target: NDArray) -> Iterator[NumberedBlock]:
    """The same places in the stream, over the numbers of another array of the same length."""
    start = 0
    for number, block in blocks:
        yield number, target[start : start + len(block)]
        start += len(block)


def add_on_grid(blocks: Iterable[NumberedBlock], std: float, maker: Maker, step: float | None = None) -> None:
    """Add N(0, std²) in the maker's precision, and round to a public grid before numbers go back to their own dtype.

    The low bits of floating-point noise betray what it was added to (Mironov, 2012; Haney et al., 2022): no number is
    released to more than `GRID_BITS` bits below `std`, and 33 bits of a double lie below that.

    Args:
        blocks: of float32 or float64 numbers, changed in place. At `std` 0 nothing is.
        std: ≥ 0.
        maker: of float64 noise; float32 noise needs a coarser `step`.
        step: of the grid, a power of two; None: `grid_step(std)`. Where `std` is secret, the grid must not follow it.
    """
    put_on_grid(((number, block, block) for number, block in blocks if std), std, maker, step)


def put_on_grid(places: Iterable[NoisedBlock], std: float, maker: Maker, step: float | None = None) -> None:
    """Write what `add_on_grid` makes of numbers to another place.

    Args:
        places: the place in the stream, the numbers, and where the noised ones go. At `std` 0 these are the numbers.
        std: ≥ 0.
        maker, step: as in `add_on_grid`.
    """
    step = grid_step(std) if step is None else step
    for number, block, out in places:
        if not std:
            np.copyto(out, block)
            continue
        wide = maker.normals(number, len(block), std)
        wide += block
        wide *= 1 / step  # exact, like the product below: a power of two
        np.rint(wide, out=wide)
        np.multiply(wide, step, out=out, casting="same_kind")


def grid_step(std: float) -> float:
    """The distance between the numbers that may be released under noise of this standard deviation: a power of two."""
    return float(2.0 ** (math.floor(math.log2(std)) - GRID_BITS)) if std else 0.0


def refuse_beyond(log_std: float) -> None:
    """Refuse noise that would leave the range of single precision: infinities and zeros are no noise.

    Args:
        log_std: ln of the standard deviation of one coordinate.

    Raises:
        PrivacyError: without the value, which may follow from private numbers.
    """
    limits = np.finfo(np.float32)
    if not math.log(limits.tiny) + GRID_BITS < log_std < math.log(limits.max) - math.log(HEADROOM):
        raise PrivacyError("this asks for noise beyond the range of single precision; scale the model")


def noised(model: Row, std: float, noise: GaussianNoise) -> Row:
    """A copy of a model with N(0, std²) on every parameter, in double precision and on the grid."""
    copies = tuple(piece.astype(np.result_type(piece, np.float32)) for piece in model)
    maker = noise.maker(np.empty(WORKSPACE))
    for copy in copies:
        add_on_grid(noise.blocks(copy), std, maker)
    return copies


def bounded_models(cohort: Cohort) -> list[Row]:
    """sent + factors[i]·U[i] for each client: what a strategy that must see every reply is shown."""
    return [
        tuple(
            sent + (piece - sent) * sent.dtype.type(factor) if factor != 1 else piece
            for piece, sent in zip(row, cohort.sent, strict=True)
        )
        for row, factor in zip(cohort.rows, cohort.factors, strict=True)
    ]
