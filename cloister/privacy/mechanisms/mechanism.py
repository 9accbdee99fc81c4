"""Base class of the server's mechanisms: frozen values that determine ledger entries, budget, claim and promise.

A mechanism bounds contributions, makes the release, and returns the worst-case events of a round and the caveats.
`PrivateStrategy` of `cloister.server` screens replies first, and records the events before it hands on a release. A
plugin is a subclass registered under the entry point `cloister.mechanisms`; `cloister.audits.testing` checks it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.premises import Contributor
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.release import StreamingAggregator
from cloister.utils.arrays import Layout, Row, State
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ConfigError
from cloister.utils.registry import Capabilities

Parameter = str | int | float | bool


@dataclass(frozen=True)
class Contributions:
    """Input of a mechanism in one round.

    Attributes:
        cohort: the screened replies of n clients, unbounded.
        examples: the example count that each client reports, shape (n,). Clients choose these numbers.
        asked: number of clients that were asked to train. Public unless the draw is Poisson.
        expected: the public size that a mean is taken over: `asked`, or for a Poisson draw the expected number.
        noise: source of random numbers.
        server_round: counted from 1.
        taken: intake that holds the sum of the cohort's updates, whose rows are dropped; None: the cohort has its rows.
    """

    cohort: Cohort
    examples: tuple[float, ...]
    asked: int
    expected: float
    noise: GaussianNoise
    server_round: int
    taken: StreamingAggregator | None = None


@dataclass(frozen=True)
class Diagnostics:
    """Figures from un-noised updates. They are shown only in runs without a claim.

    Attributes:
        clipped_fraction: share of the updates with a norm above the bound.
        clip_calibration: a hint for the choice of the bound.
        distance: distance of the clients.
    """

    clipped_fraction: float | None = None
    clip_calibration: float | None = None
    distance: float | None = None


NOTHING_SEEN = Diagnostics()


@dataclass(frozen=True)
class Released:
    """Result of a mechanism in one round.

    Attributes:
        models: input of the wrapped strategy: one released model, or none, or (heuristic) one for each reply.
        noise_std: standard deviation of the noise on one parameter of the resulting model.
        sensitivity: the L2 distance for which this noise is calibrated, on the same scale.
        noise_multiplier: of this round, if noise is a multiple of the bound.
        clipping_norm: the bound in force.
        released_distance: the released distance, if the noise follows a distance.
        diagnostics: un-noised figures of this round.
        following: the mechanism of the next round; None: the same.
        widest_std: the largest possible `noise_std`, if the noise is added to the strategy's output and depends on
            private data. The grid of the noise follows this one. 0: `noise_std` is public.
    """

    models: tuple[Row, ...]
    noise_std: float
    sensitivity: float
    noise_multiplier: float | None = None
    clipping_norm: float | None = None
    released_distance: float | None = None
    diagnostics: Diagnostics = NOTHING_SEEN
    following: "Mechanism | None" = None
    widest_std: float = 0.0


class Mechanism(Contributor, ABC, abstract=True):
    """How the contributions of a round become a release: a frozen value.

    Subclasses are frozen dataclasses, so that nothing about a mechanism changes behind a claim. Each declares its
    `premises`: what its claim rests on beside the transport.

    Guarantee: `release` costs at most `events`, for adding or removing one client's contribution. That holds for any
        replies of clients, and for any earlier use of the released models. It is claimed if `caveats` is empty.

    Examples:
        A mechanism is a value: its attributes cannot be changed.

        >>> import numpy as np
        >>> from cloister.utils.arrays import Layout
        >>> from cloister.privacy.accounting.events import UNSAMPLED
        >>> from cloister.privacy.mechanisms.gaussian import global_dp
        >>> mechanism = global_dp(noise_multiplier=2.0, clipping_norm=0.5)
        >>> isinstance(mechanism, Mechanism), mechanism.clipping_norm, mechanism.caveats()
        (True, 0.5, ())
        >>> layout = Layout.of({"w": np.zeros(2)})
        >>> [event.noise_multiplier for event in mechanism.events(layout, UNSAMPLED)]
        [2.0]
        >>> mechanism.noise_multiplier = 0.1
        Traceback (most recent call last):
        dataclasses.FrozenInstanceError: cannot assign to field 'noise_multiplier'
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name in configurations, ledgers and claims; a class attribute suffices."""

    @property
    def amplified(self) -> bool:
        """Return whether `events` accounts for the draw of a round."""
        return False

    @abstractmethod
    def events(self, layout: Layout, sampling: Sampling) -> tuple[Event, ...]:
        """Return the worst-case events of one round in order, that of the model last.

        Args:
            layout: of the model.
            sampling: draw of the round's clients; no draw unless the mechanism is `amplified`.
        """

    @abstractmethod
    def release(self, contributions: Contributions) -> Released:
        """Bound the contributions and make the release, after its events are recorded.

        Args:
            contributions: of the round; the cohort may be empty.
        """

    def intake(self, layout: Layout, sent: Row, most: int) -> "StreamingAggregator | None":
        """Return an intake for replies; None: `release` needs all of them at once.

        A mechanism with an intake receives contributions without rows, summed in `Contributions.taken`.

        Args:
            layout: of the model.
            sent: the global model of the round.
            most: largest number of replies.
        """
        return None

    @abstractmethod
    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters of the claim, by configuration key or option."""

    def caveats(self) -> tuple[str, ...]:
        """Return the reasons why the claim is not sound; empty if it is."""
        return ()

    @property
    def needs_public_cohort(self) -> bool:
        """Return whether the cohort size must be public; that of a Poisson draw is not."""
        return False

    @property
    def noises_output(self) -> bool:
        """Return whether the noise is added to the strategy's output."""
        return False

    @property
    def is_calibrated(self) -> bool:
        """Return whether the noise is fixed; `calibrated` fixes it."""
        return True

    @property
    def clipping_norm(self) -> float:
        """Return the largest L2 norm of one contribution; 0: another kind of bound."""
        return 0.0

    @property
    def skips_empty_rounds(self) -> bool:
        """Return whether a round without replies makes no release.

        Under a guarantee such a round makes a release, since its absence would reveal the empty round.
        """
        return False

    def refuse_canaries(self) -> None:
        """Refuse audits by canaries.

        Canaries are simulated clients with an update of at most `clipping_norm` after the bound.

        A mechanism that noises the mean of bounded updates, for any number of them, overrides this method.

        Raises:
            ConfigError: always in this class: canaries could change the release in ways that their scores do not show.
        """
        raise ConfigError(
            f"privacy.canaries has no meaning with privacy.server = {self.name!r}: scores of canaries are read off the "
            "noised mean of clipped updates; use 'global-dp', or 0 canaries"
        )

    def suited_to(self, capabilities: Capabilities | None, strategy: str) -> "Mechanism":
        """Return this mechanism for a strategy, or refuse the strategy.

        Args:
            capabilities: declared by the strategy; None: undeclared.
            strategy: its name, for the message.

        Raises:
            ConfigError: the strategy is not meaningful on one released model, or declares no capabilities.
        """
        refuse_unless_meaningful_on_one_reply(capabilities, strategy, "another strategy")
        return self

    def calibrated(self, spent: Callable[["Mechanism"], float], limit: float, budget: str) -> "Mechanism":
        """Return this kind of mechanism with the smallest noise within a budget.

        Args:
            spent: returns the total spending with a mechanism.
            limit: upper bound of the spending.
            budget: description of the limit, for the message.

        Raises:
            ConfigError: this mechanism has no noise to calibrate, or no noise stays within the budget.
        """
        raise ConfigError(f"privacy.server = {self.name!r} has no noise that could be calibrated to {budget}")

    def state_dict(self) -> State:
        """Return the state beyond the configuration, such as calibrated noise."""
        return {}

    def restored(self, state: State) -> "Mechanism":
        """Return this mechanism with the saved state of a run that continues.

        Args:
            state: result of `state_dict` in that process.
        """
        return self


def refuse_unless_meaningful_on_one_reply(capabilities: Capabilities | None, strategy: str, instead: str) -> None:
    """Refuse a strategy that is not meaningful on one released model.

    Args:
        capabilities: declared by the strategy; None: undeclared.
        strategy: its name.
        instead: the alternative that the message recommends.

    Raises:
        ConfigError: the strategy needs every reply, or declares no capabilities.
    """
    if capabilities is None:
        raise ConfigError(
            f"strategy {strategy} declares no capabilities, so it is not known whether it means anything on one reply, "
            "the release; declare them in its class (capabilities = cloister.Capabilities(...)), or use "
            "privacy.placement = 'model' (heuristic)"
        )
    if capabilities.needs_every_reply:
        raise ConfigError(
            f"privacy.placement = 'update' shows strategy {strategy} one reply, the release, and it needs every reply; "
            f"use {instead}"
        )
