"""Constructors for a strategy with one of the built-in server mechanisms."""

from typing import Unpack

from flwr.serverapp.strategy import Strategy

from cloister.aggregation.private_strategy import PrivateStrategy
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.mechanisms.clipping import FixedClip
from cloister.privacy.mechanisms.named import DistanceOptions, Placement, global_dp, metric
from cloister.privacy.mechanisms.noise import GaussianNoise


def GlobalDP(
    inner: Strategy,
    *,
    noise_multiplier: float,
    clipping_norm: float | FixedClip,
    placement: Placement = "update",
    noise: GaussianNoise | None = None,
    examples_cap: float = 0.0,
    budget: PrivacyBudget | None = None,
) -> PrivateStrategy:
    """Wrap a Flower strategy in central differential privacy with Gaussian noise.

    Args:
        inner: the wrapped strategy.
        noise_multiplier, clipping_norm, placement, examples_cap: as in `cloister.privacy.mechanisms.named.global_dp`.
        noise: source of the noise; by default the operating system's entropy.
        budget: records every release in a ledger and refuses rounds beyond its limit.

    Raises:
        ConfigError: a parameter is out of range, or `inner` needs every reply and the placement is `update`.

    Guarantee: that of `GaussianMean` or `GaussianTrimmedMean`; none for placement `model`.

    Examples:
        >>> from flwr.serverapp.strategy import FedAdam
        >>> strategy = GlobalDP(FedAdam(), noise_multiplier=1.0, clipping_norm=0.5)
        >>> strategy.mechanism.name, strategy.claim().status
        ('global-dp', 'conditional')
        >>> GlobalDP(FedAdam(), noise_multiplier=1.0, clipping_norm=0.5, placement="model").claim().status
        'heuristic'
    """
    mechanism = global_dp(
        noise_multiplier=noise_multiplier, clipping_norm=clipping_norm, placement=placement, examples_cap=examples_cap
    )
    return PrivateStrategy(inner, mechanism, budget=budget, noise=noise)


def MetricDP(
    inner: Strategy,
    *,
    noise_multiplier: float,
    clipping_norm: float | FixedClip,
    placement: Placement = "update",
    noise: GaussianNoise | None = None,
    examples_cap: float = 0.0,
    budget: PrivacyBudget | None = None,
    **distance: Unpack[DistanceOptions],
) -> PrivateStrategy:
    """Wrap a Flower strategy in noise scaled by the distance between clients' models.

    Args:
        inner, noise_multiplier, clipping_norm, placement, noise, examples_cap, budget: as in `GlobalDP`.
        distance: options of `cloister.privacy.mechanisms.noise_scale.DistanceScaled`.

    Raises:
        ConfigError: a parameter is out of range, or the distance has no bound to calibrate noise for.

    Guarantee: that of `DistanceScaled`; none for a distance used unchanged.
    """
    mechanism = metric(
        noise_multiplier=noise_multiplier,
        clipping_norm=clipping_norm,
        placement=placement,
        examples_cap=examples_cap,
        **distance,
    )
    return PrivateStrategy(inner, mechanism, budget=budget, noise=noise)
