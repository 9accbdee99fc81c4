"""The server's mechanisms by the names that `privacy.server` knows them by."""

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
"""Where the noise goes: on the mean update, on the median or trimmed mean, or on what the strategy makes of all."""


class DistanceOptions(TypedDict, total=False):
    """The options of `DistanceScaled`, which says what they mean."""

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
    """Central differential privacy with Gaussian noise.

    Args:
        noise_multiplier: z ≥ 0; the noise on the sum of updates has standard deviation z·C. `auto`: to be calibrated.
        clipping_norm: C > 0, the largest L2 norm of one client's update, in units of the weights; or a clip that
            adapts it.
        placement: `update` noises the mean update and hands it to the strategy; `rule` does so with the median or
            trimmed mean that the strategy stands for; `model` noises what the strategy makes of all clipped replies.
        examples_cap: let updates weigh by min(n/cap, 1) of their example counts; 0: all the same.
        scale: what scales z in each round.

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
    """Gaussian noise that is scaled by how far the clients' models lie apart: σ = (z/d)·C/n.

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
