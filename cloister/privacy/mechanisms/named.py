"""Factories of the server's mechanisms, by their names in `privacy.server`."""

from collections.abc import Mapping
from typing import Literal, TypedDict, Unpack

from cloister.core import check
from cloister.privacy.mechanisms.clipping import FixedClip
from cloister.privacy.mechanisms.gaussian import GaussianMean, GaussianMechanism, GaussianOutput, GaussianTrimmedMean
from cloister.privacy.mechanisms.noise_scale import CONSTANT, Constant, DistanceScaled

Placement = Literal["update", "rule", "model"]
PLACEMENTS: Mapping[Placement, type[GaussianMechanism]] = {
    "update": GaussianMean,
    "rule": GaussianTrimmedMean,
    "model": GaussianOutput,
}
"""Mechanism by placement of the noise: on the mean update, the median or trimmed mean, or the strategy's output."""


class DistanceOptions(TypedDict, total=False):
    """Options of `DistanceScaled`; see there for their meaning."""

    distance: str
    direction: Literal["divide", "multiply"]
    measure: Literal["after", "before"]
    release: Literal["exact", "private"]
    distance_multiplier: float
    min_distance: float
    max_distance: float


def global_dp(
    *,
    noise_multiplier: float | Literal["auto"],
    clipping_norm: float | FixedClip,
    placement: Placement = "update",
    examples_cap: float = 0.0,
    scale: Constant = CONSTANT,
) -> GaussianMechanism:
    """Return a mechanism for central differential privacy with Gaussian noise.

    Args:
        noise_multiplier: z ≥ 0; the noise on the sum of updates has standard deviation z·C. `auto`: calibrated later.
        clipping_norm: C > 0, the largest L2 norm of one client's update, in units of the weights; or a clip that
            adapts it.
        placement: `update` noises the mean update and hands it to the strategy; `rule` noises the strategy's median or
            trimmed mean; `model` noises the strategy's output from all clipped replies.
        examples_cap: cap for weights min(n/cap, 1) from example counts; 0: uniform weights.
        scale: factor of z in each round.

    Raises:
        ConfigError: a parameter is out of range, or parameters contradict each other.
    """
    check.one_of(PLACEMENTS, placement=placement)
    clip = clipping_norm if isinstance(clipping_norm, FixedClip) else FixedClip(clipping_norm)
    return PLACEMENTS[placement](noise_multiplier=noise_multiplier, clip=clip, examples_cap=examples_cap, scale=scale)


def metric(
    *,
    noise_multiplier: float | Literal["auto"],
    clipping_norm: float | FixedClip,
    placement: Placement = "update",
    examples_cap: float = 0.0,
    **distance: Unpack[DistanceOptions],
) -> GaussianMechanism:
    """Return a mechanism with noise scaled by the models' distance: σ = (z/d)·C/n.

    Args:
        noise_multiplier, clipping_norm, placement, examples_cap: as in `global_dp`.
        distance: options of `DistanceScaled`.

    Raises:
        ConfigError: a parameter is out of range, or parameters contradict each other.
    """
    return global_dp(
        noise_multiplier=noise_multiplier,
        clipping_norm=clipping_norm,
        placement=placement,
        examples_cap=examples_cap,
        scale=DistanceScaled(**distance),
    )
