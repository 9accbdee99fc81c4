"""Privacy around a Flower strategy.

    replies → screen → clip → [distance] → sum → noise → mean → one virtual reply → the wrapped strategy
                                  ↓                ↓                                (post-processing)
                               ledger           ledger

That is placement `update`. The wrapped strategy sees one model, the release, and whatever it does with it (momentum,
Adam, anything that keeps state) costs no privacy. Placement `model` is what Flower and the papers do: the wrapped
strategy sees every clipped model, and its output is noised as if it were their mean. It is there to compare with.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from cloister.core import check
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.cohort import Cohort
from cloister.core.decorator import Decorator, Measurements, virtual_reply
from cloister.core.errors import ConfigError, PrivacyError
from cloister.core.replies import Screening
from cloister.core.wire import PROMISE
from cloister.privacy.accounting import Account, best_epsilon, least_multiplier
from cloister.privacy.books import Books
from cloister.privacy.claim import Claim
from cloister.privacy.clipping import AdaptiveClip, FixedClip, capped_weights, clip, clipped_fraction
from cloister.privacy.distance import DISTANCES, L2, Distance, largest_distance
from cloister.privacy.events import UNSAMPLED, Event, Gaussian, Sampling, Unaccounted
from cloister.privacy.noise import GaussianNoise
from cloister.privacy.release import bounded_models, noised, noisy_mean

Placement = Literal["update", "model"]
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]

EVERY_REPLY = "needs_every_reply"
"""A strategy with this attribute set is meaningless on one reply (a median, a selection)."""
UNIFORM_MEAN = "is_uniform_mean"
"""A strategy with this attribute set returns the plain mean of the replies it is given."""


class GlobalDP(Decorator):
    """Central differential privacy around any Flower strategy.

    Args:
        inner: the wrapped strategy.
        noise_multiplier: z ≥ 0; the noise on the sum of updates has standard deviation z·C.
        clipping_norm: C > 0, the largest L2 norm of one client's update, in units of the weights; or a clip that
            adapts it.
        placement: `update` noises the mean update and hands it to `inner`; `model` noises what `inner` makes of all
            clipped replies.
        noise: where the noise comes from; by default the operating system's entropy.
        examples_cap: let updates weigh by min(n/cap, 1) of their example counts; 0: all the same.
        books: record every release in a ledger, and stop at its budget.

    Guarantee (placement `update`): each round is a Gaussian mechanism with noise multiplier z for adding or removing
        one client's contribution, whatever `inner` is and whoever drops out. The weights clients report do not enter,
        or enter capped at 1.

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
        clipping_norm: float | FixedClip,
        placement: Placement = "update",
        noise: GaussianNoise | None = None,
        examples_cap: float = 0.0,
        books: Books | None = None,
    ) -> None:
        super().__init__(inner)
        check.non_negative(noise_multiplier=noise_multiplier, examples_cap=examples_cap)
        check.one_of(("update", "model"), placement=placement)
        self.clip = clipping_norm if isinstance(clipping_norm, FixedClip) else FixedClip(clipping_norm)
        self.noise_multiplier = noise_multiplier
        self.placement = placement
        self.noise = GaussianNoise() if noise is None else noise
        self.examples_cap = examples_cap
        self.books = books
        self._refuse_impossible()

    def _refuse_impossible(self) -> None:
        name = type(self.inner).__name__
        if self.placement == "update" and getattr(self.inner, EVERY_REPLY, False):
            raise ConfigError(
                f"privacy.placement = 'update' shows strategy {name} one reply, the release, and it needs every reply; "
                "use privacy.placement = 'model' (heuristic)"
            )
        if self.placement == "model" and (self.examples_cap or isinstance(self.clip, AdaptiveClip)):
            raise ConfigError(
                "privacy.placement = 'model' goes with a fixed clip and uniform weights only; "
                "use privacy.placement = 'update'"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy, unless the round would pass the budget: then nothing is sent.

        Raises:
            BudgetExhausted: it would.
        """
        layout = Layout.of(from_record(arrays))
        promised = [event for event in self.worst_events(layout) if isinstance(event, Gaussian)]
        if promised and self.is_accounted:
            config[PROMISE] = [event.noise_multiplier for event in promised]
        messages = super().configure_train(server_round, arrays, config, grid)
        if self.books is not None:
            self.books.require(self.worst_events(layout))
        return messages

    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """Bound, choose this round's multiplier, release in the configured placement, and let the clip follow."""
        if self.skips(screening.cohort):
            self.measured = Measurements(len(self._asked), 0, screening.rejected)
            return None, None
        bounded = clip(screening.cohort, self.clip.bound)
        fraction = clipped_fraction(bounded)
        if self.examples_cap:
            bounded = capped_weights(bounded, screening.examples, self.examples_cap)
        multiplier, distance, released = self.multiplier(server_round, screening.cohort, bounded)
        release = self._release_update if self.placement == "update" else self._release_model
        # Recorded is the least noise that this round could have had: what it has may depend on earlier releases.
        with self.recorded(self.worst_events(bounded.layout)[-1], server_round):
            arrays, metrics, std, sensitivity = release(server_round, bounded, multiplier)
            norm = self.clip.bound
            self.clip.follow(screening.cohort, self._expected, self.noise)
        self.measured = Measurements(
            asked=len(self._asked),
            accepted=len(bounded),
            rejected=screening.rejected,
            noise_std=std,
            noise_multiplier=multiplier,
            sensitivity=sensitivity,
            clipping_norm=norm,
            clipped_fraction=fraction,
            clip_calibration=self.clip_calibration(server_round, screening.cohort),
            distance=distance,
            released_distance=released,
            epsilon=self.spent(),
        )
        return arrays, metrics

    def skips(self, cohort: Cohort) -> bool:
        """Whether a round makes no release. A guarantee needs one whoever replied: its absence would tell."""
        return False

    def clip_calibration(self, server_round: int, raw: Cohort) -> float | None:
        """A hint for choosing C by, where the mechanism has one."""
        return None

    def multiplier(self, server_round: int, raw: Cohort, bounded: Cohort) -> tuple[float, float | None, float | None]:
        """This round's noise multiplier, and the distance it was scaled by: as it is, and as it was released."""
        return self.noise_multiplier, None, None

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

    # --- what is recorded and claimed ---

    @contextmanager
    def recorded(self, event: Event, server_round: int) -> Iterator[None]:
        """The block, in the books if there are any."""
        if self.books is None:
            yield
        else:
            with self.books.release(event, server_round):
                yield

    def sum_event(self, multiplier: float) -> Event:
        """The release of this round's sum, with the draw it was made over."""
        if not self.is_accounted:
            return Unaccounted("; ".join(self.reservations()))
        return Gaussian(self.clip.joint_multiplier(multiplier), self.amplification())

    def worst_events(self, layout: Layout) -> list[Event]:
        """The releases of a round, with the least noise that they can have."""
        return [self.sum_event(self.noise_multiplier)]

    def amplification(self) -> Sampling:
        """What the draw of this round lets an accountant claim: nothing unless it was random and secret."""
        draw = self._draw
        if draw is None or not draw.secret:
            return UNSAMPLED
        if draw.kind == "poisson":
            return Sampling("poisson", probability=draw.fraction)
        if draw.population:
            return Sampling("without-replacement", cohort=int(draw.expected), population=draw.population)
        return UNSAMPLED

    def calibrate(self, layout: Layout, rounds: int) -> None:
        """Choose the least noise multiplier with which so many more rounds stay within the budget of the books.

        Raises:
            ConfigError: there is no budget to calibrate to, or none will do.
        """
        books = self.books
        if books is None or not books.max_epsilon:
            raise ConfigError("a noise multiplier can only be calibrated to a budget; set privacy.max-epsilon")

        def spent(multiplier: float) -> float:
            self.noise_multiplier = multiplier
            return self.composed(books.account(), layout, rounds, books.delta)

        self.noise_multiplier = least_multiplier(spent, books.max_epsilon)

    def composed(self, account: Account, layout: Layout, rounds: int, delta: float) -> float:
        """ε of an account and so many rounds more, each with the least noise it can have."""
        for event in self.worst_events(layout):
            account = account.plus(event, rounds)
        return best_epsilon(account, delta)[0]

    @property
    def is_accounted(self) -> bool:
        """Whether the releases of this decorator have a guarantee that can be composed."""
        return not self.reservations()

    def spent(self) -> float | None:
        """ε of everything in the ledger so far; None where nothing is recorded or nothing can be claimed."""
        if self.books is None:
            return None
        epsilon = self.books.epsilon()
        return epsilon if math.isfinite(epsilon) else None

    def claim(self) -> Claim:
        """What may be said about the models this strategy returns."""
        return Claim(
            mechanism=self.mechanism,
            reasons=tuple(self.reservations()),
            relation="add-or-remove" if self.books is None else self.books.relation,
            seeded=self.noise.seeded,
            parameters={
                "privacy.noise-multiplier": self.noise_multiplier,
                "privacy.clipping-norm": self.clip.bound,
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
        inner, noise_multiplier, clipping_norm, placement, noise, examples_cap, books: as in `GlobalDP`.
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
        books: Books | None = None,
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
            books=books,
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
            released = self._released(distance, bounded.layout)
        return self._scaled(released, bounded.layout), distance, released

    def _released(self, distance: float, layout: Layout) -> float:
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

    def _distance_event(self) -> Event:
        # The distance decides over the noise of the same cohort: a draw amplifies neither.
        return Gaussian(self.distance_multiplier) if self.is_accounted else Unaccounted("; ".join(self.reservations()))

    def worst_events(self, layout: Layout) -> list[Event]:
        """The distance, and the sum with the least noise that a distance can give it."""
        if self.release == "exact":
            return [self.sum_event(self.noise_multiplier)]
        if self.direction == "divide":
            least = 1 / max(self.min_distance, self.max_distance or self._limit(layout))
        else:
            least = self.min_distance
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

    def reservations(self) -> list[str]:
        """As `GlobalDP`, and that an exact distance is not noised."""
        reasons = super().reservations()
        if self.release == "exact":
            exact = "the distance between private models sets the noise and is itself not noised; z/d is nominal"
            if self.measure == "before":
                exact += ", and before clipping one client can drive the noise to nothing"
            reasons.append(exact)
        return reasons
