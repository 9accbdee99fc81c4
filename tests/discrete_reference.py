"""The discrete Gaussian in other ways: in decimal arithmetic, and by the sampler of Canonne, Kamath and Steinke."""

from decimal import Decimal, getcontext
from fractions import Fraction
from functools import cache
from itertools import accumulate

import numpy as np
from scipy import stats
from statistics_of_noise import FALSE_ALARM

from cloister.privacy.mechanisms.discrete.tables import LEFT_OVER, blocks_in_order

DIGITS = 110
"""Of the decimal arithmetic: 2^-256 has 78."""


def decimal(value: Fraction) -> Decimal:
    """A fraction to `DIGITS` digits."""
    getcontext().prec = DIGITS
    return Decimal(value.numerator) / Decimal(value.denominator)


@cache
def blocks_up_to(rate: Fraction) -> tuple[list[Decimal], list[Decimal]]:
    """The probabilities of the blocks 0, -1, 1, -2, … and their sums; what lies beyond them is below 10^-85.

    Each weight follows from the one before, with a rounding of 10^-110; the last one is held to its exponential.
    """
    unit = decimal(rate)
    weights, ratio, square = [Decimal(1)], (-unit).exp(), (-2 * unit).exp()
    while weights[-1] > Decimal("1e-90"):
        weights.append(weights[-1] * ratio)
        ratio *= square
    m = len(weights) - 1
    assert abs(weights[-1] / (-unit * m * m).exp() - 1) < Decimal("1e-98")
    whole = 2 * sum(weights)
    each = [weight / whole for weight in weights for _ in range(2)]
    return each, list(accumulate(each))


def rate_of(tables):
    return Fraction(4**tables.low_bits) / (2 * tables.scale**2)


def given_to(order, tables):
    """Return the weight of each block in the two tables, of 2^32."""
    first, second = (
        dict(zip(*(part.tolist() for part in np.unique(table, return_counts=True))))
        for table in (tables.first, tables.second)
    )
    return [(first.get(block, 0) << 16) + first[LEFT_OVER] * second.get(block, 0) for block in order]


@cache
def thresholds_of(tables):
    """T of each block, in decimal arithmetic, from the counts that stand in the tables."""
    exact = blocks_up_to(rate_of(tables))[1]
    given = list(accumulate(given_to(blocks_in_order(len(exact) // 2), tables)))
    return [(2**32 * upto - part) / (2**32 - given[-1]) for upto, part in zip(exact, given)]


def probabilities(scale: Fraction, largest: int) -> np.ndarray:
    """The probabilities of -largest … largest, to double precision: the sum of all weights is s·√(2π) to 10^-1000."""
    numbers = np.arange(-largest, largest + 1, dtype=np.float64)
    return np.exp(-(numbers**2) / (2 * float(scale) ** 2)) / (float(scale) * np.sqrt(2 * np.pi))


def fits(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's χ² of counts; cells of less than 20 expected are left out, the rest makes one more cell."""
    used = expected >= 20
    counts = np.append(counts[used], counts.sum() - counts[used].sum())
    expected = np.append(expected[used], counts.sum() - expected[used].sum())
    if expected[-1] < 20:
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(stats.chi2.sf(statistic, len(counts) - 1) > FALSE_ALARM)


class Slow:
    """Canonne, Kamath, Steinke (2020), Algorithms 1 to 3, in Python's integers.

    Args:
        below: draws a uniform integer below its argument.
    """

    def __init__(self, below):
        self._below = below

    def bernoulli(self, p: Fraction) -> bool:
        """True with probability p."""
        return self._below(p.denominator) < p.numerator

    def bernoulli_exp(self, gamma: Fraction) -> bool:
        """Algorithm 1: true with probability exp(-γ), γ ≥ 0."""
        while gamma > 1:
            if not self.bernoulli_exp(Fraction(1)):
                return False
            gamma -= 1
        k = 1
        while self.bernoulli(gamma / k):
            k += 1
        return k % 2 == 1

    def laplace(self, t: int) -> int:
        """Algorithm 2: the discrete Laplace law of scale t."""
        while True:
            u = self._below(t)
            if not self.bernoulli_exp(Fraction(u, t)):
                continue
            v = 0
            while self.bernoulli_exp(Fraction(1)):
                v += 1
            x, negative = u + t * v, self._below(2)
            if not (negative and x == 0):
                return -x if negative else x

    def gaussian(self, scale: Fraction) -> int:
        """Algorithm 3: the discrete Gaussian law of scale s."""
        t = int(scale) + 1
        while True:
            y = self.laplace(t)
            if self.bernoulli_exp((abs(y) - scale**2 / t) ** 2 / (2 * scale**2)):
                return y
