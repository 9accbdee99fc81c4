"""Slow and obvious oracles, with mpmath: what accountants are judged by. Product code never imports this.

Everything follows from the definitions, on densities written down by hand:

    δ(ε) = sup over neighbours of ∫ max(0, P - e^ε·Q)        the hockey-stick divergence
    D_α  = ln(∫ P^α·Q^(1-α)) / (α - 1)                      the Rényi divergence

A pair of neighbours is given as its two densities and the points between which quadrature works piece by piece.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import mpmath as mp

mp.mp.dps = 20

Density = Callable[[mp.mpf], mp.mpf]
REACH = 14
"""Standard deviations beyond the outermost mean at which a density counts as 0: its tail is below 1e-43."""


@dataclass(frozen=True)
class Pair:
    """The outputs of a mechanism on two neighbouring datasets, both mixtures of normal distributions of deviation z.

    Attributes:
        left, right: weight and mean of each component.
        z: of all of them.
    """

    left: tuple[tuple[float, float], ...]
    right: tuple[tuple[float, float], ...]
    z: float

    @property
    def densities(self) -> tuple[Density, Density]:
        return mixture(self.left, self.z), mixture(self.right, self.z)

    @property
    def swapped(self) -> "Pair":
        return Pair(self.right, self.left, self.z)

    def points(self, apart: float, order: float = 0) -> list[mp.mpf]:
        """Equal stretches of at most this length. P^α·Q^(1-α) peaks at up to α times the distance."""
        means = [mean for _, mean in self.left + self.right]
        reach = REACH * self.z + order * (max(means) - min(means))
        low, high = min(means) - reach, max(means) + reach
        count = int(mp.ceil((high - low) / apart))
        return [low + (high - low) * mp.mpf(k) / count for k in range(count + 1)]


def mixture(parts: tuple[tuple[float, float], ...], z: float) -> Density:
    """The density of a mixture of normal distributions of deviation z."""
    known = [(mp.mpf(weight) / (mp.sqrt(2 * mp.pi) * z), mp.mpf(mean)) for weight, mean in parts]
    return lambda x: sum(weight * mp.exp(-(((x - mean) / z) ** 2) / 2) for weight, mean in known)


def gaussian(z: float) -> Pair:
    """One release of a sum that one unit moves by 1."""
    return Pair(((1, 1),), ((1, 0),), z)


def poisson(z: float, q: float) -> Pair:
    """The same, where the unit is drawn with probability q."""
    return Pair(((1 - mp.mpf(q), 0), (q, 1)), ((1, 0),), z)


def replaced(z: float, q: float) -> Pair:
    """A unit drawn with probability q is at +1 or at -1, and everybody else at 0."""
    return Pair(((1 - mp.mpf(q), 0), (q, 1)), ((1 - mp.mpf(q), 0), (q, -1)), z)


def delta(pair: Pair, epsilon: float) -> float:
    """The larger of the two hockey-stick divergences of a pair."""
    return max(hockey_stick(pair, epsilon), hockey_stick(pair.swapped, epsilon))


def hockey_stick(pair: Pair, epsilon: float) -> float:
    """∫ max(0, P - e^ε·Q). The loss ln(P/Q) of these pairs rises or falls, so P = e^ε·Q at one point at most."""
    p, q = pair.densities
    factor = mp.exp(epsilon)
    gain = lambda x: p(x) - factor * q(x)  # noqa: E731
    pieces = pair.points(3 * pair.z)  # between which quadrature starts anew
    signs = [mp.sign(gain(x)) for x in pieces]
    crossings = [
        bisected(gain, a, b) for a, b, left, right in zip(pieces, pieces[1:], signs, signs[1:]) if left * right < 0
    ]
    assert len(crossings) <= 1
    points = sorted([*pieces, *crossings])
    return float(mp.fsum(mp.quad(gain, [a, b]) for a, b in pairwise(points) if gain((a + b) / 2) > 0))


def bisected(function: Density, low: mp.mpf, high: mp.mpf) -> mp.mpf:
    """Where the function changes its sign."""
    at_low = mp.sign(function(low))
    for _ in range(3 * mp.mp.dps):
        middle = (low + high) / 2
        low, high = (middle, high) if mp.sign(function(middle)) == at_low else (low, middle)
    return low


def renyi(pair: Pair, order: float) -> float:
    """The larger of the two Rényi divergences of a pair."""
    return max(renyi_of(pair, order), renyi_of(pair.swapped, order))


def renyi_of(pair: Pair, order: float) -> float:
    """By the trapezoidal rule. Its error falls like exp(-2πa/h): no density has a zero within a = πz² of the line."""
    p, q = pair.densities
    a, points = mp.mpf(order), pair.points(min(pair.z, pair.z**2) / 6, order)
    total = mp.fsum(p(x) * (p(x) / q(x)) ** (a - 1) for x in points) * (points[1] - points[0])
    return float(mp.log(total) / (a - 1))


def gaussian_delta(epsilon: float, z: float) -> float:
    """δ(ε) of one Gaussian release in closed form. Source: Balle, Wang (2018), arXiv:1805.06530, Theorem 8."""
    e, s = mp.mpf(epsilon), mp.mpf(z)
    return float(mp.ncdf(1 / (2 * s) - e * s) - mp.exp(e) * mp.ncdf(-1 / (2 * s) - e * s))


def gaussian_epsilon(delta: float, z: float) -> float:
    """ε at which `gaussian_delta` is δ, by bisection."""
    low, high = 0.0, 1.0
    while gaussian_delta(high, z) > delta:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, z) > delta else (low, middle)
    return high
