"""Differential privacy for clients without floating point in the claim: integer updates, their sum, exact noise."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from cloister import CRYPTOGRAPHY, Contributions, DiscreteGaussian, Mechanism, Released, clip
from cloister.privacy.accounting.events import Event, Gaussian
from cloister.utils import check

STEPS = 1 << 20
"""Steps of the grid in the bound C: the sensitivity of the sum."""


@dataclass(frozen=True)
class ExactGaussian(Mechanism):
    """Discrete Gaussian noise on the sum of updates that are whole multiples of C/2^20.

    Attributes:
        multiplier: z, from 2^-12 up to 2^5.
        bound: C > 0, the largest L2 norm of one client's update, in units of the weights.

    Guarantee: joining or leaving moves the sum by at most `STEPS` steps, for any update.
    """

    multiplier: float = 1.0
    bound: float = 1.0

    name = "exact-gaussian"
    premises = (CRYPTOGRAPHY,)
    amplified = True

    def __post_init__(self) -> None:
        """Refuse parameters that are not positive."""
        check.positive(multiplier=self.multiplier, bound=self.bound)

    @property
    def clipping_norm(self) -> float:
        """Return C."""
        return self.bound

    def source(self) -> DiscreteGaussian:
        """Return the source of the noise: integers of standard deviation z·`STEPS`."""
        return DiscreteGaussian(scale=Fraction(self.multiplier) * STEPS)

    def events(self, layout, sampling) -> tuple[Event, ...]:
        """Return the cost of a round: one Gaussian, sampled as the round is."""
        return (Gaussian(self.source().noise_multiplier(STEPS), sampling),)

    def parameters(self) -> dict[str, str | int | float | bool]:
        """Return the parameters, as the claim states them."""
        return {"multiplier": self.multiplier, "bound": self.bound}

    def release(self, contributions: Contributions) -> Released:
        """Return sent + (Σ whole steps + noise)·C/(2^20·expected number of replies)."""
        cohort, source = clip(contributions.cohort, self.bound), self.source()
        step, sent = self.bound / STEPS, [piece.astype(np.float64) for piece in cohort.sent]
        total = [np.zeros(piece.size) for piece in sent]
        for row, factor in zip(cohort.rows, cohort.factors, strict=True):
            whole = truncated([(piece - base) * (factor / step) for piece, base in zip(row, sent, strict=True)])
            for sums, piece in zip(total, whole, strict=True):
                sums += piece
        for sums in total:
            source.add(sums)
        size = contributions.expected
        pairs = zip(cohort.sent, total, strict=True)
        model = tuple((base + sums * (step / size)).astype(base.dtype) for base, sums in pairs)
        return Released((model,), noise_std=self.multiplier * self.bound / size, sensitivity=self.bound / size)


def truncated(update):
    """Return whole numbers toward zero, a little shorter where their norm would exceed `STEPS`."""
    whole = [np.trunc(piece) for piece in update]
    if sum(float(piece @ piece) for piece in whole) <= STEPS**2:
        return whole
    return truncated([piece * (1 - 2.0**-20) for piece in update])
