"""Empirical lower bound on ε of a round, from an observer of the released model.

One round is run many times with a client, the canary, and many times without it. Each release gives a score. A
threshold is chosen on half of the runs and tested on the other half. The rates at which it is reached with and without
the canary bound ε from below, with Clopper-Pearson intervals. The bound holds for every distribution of the scores.

A claim below the bound is false, with the confidence stated. A bound below the claim proves nothing: another score,
canary or cohort might show more. From n runs of each kind, the bound is at most about
ln(n / (2·ln(2/(1 - confidence)))).

Sources: Jagielski, Ullman, Oprea (2020), arXiv:2006.07709, Algorithm 1; Nasr et al. (2021), arXiv:2101.04535, for the
adversary that chooses the cohort and reads the released model; Clopper, Pearson (1934), Biometrika 26(4).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from scipy import stats

from cloister.audits.sensitivity import Arrays, Rehearsal
from cloister.core import check
from cloister.core.errors import ConfigError

Rates = NDArray[np.float64]
Strength = Callable[[Rates, Rates], Rates]
"""Bound from a lower bound on the rate of hits and an upper bound on the rate of false alarms."""
Score = Callable[[Strategy, Rates], float]
"""Evidence that the canary took part, from a strategy after its round and the update that it released."""


@dataclass(frozen=True)
class Trials:
    """Scores of the same round with the canary and without it, each run independently.

    Attributes:
        present: with the canary; it should score higher.
        absent: without.
    """

    present: Rates
    absent: Rates

    def epsilon(self, delta: float, confidence: float = 0.99) -> float:
        """Return a lower bound on the ε(δ) of the round.

        Guarantee: if the round is (ε, δ)-DP for adding or removing the canary, this is above ε with probability at
            most 1 - `confidence`.

        Source: Jagielski et al. (2020), Algorithm 1, over both directions: ln((P(S) - δ)/Q(S)) for the event S that
            speaks for the canary and for the one that speaks against it.

        Raises:
            ConfigError: δ or the confidence is out of range.
        """
        if not 0 <= delta < 1:
            raise ConfigError(f"delta must be at least 0 and below 1, got {delta}")

        def strength(hits: Rates, alarms: Rates) -> Rates:
            return np.log(np.maximum(hits - delta, 0.0) / alarms)

        return self._shown(strength, confidence)

    def shift(self, confidence: float = 0.99) -> float:
        """Return a lower bound on μ of the round.

        The round is at least as distinguishable as N(μ, 1) and N(0, 1).

        Guarantee: if the round is a Gaussian mechanism of noise multiplier z, this is above 1/z with probability at
            most 1 - `confidence`. It is much closer to 1/z than `epsilon` is to ε. It has no meaning for a round that
            is not Gaussian, such as one over a Poisson cohort.

        Source: Dong, Roth, Su (2022), arXiv:1905.02383, §2.3; as an audit Nasr et al. (2023), arXiv:2302.07956, §4.
        """
        return self._shown(lambda hits, alarms: stats.norm.ppf(hits) - stats.norm.ppf(alarms), confidence)

    def _shown(self, strength: Strength, confidence: float) -> float:
        """Return the bound of a threshold and direction on the second half.

        They are the best ones on the first half.
        """
        if not 0 < confidence < 1:
            raise ConfigError(f"confidence must be above 0 and below 1, got {confidence}")
        error = (1 - confidence) / 2  # half of the error each for hits and for false alarms
        options = []
        for high, low in ((self.present, self.absent), (-self.absent, -self.present)):
            thresholds = np.unique(np.concatenate([high[::2], low[::2]]))
            shown = _at(thresholds, high[::2], low[::2], strength, error)
            options.append((shown.max(), thresholds[shown.argmax()], high, low))
        _, threshold, high, low = max(options, key=lambda option: option[0])
        return max(0.0, float(_at(np.array([threshold]), high[1::2], low[1::2], strength, error)[0]))


def _at(thresholds: Rates, high: Rates, low: Rates, strength: Strength, error: float) -> Rates:
    """Compute the bound of each threshold.

    Hits are scores of `high` that reach it, false alarms are scores of `low` that reach it.
    """
    with np.errstate(divide="ignore"):
        return strength(
            minimum_rate(_reaching(high, thresholds), len(high), error),
            maximum_rate(_reaching(low, thresholds), len(low), error),
        )


def _reaching(scores: Rates, thresholds: Rates) -> NDArray[np.intp]:
    """Count the scores that are at least as large as each threshold."""
    return len(scores) - np.searchsorted(np.sort(scores), thresholds)


def minimum_rate(count: NDArray[np.intp], runs: int, error: float) -> Rates:
    """Return a lower confidence bound on a rate, seen `count` times in `runs`.

    It is wrong with probability at most `error`.

    Source: Clopper, Pearson (1934).
    """
    return np.where(count > 0, stats.beta.ppf(error, np.maximum(count, 1), runs - count + 1), 0.0)


def maximum_rate(count: NDArray[np.intp], runs: int, error: float) -> Rates:
    """Return an upper confidence bound on a rate, with the same error as `minimum_rate`."""
    return 1 - minimum_rate(runs - count, runs, error)


def try_to_tell(
    make: Callable[[], Strategy],
    sent: Arrays,
    models: list[Arrays],
    examples: list[float],
    *,
    canary: int = 0,
    runs: int = 1000,
    score: Score | None = None,
) -> Trials:
    """Run a round with and without the canary, and score its releases.

    The cohort is the adversary's choice: a canary of norm C in a direction of its own loses nothing, and a single
    coordinate survives any optimizer that treats coordinates apart.

    Args:
        make: returns a new strategy as in a run, with its noise. The noise must not restart from one seed each time.
        sent: the global model of the round.
        models: reply of each client.
        examples: the example count each client reports.
        canary: index of the client that replies or is absent.
        runs: of each kind.
        score: by default the released update along the canary's own.

    Raises:
        ConfigError: there are too few runs to choose and test a threshold, or the canary does not move the model.
    """
    check.positive(runs=runs // 2)
    rehearsal = Rehearsal(sent, models, examples)
    origin = _flat(sent)
    evidence = along(_flat(models[canary]) - origin) if score is None else score

    def trial(absent: int | None) -> float:
        strategy = make()
        return evidence(strategy, rehearsal.flat(rehearsal.run(strategy, absent)) - origin)

    return Trials(np.array([trial(None) for _ in range(runs)]), np.array([trial(canary) for _ in range(runs)]))


def along(direction: Rates) -> Score:
    """Return the score of an update by its component along a direction.

    Raises:
        ConfigError: the direction is zero: a canary that does not move the model shows nothing.
    """
    check.positive(norm_of_the_canary=float(np.linalg.norm(direction)))
    unit = direction / np.linalg.norm(direction)
    return lambda strategy, update: float(update @ unit)


def _flat(model: Arrays) -> Rates:
    return np.concatenate([array.ravel() for array in model.values()], dtype=np.float64)
