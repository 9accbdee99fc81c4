"""Clocks: actions that take turns, and how long each of them took."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

MAX_TURNS = 200
Action = Callable[[], Callable[[], object]]
"""Prepares a turn, outside of the time, and returns what is timed."""


@dataclass(frozen=True)
class Times:
    """How long something took, turn by turn.

    Attributes:
        seconds: of each turn, at least one.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds, in the middle."""
        return median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and the upper quartile, in seconds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def times(self, factor: float) -> "Times":
        """The same turns with every time multiplied.

        Args:
            factor: such as 1/k, where a turn was k steps.
        """
        return Times(tuple(seconds * factor for seconds in self.seconds))

    def ratio(self, base: "Times") -> float:
        """The median of the ratios to another action's time, turn by turn: a slow moment of the machine hits both.

        Args:
            base: of an action that took turns with this one.
        """
        return median(own / other for own, other in zip(self.seconds, base.seconds, strict=True))


def in_turns(actions: Mapping[str, Action], seconds: float) -> dict[str, Times]:
    """The times of actions that take turns, after each was done once: that loads libraries and compiles.

    Args:
        actions: by their names.
        seconds: after which no further turn begins; there is always one.
    """
    for prepare in actions.values():
        prepare()()
    taken: dict[str, list[float]] = {name: [] for name in actions}
    end = time.perf_counter() + seconds
    for turn in range(MAX_TURNS):
        if turn and time.perf_counter() >= end:
            break
        for name, prepare in actions.items():
            work = prepare()
            start = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - start)
    return {name: Times(tuple(found)) for name, found in taken.items()}
