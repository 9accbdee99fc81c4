"""A client's choice among k hypotheses, made privately: the exponential mechanism on bounded losses.

The loss of every example is held within [0, L]; one that is not a number counts as L. Then, for each hypothesis,

    client:           score = mean over the client's examples         moves by at most Δ = L, whatever it holds
    example, group:   score = sum over its examples (or its groups)   moves by at most Δ = L for one of them

and hypothesis j is chosen with a probability ∝ exp(-ε·score_j / 2Δ): what report-noisy-max gives with Gumbel noise of
scale 2Δ/ε on the scores (McSherry, Talwar, 2007). A mean over a public number N of examples, with Δ = L/N, is the same
choice as the sum: N cancels, so none is needed, and the true number does not matter.

No noise is added to floating-point numbers, whose low bits and cut tails would make "pure" a figure of speech. Losses
are rounded to multiples of L·2⁻³², so that scores are fractions of integers, and the law is drawn from exactly: a
hypothesis is proposed uniformly and accepted with probability exp(-γ), γ the rational distance of its score from the
best one over 2Δ/ε (Canonne, Kamath, Steinke, 2020, Algorithm 1, for coins of such bias), with integers from the
operating system. How long that takes depends on the scores, by microseconds beside the losses' own computation.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.events import Event, Pure

STEPS = 2**32
"""Multiples that a loss is rounded to lie from 0 to this many, which stands for L."""

Below = Callable[[int], int]
"""A uniform whole number from 0 to below another."""


@dataclass(frozen=True)
class PrivateChoice:
    """A private choice among hypotheses by their losses on a client's own examples.

    Args:
        epsilon: ε > 0 of one choice.
        max_loss: L > 0, the largest loss of one example that counts.
        unit: `client`: everything that the client holds; `example`; `group`: all examples of one group.

    Guarantee: a choice is pure ε-DP for exchanging one unit for any other, and so for adding, removing or zeroing it,
        for any hypotheses and losses.

    Raises:
        ConfigError: ε or L is not a finite number above 0, or the unit is another.
    """

    epsilon: float
    max_loss: float
    unit: Literal["client", "example", "group"] = "client"

    def __post_init__(self) -> None:
        check.positive(choice_epsilon=self.epsilon, max_loss=self.max_loss)
        check.one_of(("client", "example", "group"), unit=self.unit)

    def events(self, hypotheses: int) -> list[Event]:
        """What one choice costs: nothing where there is none."""
        return [Pure(self.epsilon)] if hypotheses > 1 else []

    def choose(
        self,
        losses: Sequence[NDArray],
        groups: NDArray[np.integer] | None = None,
        below: Below = secrets.randbelow,
    ) -> int:
        """Choose a hypothesis.

        Args:
            losses: of each of the k hypotheses, on each of the n examples, shape (n,); any numbers, and n may be 0.
            groups: whose each example is, shape (n,), whole numbers, where the unit is a group: it counts as one
                example with the mean of its losses.
            below: where the integers come from; another than the operating system's for tests and papers only.

        Returns:
            The index of the chosen hypothesis.

        Raises:
            PrivacyError: there are no hypotheses; or there are groups and the unit is another, or the other way round.
        """
        if not losses:
            raise PrivacyError("there is no hypothesis to choose")
        if (groups is None) == (self.unit == "group"):
            raise PrivacyError(f"examples are told apart by groups where the unit is a group, and it is {self.unit!r}")
        scores = [self._score(each, groups) for each in losses]
        rate, best = Fraction(self.epsilon) / 2, min(scores)
        while True:
            proposed = below(len(scores))
            if accepted(rate * (scores[proposed] - best), below):
                return proposed

    def _score(self, losses: NDArray, groups: NDArray[np.integer] | None) -> Fraction:
        """The score of a hypothesis, in units of its sensitivity Δ = L."""
        steps = bounded(losses, self.max_loss)
        if groups is not None:
            steps = _means(steps, groups)
        counted = len(steps) if self.unit == "client" else 1
        return Fraction(int(steps.sum()), STEPS * max(1, counted))


def bounded(losses: NDArray, limit: float) -> NDArray[np.int64]:
    """Losses held within [0, L], as multiples of L·2⁻³²; what is not finite counts as L.

    Args:
        losses: of n examples, any numbers.
        limit: L > 0.

    Returns:
        Whole numbers from 0 to `STEPS`, shape (n,).
    """
    wide = np.asarray(losses).astype(np.float64).reshape(-1)
    wide[~np.isfinite(wide)] = limit
    return np.rint(np.clip(wide, 0, limit) / limit * STEPS).astype(np.int64)


def _means(steps: NDArray[np.int64], groups: NDArray[np.integer]) -> NDArray[np.int64]:
    """The mean of each group, rounded down to a whole number."""
    _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros(len(counts), np.int64)
    np.add.at(sums, group, steps)
    return sums // counts


def accepted(gamma: Fraction, below: Below = secrets.randbelow) -> bool:
    """A coin that shows True with probability exp(-γ), exactly.

    exp(-1) once for each whole unit of γ, and what remains by von Neumann's alternating series.

    Args:
        gamma: γ ≥ 0.
        below: where the integers come from.

    Source: Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Algorithm 1.
    """
    whole = math.floor(gamma)
    # A generator: the first tails ends it, after two or three coins however large γ is.
    return all(_unit_coin(Fraction(1), below) for _ in range(whole)) and _unit_coin(gamma - whole, below)


def _unit_coin(gamma: Fraction, below: Below) -> bool:
    """True with probability exp(-γ) for γ from 0 to 1: the first failure of coins of bias γ/1, γ/2, … is at odd k."""
    k = 1
    while below(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1
