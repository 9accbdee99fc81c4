"""The Gaussian mechanism on a cohort: the sum of bounded updates, noised, then divided by a public number."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cloister.core import check
from cloister.core.arrays import Row
from cloister.core.cohort import Cohort, Span, scratch_for, share, spans, weighted_sum
from cloister.core.errors import UnboundedSensitivity
from cloister.privacy.noise import Block, GaussianNoise


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
    """sent + (Σ factors[i]·U[i] + N(0, (z·C)²)) / size, in one pass over the replies.

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
    model = tuple(np.zeros(piece.size, cohort.layout.dtype) for piece in cohort.sent)
    # Noise is numbered here and made there: which thread takes which span must not decide who gets which number.
    places = [(span, noise.blocks(span.of(model))) for span in spans(cohort.layout)]

    def work(mine: Iterator[tuple[Span, list[Block]]]) -> None:
        scratch = scratch_for(cohort.layout)
        maker = noise.maker(scratch)
        for span, blocks in mine:
            total = weighted_sum(cohort, span, factors, scratch, span.of(model))
            maker.add(blocks, multiplier * cohort.l2_bound)
            total /= total.dtype.type(size)
            total += span.of(cohort.sent)

    share(places, work)
    return Release(model, multiplier * cohort.l2_bound / size, cohort.l2_bound / size)


def noised(model: Row, std: float, noise: GaussianNoise) -> Row:
    """A copy of a model with N(0, std²) on every parameter."""
    copies = tuple(piece.copy() for piece in model)
    for copy in copies:
        noise.add(copy, std)
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
