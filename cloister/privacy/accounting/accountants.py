"""Adapter from Cloister's events to dp-accounting."""

import functools
import logging
import math
from collections.abc import Mapping
from typing import Protocol

import dp_accounting
import numpy as np
from dp_accounting import gaussian_mechanism
from dp_accounting.pld import common, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Losses
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray
from scipy import special

from cloister.privacy.accounting.vocabulary import MIN_MULTIPLIER, Relation, Sampling, units_of

RULES = {"add-or-remove": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace-one": NeighboringRelation.REPLACE_ONE}


class Lossy(Protocol):
    """Event that has a privacy loss distribution."""

    def losses(self, relation: Relation, step: float) -> Losses:
        """Return the distribution, as `Event.losses`."""


def rdp_epsilon(orders: NDArray, curve: NDArray, delta: float) -> float:
    """Return ε of a Rényi curve at δ, by the tight conversion of dp-accounting.

    Args:
        orders: α > 1, shape (orders,).
        curve: the divergence at each, shape (orders,).
        delta: δ.
    """
    return float(rdp_privacy_accountant.compute_epsilon(orders, curve, delta)[0])


def rdp_delta(orders: NDArray, curve: NDArray, epsilon: float) -> float:
    """Return δ of a Rényi curve at ε.

    Args:
        orders: α > 1, shape (orders,).
        curve: the divergence at each, shape (orders,).
        epsilon: ε.
    """
    return float(rdp_privacy_accountant.compute_delta(orders, curve, epsilon)[0])


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """Return ε of one Gaussian release, exactly.

    Args:
        multiplier: z > 0.
        delta: δ.
    """
    return float(gaussian_mechanism.get_epsilon_gaussian(multiplier, delta))


def gaussian_delta(multiplier: float, epsilon: float) -> float:
    """Return δ of one Gaussian release, exactly.

    Args:
        multiplier: z > 0.
        epsilon: ε.
    """
    # dp-accounting has no public function for the curve that its `get_epsilon_gaussian` inverts.
    return math.exp(gaussian_mechanism._get_log_delta(multiplier, epsilon))


LARGEST_EPSILON = 1e150
"""Largest ε for which μ is computed. Far above it, exponents exceed the floating-point numbers."""


@functools.lru_cache(maxsize=4096)
def gaussian_parameter(epsilon: float, delta: float) -> float:
    """Return the largest μ of an (ε, δ)-DP Gaussian release of multiplier 1/μ.

    The exact curve rises with μ. The result is the lower end of a bisection on it, exact to one part in 10¹².

    Args:
        epsilon: ε; above `LARGEST_EPSILON` it counts as that, which gives a smaller μ.
        delta: δ.
    """
    epsilon = min(epsilon, LARGEST_EPSILON)
    low, high = 0.0, 1.0
    while gaussian_delta(1 / high, epsilon) <= delta:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(1 / middle, epsilon) <= delta else (low, middle)
    return low


@functools.lru_cache(maxsize=4096)
def pure_parameter(epsilon: float) -> float:
    """Return μ of the Gaussian that protects no better than a pure ε.

    It is given by Φ(μ/2) = e^ε/(1 + e^ε).

    Let a test of two neighbours have type I error α and type II error β. A pure ε bounds β from below by two straight
    lines: β ≥ 1 - e^ε·α and β ≥ e^-ε·(1 - α) (Kairouz, Oh, Viswanath, 2017, arXiv:1311.0776). They meet at
    α = β = a = 1/(1 + e^ε). Together they run from (0, 1) over (a, a) to (1, 0).

    The curve of a Gaussian is G(α) = Φ(Φ⁻¹(1 - α) - μ). It is convex and its own inverse, and runs from (0, 1) to
    (1, 0). Its fixed point has Φ⁻¹(1 - α) = μ/2, so it is Φ(-μ/2), which equals a for this μ. So the two lines are
    chords of G. A convex function is below its chords, so the errors of any test are on or above G. Every such release
    is μ-GDP (Dong, Roth, Su, 2022, arXiv:1905.02383, Definition 4). No smaller μ is possible: G would pass above
    (a, a).
    """
    # Φ⁻¹ loses its relative precision at 1/2: an ε below `MIN_MULTIPLIER` counts as this value.
    return float(-2 * special.ndtri_exp(-np.logaddexp(0.0, max(epsilon, MIN_MULTIPLIER))))


def pure_curve(epsilon: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the Rényi divergence of a pure release at each order.

    It is at most min(ε, α·ε²/2).

    Args:
        epsilon: ε.
        orders: α > 1.

    Source: Bun, Steinke (2016), arXiv:1605.02065, Proposition 3.3; every divergence is at most that of order ∞.
    """
    return np.minimum(epsilon, np.array(orders) * epsilon**2 / 2)


def composed_losses(unsampled: float, others: Mapping[Lossy, int], relation: Relation, step: float) -> Losses:
    """Return the privacy loss distribution of several releases together.

    Args:
        unsampled: multiplier of the one Gaussian that composes all releases without a draw; 0: there are none.
        others: all other releases, with the count of each.
        relation: neighbouring relation of datasets.
        step: of the distribution.
    """
    return _composed(unsampled, tuple(others.items()), relation, step)


# A claim has several figures about the same releases, and a plan has one after every round. Without the cache most of
# their time would go into equal distributions.
@functools.lru_cache(maxsize=8)
def _composed(unsampled: float, others: tuple[tuple[Lossy, int], ...], relation: Relation, step: float) -> Losses:
    composed = privacy_loss_distribution.identity(step)
    if unsampled:
        composed = composed.compose(gaussian_losses(unsampled, 1.0, relation, step))
    for event, count in others:
        composed = composed.compose(event.losses(relation, step).self_compose(count))
    return composed


@functools.lru_cache(maxsize=16)
def gaussian_losses(multiplier: float, probability: float, relation: Relation, step: float) -> Losses:
    """Return the privacy loss distribution of one Gaussian release over a Poisson draw.

    Args:
        multiplier: z, relative to adding or removing a unit: dp-accounting doubles the shift under replace-one itself.
        probability: q of the draw; 1: no draw.
        relation: neighbouring relation of datasets.
        step: of the distribution.
    """
    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=multiplier,
        value_discretization_interval=step,
        sampling_prob=probability,
        neighboring_relation=RULES[relation],
    )


def pure_losses(epsilon: float, step: float) -> Losses:
    """Return the privacy loss distribution of the worst release of a pure ε.

    Args:
        epsilon: ε.
        step: of the distribution.
    """
    parameters = common.DifferentialPrivacyParameters(epsilon, 0.0)
    return privacy_loss_distribution.from_privacy_parameters(parameters, value_discretization_interval=step)


ROUNDING = 1e-15
"""Bound on the underestimate of dp-accounting's Rényi divergence of a sampled release, for α ≥ 2.

The divergence is the logarithm of a sum near 1, divided by α - 1. The measured underestimate is 8e-17.
"""


@functools.lru_cache(maxsize=4096)
def sampled_curve(
    multiplier: float, sampling: Sampling, relation: Relation, orders: tuple[float, ...]
) -> NDArray[np.float64]:
    """Return the Rényi divergence of one Gaussian release over a draw at each order.

    The divergence without a draw is an upper bound, since divergences are quasi-convex. It replaces a missing or larger
    result of dp-accounting, as for draws without replacement of a large share. It is also the result for Poisson draws
    under replace-one, for which this module has no curve.

    Args:
        multiplier: z > 0 of the release.
        sampling: the draw.
        relation: neighbouring relation of datasets.
        orders: α > 1.
    """
    # dp-accounting's Rényi accountant uses the same multiplier under either relation: halve it here.
    halved = multiplier / units_of(relation)
    unsampled = np.array(orders) / (2 * halved**2)
    if sampling.share == 1 or (relation == "replace-one" and sampling.is_poisson):
        return unsampled
    accountant = rdp_privacy_accountant.RdpAccountant(orders, RULES[relation])
    gaussian = dp_accounting.GaussianDpEvent(halved)
    if sampling.is_poisson:
        sampled = dp_accounting.PoissonSampledDpEvent(sampling.probability, gaussian)
    else:
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(sampling.population, sampling.cohort, gaussian)
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about fractional orders that do not converge and are omitted
    try:
        accountant.compose(sampled)
    finally:
        logger.setLevel(level)
    # The curve has no public accessor; this project pins the version of dp-accounting.
    # A tiny divergence can be underestimated by rounding in its sum of terms, even below 0.
    rounded = ROUNDING / np.minimum(1.0, np.array(orders) - 1)
    return np.minimum(np.maximum(accountant._rdp, 0.0) + rounded, unsampled)
