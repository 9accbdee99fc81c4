"""The server's mechanism: a frozen value from which ledger, budget, claim and promise follow.

It says how a contribution is bounded, how the release is made, what a round costs at worst, and what must be said
against it. The strategy that runs it (`cloister.aggregation.PrivateStrategy`) screens replies before it and records its
events before anything that it made leaves. A mechanism of another package is one such class, registered under the entry
point `cloister.mechanisms`; `cloister.audits.conformance` checks it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from cloister.core.arrays import Layout, Row
from cloister.core.capabilities import Capabilities
from cloister.core.cohort import Cohort
from cloister.core.errors import ConfigError
from cloister.core.state import State
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.premises import Contributor
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.total import Intake

Parameter = str | int | float | bool


@dataclass(frozen=True)
class Contributions:
    """What a mechanism is given in one round.

    Attributes:
        cohort: the screened replies of n clients; nothing has bounded them.
        examples: the example count that each client reports, shape (n,). Clients choose these numbers.
        asked: how many clients were asked to train. Public, but for a Poisson draw.
        expected: the public size that a mean is taken over: what was asked, or for a Poisson draw what was expected.
        noise: where random numbers come from.
        server_round: counted from 1.
        taken: has added the cohort's updates up, whose rows are dropped then; None: the cohort has its rows.
    """

    cohort: Cohort
    examples: tuple[float, ...]
    asked: int
    expected: float
    noise: GaussianNoise
    server_round: int
    taken: Intake | None = None


@dataclass(frozen=True)
class Diagnostics:
    """Figures that come from un-noised updates. They are shown only where nothing is claimed.

    Attributes:
        clipped_fraction: share of the updates that were longer than the bound.
        clip_calibration: a hint by which to choose the bound.
        distance: how far the clients lie apart.
    """

    clipped_fraction: float | None = None
    clip_calibration: float | None = None
    distance: float | None = None


NOTHING_SEEN = Diagnostics()


@dataclass(frozen=True)
class Released:
    """What a mechanism has made of a round.

    Attributes:
        models: what the wrapped strategy is shown: one released model, or none, or (heuristic) one for each reply.
        noise_std: standard deviation of the noise on one parameter of the model that results.
        sensitivity: the L2 distance that this noise was calibrated for, on the same scale.
        noise_multiplier: of this round, where noise is a multiple of the bound.
        clipping_norm: the bound that was in force.
        released_distance: the distance as it was released, where the noise follows a distance.
        diagnostics: what was seen on the way, un-noised.
        following: the mechanism of the next round; None: the same.
        widest_std: if the mechanism leaves the noise to the end and `noise_std` depends on private data: the largest
            that it could have been. The grid of the noise follows this one. 0: `noise_std` is public.
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

    Guarantee: that `release` costs what `events` says, for adding or removing one client's contribution, whatever
        clients send and whatever the released models were used for before. It is claimed as soon as `caveats` is empty.

    Examples:
        A mechanism is a value. Another one is made, never changed.

        >>> import numpy as np
        >>> from cloister.core.arrays import Layout
        >>> from cloister.privacy.accounting.events import UNSAMPLED
        >>> from cloister.privacy.mechanisms.named import global_dp
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
        """The mechanism's name in configurations, ledgers and claims; a class attribute will do."""

    @property
    def amplified(self) -> bool:
        """Whether `events` counts the draw of a round."""
        return False

    @abstractmethod
    def events(self, layout: Layout, sampling: Sampling) -> tuple[Event, ...]:
        """What one round costs at worst, in the order of the releases; that of the model is the last.

        Args:
            layout: of the model.
            sampling: how the clients of the round were drawn; no draw unless the mechanism is `amplified`.
        """

    @abstractmethod
    def release(self, contributions: Contributions) -> Released:
        """Bound the contributions and make the release. It has been recorded when this is called.

        Args:
            contributions: of the round; there may be none.
        """

    def intake(self, layout: Layout, sent: Row, most: int) -> "Intake | None":
        """What takes the replies of a round a few at a time; None: `release` has to see all of them.

        A mechanism that returns one is given contributions without rows, which `Contributions.taken` has added up.

        Args:
            layout: of the model.
            sent: the global model of the round.
            most: how many clients can reply.
        """
        return None

    @abstractmethod
    def parameters(self) -> dict[str, Parameter]:
        """Everything that the claim depends on, by configuration key, or by the name of its option."""

    def caveats(self) -> tuple[str, ...]:
        """Why the claim is not sound; empty if it is."""
        return ()

    @property
    def needs_public_cohort(self) -> bool:
        """Whether it must be public how many clients were drawn, as it is not of a Poisson draw."""
        return False

    @property
    def noises_output(self) -> bool:
        """Whether the noise is still to be added, to what the wrapped strategy makes of `Released.models`."""
        return False

    @property
    def is_calibrated(self) -> bool:
        """Whether its noise is decided; `calibrated` decides it."""
        return True

    @property
    def clipping_norm(self) -> float:
        """The largest L2 norm of one client's contribution, for the ledger; 0 where it is bounded in another way."""
        return 0.0

    @property
    def skips_empty_rounds(self) -> bool:
        """Whether a round without replies makes no release. Under a guarantee it makes one: its absence would tell."""
        return False

    def refuse_canaries(self) -> None:
        """Refuse to be audited by canaries: made-up clients, each at most `clipping_norm` long after the bound.

        A mechanism that noises the mean of bounded updates, as many as take part, overrides this and returns.

        Raises:
            ConfigError: always, here: canaries would change what is released in ways that their scores do not show.
        """
        raise ConfigError(
            f"privacy.canaries has no meaning with privacy.server = {self.name!r}: scores of canaries are read off the "
            "noised mean of clipped updates; use 'global-dp', or 0 canaries"
        )

    def suited_to(self, capabilities: Capabilities | None, strategy: str) -> "Mechanism":
        """This mechanism for a strategy, or a refusal.

        Args:
            capabilities: what the strategy declares; None: nothing is known.
            strategy: its name, for the message.

        Raises:
            ConfigError: the strategy is not meaningful on one released model, or nobody knows.
        """
        refuse_unless_meaningful_on_one_reply(capabilities, strategy, "another strategy")
        return self

    def calibrated(self, spent: Callable[["Mechanism"], float], limit: float, budget: str) -> "Mechanism":
        """The mechanism of this kind with the smallest noise that stays within a budget.

        Args:
            spent: what would be spent in all, with a mechanism.
            limit: that may be spent.
            budget: how the limit came about, for the message.

        Raises:
            ConfigError: this mechanism has nothing to calibrate, or no noise will do.
        """
        raise ConfigError(f"privacy.server = {self.name!r} has no noise that could be calibrated to {budget}")

    def state_dict(self) -> State:
        """What of it the configuration does not say: noise that was calibrated, what followed from earlier rounds."""
        return {}

    def restored(self, state: State) -> "Mechanism":
        """The mechanism of a run that goes on in another process: this one, as it was saved.

        Args:
            state: as `state_dict` returned it there.
        """
        return self


def refuse_unless_meaningful_on_one_reply(capabilities: Capabilities | None, strategy: str, instead: str) -> None:
    """Refuse a strategy that would aggregate one released model into something else than its name says.

    Args:
        capabilities: what the strategy declares; None: nothing is known.
        strategy: its name.
        instead: what to use in its place.

    Raises:
        ConfigError: it needs every reply, or nobody knows.
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
