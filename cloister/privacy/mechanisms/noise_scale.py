"""What the noise multiplier of a round is scaled by: nothing, or how far the clients' models lie apart."""

import math
from dataclasses import dataclass
from typing import Literal

from cloister.core import check
from cloister.core.arrays import Layout
from cloister.core.cohort import Cohort
from cloister.core.errors import ConfigError, PrivacyError
from cloister.privacy.accounting.events import Event, Gaussian
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip
from cloister.privacy.mechanisms.distance import DISTANCES, L2, Distance, largest_distance
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.mechanism import NOTHING_SEEN, Contributions, Diagnostics, Parameter
from cloister.privacy.mechanisms.noise import GaussianNoise


@dataclass(frozen=True)
class Scaling:
    """What a scale found in one round.

    Attributes:
        factor: by which the multiplier is scaled.
        released: the distance as it was released; None: none was.
        diagnostics: the distance as it is, and a hint for the bound.
    """

    factor: float = 1.0
    released: float | None = None
    diagnostics: Diagnostics = NOTHING_SEEN


@dataclass(frozen=True)
class Constant:
    """The same multiplier in every round: fixed-clip global differential privacy."""

    mechanism = "global-dp"

    @property
    def skips_empty_rounds(self) -> bool:
        """A guarantee needs a release whoever replied."""
        return False

    @property
    def amplified(self) -> bool:
        """A draw amplifies the one release of a round."""
        return True

    @property
    def compares_clients(self) -> bool:
        """Whether it has to see the updates of a round together."""
        return False

    def refuse_with(self, clip: FixedClip) -> None:
        """Nothing is refused: the noise is known beforehand with any clip."""

    def refuse_canaries(self) -> None:
        """Nothing is refused: no client decides how much noise there is."""

    def events(self) -> tuple[Event, ...]:
        """Nothing is released beside the sum."""
        return ()

    def minimum(self, clip: FixedClip, layout: Layout) -> float:
        """The smallest factor that any round can have.

        Args:
            clip: of the mechanism.
            layout: of the model.
        """
        return 1.0

    def factors(self, bound: float, layout: Layout) -> tuple[float, float]:
        """The smallest and the largest factor that a round with this clip has; 0 or ∞: nothing limits it.

        Args:
            bound: C in force.
            layout: of the model.
        """
        return 1.0, 1.0

    def limits(self, bound: float, layout: Layout) -> tuple[float, float]:
        """What a distance is held between.

        Args:
            bound, layout: as in `factors`.
        """
        return 1.0, 1.0

    def at(self, distance: float, bound: float, layout: Layout) -> float:
        """The factor of a round.

        Args:
            distance: d, as it was found or told.
            bound, layout: as in `factors`.
        """
        return 1.0

    def widest(self, bound: float, layout: Layout) -> float:
        """The largest factor that a round can have, where the factor is private; 0: it is public.

        Args:
            bound, layout: as in `factors`.
        """
        return 0.0

    def of(self, contributions: Contributions, bounded: Cohort) -> Scaling:
        """The factor of a round.

        Args:
            contributions: as they arrived.
            bounded: the same, clipped.
        """
        return Scaling()

    def caveats(self) -> tuple[str, ...]:
        """There are none."""
        return ()

    def parameters(self) -> dict[str, Parameter]:
        """There are none."""
        return {}


CONSTANT = Constant()


@dataclass(frozen=True, kw_only=True)
class DistanceScaled(Constant):
    """A multiplier divided (or multiplied) by the distance d of the clients: σ = (z/d)·C/n.

    Attributes:
        distance: a registered distance, the largest of two clients for most; `mean-layer-frobenius` in the paper.
        direction: `divide` the multiplier by the distance (the paper's formula and code) or `multiply` (its text).
        measure: the distance `after` clipping (bounded: one client cannot drive the noise to nothing) or `before`
            (the paper's Algorithm 1 and code).
        release: `exact` uses the distance as it is; `private` releases it first, with noise of its own.
        distance_multiplier: z_d of the release of the distance.
        min_distance, max_distance: what d is held between; `max_distance` 0 is the largest distance there can be.

    Guarantee: with `exact` none: the distance is computed from private data, is not noised itself, and steers the
        noise; z/d is a nominal figure, and no ε may be derived from it. With `private` and `after`: each round is two
        Gaussian releases, of the distance with z_d and of the sum with at least the multiplier at the limit of d. It is
        accounted for at that, so that nothing rests on what was released before; the noise a round really has is that
        or more.

    Raises:
        ConfigError: a parameter is out of range, or no noise covers the distance.

    Source: Sáinz-Pardo Díaz et al. (2026), Algorithm 1 and Appendix G; the private release is ours.
    """

    distance: str = "mean-layer-frobenius"
    direction: Literal["divide", "multiply"] = "divide"
    measure: Literal["after", "before"] = "after"
    release: Literal["exact", "private"] = "exact"
    distance_multiplier: float = 1.0
    min_distance: float = 0.1
    max_distance: float = 0.0

    mechanism = "metric"

    def __post_init__(self) -> None:
        check.one_of(("divide", "multiply"), distance_direction=self.direction)
        check.one_of(("after", "before"), distance_clip=self.measure)
        check.one_of(("exact", "private"), distance_release=self.release)
        check.positive(min_distance=self.min_distance, distance_noise_multiplier=self.distance_multiplier)
        check.non_negative(max_distance=self.max_distance)
        DISTANCES.load(self.distance)
        if self.release == "private" and self.measure == "before":
            raise ConfigError(
                "privacy.distance-release = 'private' needs privacy.distance-clip = 'after': before clipping no noise "
                "covers what one client can do to the distance"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the distance is used without noise."""
        return self.release == "exact"

    @property
    def skips_empty_rounds(self) -> bool:
        """An exact distance makes no promise that a round without replies would have to keep."""
        return self.is_exact

    @property
    def compares_clients(self) -> bool:
        """The distance of two clients needs the updates of a round together."""
        return True

    @property
    def amplified(self) -> bool:
        """The draw of a round serves two releases, the second of which depends on the first: it amplifies neither."""
        return False

    def refuse_with(self, clip: FixedClip) -> None:
        """Raises ConfigError if the noise would have no minimum that is known beforehand."""
        if self.release == "private" and isinstance(clip, AdaptiveClip) and not self.max_distance:
            raise ConfigError(
                "privacy.distance-release = 'private' with privacy.clipping = 'adaptive' needs privacy.max-distance "
                "above 0: the limit of the distance moves with the clip, so no minimum of the noise is known beforehand"
            )

    def refuse_canaries(self) -> None:
        """Raises ConfigError: a canary lies far from everybody."""
        raise ConfigError(
            "privacy.canaries contradicts privacy.server = 'metric': canaries would decide the distance of clients, "
            "and with it the noise; use 'global-dp', or 0 canaries"
        )

    def events(self) -> tuple[Event, ...]:
        """The release of the distance, where there is one."""
        return () if self.is_exact else (Gaussian(self.distance_multiplier),)

    def minimum(self, clip: FixedClip, layout: Layout) -> float:
        """As in `Constant`: at the limit of the distance in any round. An adaptive clip moves what geometry allows.

        Args:
            clip: of the mechanism.
            layout: of the model.
        """
        if self.is_exact:
            return 1.0
        adaptive = isinstance(clip, AdaptiveClip)
        maximum = max(self.min_distance, self.max_distance) if adaptive else self._maximum(clip.bound, layout)
        return 1 / maximum if self.direction == "divide" else self.min_distance

    def factors(self, bound: float, layout: Layout) -> tuple[float, float]:
        """As in `Constant`: at the limits of the distance.

        Args:
            bound, layout: as in `Constant.factors`.
        """
        low, high = self.limits(bound, layout)
        return (1 / high, 1 / low) if self.direction == "divide" else (low, high)

    def limits(self, bound: float, layout: Layout) -> tuple[float, float]:
        """As in `Constant`: what is configured, and where the release is private what geometry allows.

        Args:
            bound, layout: as in `Constant.factors`.
        """
        return self.min_distance, self._maximum(bound, layout)

    def at(self, distance: float, bound: float, layout: Layout) -> float:
        """1/d or d, with d held between its limits, so that no noise is less than `minimum` says.

        Args:
            distance, bound, layout: as in `Constant.at`.
        """
        low, high = self.limits(bound, layout)
        held = min(max(distance, low), high)
        return 1 / held if self.direction == "divide" else held

    def widest(self, bound: float, layout: Layout) -> float:
        """As in `Constant`: an exact distance is private, and so is the factor that it makes.

        Args:
            bound, layout: as in `Constant.factors`.
        """
        return self.factors(bound, layout)[1] if self.is_exact else 0.0

    def of(self, contributions: Contributions, bounded: Cohort) -> Scaling:
        """1/d or d, with d held between its limits, and released first if it is to be private.

        Args:
            contributions: as they arrived.
            bounded: the same, clipped.
        """
        raw, bound = contributions.cohort, bounded.l2_bound
        distance = self._distance.of(raw if self.measure == "before" else bounded)
        # The paper's c̄: the largest L2 distance of two models in the first round, before clipping.
        hint = largest_distance(raw, L2.pairwise) if self.is_exact and contributions.server_round == 1 else None
        released = None if self.is_exact else self.noised(distance, bounded, contributions.noise)
        used = distance if released is None else released
        factor = self.at(used, bound, bounded.layout)
        return Scaling(factor, released, Diagnostics(clip_calibration=hint, distance=distance))

    def noised(self, distance: float, bounded: Cohort, noise: GaussianNoise) -> float:
        """d, rounded up to a public grid, + noise of deviation z_d·Δ: Δ is the largest that the distance can be.

        Args:
            distance: d.
            bounded: the cohort that it is of.
            noise: where the key of the noise comes from.

        Guarantee: the noise is added to a whole number from 0 to D, D steps being Δ, and its law is exact: whatever
            was rounded while d was computed, nobody moves that number by more than D.

        Raises:
            PrivacyError: the distance has no bound after clipping.
        """
        limit = self._limit(bounded.l2_bound, bounded.layout)
        grid = Grid.of(limit, self.distance_multiplier, 1)
        # The limit is the sensitivity: a distance of another package that passes its own is held to it; NaN is 0.
        held = min(max(0.0, distance), limit)
        return grid.noised(min(math.ceil(held / limit * grid.steps), grid.whole(1)), noise)

    @property
    def _distance(self) -> Distance:
        return DISTANCES.load(self.distance)

    def _limit(self, bound: float, layout: Layout) -> float:
        """The largest distance of two clients clipped to `bound`, for this model."""
        limit = self._distance.largest(bound, len(layout.names))
        if not 0 < limit < math.inf:
            raise PrivacyError(
                f"privacy.distance = {self.distance!r} has no bound after clipping, so no noise covers its release"
            )
        return limit

    def _maximum(self, bound: float, layout: Layout) -> float:
        """What d is held below in a round: the configured ceiling, or in private form what geometry allows."""
        if self.is_exact:
            return self.max_distance or math.inf
        return max(self.min_distance, min(self.max_distance or math.inf, self._limit(bound, layout)))

    def caveats(self) -> tuple[str, ...]:
        """That an exact distance is not noised."""
        if not self.is_exact:
            return ()
        exact = "the distance between private models sets the noise and is itself not noised; z/d is nominal"
        if self.measure == "before":
            exact += ", and before clipping one client can drive the noise to nothing"
        return (exact,)

    def parameters(self) -> dict[str, Parameter]:
        """Those of the distance, by configuration key."""
        return {
            "privacy.distance": self.distance,
            "privacy.distance-direction": self.direction,
            "privacy.distance-clip": self.measure,
            "privacy.distance-release": self.release,
            "privacy.distance-noise-multiplier": self.distance_multiplier,
            "privacy.min-distance": self.min_distance,
            "privacy.max-distance": self.max_distance,
        }
