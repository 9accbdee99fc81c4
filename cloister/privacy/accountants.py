"""dp-accounting, asked about our events."""

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import dp_accounting
import numpy as np
from dp_accounting import gaussian_mechanism, pld
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray

from cloister.privacy.events import Gaussian, Relation

RULES = {
    "add-or-remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": NeighboringRelation.REPLACE_ONE,
}


def rdp_epsilon(orders: NDArray, curve: NDArray, delta: float) -> float:
    """ε of a Rényi curve at δ, by today's conversion."""
    return float(rdp_privacy_accountant.compute_epsilon(orders, curve, delta)[0])


def rdp_delta(orders: NDArray, curve: NDArray, epsilon: float) -> float:
    """δ of a Rényi curve at ε."""
    return float(rdp_privacy_accountant.compute_delta(orders, curve, epsilon)[0])


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """ε of one Gaussian release, exactly."""
    return float(gaussian_mechanism.get_epsilon_gaussian(multiplier, delta))


def gaussian_delta(multiplier: float, epsilon: float) -> float:
    """δ of one Gaussian release, exactly."""
    # dp-accounting has no public form of the curve that its `get_epsilon_gaussian` inverts.
    return math.exp(gaussian_mechanism._get_log_delta(multiplier, epsilon))


def losses(unsampled: float, sampled: Mapping[Gaussian, int], relation: Relation, step: float) -> pld.PLDAccountant:
    """The privacy loss distribution of releases.

    Args:
        unsampled: multiplier of the one Gaussian that all releases without a draw amount to; 0: there are none.
        sampled: the others, and how often each was made.
        relation: which datasets are neighbours.
        step: of the distribution.
    """
    accountant = pld.PLDAccountant(RULES[relation], step)
    if unsampled:
        # dp-accounting's loss distributions double the shift under replace-one themselves.
        accountant.compose(dp_accounting.GaussianDpEvent(unsampled))
    for event, count in sampled.items():
        accountant.compose(_as_dp_event(event), count)
    return accountant


@functools.lru_cache(maxsize=4096)
def sampled_curve(event: Gaussian, relation: Relation, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Rényi divergence of one sampled release at each order.

    A draw never tells more than a release without one: divergences are quasi-convex. That holds where dp-accounting
    finds no number, or one above it (draws without replacement of a large share), and for Poisson draws under
    replace-one, for which no curve is known here.
    """
    # dp-accounting's Rényi accountant takes the multiplier as it is under either relation: halve it here.
    halved = event.noise_multiplier / (1 if relation == "add-or-remove" else 2)
    unsampled = np.array(orders) / (2 * halved**2)
    if relation == "replace-one" and event.sampling.kind == "poisson":
        return unsampled
    accountant = rdp_privacy_accountant.RdpAccountant(orders, RULES[relation])
    sampled = _as_dp_event(Gaussian(halved, event.sampling))
    with _absl_silenced():
        accountant.compose(sampled)
    # The curve has no public accessor; this project pins the version it is read from.
    curve: NDArray[np.float64] = np.minimum(accountant._rdp, unsampled)
    return curve


def _as_dp_event(event: Gaussian) -> dp_accounting.DpEvent:
    inner, sampling = dp_accounting.GaussianDpEvent(event.noise_multiplier), event.sampling
    if sampling.kind == "poisson":
        return dp_accounting.PoissonSampledDpEvent(sampling.probability, inner)
    return dp_accounting.SampledWithoutReplacementDpEvent(sampling.population, sampling.cohort, inner)


@contextmanager
def _absl_silenced() -> Iterator[None]:
    """Without the warnings about fractional orders that do not converge: those orders are left out, as they should."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
