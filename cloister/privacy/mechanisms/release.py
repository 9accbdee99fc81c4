"""Gaussian mechanism on a cohort: the noised sum of bounded updates, divided by a public number."""

import math
from dataclasses import dataclass

import numpy as np

from cloister.core import check
from cloister.core.arrays import Row
from cloister.core.cohort import Cohort, scratch_for, weighted_sum
from cloister.core.errors import PrivacyError, UnboundedSensitivity
from cloister.core.threads import spans
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.total import Total


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
