"""Shared vocabulary of events, accountants and claims: units, relations, draws."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from cloister.utils.errors import PrivacyError

Relation = Literal["add-or-remove", "replace-one"]
Unit = Literal["client", "example", "group", "neighbourhood"]
"""Unit of privacy: a client with all its data, one of its examples, all examples of one group (such as a patient), or
the vector that a client sends against all vectors within a distance (d-privacy)."""
GROUP = "task.group"
"""Key of a run with the name of the array or column that says whose an example is."""
SamplingKind = Literal["none", "poisson", "bounded-poisson", "without-replacement"]

OVERFLOW = 2.0**-50
"""Upper bound on the probability that a draw of `bounded-poisson` fills all places for units."""


def word_for(unit: str, group: object) -> str:
    """Return the word for a unit in a text: for a group, the name of its column.

    Args:
        unit: of privacy.
        group: that name; empty: it is not known.
    """
    return str(group) if unit == "group" and group else unit


@dataclass(frozen=True)
class Sampling:
    """Draw of the units of a release, as it was executed.

    Attributes:
        kind: `none`: no claim about the draw. `poisson`: each unit independently with `probability`, in secret.
            `bounded-poisson`: the same, for units that need one of a bounded number of places. A draw that fills all
            places has no claim; its probability is part of δ. `without-replacement`: `cohort` of a fixed, registered
            `population`, uniformly and in secret.
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
        """Return the expected share of units in a release; 1 without a claim."""
        if self.kind == "without-replacement":
            return self.cohort / self.population
        return self.probability if self.is_poisson else 1.0

    @property
    def is_poisson(self) -> bool:
        """Return whether each unit is drawn independently."""
        return self.kind in ("poisson", "bounded-poisson")

    @property
    def overflow(self) -> float:
        """Return an upper bound on the probability of a draw without a claim."""
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
"""Smallest multiplier in events: below it, squares lose precision and ε is useless."""
MAX_MULTIPLIER = 1e6
"""Largest multiplier in events and in calibration."""

Orders = tuple[float, ...]
Losses = Any
"""A privacy loss distribution of dp-accounting, which has no types."""


def units_of(relation: Relation) -> int:
    """Return the number of changed units between neighbours: 1, or 2 to replace."""
    return 1 if relation == "add-or-remove" else 2
