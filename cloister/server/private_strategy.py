"""Flower strategy that wraps another strategy in a privacy mechanism.

    replies → screen → [canaries] → bound → [distance] → sum → noise → mean → one virtual reply → the wrapped strategy
                                                ↓                ↓                                (post-processing)
                                             ledger           ledger

The mechanism covers every step between the screen and the virtual reply. Its cost is on disk before the release is
computed. The wrapped strategy receives one model, the release. All further processing of it (momentum, Adam, any step
with state) is post-processing and costs no privacy.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Self, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from cloister.privacy.accounting.budget import PrivacyBudget, recorded, to_wire, undrawn
from cloister.privacy.accounting.events import Event, Unaccounted
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.premises import CARRIED
from cloister.privacy.mechanisms.clipping import FixedClip
from cloister.privacy.mechanisms.gaussian import DistanceOptions, Placement, global_dp, metric
from cloister.privacy.mechanisms.mechanism import NOTHING_SEEN, Contributions, Mechanism, Released
from cloister.privacy.mechanisms.noise import GaussianNoise, noised
from cloister.privacy.mechanisms.selection import SEEDED
from cloister.server.canaries import NO_CANARIES, Canaries
from cloister.server.screening import Screening, screen
from cloister.server.strategy_wrapper import Measurements, StrategyWrapper, aggregated_apart, capabilities_of
from cloister.utils.arrays import Layout, Row, State, declares_state, from_record, joined, part, to_record
from cloister.utils.errors import BudgetExhausted, ConfigError, PrivacyError
from cloister.utils.registry import Aggregated, Messages
from cloister.utils.state import Coordinates
from cloister.utils.text import at_most
from cloister.utils.wire import LEDGER_HEAD, PROMISE

SPENT = 0.99
"""Spent share of a budget above which calibration to the rest is refused."""


class PrivateStrategy(StrategyWrapper):
    """A Flower strategy whose replies pass through a mechanism.

    Args:
        inner: the wrapped strategy.
        mechanism: bounds the replies and computes the release.
        budget: records every release in a ledger and refuses rounds beyond its limit; None: no ledger.
        noise: source of the noise; None: the operating system's entropy.
        canaries: take part beside the clients and are scored after every round.

    Attributes:
        mechanism: of the next round. An adaptive clipping norm replaces it in each round.

    Guarantee: that of the mechanism in each round where `caveats` is empty, for every `inner` and every set of
        dropouts.

    Raises:
        ConfigError: the mechanism is incompatible with `inner`, with its sampling of nodes, or with canaries.

    Examples:
        >>> from flwr.serverapp.strategy import FedAvg, Krum
        >>> from cloister.privacy.mechanisms.gaussian import global_dp
        >>> mechanism = global_dp(noise_multiplier=1.0, clipping_norm=0.5)
        >>> PrivateStrategy(FedAvg(), mechanism).caveats()
        ()
        >>> PrivateStrategy(Krum(), mechanism)
        Traceback (most recent call last):
        cloister.utils.errors.ConfigError: privacy.placement = 'update' shows strategy Krum one reply, ...
    """

    def __init__(
        self,
        inner: Strategy,
        mechanism: Mechanism,
        *,
        budget: PrivacyBudget | None = None,
        noise: GaussianNoise | None = None,
        canaries: Canaries = NO_CANARIES,
    ) -> None:
        super().__init__(inner)
        self.canaries = canaries
        self._has_followed = False
        self.mechanism = mechanism.suited_to(capabilities_of(inner), type(inner).__name__)
        self.budget = budget
        self.noise = GaussianNoise() if noise is None else noise
        if self.mechanism.needs_public_cohort and self._draw is not None and self._draw.kind == "poisson":
            raise ConfigError(
                f"privacy.server = {self.mechanism.name!r} as it is set needs a cohort of public size, and "
                "strategy.sampling = 'poisson' draws a secret one; use 'fixed'"
            )
        if len(canaries):
            self.mechanism.refuse_canaries()
            # A claim may use such sampling for amplification.
            draw = self._draw
            if draw is not None and (draw.kind == "poisson" or draw.population):
                raise ConfigError(
                    f"privacy.canaries = {len(self.canaries)} contradicts strategy.sampling = 'poisson' and "
                    "privacy.population: canaries take part in every round, and what is claimed counts on clients who "
                    "do not; use 'fixed' and no population"
                )

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Return the wrapped strategy's messages if the budget covers the round.

        With a guarantee, the messages contain the promised releases and the head of the ledger, which nodes store. The
        head reveals nothing to them: they have seen the earlier rounds, and each round's ledger lines contain a random
        id. So no line can be guessed from its hash.

        Args:
            server_round, arrays, config, grid: as in Flower's `Strategy`.

        Raises:
            BudgetExhausted: the budget does not cover the round; nothing is sent.
        """
        layout = Layout.of(from_record(arrays))
        if self.is_accounted:
            config[PROMISE] = to_wire(self.promised(layout))
            if self.budget is not None:
                config[LEDGER_HEAD] = self.budget.ledger.head
        messages = super().configure_train(server_round, arrays, config, grid)
        if self.budget is not None:
            self.budget.require(self.events(layout))
        return messages

    def needs_all_replies(self, layout: Layout, sent: Row) -> str:
        """Name the component that needs all replies: the mechanism, or the canaries.

        Args:
            layout, sent: as in `StrategyWrapper.screened`.
        """
        if len(self.canaries):
            return f"privacy.canaries = {len(self.canaries)}"
        if self.mechanism.intake(layout, sent, len(self._asked)) is not None:
            return ""
        return f"privacy.server = {self.mechanism.name!r} around {super().needs_all_replies(layout, sent)}"

    def screened(self, replies: Messages, layout: Layout, sent: Row) -> Screening:
        """Screen the replies, and keep only their sum if the mechanism needs no more.

        Args:
            replies, layout, sent: as in `StrategyWrapper.screened`.
        """
        coordinates = Coordinates.of(layout, sent, self.mechanism.clipping_norm)
        # The release with canaries needs the rows of all replies.
        intake = None if len(self.canaries) else self.mechanism.intake(layout, coordinates.origin, len(self._asked))
        return screen(replies, self._asked, layout, coordinates.origin, intake, coordinates.bounded)

    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """Record the cost of the round, and let the wrapped strategy aggregate the release.

        Args:
            server_round: counted from 1.
            screening: of the replies.
        """
        cohort = screening.cohort
        if self.mechanism.skips_empty_rounds and not self.is_accounted and not len(cohort):
            self.measured = Measurements(len(self._asked), 0, screening.rejected)
            return None, None
        asked, examples = len(self._asked), screening.examples
        given = Contributions(cohort, examples, asked, self._expected, self.noise, server_round, screening.intake)
        given = self.canaries.joined(given, self.mechanism.clipping_norm)
        with self.recorded(cohort.layout, server_round):
            released = self.mechanism.release(given)
            arrays, metrics = self._aggregated(server_round, cohort.layout, released)
        self.canaries = self.canaries.scored(given, released.models, self.mechanism.clipping_norm)
        self.measured = self._measurements(screening, released)
        self._follow(released.following, cohort.layout)
        return arrays, metrics

    def _follow(self, following: Mechanism | None, layout: Layout) -> None:
        """Set the mechanism of the next round.

        Raises:
            PrivacyError: its events differ from the current ones, on which the worst-case cost of the run is based.
        """
        if following is None:
            return
        other = copy(self)  # if the events differ, self keeps the mechanism of its claim
        other.mechanism = following
        draws = following.needs_public_cohort, self.mechanism.needs_public_cohort
        if other.events(layout) != self.events(layout) or draws[0] != draws[1]:
            raise PrivacyError(f"mechanism {following.name!r} changed what a round costs")
        self.mechanism = following
        self._has_followed = True

    def state_dict(self) -> State:
        """Return the state of `StrategyWrapper`, the mechanism and the canaries.

        The mechanism is that of the next round. Noise has no state.
        """
        own = {"mechanism": self.mechanism.state_dict(), "canaries": self.canaries.state_dict()}
        return {**super().state_dict(), **joined(own), "followed": np.array(self._has_followed)}

    def load_state_dict(self, state: State) -> None:
        """Restore the state of the wrapped strategy, the mechanism and the canaries.

        Raises:
            ConfigError: the wrapped strategy, or a calibrated or changed mechanism, declares no state.
        """
        super().load_state_dict(state)
        self._has_followed = bool(state["followed"])
        changes = self._has_followed or not self.mechanism.is_calibrated
        if changes and not declares_state(self.mechanism, ("state_dict", "restored")):
            raise ConfigError(
                f"resume: privacy.server = {self.mechanism.name!r} was calibrated, or changes from round to round, and "
                "does not say how it goes on; its class needs state_dict and restored of its own (docs/extending.md)"
            )
        self.mechanism = self.mechanism.restored(part(state, "mechanism"))
        self.canaries = self.canaries.restored(part(state, "canaries"))

    def _aggregated(self, server_round: int, layout: Layout, released: Released) -> Aggregated:
        """Let the wrapped strategy aggregate the release, and add output noise if required."""
        sent = layout.rows(from_record(self.sent))
        coordinates = Coordinates.of(layout, sent, self.mechanism.clipping_norm)
        models = [coordinates.decoded(model) for model in released.models]
        arrays, metrics = aggregated_apart(self.inner, server_round, layout, models) if models else (None, None)
        if arrays is None or not self.mechanism.noises_output:
            return arrays, metrics
        named = from_record(arrays)
        own = Layout.of(named)
        output = coordinates.encoded(own.rows(named))
        made = noised(output, released.noise_std, self.noise, released.widest_std)
        return to_record(own.named(coordinates.decoded(made))), metrics

    def _measurements(self, screening: Screening, released: Released) -> Measurements:
        # Diagnostics of un-noised updates would be a further release: with a guarantee they are omitted.
        seen = NOTHING_SEEN if self.is_accounted else released.diagnostics
        return Measurements(
            asked=len(self._asked),
            accepted=len(screening.cohort),
            rejected=screening.rejected,
            noise_std=released.noise_std,
            noise_multiplier=released.noise_multiplier,
            sensitivity=released.sensitivity,
            clipping_norm=released.clipping_norm,
            clipped_fraction=seen.clipped_fraction,
            clip_calibration=seen.clip_calibration,
            distance=seen.distance,
            released_distance=released.released_distance,
            epsilon=self.spent(),
        )

    # --- recorded releases and claims ---

    @contextmanager
    def recorded(self, layout: Layout, server_round: int) -> Iterator[None]:
        """Record and charge all releases of the round before the block runs.

        Without a budget nothing is recorded. The ledger records the least noise possible in this round, since the
        actual noise may depend on earlier releases.

        Args:
            layout: of the model.
            server_round: counted from 1.

        Raises:
            BudgetExhausted: the budget does not cover the round; the block is not entered.
            LedgerError: the releases cannot be recorded; the block is not entered.
        """
        if self.budget is None:
            yield
            return
        own, budget = self.mechanism, self.budget
        openings = [budget.opening(event, server_round, own.name, own.clipping_norm) for event in self.events(layout)]
        with recorded([(budget, openings)]):
            yield

    def promised(self, layout: Layout) -> tuple[Event, ...]:
        """Return the releases of a round that nodes account for: the recorded ones.

        Args:
            layout: of the model.
        """
        return self.events(layout)

    def events(self, layout: Layout) -> tuple[Event, ...]:
        """Return the worst-case releases of a round.

        Without a guarantee, each release is `Unaccounted`, and there is at least one.

        Args:
            layout: of the model.

        Raises:
            PrivacyError: the mechanism claims a guarantee without a release, or counts a draw more than once.
        """
        events = tuple(self.mechanism.events(layout, self.sampling))
        if caveats := "; ".join(self.caveats()):
            return (Unaccounted(caveats),) * max(1, len(events))
        if not events:
            raise PrivacyError(f"mechanism {self.mechanism.name!r} claims that a round costs nothing")
        # Releases that share a draw depend on each other through it: only one of them may count it.
        if sum(undrawn(event) != event for event in events) > 1:
            raise PrivacyError(f"mechanism {self.mechanism.name!r} counts the draw of a round for several releases")
        return events

    @property
    def sampling(self) -> Sampling:
        """Return the sampling that an accountant may use.

        It is none unless the draw is random, secret and counted by the mechanism.
        """
        draw = self._draw
        if draw is None or not draw.secret or self.draws_are_seen or not self.mechanism.amplified:
            return UNSAMPLED
        if draw.kind == "poisson":
            return Sampling("poisson", probability=draw.fraction)
        if draw.population:
            return Sampling("without-replacement", cohort=int(draw.expected), population=draw.population)
        return UNSAMPLED

    @property
    def has_secret_cohorts(self) -> bool:
        """Return True if privacy amplification rests on the draw."""
        return self.sampling.kind != "none"

    def caveats(self) -> tuple[str, ...]:
        """Return the reasons why the claim is not sound; empty if it is."""
        seeded = (SEEDED,) if self.noise.seeded else ()
        return (*seeded, *self.mechanism.caveats())

    @property
    def is_accounted(self) -> bool:
        """Return True if the releases have a guarantee that composes."""
        return not self.caveats()

    def calibrated(self, layout: Layout, rounds: int) -> Self:
        """Return this strategy with the least noise for this many rounds within the budget.

        A mechanism with configured noise is returned unchanged.

        Args:
            layout: of the model.
            rounds: number of rounds to come.

        Raises:
            ConfigError: there is no budget to calibrate to, or no noise multiplier is large enough.
            BudgetExhausted: earlier runs have spent it.
        """
        budget = self.budget
        if self.mechanism.is_calibrated:
            return self
        if budget is None or not budget.max_epsilon:
            raise ConfigError("a noise multiplier can only be calibrated to a budget; set privacy.max-epsilon")
        if not self.is_accounted:
            raise ConfigError("nothing can be calibrated to a budget without a guarantee: " + "; ".join(self.caveats()))
        if budget.spent() > SPENT * budget.limit:
            budget.require(())  # raises its own message for a ledger with unaccounted releases
            raise BudgetExhausted(
                f"{budget.ledger.path}: {at_most(100 * budget.share())} % of privacy.max-epsilon = "
                f"{budget.max_epsilon:g} is spent; what is left would take noise in which nothing can be learnt"
            )

        def spent(mechanism: Mechanism) -> float:
            return budget.spent() + rounds * sum(map(budget.cost, mechanism.events(layout, self.sampling)))

        other = copy(self)
        other.mechanism = self.mechanism.calibrated(
            spent, budget.limit, f"privacy.max-epsilon = {budget.max_epsilon:g}"
        )
        return other

    def spent(self) -> float | None:
        """Return ε of all releases in the ledger; None without a ledger or a finite ε."""
        if self.budget is None:
            return None
        epsilon = self.budget.epsilon()
        return epsilon if math.isfinite(epsilon) else None

    def claim(self) -> Claim:
        """Return the claim about this strategy's models, with premises that no transport has shown yet."""
        return Claim(
            mechanism=self.mechanism.name,
            reasons=self.caveats(),
            relation="add-or-remove" if self.budget is None else self.budget.relation,
            seeded=self.noise.seeded,
            parameters=self.mechanism.parameters(),
            premises=(*self.mechanism.premises, *CARRIED),
        )


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
        noise_multiplier, clipping_norm, placement, examples_cap: as in
            `cloister.privacy.mechanisms.gaussian.global_dp`.
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
        distance: options of `cloister.privacy.mechanisms.metric.DistanceScaled`.

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
