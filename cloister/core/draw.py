"""Who was drawn for a round, and how: facts that a strategy states and an accountant may use."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Draw:
    """The nodes of a round.

    Attributes:
        nodes: their ids.
        expected: how many were expected: a public number, unlike the number that `poisson` draws.
        kind: `fixed`: a cohort of one size, without replacement; `poisson`: each node by itself.
        fraction: of the nodes; the probability of `poisson`.
        population: how many nodes there are, where they are registered and may not change; 0 where they are not.
        secret: whether nobody can know who was drawn: not if a seed decided it.
    """

    nodes: list[int]
    expected: float
    kind: Literal["fixed", "poisson"]
    fraction: float
    population: int
    secret: bool
