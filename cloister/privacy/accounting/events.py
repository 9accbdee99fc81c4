"""Events of the ledger and their prices: a closed vocabulary of releases in the terms of accountants.

Ledgers contain events; ε is computed from them on demand. An event of an unknown kind or version is refused. A field
with a new meaning requires a new kind.

**Prices.** Every kind of event has a price for each accountant, in the methods that `PRICES` names. A kind without one
of them is refused when its class is created: it would be charged less than its cost. A price of ∞ means that there is
no bound.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib import import_module
from types import ModuleType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.accounting import distributed
from cloister.privacy.accounting.vocabulary import (
    MAX_MULTIPLIER,
    MIN_MULTIPLIER,
    UNSAMPLED,
    Losses,
    Orders,
    Relation,
    Sampling,
    units_of,
)
from cloister.utils.errors import PrivacyError
from cloister.utils.files import Json
from cloister.utils.text import at_least, at_most

MAX_COUNT = 10**9
"""Largest number of releases in one event."""

MAX_PURE = 500.0
"""Largest pure ε for a loss distribution of dp-accounting: e^ε overflows soon after."""

GRID = 128
"""Steps per doubling to which the multipliers of very many sampled releases are rounded down, so that similar rounds
share one computation. ε is then slightly overestimated, never underestimated."""

KINDS: dict[str, type["Event"]] = {}
"""Every kind of event by its name in a ledger. A class registers itself when it is created."""
PRICES = ("multiplier", "renyi", "mu_squared", "has_losses", "losses", "pure", "leakage")
"""Methods of every kind of event for accountants and filters."""
WORDS = ("replaced", "__str__")
"""Methods of every kind of event beside its prices: its cost for an example, and its description."""


class Event:
    """One or several releases, with their price for every accountant.

    A kind of event is a frozen dataclass that names itself: `class Gaussian(Event, kind="gaussian")`. An event of
    several releases defines `parts`, which determine its price; every other kind defines its own prices.

    Raises:
        PrivacyError: (when a class is created) the kind has no price for some accountant, or its name is taken.
    """

    kind: ClassVar[str]
    overflow = 0.0
    """Upper bound on the probability that the release violates the event; it is part of δ."""

    def __init_subclass__(cls, kind: str) -> None:
        super().__init_subclass__()
        needed = WORDS if cls.parts is not Event.parts else (*PRICES, *WORDS)
        missing = [name for name in needed if getattr(cls, name) is getattr(Event, name)]
        if missing:
            raise PrivacyError(
                f"events of kind {kind!r} do not say {', '.join(missing)}: every accountant needs a price"
            )
        if kind in KINDS:
            raise PrivacyError(f"there are events of kind {kind!r} already")
        cls.kind = kind
        KINDS[kind] = cls

    def parts(self) -> tuple["Event", int]:
        """Return one of the equal releases in this event, and their number."""
        return self, 1

    def rounded(self) -> "Event":
        """Return an event of slightly higher cost that is equal for similar releases."""
        return self

    def multiplier(self, relation: Relation, insiders: bool) -> float | None:
        """Return the multiplier of the unsampled Gaussian with exactly this cost.

        Args:
            relation: neighbouring relation of datasets.
            insiders: whether clients may be adversaries, each of which can see whether a draw contains it.

        Returns:
            z, relative to adding or removing a unit; 0: the release has no bound; None: it has curves of its own.
        """
        raise NotImplementedError

    def renyi(self, orders: Orders, relation: Relation) -> NDArray[np.float64]:
        """Return the Rényi divergence of one release at each order.

        It is for `rdp`, `published` and the Rényi filter.

        Args:
            orders: α > 1.
            relation: neighbouring relation of datasets.

        Returns:
            Shape (orders,); ∞ without a bound.
        """
        raise NotImplementedError

    def mu_squared(self, relation: Relation) -> float:
        """Return μ² of one release, unamplified, for the Gaussian filter."""
        raise NotImplementedError

    def has_losses(self, relation: Relation) -> bool:
        """Return whether `pld` has a loss distribution of this release."""
        raise NotImplementedError

    def losses(self, relation: Relation, step: float) -> Losses:
        """Return the privacy loss distribution of one release, if it has one, for `pld`.

        Args:
            relation: neighbouring relation of datasets.
            step: of the distribution.
        """
        raise NotImplementedError

    def pure(self, relation: Relation) -> float:
        """Return ε with which one release is (ε, 0)-DP; ∞ if it is not."""
        raise NotImplementedError

    @property
    def leakage(self) -> float:
        """Return the log of the largest likelihood ratio in a neighbourhood; or ∞."""
        raise NotImplementedError

    def replaced(self) -> "Event":
        """Return the event for one example, from an event about the whole client.

        Without the example the client still contributes, with another update: a replacement, which moves the sum twice
        as far.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        """Return a short description of the event."""
        raise NotImplementedError


@dataclass(frozen=True)
class Gaussian(Event, kind="gaussian"):
    """One release of a sum with Gaussian noise.

    Attributes:
        noise_multiplier: z ≥ 0: standard deviation of the noise over the L2 distance by which adding or removing one
            unit moves the sum. 0 is a release without protection.
        sampling: draw of the units in the sum.
    """

    noise_multiplier: float
    sampling: Sampling = UNSAMPLED
    leakage = math.inf

    def __post_init__(self) -> None:
        if isinstance(self.noise_multiplier, bool) or not isinstance(self.noise_multiplier, int | float):
            raise PrivacyError("a noise multiplier must be a number")
        if self.noise_multiplier and not MIN_MULTIPLIER <= self.noise_multiplier <= MAX_MULTIPLIER:
            raise PrivacyError(
                f"a noise multiplier must be 0 or between {MIN_MULTIPLIER:g} and {MAX_MULTIPLIER:g}, "
                f"got {self.noise_multiplier}"
            )

    @property
    def overflow(self) -> float:  # type: ignore[override]
        """Return the overflow probability of the draw."""
        return self.sampling.overflow

    def rounded(self) -> "Gaussian":
        """Return the event with the multiplier rounded down to one of `GRID` in a doubling."""
        steps = math.floor(GRID * math.log2(self.noise_multiplier))
        return Gaussian(float(2 ** (steps / GRID)), self.sampling)

    def multiplier(self, relation: Relation, insiders: bool) -> float | None:
        """Return z, or z/2 for some fixed cohorts; None if the draw amplifies.

        The multiplier is z/2 for a cohort without replacement under add-or-remove.

        Args: as `Event.multiplier`.
        """
        fixed = self.sampling.kind == "without-replacement"
        if fixed and relation == "add-or-remove":
            # With one unit more in the population, a draw may hold it instead of another: a replacement, unamplified.
            return self.noise_multiplier / 2
        if not self.noise_multiplier or self.sampling.share == 1 or (insiders and fixed):
            return self.noise_multiplier
        return None

    def renyi(self, orders: Orders, relation: Relation) -> NDArray[np.float64]:
        """Return the curve of `accountants.sampled_curve`.

        Args: as `Event.renyi`.
        """
        return accountants().sampled_curve(self.noise_multiplier, self.sampling, relation, orders)

    def mu_squared(self, relation: Relation) -> float:
        """Return 1/z², four times that for a replacement, without amplification."""
        return units_of(relation) ** 2 / self.noise_multiplier**2 if self.noise_multiplier else math.inf

    def has_losses(self, relation: Relation) -> bool:
        """Return False for draws without replacement, otherwise True."""
        return self.sampling.kind != "without-replacement"

    def losses(self, relation: Relation, step: float) -> Losses:
        """Return the loss distribution of dp-accounting.

        Args: as `Event.losses`.
        """
        return accountants().gaussian_losses(self.noise_multiplier, self.sampling.share, relation, step)

    def pure(self, relation: Relation) -> float:
        """Return ∞: Gaussian noise has no pure ε."""
        return math.inf

    def replaced(self) -> "Gaussian":
        """Return the event with half the multiplier and without amplification."""
        return Gaussian(self.noise_multiplier / 2, Sampling(self.sampling.kind) if self.overflow else UNSAMPLED)

    def __str__(self) -> str:
        return f"gaussian, z = {at_least(self.noise_multiplier)}{self.sampling}"


@dataclass(frozen=True)
class Repeated(Event, kind="repeated"):
    """Repetition of the same release, such as the steps of a training.

    Attributes:
        event: one of the releases. Later ones may depend on earlier ones, except in their multiplier.
        count: number of releases, above 0.
    """

    event: Gaussian
    count: int

    def __post_init__(self) -> None:
        if type(self.event) is not Gaussian:
            raise PrivacyError("what is repeated must be a gaussian event")
        if type(self.count) is not int or not 0 < self.count <= MAX_COUNT:
            raise PrivacyError(f"a count of releases must be a whole number from 1 to {MAX_COUNT}, got {self.count!r}")

    @property
    def overflow(self) -> float:  # type: ignore[override]
        """Return the overflow probability of all releases together."""
        return self.count * self.event.overflow

    def parts(self) -> tuple[Event, int]:
        """Return the repeated release and its count."""
        return self.event, self.count

    def replaced(self) -> "Repeated":
        """Return the same number of releases, each with its cost for an example."""
        return Repeated(self.event.replaced(), self.count)

    def __str__(self) -> str:
        return f"{self.count} times {self.event}"


MAX_PURE_EPSILON = 1e100
"""Largest ε of one pure release that accountants accept."""


@dataclass(frozen=True)
class Pure(Event, kind="pure"):
    """Release with pure differential privacy.

    Attributes:
        epsilon: ε > 0: log of the largest factor by which adding one unit, or zeroing it out, changes the probability
            of any outcome. Replacing one unit is both at once, and costs 2ε.
    """

    epsilon: float

    def __post_init__(self) -> None:
        if isinstance(self.epsilon, bool) or not isinstance(self.epsilon, int | float):
            raise PrivacyError("the ε of a pure release must be a number")
        if not 0 < self.epsilon < math.inf:
            raise PrivacyError(f"the ε of a pure release must be finite and above 0, got {self.epsilon}")
        # Squares of larger values overflow, and a ledger that contains one could not be summed.
        if self.epsilon > MAX_PURE_EPSILON:
            raise PrivacyError(f"the ε of a pure release must be at most {MAX_PURE_EPSILON:g}")

    @property
    def leakage(self) -> float:
        """Return ε, which bounds the likelihood ratio of any two values."""
        return self.epsilon

    def multiplier(self, relation: Relation, insiders: bool) -> float | None:
        """Return None: the release is not Gaussian.

        Args: as `Event.multiplier`.
        """
        return None

    def renyi(self, orders: Orders, relation: Relation) -> NDArray[np.float64]:
        """Return the curve of `accountants.pure_curve`.

        Args: as `Event.renyi`.
        """
        return accountants().pure_curve(self.pure(relation), orders)

    def mu_squared(self, relation: Relation) -> float:
        """Return μ² of the Gaussian that protects no better."""
        return float(accountants().pure_parameter(self.pure(relation)) ** 2)

    def has_losses(self, relation: Relation) -> bool:
        """Return True up to `MAX_PURE`."""
        return self.pure(relation) <= MAX_PURE

    def losses(self, relation: Relation, step: float) -> Losses:
        """Return the loss distribution of the worst mechanism for this ε.

        Args: as `Event.losses`.
        """
        return accountants().pure_losses(self.pure(relation), step)

    def pure(self, relation: Relation) -> float:
        """Return ε, or 2ε under `replace-one`."""
        return self.epsilon * units_of(relation)

    def replaced(self) -> "Pure":
        """Return the event with 2ε."""
        return Pure(2 * self.epsilon)

    def __str__(self) -> str:
        return f"pure, ε = {at_most(self.epsilon)}"


class Unbounded:
    """Prices of a release that no accountant bounds: ∞ for each, except possibly its leakage."""

    def multiplier(self, relation: Relation, insiders: bool) -> float | None:
        """Return 0: the noise bounds nothing.

        Args: as `Event.multiplier`.
        """
        return 0.0

    def renyi(self, orders: Orders, relation: Relation) -> NDArray[np.float64]:
        """Return ∞ at every order.

        Args: as `Event.renyi`.
        """
        return np.full(len(orders), math.inf)

    def mu_squared(self, relation: Relation) -> float:
        """Return ∞."""
        return math.inf

    def has_losses(self, relation: Relation) -> bool:
        """Return False."""
        return False

    def losses(self, relation: Relation, step: float) -> Losses:
        """Raise PrivacyError: there is no loss distribution.

        Args: as `Event.losses`.

        Raises:
            PrivacyError: always.
        """
        raise PrivacyError("a release without a bound has no loss distribution")

    def pure(self, relation: Relation) -> float:
        """Return ∞."""
        return math.inf


@dataclass(frozen=True)
class Unaccounted(Unbounded, Event, kind="unaccounted"):
    """Release without a guarantee, and the reason."""

    reason: str
    leakage = math.inf

    def replaced(self) -> "Unaccounted":
        """Return this event: it has no bound for examples either."""
        return self

    def __str__(self) -> str:
        return f"no guarantee: {self.reason}"


@dataclass(frozen=True)
class Laplace(Unbounded, Event, kind="laplace"):
    """Release of a vector with noise of density ∝ exp(-ε‖x‖).

    For vectors at any distance such noise has no bound, so every price except its leakage is ∞.

    Attributes:
        epsilon: ε > 0, per unit of Euclidean distance.
        radius: of the neighbourhood for which it is charged, ≥ 0.
    """

    epsilon: float
    radius: float

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon) and 0 <= self.radius < math.inf):
            raise PrivacyError("a Laplace release has a finite ε above 0 and a finite radius of at least 0")

    @property
    def leakage(self) -> float:
        """Return ε·radius: log of the largest likelihood ratio within the neighbourhood."""
        return self.epsilon * self.radius

    def replaced(self) -> "Laplace":
        """Return this event: it has no bound for examples either."""
        return self

    def __str__(self) -> str:
        return (
            f"laplace, ε = {at_most(self.epsilon)} per unit, leakage {at_most(self.leakage)} within {self.radius:.4g}"
        )


MAX_STEPS = 2.0**53
"""Largest sensitivity and deviation of an event, in steps of a grid."""


@dataclass(frozen=True)
class DistributedGaussian(Event, kind="distributed-gaussian"):
    """Release of a sum of integers to which every client has added a share of the noise.

    Under add-or-remove, a client's input is zeroed and its share of the noise stays: the participants of such a sum
    are public. `alone` leaves out that share.

    Attributes:
        honest: h, clients that keep their share secret and are in every released sum, including the protected one.
        sensitivity: D, in steps: the L2 distance by which zeroing a client moves the sum.
        scale: σ_c, in steps: the least deviation of a client's share. All shares together have a variance of h·σ_c².
        parameters: p, the numbers of a release.
        components: largest number of discrete Gaussians in a client's share, on average over h clients.
        smallest: the least deviation of one of these, in steps; 0: there is one, of deviation σ_c.
    """

    honest: int
    sensitivity: float
    scale: float
    parameters: int
    components: int = 1
    smallest: float = 0.0
    leakage = math.inf

    def __post_init__(self) -> None:
        counts = (self.honest, self.parameters, self.components)
        if any(type(count) is not int or not 0 < count <= MAX_COUNT for count in counts):
            raise PrivacyError(f"honest, parameters and components must be whole numbers from 1 to {MAX_COUNT}")
        lengths = (self.sensitivity, self.scale, self.smallest)
        if any(isinstance(length, bool) or not isinstance(length, int | float) for length in lengths):
            raise PrivacyError("sensitivity, scale and smallest must be numbers")
        if not (0 < self.sensitivity <= MAX_STEPS and 0 < self.scale <= MAX_STEPS and self._smallest <= self.scale):
            raise PrivacyError(
                "sensitivity and scale must be above 0 and at most 2^53 steps, and smallest at most scale"
            )
        if self._smallest < 0.5 or not distributed.is_negligible(
            self.honest * self.components, self._smallest, self.parameters
        ):
            raise PrivacyError(
                f"shares of noise of {self._smallest:g} steps are too small: the sum of {self.honest * self.components}"
                f" over {self.parameters} parameters could be told from a discrete Gaussian; take a finer grid"
            )
        if not (self._variance > distributed.SMOOTHED and MIN_MULTIPLIER <= self._multiplier <= MAX_MULTIPLIER):
            raise PrivacyError(
                f"the noise of {self.honest} shares of {self.scale:g} steps for a sensitivity of {self.sensitivity:g}"
                f" must be a multiplier between {MIN_MULTIPLIER:g} and {MAX_MULTIPLIER:g}"
            )

    @property
    def _smallest(self) -> float:
        return self.smallest or self.scale

    @property
    def _variance(self) -> Fraction:
        return self.honest * Fraction(self.scale) ** 2

    @property
    def _multiplier(self) -> float:
        return distributed.smoothed_multiplier(self._variance, self.sensitivity)

    def multiplier(self, relation: Relation, insiders: bool) -> float | None:
        """Return √(h·σ_c² - 25)/D.

        The sum's law is a Gaussian's, rounded at random, up to (p + 1)·2^-700.

        Args: as `Event.multiplier`.
        """
        return self._multiplier

    def renyi(self, orders: Orders, relation: Relation) -> NDArray[np.float64]:
        """Return the curve of `distributed.distributed_curve`.

        A replacement moves the sum by 2D.

        Args: as `Event.renyi`.
        """
        tau = math.exp(distributed.log_tau(self.honest * self.components, self._smallest))
        moved = self.sensitivity * units_of(relation)
        return distributed.distributed_curve(orders, moved, float(self._variance), tau, self.parameters)

    def mu_squared(self, relation: Relation) -> float:
        """Return 1/z² of the multiplier z, four times that for a replacement."""
        return units_of(relation) ** 2 / self._multiplier**2

    def has_losses(self, relation: Relation) -> bool:
        """Return True: the loss distribution is that of a Gaussian."""
        return True

    def losses(self, relation: Relation, step: float) -> Losses:
        """Return the loss distribution of the Gaussian with the same multiplier.

        Args: as `Event.losses`.
        """
        return accountants().gaussian_losses(self._multiplier, 1.0, relation, step)

    def pure(self, relation: Relation) -> float:
        """Return ∞: the noise has no pure ε."""
        return math.inf

    def replaced(self) -> "DistributedGaussian":
        """Return the event with twice the sensitivity."""
        return replace(self, sensitivity=2 * self.sensitivity)

    def alone(self) -> "DistributedGaussian":
        """Return the release covered by h - 1 shares, without the client's own.

        Raises:
            PrivacyError: the protected client has the only share.
        """
        return replace(self, honest=self.honest - 1)

    def __str__(self) -> str:
        return f"distributed gaussian, {self.honest} shares, z = {at_least(self._multiplier)}"


def accountants() -> ModuleType:
    """Return the adapter to dp-accounting, imported on demand to save SciPy."""
    return import_module("cloister.privacy.accounting.accountants")


def to_json(event: Event) -> dict[str, object]:
    """Return an event as a JSON object."""
    fields = dict(vars(event))
    if "event" in fields:
        fields["event"] = to_json(fields["event"])
    if "sampling" in fields:
        fields["sampling"] = dict(vars(fields["sampling"]))
    return {"kind": event.kind, **fields}


def from_json(content: Json) -> Event:
    """Return the event of a JSON object, the inverse of `to_json`.

    Raises:
        PrivacyError: the kind or a field is unknown.
    """
    if not isinstance(content, Mapping):
        raise PrivacyError("an event must be a JSON object")
    fields = dict(content)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise PrivacyError(f"unknown event kind {kind!r}; known: {', '.join(KINDS)}")
    try:
        if "event" in fields:
            fields["event"] = from_json(fields["event"])
        if "sampling" in fields:
            fields["sampling"] = Sampling(**fields["sampling"])
        return KINDS[kind](**fields)
    except TypeError as error:
        raise PrivacyError(f"a {kind!r} event does not have these fields: {error}") from None
