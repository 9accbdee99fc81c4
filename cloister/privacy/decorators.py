"""Privacy around a Flower strategy.

    replies → screen → clip → [distance] → sum → noise → mean → one virtual reply → the wrapped strategy
                                                                                    (post-processing)

That is placement `update`. The wrapped strategy sees one model, the release, and whatever it does with it (momentum,
Adam, anything that keeps state) costs no privacy. Placement `model` is what Flower and the papers do: the wrapped
strategy sees every clipped model, and its output is noised as if it were their mean. It is there to compare with.
"""

from typing import Literal

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from cloister.core import check
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.cohort import Cohort
from cloister.core.decorator import Decorator, Measurements, virtual_reply
from cloister.core.errors import ConfigError
from cloister.core.replies import Screening
from cloister.privacy.claim import Claim
from cloister.privacy.clipping import clip, clipped_fraction
from cloister.privacy.distance import DISTANCES, largest_distance
from cloister.privacy.noise import GaussianNoise
from cloister.privacy.release import bounded_models, noised, noisy_mean

Placement = Literal["update", "model"]

EVERY_REPLY = "needs_every_reply"
"""A strategy with this attribute set is meaningless on one reply (a median, a selection)."""
UNIFORM_MEAN = "is_uniform_mean"
"""A strategy with this attribute set returns the plain mean of the replies it is given."""


class GlobalDP(Decorator):
    """Central differential privacy with a fixed clip, around any Flower strategy.

    Args:
        inner: the wrapped strategy.
        noise_multiplier: z ≥ 0; the noise on the sum of updates has standard deviation z·C.
        clipping_norm: C > 0, the largest L2 norm of one client's update, in units of the weights.
        placement: `update` noises the mean update and hands it to `inner`; `model` noises what `inner` makes of all
            clipped replies.
        noise: where the noise comes from; by default the operating system's entropy.

    Guarantee (placement `update`): each round is a Gaussian mechanism with noise multiplier z for adding or removing
        one client, whatever `inner` is and whoever drops out. The weights clients report do not enter.

    Raises:
        ConfigError: a parameter is out of range, or `inner` needs every reply and the placement is `update`.

    Source: McMahan et al. (2018), arXiv:1710.06963; noise before the server optimizer as in Reddi et al. (2021),
        Algorithm 1, whose Δ_t it replaces.
    """

    mechanism = "global-dp"

    def __init__(
        self,
        inner: Strategy,
        *,
        noise_multiplier: float,
        clipping_norm: float,
        placement: Placement = "update",
        noise: GaussianNoise | None = None,
    ) -> None:
        super().__init__(inner)
        check.non_negative(noise_multiplier=noise_multiplier)
        check.positive(clipping_norm=clipping_norm)
        check.one_of(("update", "model"), placement=placement)
        if placement == "update" and getattr(inner, EVERY_REPLY, False):
            raise ConfigError(
                f"privacy.placement = 'update' shows strategy {type(inner).__name__} one reply, the release, and it "
                "needs every reply; use privacy.placement = 'model' (heuristic)"
            )
        self.noise_multiplier = noise_multiplier
        self.clipping_norm = clipping_norm
        self.placement = placement
        self.noise = GaussianNoise() if noise is None else noise

    def aggregate(self, server_round: int, screening: Screening) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip, choose this round's multiplier, and release in the configured placement."""
        bounded = clip(screening.cohort, self.clipping_norm)
        multiplier, distance = self.multiplier(screening.cohort, bounded)
        release = self._release_update if self.placement == "update" else self._release_model
        arrays, metrics, std, sensitivity = release(server_round, bounded, multiplier)
        self.measured = Measurements(
            asked=len(self._asked),
            accepted=len(bounded),
            rejected=screening.rejected,
            noise_std=std,
            noise_multiplier=multiplier,
            sensitivity=sensitivity,
            clipped_fraction=clipped_fraction(bounded),
            distance=distance,
        )
        return arrays, metrics

    def multiplier(self, raw: Cohort, bounded: Cohort) -> tuple[float, float | None]:
        """This round's noise multiplier, and the distance it was scaled by, if it was."""
        return self.noise_multiplier, None

    def _release_update(
        self, server_round: int, bounded: Cohort, multiplier: float
    ) -> tuple[ArrayRecord | None, MetricRecord | None, float, float]:
        release = noisy_mean(bounded, multiplier, self._expected, self.noise)
        reply = virtual_reply(bounded.layout, release.model)
        arrays, metrics = self.inner.aggregate_train(server_round, [reply])
        return arrays, metrics, release.noise_std, release.sensitivity

    def _release_model(
        self, server_round: int, bounded: Cohort, multiplier: float
    ) -> tuple[ArrayRecord | None, MetricRecord | None, float, float]:
        """Noise the strategy's output as if it were the mean of the replies that came: std z·C/n."""
        # Fewer replies than were asked for mean more noise, not less protection for those who replied.
        sensitivity = bounded.l2_bound / max(1, len(bounded))
        std = multiplier * sensitivity
        replies = [virtual_reply(bounded.layout, row) for row in bounded_models(bounded)]
        arrays, metrics = self.inner.aggregate_train(server_round, replies) if replies else (None, None)
        return (None if arrays is None else self._noised(arrays, std)), metrics, std, sensitivity

    def _noised(self, arrays: ArrayRecord, std: float) -> ArrayRecord:
        named = from_record(arrays)
        layout = Layout.of(named)
        return to_record(layout.named(noised(layout.rows(named), std, self.noise)))

    def claim(self) -> Claim:
        """What may be said about the models this strategy returns."""
        return Claim(
            mechanism=self.mechanism,
            reasons=tuple(self.reservations()),
            parameters={
                "privacy.noise-multiplier": self.noise_multiplier,
                "privacy.clipping-norm": self.clipping_norm,
                "privacy.placement": self.placement,
            },
        )

    def reservations(self) -> list[str]:
        """Why the claim is not sound; empty if it is."""
        reasons = []
        if self.noise_multiplier == 0:
            reasons.append("privacy.noise-multiplier is 0: there is no noise")
        if self.noise.seeded:
            reasons.append("the noise is seeded: whoever knows privacy.noise-seed can remove it")
        if self.placement == "model" and not getattr(self.inner, UNIFORM_MEAN, False):
            reasons.append(
                f"privacy.placement is 'model': the noise is calibrated for a plain mean, and "
                f"{type(self.inner).__name__} is none; one client can move its output further than C/n"
            )
        elif self.placement == "model":
            reasons.append("privacy.placement is 'model': the noise depends on how many clients replied")
        return reasons


class MetricDP(GlobalDP):
    """Noise scaled by how far the clients' models lie apart: σ = (z/d)·C/n.

    Args:
        inner, noise_multiplier, clipping_norm, placement, noise: as in `GlobalDP`.
        distance: a registered distance, `mean-layer-frobenius` in the paper.
        direction: `divide` the multiplier by the distance (the paper's formula and code) or `multiply` (its text).
        measure: the distance `after` clipping (bounded: one client cannot drive the noise to nothing) or `before`
            (the paper's Algorithm 1 and code).
        min_distance, max_distance: what d is held between; `max_distance` 0 is no limit. Equal models have d = 0.

    Guarantee: none. The distance is computed from private data, is not noised itself, and steers the noise; z/d is a
        nominal figure. No ε may be derived from it.

    Source: Sáinz-Pardo Díaz et al. (2026), Algorithm 1 and Appendix G.
    """

    mechanism = "metric"

    def __init__(
        self,
        inner: Strategy,
        *,
        noise_multiplier: float,
        clipping_norm: float,
        placement: Placement = "update",
        noise: GaussianNoise | None = None,
        distance: str = "mean-layer-frobenius",
        direction: Literal["divide", "multiply"] = "divide",
        measure: Literal["after", "before"] = "after",
        min_distance: float = 1e-3,
        max_distance: float = 0.0,
    ) -> None:
        super().__init__(
            inner, noise_multiplier=noise_multiplier, clipping_norm=clipping_norm, placement=placement, noise=noise
        )
        check.one_of(("divide", "multiply"), distance_direction=direction)
        check.one_of(("after", "before"), distance_clip=measure)
        check.positive(min_distance=min_distance)
        check.non_negative(max_distance=max_distance)
        self.distance = distance
        self.direction = direction
        self.measure = measure
        self.min_distance = min_distance
        self.max_distance = max_distance
        self._pairwise = DISTANCES.load(distance)

    def multiplier(self, raw: Cohort, bounded: Cohort) -> tuple[float, float | None]:
        """z/d or z·d, with d held between its limits."""
        distance = largest_distance(raw if self.measure == "before" else bounded, self._pairwise)
        held = max(distance, self.min_distance)
        held = min(held, self.max_distance) if self.max_distance else held
        factor = 1 / held if self.direction == "divide" else held
        return self.noise_multiplier * factor, distance

    def claim(self) -> Claim:
        """As `GlobalDP`, with the parameters of the distance."""
        claim = super().claim()
        claim.parameters.update(
            {
                "privacy.distance": self.distance,
                "privacy.distance-direction": self.direction,
                "privacy.distance-clip": self.measure,
                "privacy.distance-release": "exact",
                "privacy.min-distance": self.min_distance,
                "privacy.max-distance": self.max_distance,
            }
        )
        return claim

    def reservations(self) -> list[str]:
        """As `GlobalDP`, and that the distance itself is exact."""
        exact = "the distance between private models sets the noise and is not noised itself; z/d is a nominal figure"
        if self.measure == "before":
            exact += ", and before clipping one client can drive the noise to nothing"
        return [*super().reservations(), exact]
