"""Distinguishability of two kinds of scores: AUC, ROC points, hits at few false alarms, with bootstrap intervals.

Scores are higher for the kind that the attacker seeks. Sources: Hanley, McNeil (1982), Radiology 143(1), for the AUC
as the probability that a score of one kind exceeds one of the other; Efron (1979) for the bootstrap; Carlini et al.
(2022), arXiv:2112.03570, §III, for hits at few false alarms, and for the logarithmic scale.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.audits.findings import CHANCE, Control, Measured, Unit
from cloister.audits.testing import maximum_rate, minimum_rate
from cloister.utils.errors import ConfigError

Scores = NDArray[np.float64]
Statistic = Callable[[Scores, Scores], float]
RESAMPLES = 1000
FEW_ALARMS = (0.001, 0.01)
"""Rates of false alarms for the rates of hits."""
STRICT = 0.999
"""Confidence of the interval for controls that must fail: 95 % would raise a false alarm in one of 20 audits."""
FEW_ROWS = 10
"""Fewest scores or runs of a kind for a control by resampling alone: with fewer, their spread is underestimated."""
POINTS = 50
"""Points of a ROC curve, evenly spaced on a logarithmic scale of false alarms."""


@dataclass(frozen=True)
class Evidence:
    """Scores of the kind that the attacker seeks, and of the other kind.

    Attributes:
        attack: name of the attack.
        unit: unit about which it learns.
        present: of members, or of runs with the client, shape (m,). Or (m, k) for k dependent scores per run, which are
            resampled together.
        absent: of the other kind, shape (n,) or (n, k).
        seed: of the resamples.
    """

    attack: str
    unit: Unit
    present: Scores
    absent: Scores
    seed: int = 0

    def __post_init__(self) -> None:
        if not (len(self.present) and len(self.absent)):
            raise ConfigError(f"{self.attack}: scores of both kinds are needed to tell them apart")

    def auc(self, confidence: float = 0.95) -> Measured:
        """Compute the AUC with its interval.

        Args:
            confidence: of the interval.
        """
        value = auc(self.present, self.absent)
        low, high = interval(auc, self.present, self.absent, confidence, self.seed)
        if low == high:
            low, high = _of_pairs(value, min(len(self.present), len(self.absent)), confidence)
        return Measured(self.attack, "auc", value, self.unit, low, high)

    def hits(self, alarms: float) -> Measured:
        """Compute the rate of hits at a rate of false alarms, with its interval.

        Args:
            alarms: largest rate of false alarms.
        """

        def rate(present: Scores, absent: Scores) -> float:
            return hits_at(present, absent, alarms)

        low, high = interval(rate, self.present, self.absent, 0.95, self.seed)
        value = rate(self.present, self.absent)
        return Measured(self.attack, "tpr", value, self.unit, low, high, alarms=alarms)

    def figures(self) -> list[Measured]:
        """Return the AUC, and for single examples the rates of hits at few false alarms."""
        few = FEW_ALARMS if self.unit == "example" else ()
        return [self.auc(), *(self.hits(alarms) for alarms in few)]

    def curve(self) -> list[tuple[float, float]]:
        """Return points of the ROC curve for a logarithmic scale.

        The first rate of false alarms is one in all absent scores.
        """
        alarms = np.geomspace(1 / len(self.absent), 1.0, POINTS)
        return [(float(rate), hits_at(self.present, self.absent, float(rate))) for rate in alarms]

    def has_to_succeed(self, name: str) -> Control:
        """Return a control that is met if the attack beats chance.

        Args:
            name: attacked case, in a few words.
        """
        found = self.auc()
        return Control(name, "succeeds", found, found.beats_chance)

    def has_to_fail(self, name: str) -> Control:
        """Return a control that is met if the attack is neither better nor worse than a guess.

        Args:
            name: attacked case, in a few words.
        """
        found, strict = self.auc(), self.auc(STRICT)
        low, high = strict.low or 0.0, strict.high or 1.0
        if (rows := min(len(self.present), len(self.absent))) < FEW_ROWS:
            wide = _of_pairs(found.value, rows, STRICT)
            low, high = min(low, wide[0]), max(high, wide[1])
        return Control(name, "fails", found, low <= CHANCE <= high)


def auc(present: Scores, absent: Scores) -> float:
    """Compute the probability that a present score exceeds an absent one; ties count half.

    Args:
        present: of any shape.
        absent: of any shape.
    """
    ordered = np.sort(absent, axis=None)
    below, reached = np.searchsorted(ordered, present, "left"), np.searchsorted(ordered, present, "right")
    return float((below + reached).mean() / (2 * ordered.size))


def _of_pairs(value: float, pairs: int, confidence: float) -> tuple[float, float]:
    """Return an interval for scores without spread under resampling, as when separated.

    Present and absent scores are paired. In each pair the present score is higher with probability AUC. So the interval
    is that of Clopper-Pearson over this number of pairs.
    """
    tail, count = (1 - confidence) / 2, np.array([round(value * pairs)])
    return float(minimum_rate(count, pairs, tail)[0]), float(maximum_rate(count, pairs, tail)[0])


def hits_at(present: Scores, absent: Scores, alarms: float) -> float:
    """Return the rate of hits at a rate of false alarms.

    It is the share of present scores above the lowest threshold that keeps this rate.

    Args:
        present: shape (m,).
        absent: shape (n,).
        alarms: largest share of absent scores above the threshold, from 0 to 1.
    """
    # The float of a rate such as 0.001 is inexact: the tolerance still permits one alarm in 1,000 absent scores.
    allowed = int(np.floor(alarms * len(absent) + 1e-9))
    if allowed >= len(absent):
        return 1.0
    threshold = np.partition(absent, len(absent) - 1 - allowed)[len(absent) - 1 - allowed]
    return float((present > threshold).mean())


def interval(
    statistic: Statistic, present: Scores, absent: Scores, confidence: float, seed: int
) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of a statistic.

    Each kind is resampled separately, row by row.

    Args:
        statistic: of (present, absent).
        present: shape (m,) or (m, k).
        absent: shape (n,) or (n, k).
        confidence: of the interval.
        seed: of the resamples.
    """
    rng = np.random.default_rng(seed)
    found = [statistic(rng.choice(present, len(present)), rng.choice(absent, len(absent))) for _ in range(RESAMPLES)]
    tail = (1 - confidence) / 2
    return float(np.quantile(found, tail)), float(np.quantile(found, 1 - tail))
