"""Canary audit of a run: lower bounds on ε from the coins and scores of its canaries.

Independent fair coins determine which of m canaries take part, and the releases give each a score. Two bounds follow:

- **Distribution-free.** A number of coins, fixed beforehand, is guessed: those with the most extreme scores. (ε, δ)-DP
  limits the number of right guesses. There is no other assumption. r guesses show an ε of at most about ln(r/3).
- **Gaussian shape.** Assume that the scores of present and of absent canaries are normal with one standard deviation,
  as under Gaussian noise. Then the distance of their means is μ of one Gaussian release. 1,000 canaries show most of
  its ε.

A claim below a bound is false, with the confidence stated (for the second: if the shape is right). A bound below the
claim proves nothing. The standard deviation is estimated from the scores, never derived from the stated noise: other
canaries and the clients add to it.

Sources: Steinke, Nasr, Jagielski (2023), arXiv:2305.08846, Theorem 5.2; Nasr et al. (2023), arXiv:2302.07956, for the
Gaussian shape; Dong, Roth, Su (2022), arXiv:1905.02383, for μ.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from cloister.audits.audit import Effort, FinishedRun
from cloister.audits.findings import Control, Finding, Measured
from cloister.privacy.accounting.accountants import gaussian_epsilon
from cloister.privacy.claims.server import RUN
from cloister.utils.errors import ConfigError
from cloister.utils.text import at_least, at_most, percent_at_least

CONFIDENCE = 0.95
LARGEST = 700.0
"""Largest ε of the search: above it, e^ε overflows."""
QUANTILES = np.linspace(-7, 7, 281)
"""Normal quantiles for the numerical average over the estimated standard deviation."""


@dataclass(frozen=True)
class OneRun:
    """Coins and scores of one run.

    Attributes:
        coins: True for each canary that took part, shape (m,).
        scores: evidence that it did, shape (m,).
        guesses: r ≤ m, even: number of guessed coins. It must be fixed before the scores are read.

    Raises:
        ConfigError: shapes differ, r is out of range or odd, or a score is not finite.
    """

    coins: NDArray[np.bool_]
    scores: NDArray[np.float64]
    guesses: int

    def __post_init__(self) -> None:
        if self.coins.shape != self.scores.shape or not np.isfinite(self.scores).all():
            raise ConfigError("every canary must have a coin and a finite score")
        if not 0 <= self.guesses <= len(self.coins) or self.guesses % 2:
            raise ConfigError(f"guesses must be even, and from 0 to {len(self.coins)} canaries; got {self.guesses}")

    @property
    def right(self) -> int:
        """Return v, the number of right guesses.

        The guess is "present" for the r/2 highest scores, and "absent" for the r/2 lowest.
        """
        order, half = np.argsort(self.scores, kind="stable"), self.guesses // 2
        return int(self.coins[order[len(order) - half :]].sum() + (~self.coins[order[:half]]).sum())

    def distribution_free(self, delta: float, confidence: float = CONFIDENCE) -> float:
        """Return a lower bound on the ε(δ) of the run.

        Args:
            delta: δ, from 0 to below 1.
            confidence: above 0 and below 1.

        Guarantee: if the run is (ε, δ)-DP for adding or removing any one canary, this is above ε with probability at
            most 1 - `confidence`, for every distribution of the scores.

        Source: Steinke et al. (2023), Theorem 5.2.
        """
        return guessing_bound(len(self.coins), self.guesses, self.right, delta, confidence)

    def shift(self, confidence: float = CONFIDENCE) -> float:
        """Return a lower bound on μ.

        μ is the distance between the mean scores of both kinds, in standard deviations within a kind.

        Args:
            confidence: above 0 and below 1.

        Guarantee: if scores are independent and normal with one standard deviation, and their means are μ of these
            apart, this is above μ with probability 1 - `confidence`: it inverts the noncentral t distribution.
        """
        _check(0.0, confidence)
        present, absent = self.scores[self.coins], self.scores[~self.coins]
        if min(len(present), len(absent)) < 2:
            return 0.0
        freedom = len(self.scores) - 2
        spread = math.sqrt((len(present) * present.var() + len(absent) * absent.var()) / freedom)
        unit = math.sqrt(1 / len(present) + 1 / len(absent))  # of a difference of means, in units of `spread`
        apart = float(present.mean() - absent.mean())
        if spread <= abs(apart) * np.finfo(np.float32).eps:
            return math.inf if apart > 0 else 0.0
        return max(0.0, unit * least_noncentrality(apart / (spread * unit), freedom, confidence))

    def gaussian(self, delta: float, confidence: float = CONFIDENCE) -> float:
        """Return a lower bound on the ε(δ) of the run, under the Gaussian shape.

        It is the ε of one Gaussian release with μ = `shift`.

        Args:
            delta: δ, above 0 and below 1.
            confidence: above 0 and below 1.

        Guarantee: that of `shift`, for a run that is in total one Gaussian mechanism, such as rounds of Gaussian noise
            without a draw. It does not apply to other runs.
        """
        _check(delta, confidence)
        mu = self.shift(confidence)
        return gaussian_epsilon(1 / mu, delta) if 0 < mu < math.inf else mu


def guessing_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """Return the largest ε that the right guesses refute; 0 if there is none.

    Under a refuted ε, this many right guesses have a probability below 1 - `confidence`.

    Args:
        canaries: m.
        guesses: r ≤ m, fixed beforehand.
        right: v ≤ r of them.
        delta: δ, from 0 to below 1.
        confidence: above 0 and below 1.

    Source: Steinke et al. (2023), Theorem 5.2.
    """
    _check(delta, confidence)

    def excess(epsilon: float) -> float:
        return chance_of_guesses(canaries, guesses, right, epsilon, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    return LARGEST if excess(LARGEST) < 0 else float(optimize.bisect(excess, 0.0, LARGEST, xtol=1e-9))


def chance_of_guesses(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of at least v right guesses in an (ε, δ)-DP run.

    The bound is P[W ≥ v] + 2mδ·max over i of P[v > W ≥ v - i]/i, where W is binomial, of r guesses that are each right
    with probability e^ε/(1 + e^ε).

    Args:
        canaries, guesses, right: m, r and v.
        epsilon, delta: ε and δ.

    Source: Steinke et al. (2023), Theorem 5.2.
    """
    fewer = np.arange(right + 1)
    at_least = special.bdtrc(right - fewer - 1, guesses, 1 / (1 + math.exp(-epsilon)))  # P[W ≥ v - i]
    slopes = (at_least[1:] - at_least[0]) / fewer[1:]
    return min(1.0, float(at_least[0] + 2 * canaries * delta * slopes.max(initial=0.0)))


def least_noncentrality(t: float, freedom: int, confidence: float) -> float:
    """Return the smallest noncentrality λ that t does not refute.

    For λ, Student's statistic is at least t with probability 1 - `confidence`; smaller values are refuted. This
    probability is the mean of Φ(λ - t·s) over the standard deviation s, which is √(χ²/freedom). The mean is computed by
    the trapezoid rule over normal quantiles of s: closed forms fail for canaries that are perfectly distinguishable.

    Args:
        t: the observed statistic.
        freedom: its degrees of freedom.
        confidence: above 0 and below 1.
    """
    centres = t * np.sqrt(stats.chi2.isf(special.ndtr(-QUANTILES), freedom) / freedom)
    weights = np.exp(-np.square(QUANTILES) / 2)

    def excess(noncentrality: float) -> float:
        return float(np.average(special.ndtr(noncentrality - centres), weights=weights)) - (1 - confidence)

    return float(optimize.brentq(excess, centres.min() - 40, centres.max() + 40))


def _check(delta: float, confidence: float) -> None:
    if not 0 <= delta < 1:
        raise ConfigError(f"delta must be at least 0 and below 1, got {delta}")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be above 0 and below 1, got {confidence}")


NAME = "canaries.json"
"""File in the run directory."""
DELTA = 1e-5
"""δ of the bounds if the run claims no ε."""


@dataclass(frozen=True)
class CanaryBounds:
    """Lower bounds on the ε of a run, with the claim that they test.

    Attributes:
        canaries, guesses, right, rounds: m, r, number of right guesses, and number of scored rounds.
        delta, confidence: of every bound.
        claimed: ε at δ that the run claims for adding or removing a client; None: it claims none.
        distribution_free: ε, for every distribution of the scores.
        shift: μ, under the Gaussian shape.
        gaussian: ε, under the Gaussian shape.
    """

    canaries: int
    guesses: int
    right: int
    rounds: int
    delta: float
    confidence: float
    claimed: float | None
    distribution_free: float
    shift: float
    gaussian: float

    @property
    def contradicted(self) -> tuple[str, ...]:
        """Return the names of the bounds that contradict the claim; empty without a claim."""
        found = {"distribution-free": self.distribution_free, "Gaussian shape": self.gaussian}
        return tuple(name for name, bound in found.items() if self.claimed is not None and bound > self.claimed)

    def words(self) -> tuple[str, ...]:
        """Format the claim, each bound with its assumption, and the verdict: a sentence each."""
        share, delta = percent_at_least(self.confidence), at_most(self.delta)
        sure = f"with {share} confidence"
        claimed = "nothing is claimed" if self.claimed is None else f"ε = {at_most(self.claimed)} at δ = {delta}"
        verdict = (
            f"The claim is contradicted, {share} sure, by the bound: {', '.join(self.contradicted)}."
            if self.contradicted
            else "No bound is above a claim. That proves nothing: another attack might show more."
        )
        return (
            f"Claimed: {claimed}, for a client, over all rounds.",
            f"Distribution-free: ε is at least {at_least(self.distribution_free)} {sure}, for any distribution of "
            f"the scores; {self.right} of {self.guesses} guesses about {self.canaries} canaries were right.",
            f"Under the Gaussian shape: ε is at least {at_least(self.gaussian)} {sure} (μ at least "
            f"{at_least(self.shift)}), if the scores of canaries are normal with one spread, as under Gaussian noise "
            "without a draw.",
            verdict,
        )


def canary_bounds(run: Path, confidence: float = CONFIDENCE) -> CanaryBounds:
    """Compute both bounds on the ε of a finished run from its canaries.

    Args:
        run: the run directory.
        confidence: of each bound.

    Raises:
        ConfigError: the run had no canaries, or its files are not those of a run.
    """
    told = one_run_of(run)
    try:
        claims = json.loads((run / "privacy.json").read_text())["claims"]
        rounds = int(json.loads((run / NAME).read_text())["rounds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run / NAME} cannot be read: {type(error).__name__}") from None
    figure: dict[str, float] = next((claim for claim in claims if claim["scope"] == RUN), {})
    delta = figure.get("delta", DELTA)
    return CanaryBounds(
        canaries=len(told.coins),
        guesses=told.guesses,
        right=told.right,
        rounds=rounds,
        delta=delta,
        confidence=confidence,
        claimed=figure.get("epsilon"),
        distribution_free=told.distribution_free(delta, confidence),
        shift=told.shift(confidence),
        gaussian=told.gaussian(delta, confidence),
    )


def one_run_of(run: Path) -> OneRun:
    """Read the coins and scores of a finished run.

    Raises:
        ConfigError: the run had no canaries, or its file is not that of a run.
    """
    try:
        facts = json.loads((run / NAME).read_text())
        return OneRun(np.array(facts["coins"], bool), np.array(facts["scores"], float), facts["guesses"])
    except FileNotFoundError:
        raise ConfigError(f"{run} is no finished run with canaries: it has no {NAME}; set privacy.canaries") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run / NAME} cannot be read: {type(error).__name__}") from None


FREE, SHAPED = "canaries, distribution-free", "canaries, Gaussian shape"
SHAPE = "the scores of canaries are normal with one spread, as under Gaussian noise without a draw"
LOUD = 20.0
"""Shift of the present canaries' scores in the control with large bounds, in standard deviations."""
LARGE = 1.0
"""ε that the bounds must reach in this control. It needs more than ten guesses."""


class CanaryAudit:
    """The audit of a run with `privacy.canaries`."""

    name = "canaries"

    def misfit(self, run: FinishedRun) -> str:
        """Return the reason why the run cannot be audited; empty if it can.

        Args:
            run: audited run.
        """
        return "" if (run.path / NAME).is_file() else "it had no canaries (privacy.canaries)"

    def conduct(self, run: FinishedRun, effort: Effort) -> Finding:
        """Bound the ε of the run from its canaries' scores and coins.

        Args:
            run: audited run.
            effort: the seed of the control with permuted coins.
        """
        bounds, told = canary_bounds(run.path), one_run_of(run.path)
        measured = _measured(told, bounds.delta)
        spread = float(told.scores.std()) or 1.0
        loud = replace(told, scores=told.scores + LOUD * spread * told.coins)
        # A permutation keeps the number of present canaries, and makes coins independent of scores.
        blind = replace(told, coins=np.random.default_rng(effort.seed).permutation(told.coins))
        controls = [
            Control("those present stand out", "succeeds", each, each.value >= LARGE)
            for each in _measured(loud, bounds.delta)
        ]
        controls += [
            Control("coins exchanged at random", "fails", each, each.value < LARGE)
            for each in _measured(blind, bounds.delta)
        ]
        return Finding(
            self.name,
            " ".join(bounds.words()),
            measured,
            tuple(controls),
            details={"canaries": bounds.canaries, "guesses": bounds.guesses, "right": bounds.right},
        )


def _measured(told: OneRun, delta: float) -> tuple[Measured, Measured]:
    free, shaped = told.distribution_free(delta, CONFIDENCE), told.gaussian(delta, CONFIDENCE)
    return (
        Measured(FREE, "epsilon", free, "client", delta=delta, confidence=CONFIDENCE),
        Measured(SHAPED, "epsilon", shaped, "client", delta=delta, confidence=CONFIDENCE, assumption=SHAPE),
    )


AUDIT = CanaryAudit()
