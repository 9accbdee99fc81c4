"""Facts about the draw of a round's nodes, stated by a strategy for the accountant."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Draw:
    """The nodes of a round.

    Attributes:
        nodes: their ids.
        expected: expected size of the cohort. It is public; the actual size of a `poisson` draw is not.
        kind: `fixed`: a cohort of one size, without replacement; `poisson`: each node independently.
        fraction: of the nodes; the probability of `poisson`.
        population: number of nodes, if they are registered and may not change; otherwise 0.
        secret: True if the draw is unpredictable; False if a seed determined it.
    """

    nodes: list[int]
    expected: float
    kind: Literal["fixed", "poisson"]
    fraction: float
    population: int
    secret: bool
