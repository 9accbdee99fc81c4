"""Trials of the kernel properties that DP-SGD assumes, for any framework: what they count, and their table."""

import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

EXTREMES = (math.nan, math.inf, -math.inf, 1e38, -1e38, 1e-40, 0.0, 1.0)
"""Numbers that replace those in the other rows."""
LINE = "{:30} {:38} {:>6} {:>5} {:>12} {:>12}"
KEPT = "This platform kept rows apart in {} cases, and equal calls gave equal results in {}."
BROKEN = "DP-SGD has no guarantee on this platform: do not use it here."


class Tried(Protocol):
    """Test cases of one model so far.

    Attributes:
        cases: number of cases.
        changed: cases in which a bit of a row's results changed with the numbers in the other rows.
        differed: cases in which two equal calls gave unequal bits.
        kernels: names of what is tried.
        places: rows of a call.
        in_rows: whether rows are compared; else equal calls alone.
    """

    cases: int
    changed: int
    differed: int
    kernels: str
    places: int
    in_rows: bool

    def case(self) -> None:
        """Try one more case."""


def scale(rng: np.random.Generator) -> float:
    """Draw the scale of a variable's weights, from 1e-38 to 1e38. A later layer may cancel this scale."""
    return float(10.0 ** rng.uniform(-38, 38) if rng.random() < 0.5 else 10.0 ** rng.uniform(-3, 3))


def processor() -> str:
    """Return the architecture and the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()}, {named[0] if named else platform.processor() or platform.machine()}"


def told(trials: Mapping[str, Tried]) -> Iterator[str]:
    """Yield a table with a line for each model, and the verdict.

    Args:
        trials: by the names of their models.
    """
    yield LINE.format("model", "kernels", "places", "cases", "rows changed", "calls differ")
    for name, trial in trials.items():
        yield LINE.format(name, trial.kernels, trial.places, trial.cases, trial.changed, trial.differed)
    in_rows = sum(trial.cases for trial in trials.values() if trial.in_rows)
    yield BROKEN if are_broken(trials) else KEPT.format(in_rows, sum(trial.cases for trial in trials.values()))


def are_broken(trials: Mapping[str, Tried]) -> bool:
    """Return True if a row changed or a call differed, in any trial."""
    return any(trial.changed or trial.differed for trial in trials.values())
