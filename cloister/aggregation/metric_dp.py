"""Noise scaled by how far the clients' models lie apart."""

import math
from typing import Literal

import numpy as np
from flwr.serverapp.strategy import Strategy

from cloister.aggregation.global_dp import GlobalDP, Placement
from cloister.core import check
from cloister.core.arrays import Layout
from cloister.core.cohort import Cohort
from cloister.core.errors import ConfigError, PrivacyError
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import UNSAMPLED, Event, Gaussian, Sampling, Unaccounted
from cloister.privacy.claims.claim import Claim
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip
from cloister.privacy.mechanisms.distance import DISTANCES, L2, Distance, largest_distance
from cloister.privacy.mechanisms.noise import GaussianNoise, noised


class MetricDP(GlobalDP):
    """Noise scaled by how far the clients' models lie apart: σ = (z/d)·C/n.

    Args:
        inner, noise_multiplier, clipping_norm, placement, noise, examples_cap, budget: as in `GlobalDP`.
        distance: a registered distance, `mean-layer-frobenius` in the paper.
        direction: `divide` the multiplier by the distance (the paper's formula and code) or `multiply` (its text).
        measure: the distance `after` clipping (bounded: one client cannot drive the noise to nothing) or `before`
            (the paper's Algorithm 1 and code).
        release: `exact` uses the distance as it is; `private` releases it first, with noise of its own.
        distance_multiplier: z_d of the release of the distance.
        min_distance, max_distance: what d is held between; `max_distance` 0 is the largest distance there can be.

    Guarantee: with `exact` none: the distance is computed from private data, is not noised itself, and steers the
        noise; z/d is a nominal figure, and no ε may be derived from it. With `private`, placement `update` and
        `after`: each round is two Gaussian releases, of the distance with z_d and of the sum with at least the
        multiplier at the limit of d. It is accounted for at that, so that nothing rests on what was released before;
        the noise a round really has is that or more.

    Raises:
        ConfigError: a parameter is out of range, or the distance has no bound to calibrate noise for.

    Source: Sáinz-Pardo Díaz et al. (2026), Algorithm 1 and Appendix G; the private release is ours.
    """

    mechanism = "metric"

    def __init__(
        self,
        inner: Strategy,
        *,
        noise_multiplier: float,
        clipping_norm: float | FixedClip,
        placement: Placement = "update",
        noise: GaussianNoise | None = None,
        examples_cap: float = 0.0,
        budget: PrivacyBudget | None = None,
        distance: str = "mean-layer-frobenius",
        direction: Literal["divide", "multiply"] = "divide",
        measure: Literal["after", "before"] = "after",
        release: Literal["exact", "private"] = "exact",
        distance_multiplier: float = 1.0,
        min_distance: float = 0.1,
        max_distance: float = 0.0,
    ) -> None:
        check.one_of(("divide", "multiply"), distance_direction=direction)
        check.one_of(("after", "before"), distance_clip=measure)
        check.one_of(("exact", "private"), distance_release=release)
        check.positive(min_distance=min_distance, distance_noise_multiplier=distance_multiplier)
        check.non_negative(max_distance=max_distance)
        if release == "private" and isinstance(clipping_norm, AdaptiveClip) and not max_distance:
            raise ConfigError(
                "privacy.distance-release = 'private' with privacy.clipping = 'adaptive' needs privacy.max-distance "
                "above 0: the limit of the distance moves with the clip, so the noise has no floor known beforehand"
            )
        if release == "private" and measure == "before":
            raise ConfigError(
                "privacy.distance-release = 'private' needs privacy.distance-clip = 'after': before clipping no noise "
                "covers what one client can do to the distance"
            )
        self.distance_name = distance
        self.distance: Distance = DISTANCES.load(distance)
        self.direction = direction
        self.measure = measure
        self.release = release
        self.distance_multiplier = distance_multiplier
        self.min_distance = min_distance
        self.max_distance = max_distance
        super().__init__(
            inner,
            noise_multiplier=noise_multiplier,
            clipping_norm=clipping_norm,
            placement=placement,
            noise=noise,
            examples_cap=examples_cap,
            budget=budget,
        )

    def clip_calibration(self, server_round: int, raw: Cohort) -> float | None:
        """The paper's c̄: the largest L2 distance of two models in the first round, before clipping."""
        return largest_distance(raw, L2.pairwise) if server_round == 1 else None

    def skips(self, cohort: Cohort) -> bool:
        """An exact distance makes no promise that a round without replies would have to keep."""
        return self.release == "exact" and not len(cohort)

    def multiplier(self, server_round: int, raw: Cohort, bounded: Cohort) -> tuple[float, float | None, float | None]:
        """z/d or z·d, with d held between its limits, and released first if it is to be private."""
        distance = largest_distance(raw if self.measure == "before" else bounded, self.distance.pairwise)
        if self.release == "exact":
            return self._scaled(distance, bounded.layout), distance, None
        with self.recorded(self._distance_event(), server_round):
            released = self._noised_distance(distance, bounded.layout)
        return self._scaled(released, bounded.layout), distance, released

    def _noised_distance(self, distance: float, layout: Layout) -> float:
        """d + N(0, (z_d·Δ)²): Δ is the largest the distance can be."""
        std = self.distance_multiplier * self._limit(layout)
        ((noisy,),) = noised((np.array([distance]),), std, self.noise)
        return float(noisy)

    def _scaled(self, distance: float, layout: Layout) -> float:
        held = min(max(distance, self.min_distance), self._most(layout))
        return self.noise_multiplier * (1 / held if self.direction == "divide" else held)

    def _limit(self, layout: Layout) -> float:
        """The largest distance of two clipped clients, for this clip and this model."""
        limit = self.distance.largest(self.clip.bound, len(layout.names))
        if not math.isfinite(limit):
            raise PrivacyError(
                f"privacy.distance = {self.distance_name!r} has no bound after clipping, so no noise covers its release"
            )
        return limit

    def _most(self, layout: Layout) -> float:
        """What d is held below: the configured ceiling, or in private form what geometry allows."""
        if self.release == "exact":
            return self.max_distance or math.inf
        return max(self.min_distance, min(self.max_distance or math.inf, self._limit(layout)))

    def _most_ever(self, layout: Layout) -> float:
        """What d is held below in any round: an adaptive clip moves what geometry allows, but not the ceiling."""
        if isinstance(self.clip, AdaptiveClip):
            return max(self.min_distance, self.max_distance)
        return self._most(layout)

    def _distance_event(self) -> Event:
        # The distance decides over the noise of the same cohort: a draw amplifies neither.
        return Gaussian(self.distance_multiplier) if self.is_accounted else Unaccounted("; ".join(self.caveats()))

    def worst_events(self, layout: Layout) -> list[Event]:
        """The distance, and the sum with the least noise that a distance can give it."""
        if self.release == "exact":
            return [self.sum_event(self.noise_multiplier)]
        least = 1 / self._most_ever(layout) if self.direction == "divide" else self.min_distance
        return [self._distance_event(), self.sum_event(self.noise_multiplier * least)]

    def amplification(self) -> Sampling:
        """Nothing: the draw of a round serves two releases, the second of which depends on the first."""
        return UNSAMPLED

    def claim(self) -> Claim:
        """As `GlobalDP`, with the parameters of the distance."""
        claim = super().claim()
        claim.parameters.update(
            {
                "privacy.distance": self.distance_name,
                "privacy.distance-direction": self.direction,
                "privacy.distance-clip": self.measure,
                "privacy.distance-release": self.release,
                "privacy.distance-noise-multiplier": self.distance_multiplier,
                "privacy.min-distance": self.min_distance,
                "privacy.max-distance": self.max_distance,
            }
        )
        return claim

    def caveats(self) -> list[str]:
        """As `GlobalDP`, and that an exact distance is not noised."""
        reasons = super().caveats()
        if self.release == "exact":
            exact = "the distance between private models sets the noise and is itself not noised; z/d is nominal"
            if self.measure == "before":
                exact += ", and before clipping one client can drive the noise to nothing"
            reasons.append(exact)
        return reasons
