"""Privacy cost of a sum of discrete Gaussians: many clients add such integers, and only their sum is released.

The sum of m discrete Gaussians is approximately a discrete Gaussian: at every integer the two probabilities have a
ratio between e^-τ and e^τ, where

    τ = 10·Σ exp(-2π² / (1/s² + 1/S)),

over the second to the last member of the sum, s² being the variance of each and S the variance of all before it. If
every deviation is at least s₀, member number k + 1 gives at most exp(-2π²s₀²·k/(k + 1)). So m and s₀ determine a τ for
any variances and any order of addition.

Source: Kairouz, Liu, Steinke (2021), arXiv:2102.06387, Theorem 1 and Proposition 14, for one variance; their proof adds
one member after another, and its step is for any two variances of at least 1/4.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

NEGLIGIBLE = -700.0
"""Log₂ of the largest accepted τ·p: the error of the smoothing of exact noise is below 2^-700 a number too. A release
costs at most 2·τ·p more in ε than one with a discrete Gaussian, and (1 + e^ε)·τ·p more in δ. Both are far below double
precision, for as many releases as a ledger can count."""
SMOOTHED = 25
"""Variance of the exact noise minus that of the continuous Gaussian whose random rounding it is, in steps²."""
ONE_BY_ONE = 1 << 12
"""Members whose part in τ is computed one by one; later members count as much as the last of these."""


def log_tau(terms: int, smallest: float) -> float:
    """Return the natural logarithm of τ, or slightly more; -∞ for one member.

    Args:
        terms: m, discrete Gaussians in the sum, at least 1.
        smallest: s₀ ≥ 1/2, in steps: the least deviation.
    """
    if terms == 1:
        return -math.inf
    k = np.arange(1, min(terms, ONE_BY_ONE), dtype=np.float64)
    parts = -2 * (math.pi * smallest) ** 2 * k / (k + 1)
    parts[-1] += math.log(terms - len(k))
    return math.log(10) + float(np.logaddexp.reduce(parts))


def is_negligible(terms: int, smallest: float, parameters: int) -> bool:
    """Return whether a sum's law counts as that of a discrete Gaussian.

    The condition is τ·p ≤ 2^`NEGLIGIBLE`: the difference is far below double precision.

    Args:
        terms: m.
        smallest: s₀, in steps.
        parameters: p, numbers of a release.
    """
    return log_tau(terms, smallest) + math.log(parameters) <= NEGLIGIBLE * math.log(2)


def distributed_curve(
    orders: tuple[float, ...], sensitivity: float, variance: float, tau: float, parameters: int
) -> NDArray[np.float64]:
    """Return the Rényi divergence at each order of a distributed sum.

    It is the least of 3 bounds for a law within e^±τ of a discrete Gaussian's.

    Args:
        orders: α > 1.
        sensitivity: Δ, in steps: the L2 distance of two neighbours' sums, which are integers.
        variance: σ² of the sum's noise, in steps².
        tau: τ ≥ 0.
        parameters: p, numbers of a release.

    Source: Kairouz, Liu, Steinke (2021), Proposition 14. The L1 distance of integer vectors is at most √p·Δ, and Δ².
    """
    alpha, share = np.array(orders, np.float64), sensitivity / math.sqrt(variance)
    manhattan = min(math.sqrt(parameters) * sensitivity, sensitivity**2)
    return np.minimum.reduce(
        [
            alpha * share**2 / 2 + tau * parameters,
            alpha / 2 * (share**2 + 2 * manhattan * tau / math.sqrt(variance) + tau**2 * parameters),
            alpha / 2 * (share + math.sqrt(parameters) * tau) ** 2,
        ]
    )


def smoothed_multiplier(variance: Fraction, sensitivity: float) -> float:
    """Return z of a continuous Gaussian that costs at least as much.

    The cost of the discrete release is no larger, by any accountant; z is rounded down.

    Args:
        variance: of the noise, above `SMOOTHED`, in steps².
        sensitivity: Δ > 0, in steps.
    """
    squared = (variance - SMOOTHED) / Fraction(sensitivity) ** 2
    return math.nextafter(math.isqrt(math.floor(squared * 4**60)) / 2**60, 0)
