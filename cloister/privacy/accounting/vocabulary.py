"""The words that events, accountants and claims share: units, relations, draws."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from cloister.core.errors import PrivacyError

Relation = Literal["add-or-remove", "replace-one"]
Unit = Literal["client", "example", "group", "neighbourhood"]
"""Whose protection a release is about: a client with all it has, one of its examples, all examples of one group of them
(a patient's), or what a client sends against everything else within a distance (d-privacy)."""
SamplingKind = Literal["none", "poisson", "bounded-poisson", "without-replacement"]

OVERFLOW = 2.0**-50
"""With at most this probability a draw of `bounded-poisson` fills every place that there is for units."""


@dataclass(frozen=True)
class Sampling:
    """How the units of a release were drawn, as it was really done.

    Attributes:
        kind: `none`: no claim is made about the draw. `poisson`: each unit by itself with `probability`, in secret.
            `bounded-poisson`: the same, for units that need places, of which there is a bounded number. Nothing is
            claimed of a draw that fills them all: δ has room for it. `without-replacement`: `cohort` of a fixed,
            registered `population`, uniformly and in secret.
        probability: q of `poisson` and of `bounded-poisson`.
        cohort, population: n and N of `without-replacement`.
    """

    kind: SamplingKind = "none"
    probability: float = 1.0
    cohort: int = 0
    population: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(SamplingKind):
            raise PrivacyError(f"unknown kind of sampling {self.kind!r}; known: {', '.join(get_args(SamplingKind))}")
        if self.is_poisson and not 0 < self.probability <= 1:
            raise PrivacyError(f"a Poisson sampling probability must be above 0 and at most 1, got {self.probability}")
        if self.kind == "without-replacement" and not 0 < self.cohort <= self.population:
            raise PrivacyError(f"a cohort of {self.cohort} cannot be drawn from a population of {self.population}")

    @property
    def share(self) -> float:
        """The share of units that take part in a release on average; 1 where nothing is claimed about the draw."""
        if self.kind == "without-replacement":
            return self.cohort / self.population
        return self.probability if self.is_poisson else 1.0

    @property
    def is_poisson(self) -> bool:
        """Return whether each unit is drawn by itself."""
        return self.kind in ("poisson", "bounded-poisson")

    @property
    def overflow(self) -> float:
        """Return the probability of a draw of which nothing is claimed, at most."""
        return OVERFLOW if self.kind == "bounded-poisson" else 0.0

    def __str__(self) -> str:
        drawn = {
            "none": "",
            "poisson": f", poisson {self.probability:g}",
            "bounded-poisson": f", poisson {self.probability:g}",
            "without-replacement": f", {self.cohort} of {self.population}",
        }
        return drawn[self.kind]


UNSAMPLED = Sampling()

MIN_MULTIPLIER = 1e-6
"""The smallest multiplier that is accounted for: below, squares lose their meaning and ε is past every use."""
MAX_MULTIPLIER = 1e6
"""The largest one that events take, and that a calibration looks for."""

Orders = tuple[float, ...]
Losses = Any
"""A privacy loss distribution of dp-accounting, which has no types."""


def units_of(relation: Relation) -> int:
    """How often a unit is added or removed to get to a neighbour: once, or twice to replace it."""
    return 1 if relation == "add-or-remove" else 2
