"""Privacy around a Flower strategy.

    replies → screen → clip → [distance] → sum → noise → mean → one virtual reply → the wrapped strategy
                                  ↓                ↓                                (post-processing)
                               ledger           ledger

That is placement `update`. The wrapped strategy sees one model, the release, and whatever it does with it (momentum,
Adam, anything that keeps state) costs no privacy. Placement `rule` is the same for strategies that are a median or a
trimmed mean: that takes the place of the sum, with its own proved sensitivity. Placement `model` is what Flower and the
papers do: the wrapped strategy sees every clipped model, and its output is noised as if it were their mean. It is there
to compare with.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from cloister.aggregation.decorator import Aggregated, Decorator, Measurements, virtual_reply
from cloister.aggregation.screening import Screening
from cloister.core import check
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.cohort import Cohort
from cloister.core.errors import BudgetExhausted, ConfigError
from cloister.core.wire import PROMISE
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import MIN_MULTIPLIER, UNSAMPLED, Event, Gaussian, Sampling, Unaccounted
from cloister.privacy.accounting.filters import minimum_multiplier
from cloister.privacy.claims.claim import Claim
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip, capped_weights, clip, clipped_fraction
from cloister.privacy.mechanisms.noise import GaussianNoise, noised
from cloister.privacy.mechanisms.release import Release, bounded_models, noisy_mean
from cloister.privacy.mechanisms.trimmed_mean import noisy_trimmed_mean

Placement = Literal["update", "rule", "model"]
RULE_OR_MODEL = "'rule' (sound), or 'model' (heuristic)"
MODEL_ONLY = "'model' (heuristic)"
SPENT = 0.99
"""Share of a budget above which nothing is calibrated to the rest."""

EVERY_REPLY = "needs_every_reply"
"""A strategy with this attribute set is meaningless on one reply (a median, a selection)."""
UNIFORM_MEAN = "is_uniform_mean"
"""A strategy with this attribute set returns the plain mean of the replies it is given."""
TRIMMED = "trimmed"
"""A strategy with this method is a coordinate-wise trimmed mean: how many of n values it cuts off at each end."""


class GlobalDP(Decorator):
    """Central differential privacy around any Flower strategy.

    Args:
        inner: the wrapped strategy.
        noise_multiplier: z ≥ 0; the noise on the sum of updates has standard deviation z·C.
        clipping_norm: C > 0, the largest L2 norm of one client's update, in units of the weights; or a clip that
            adapts it.
        placement: `update` noises the mean update and hands it to `inner`; `rule` does so with the median or trimmed
            mean that `inner` stands for; `model` noises what `inner` makes of all clipped replies.
        noise: where the noise comes from; by default the operating system's entropy.
        examples_cap: let updates weigh by min(n/cap, 1) of their example counts; 0: all the same.
        budget: record every release in a ledger, and stop at its budget.

    Guarantee (placements `update` and `rule`): each round is a Gaussian mechanism with noise multiplier z for adding or
        removing one client's contribution, whatever `inner` is and whoever drops out. The weights clients report do not
        enter, or enter capped at 1.

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
        budget: PrivacyBudget | None = None,
    ) -> None:
        super().__init__(inner)
        check.non_negative(noise_multiplier=noise_multiplier, examples_cap=examples_cap)
        check.one_of(get_args(Placement), placement=placement)
        self.clip = clipping_norm if isinstance(clipping_norm, FixedClip) else FixedClip(clipping_norm)
        self.noise_multiplier = noise_multiplier
        self.placement = placement
        self.noise = GaussianNoise() if noise is None else noise
        self.examples_cap = examples_cap
        self.budget = budget
        self._trimmed: Callable[[int], int] | None = getattr(inner, TRIMMED, None)
        self._refuse_impossible()

    def _refuse_impossible(self) -> None:
        name, ranked = type(self.inner).__name__, self._trimmed is not None
        if self.placement == "update" and getattr(self.inner, EVERY_REPLY, False):
            raise ConfigError(
                f"privacy.placement = 'update' shows strategy {name} one reply, the release, and it needs every reply; "
                f"use privacy.placement = {RULE_OR_MODEL if ranked else MODEL_ONLY}"
            )
        if self.placement == "rule" and not ranked:
            raise ConfigError(
                f"privacy.placement = 'rule' is for a coordinate-wise median or trimmed mean, and strategy {name} is "
                "none; use privacy.placement = 'update'"
            )
        if self.placement == "model" and (self.examples_cap or isinstance(self.clip, AdaptiveClip)):
            raise ConfigError(
                "privacy.placement = 'model' goes with a fixed clip and uniform weights only; "
                "use privacy.placement = 'update'"
            )
        if self.placement == "rule" and self._draw is not None and self._draw.kind == "poisson":
            raise ConfigError(
                "privacy.placement = 'rule' needs a cohort of public size, and strategy.sampling = 'poisson' draws a "
                "secret one; use 'fixed'"
            )
        if self.placement == "rule" and self.examples_cap:
            raise ConfigError(
                f"privacy.examples-cap = {self.examples_cap:g} has no meaning with privacy.placement = 'rule': "
                "a rank knows no weights; remove it"
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
        if self.budget is not None:
            self.budget.require(self.worst_events(layout))
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
        release = self._release_model if self.placement == "model" else self._release_then_aggregate
        # Recorded is the least noise that this round could have had: what it has may depend on earlier releases.
        with self.recorded(self.worst_events(bounded.layout)[-1], server_round):
            arrays, metrics, std, sensitivity = release(server_round, bounded, multiplier)
            norm = self.clip.bound
            self.clip.follow(screening.cohort, self._expected, self.noise)
        # What comes from un-noised updates would be one more release wherever something is claimed.
        hidden = self.is_accounted
        self.measured = Measurements(
            asked=len(self._asked),
            accepted=len(bounded),
            rejected=screening.rejected,
            noise_std=std,
            noise_multiplier=multiplier,
            sensitivity=sensitivity,
            clipping_norm=norm,
            clipped_fraction=None if hidden else fraction,
            clip_calibration=None if hidden else self.clip_calibration(server_round, screening.cohort),
            distance=None if hidden else distance,
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

    def _release_then_aggregate(
        self, server_round: int, bounded: Cohort, multiplier: float
    ) -> tuple[ArrayRecord | None, MetricRecord | None, float, float]:
        release = self._released(bounded, multiplier)
        reply = virtual_reply(bounded.layout, release.model)
        arrays, metrics = self.inner.aggregate_train(server_round, [reply])
        return arrays, metrics, release.noise_std, release.sensitivity

    def _released(self, bounded: Cohort, multiplier: float) -> Release:
        """The one model that the wrapped strategy is shown: a noisy mean, or the noisy rule it stands for."""
        if self.placement == "update" or self._trimmed is None:
            return noisy_mean(bounded, multiplier, self._expected, self.noise)
        asked = len(self._asked)
        return noisy_trimmed_mean(bounded, multiplier, asked, self._trimmed(asked), self.noise)

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
        """The block, with its release recorded and charged where there is a budget."""
        if self.budget is None:
            yield
        else:
            with self.budget.release(event, server_round, self.mechanism, self.clip.bound):
                yield

    def sum_event(self, multiplier: float) -> Event:
        """The release of this round's sum, with the draw it was made over."""
        if not self.is_accounted:
            return Unaccounted("; ".join(self.caveats()))
        # More noise than an accountant has use for is counted as less: a small distance may multiply it by a lot.
        return Gaussian(min(self.clip.joint_multiplier(multiplier), 1 / MIN_MULTIPLIER), self.amplification())

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

    @property
    def has_secret_cohorts(self) -> bool:
        """Whether amplification rests on the draw."""
        return self.amplification().kind != "none"

    def calibrate(self, layout: Layout, rounds: int) -> None:
        """Choose the smallest noise multiplier with which so many more rounds stay within the budget.

        Raises:
            ConfigError: there is no budget to calibrate to, or none will do.
            BudgetExhausted: earlier runs have spent it.
        """
        budget = self.budget
        if budget is None or not budget.max_epsilon:
            raise ConfigError("a noise multiplier can only be calibrated to a budget; set privacy.max-epsilon")
        if budget.spent() > SPENT * budget.limit:
            budget.require(())
            raise BudgetExhausted(
                f"{budget.ledger.path}: {100 * budget.share():.4g} % of privacy.max-epsilon = "
                f"{budget.max_epsilon:g} is spent; what is left would take noise in which nothing can be learnt"
            )

        def spent(multiplier: float) -> float:
            self.noise_multiplier = multiplier
            return budget.spent() + rounds * sum(budget.cost(event) for event in self.worst_events(layout))

        given = self.noise_multiplier
        try:
            beside = spent(1 / MIN_MULTIPLIER)
            if beside > budget.limit:
                raise ConfigError(
                    f"privacy.max-epsilon = {budget.max_epsilon:g} is passed whatever privacy.noise-multiplier is: "
                    f"what the ledger holds and what {rounds} rounds release beside the sum (a distance, with "
                    "privacy.distance-noise-multiplier; the share of an adaptive clip, with "
                    f"privacy.bits-noise-multiplier) already take {100 * beside / budget.limit:.4g} % of it"
                )
            chosen = minimum_multiplier(spent, budget.limit, f"privacy.max-epsilon = {budget.max_epsilon:g}")
        finally:
            self.noise_multiplier = given
        self.noise_multiplier = chosen

    @property
    def is_accounted(self) -> bool:
        """Whether the releases of this decorator have a guarantee that can be composed."""
        return not self.caveats()

    def spent(self) -> float | None:
        """ε of everything in the ledger so far; None where nothing is recorded or nothing can be claimed."""
        if self.budget is None:
            return None
        epsilon = self.budget.epsilon()
        return epsilon if math.isfinite(epsilon) else None

    def claim(self) -> Claim:
        """What may be said about the models this strategy returns."""
        return Claim(
            mechanism=self.mechanism,
            reasons=tuple(self.caveats()),
            relation="add-or-remove" if self.budget is None else self.budget.relation,
            seeded=self.noise.seeded,
            parameters={
                "privacy.noise-multiplier": self.noise_multiplier,
                "privacy.placement": self.placement,
                "privacy.examples-cap": self.examples_cap,
                **self.clip.parameters(),
            },
        )

    def caveats(self) -> list[str]:
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
