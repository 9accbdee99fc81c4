"""Timing of actions that run alternately."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

MAX_TURNS = 200
Action = Callable[[], Callable[[], object]]
"""A function that prepares a turn, untimed, and returns the function that is timed."""


@dataclass(frozen=True)
class Times:
    """Durations of an action, turn by turn.

    Attributes:
        seconds: of each turn, at least one.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in seconds."""
        return median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile, in seconds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def times(self, factor: float) -> "Times":
        """Return these times multiplied by a factor.

        Args:
            factor: such as 1/k, where a turn was k steps.
        """
        return Times(tuple(seconds * factor for seconds in self.seconds))

    def ratio(self, base: "Times") -> float:
        """Return the median ratio to another action's times, turn by turn.

        A slow moment of the machine affects both times of a turn.

        Args:
            base: times of an action that ran alternately with this one.
        """
        return median(own / other for own, other in zip(self.seconds, base.seconds, strict=True))


def in_turns(actions: Mapping[str, Action], seconds: float) -> dict[str, Times]:
    """Measure actions that run alternately.

    Each runs once untimed before, to load libraries and to compile.

    Args:
        actions: by their names.
        seconds: after which no further turn begins; there is at least one.
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
