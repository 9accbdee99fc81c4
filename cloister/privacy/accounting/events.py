"""What happened, in the terms an accountant needs: the closed vocabulary of the ledger.

Events are recorded; ε is derived from them when somebody asks. An event of a kind or a version that is not known here
is refused, never guessed. Changing what a field means is a new kind.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from cloister.core.errors import PrivacyError

Relation = Literal["add-or-remove", "replace-one"]
Unit = Literal["client", "example", "group", "neighbourhood"]
"""Whose protection a release is about: a client with all it has, one of its examples, all examples of one group of them
(a patient's), or what a client sends against everything else within a distance (d-privacy)."""
SamplingKind = Literal["none", "poisson", "without-replacement"]


@dataclass(frozen=True)
class Sampling:
    """How the units of a release were drawn, as it was really done.

    Attributes:
        kind: `none`: no claim is made about the draw. `poisson`: each unit by itself with `probability`, in secret.
            `without-replacement`: `cohort` of a fixed, registered `population`, uniformly and in secret.
        probability: q of `poisson`.
        cohort, population: n and N of `without-replacement`.
    """

    kind: SamplingKind = "none"
    probability: float = 1.0
    cohort: int = 0
    population: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(SamplingKind):
            raise PrivacyError(f"unknown kind of sampling {self.kind!r}; known: {', '.join(get_args(SamplingKind))}")
        if self.kind == "poisson" and not 0 < self.probability <= 1:
            raise PrivacyError(f"a Poisson sampling probability must be above 0 and at most 1, got {self.probability}")
        if self.kind == "without-replacement" and not 0 < self.cohort <= self.population:
            raise PrivacyError(f"a cohort of {self.cohort} cannot be drawn from a population of {self.population}")


UNSAMPLED = Sampling()


MIN_MULTIPLIER = 1e-6
"""The smallest multiplier that is accounted for: below, squares lose their meaning and ε is past every use."""

MAX_COUNT = 10**9
"""The most releases that one event stands for."""


@dataclass(frozen=True)
class Gaussian:
    """One release of a sum with Gaussian noise.

    Attributes:
        noise_multiplier: z ≥ 0: standard deviation of the noise over the L2 distance by which adding or removing one
            unit moves the sum. 0 is a release without protection.
        sampling: how the units in the sum were drawn.
    """

    noise_multiplier: float
    sampling: Sampling = UNSAMPLED

    def __post_init__(self) -> None:
        if isinstance(self.noise_multiplier, bool) or not isinstance(self.noise_multiplier, int | float):
            raise PrivacyError("a noise multiplier must be a number")
        if self.noise_multiplier and not MIN_MULTIPLIER <= self.noise_multiplier <= 1 / MIN_MULTIPLIER:
            raise PrivacyError(
                f"a noise multiplier must be 0 or between {MIN_MULTIPLIER:g} and {1 / MIN_MULTIPLIER:g}, "
                f"got {self.noise_multiplier}"
            )


@dataclass(frozen=True)
class Repeated:
    """The same release several times over, as the steps of a training are.

    Attributes:
        event: each of them. Later ones may be chosen by what earlier ones released, but for their multiplier.
        count: how many, above 0.
    """

    event: Gaussian
    count: int

    def __post_init__(self) -> None:
        if type(self.event) is not Gaussian:
            raise PrivacyError("what is repeated must be a gaussian event")
        if type(self.count) is not int or not 0 < self.count <= MAX_COUNT:
            raise PrivacyError(f"a count of releases must be a whole number from 1 to {MAX_COUNT}, got {self.count!r}")


@dataclass(frozen=True)
class Pure:
    """One release with pure differential privacy.

    Attributes:
        epsilon: ε > 0: log of the most by which adding one unit, or zeroing it out, changes the probability of any
            outcome. Replacing one unit is both at once, and costs 2ε.
    """

    epsilon: float

    def __post_init__(self) -> None:
        if isinstance(self.epsilon, bool) or not isinstance(self.epsilon, int | float):
            raise PrivacyError("the ε of a pure release must be a number")
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise PrivacyError(f"the ε of a pure release must be finite and above 0, got {self.epsilon}")


@dataclass(frozen=True)
class Unaccounted:
    """A release for which no guarantee is claimed, and why."""

    reason: str


@dataclass(frozen=True)
class Laplace:
    """One release of a vector with noise of density ∝ exp(-ε‖x‖).

    Attributes:
        epsilon: ε > 0, per unit of Euclidean distance.
        radius: of the neighbourhood that it is counted for, ≥ 0.
    """

    epsilon: float
    radius: float

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon) and 0 <= self.radius < math.inf):
            raise PrivacyError("a Laplace release has a finite ε above 0 and a finite radius of at least 0")

    @property
    def leakage(self) -> float:
        """ε·radius: log of the most by which likelihoods differ within the neighbourhood."""
        return self.epsilon * self.radius


Event = Gaussian | Repeated | Pure | Laplace | Unaccounted
KINDS: dict[str, type] = {
    "gaussian": Gaussian,
    "repeated": Repeated,
    "pure": Pure,
    "laplace": Laplace,
    "unaccounted": Unaccounted,
}


def to_json(event: Event) -> dict[str, Any]:
    """An event as a JSON object."""
    (kind,) = (name for name, cls in KINDS.items() if type(event) is cls)
    if isinstance(event, Repeated):
        return {"kind": kind, "event": to_json(event.event), "count": event.count}
    return {"kind": kind, **asdict(event)}


def from_json(content: Mapping[str, Any]) -> Event:
    """The inverse of `to_json`.

    Raises:
        PrivacyError: the kind or a field is not known.
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
        event: Event = KINDS[kind](**fields)
    except TypeError as error:
        raise PrivacyError(f"a {kind!r} event does not have these fields: {error}") from None
    return event
