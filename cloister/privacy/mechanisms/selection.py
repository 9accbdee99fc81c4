"""Private choice of a client among hypotheses, and the settings of its run on which the guarantee depends.

The choice among k hypotheses is the exponential mechanism on bounded losses.

The loss of every example is held within [0, L]; a loss that is NaN or infinite counts as L. Then, for each hypothesis,

    client:           score = mean over the client's examples         moves by at most Δ = L, for any data
    example, group:   score = sum over its examples (or its groups)   moves by at most Δ = L for one of them

and hypothesis j is chosen with a probability ∝ exp(-ε·score_j / 2Δ), the law of report-noisy-max with Gumbel noise of
scale 2Δ/ε on the scores (McSherry, Talwar, 2007). A mean over a public number N of examples, with Δ = L/N, is the same
choice as the sum: N cancels, so the choice needs no public number.

The low bits and cut tails of floating-point noise would break a pure guarantee. So losses are rounded to multiples of
L·2⁻³², scores are fractions of integers, and sampling is exact: a hypothesis is proposed uniformly and accepted with
probability exp(-γ), γ the rational distance of its score from the best one over 2Δ/ε (Canonne, Kamath, Steinke, 2020,
Algorithm 1, for coins of such bias), with integers from the operating system. The duration depends on the scores, by
microseconds beside the computation of the losses.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.accounting.events import Event, Pure, Unaccounted
from cloister.utils import check
from cloister.utils.errors import PrivacyError

SEEDED = "the noise is seeded: whoever knows privacy.noise-seed can remove it"
EXACT = "privacy.choice is 'exact': which hypothesis suits the examples is found out without noise"


@dataclass(frozen=True)
class ReleaseContext:
    """Source of a client's noise, and the client's choice among hypotheses.

    Attributes:
        seeded: whether the noise can be repeated from its seed.
        hypotheses: k, number of hypotheses that a client chooses from in every round; 1: no choice.
        private: whether the client chooses by noised losses.
        choice_epsilon: ε of one private choice.
    """

    seeded: bool = False
    hypotheses: int = 1
    private: bool = True
    choice_epsilon: float = 0.0

    @property
    def chooses_privately(self) -> bool:
        """Return whether each round has a private choice, which is one more release."""
        return self.hypotheses > 1 and self.private

    def caveats(self) -> list[str]:
        """Return reasons against claims for a client under any mechanism; may be empty."""
        caveats = [SEEDED] if self.seeded else []
        if self.hypotheses > 1 and not self.private:
            caveats.append(EXACT)
        return caveats

    def events(self, caveats: Iterable[str], releases: Callable[[], Iterable[Event]]) -> tuple[Event, ...]:
        """Return the events of one reply.

        They are its releases and a private choice, or one `Unaccounted` event if there is a caveat.

        Args:
            caveats: reasons against a claim for the mechanism.
            releases: returns the releases of the mechanism in a reply; called only if there is no caveat.
        """
        if reasons := "; ".join([*caveats, *self.caveats()]):
            return (Unaccounted(reasons),)
        return (*releases(), *([Pure(self.choice_epsilon)] if self.chooses_privately else []))

    def epsilon_of_choices(self, rounds: int) -> float:
        """Return ε of all private choices of a client in this number of rounds."""
        return rounds * self.choice_epsilon if self.chooses_privately else 0.0

    def parameters(self) -> dict[str, str | float]:
        """Return the parameters of the choice, by configuration key; empty without a choice."""
        if self.hypotheses < 2:
            return {}
        return {"privacy.choice": "private" if self.private else "exact", "privacy.choice-epsilon": self.choice_epsilon}


STEPS = 2**32
"""Number of steps in L: a loss is rounded to a multiple from 0 to this one."""

Below = Callable[[int], int]
"""Draws a uniform integer from 0 to below its argument."""


@dataclass(frozen=True)
class PrivateChoice:
    """Private choice among hypotheses by their losses on a client's own examples.

    Args:
        epsilon: ε > 0 of one choice.
        max_loss: L > 0, the largest loss of one example that counts.
        unit: `client`: all data of the client; `example`; `group`: all examples of one group.

    Guarantee: a choice is pure ε-DP for exchanging one unit for any other, and so for adding, removing or zeroing it,
        for any hypotheses and losses.

    Raises:
        ConfigError: ε or L is not a finite number above 0, or the unit is unknown.
    """

    epsilon: float
    max_loss: float
    unit: Literal["client", "example", "group"] = "client"

    def __post_init__(self) -> None:
        check.positive(choice_epsilon=self.epsilon, max_loss=self.max_loss)
        check.one_of(("client", "example", "group"), unit=self.unit)

    def events(self, hypotheses: int) -> list[Event]:
        """Return the cost of one choice: none with a single hypothesis."""
        return [Pure(self.epsilon)] if hypotheses > 1 else []

    def choose(
        self, losses: Sequence[NDArray], groups: NDArray[np.integer] | None = None, below: Below = secrets.randbelow
    ) -> int:
        """Choose a hypothesis.

        Args:
            losses: of each of the k hypotheses, on each of the n examples, shape (n,); any numbers, and n may be 0.
            groups: group of each example, shape (n,), integers, if the unit is a group: a group counts as one example
                with the mean of its losses.
            below: source of the integers; other sources than the operating system's are for tests and papers only.

        Returns:
            The index of the chosen hypothesis.

        Raises:
            PrivacyError: there are no hypotheses; or groups are given for another unit, or missing for this one.
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
        """Return the score of a hypothesis, in units of its sensitivity Δ = L."""
        steps = bounded(losses, self.max_loss)
        if groups is not None:
            # The mean of each group, rounded down to an integer.
            _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
            sums = np.zeros(len(counts), np.int64)
            np.add.at(sums, group, steps)
            steps = sums // counts
        counted = len(steps) if self.unit == "client" else 1
        return Fraction(int(steps.sum()), STEPS * max(1, counted))


def bounded(losses: NDArray, limit: float) -> NDArray[np.int64]:
    """Return losses held within [0, L], as multiples of L·2⁻³²; L if not finite.

    Args:
        losses: of n examples, any numbers.
        limit: L > 0.

    Returns:
        Integers from 0 to `STEPS`, shape (n,).
    """
    wide = np.asarray(losses).astype(np.float64).reshape(-1)
    wide[~np.isfinite(wide)] = limit
    return np.rint(np.clip(wide, 0, limit) / limit * STEPS).astype(np.int64)


def accepted(gamma: Fraction, below: Below = secrets.randbelow) -> bool:
    """Toss a coin that is True with probability exp(-γ), exactly.

    The coin is one of exp(-1) for each whole unit of γ, and one for the fraction by von Neumann's alternating series.

    Args:
        gamma: γ ≥ 0.
        below: source of the integers.

    Source: Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Algorithm 1.
    """
    whole = math.floor(gamma)
    # A generator: the first failure ends it, after few coins on average for any γ.
    return all(_unit_coin(Fraction(1), below) for _ in range(whole)) and _unit_coin(gamma - whole, below)


def _unit_coin(gamma: Fraction, below: Below) -> bool:
    """Return True with probability exp(-γ), 0 ≤ γ ≤ 1.

    That is if the first failure of coins of bias γ/1, γ/2, … is at odd k.
    """
    k = 1
    while below(gamma.denominator * k) < gamma.numerator:
        k += 1
    return k % 2 == 1
