"""How the noise of a sum is shared out, so that it is the same however many clients are left.

A sum must hold noise of variance σ² from honest clients alone. At least t of n clients are left in it, c of which may
be dishonest. Where u are left, a share of σ²/(u - c) would do, but u is not known before the noise is added. So each
share is a sum itself: a base of variance σ²/(n - c), and a component for each number j from t + 1 to n, of variance
σ²/(j - 1 - c) - σ²/(j - c). When u is known, everybody who is left shows the components up to number u, and they are
taken off again. The base and the components above u stay, and together they have the variance σ²/(u - c).

Scales are whole numbers of steps: each component makes up, rounded up, what those above it and the base leave open.

| edge case | what happens |
|---|---|
| no noise | base and components of scale 0 |
| t = n, or nothing is to be taken off | a base alone, of variance σ²/(t - c) |
| a base or component below 2^8 steps | it has 2^8 steps: there is more noise than there has to be |
| nothing is left open for a component, because those above it were so enlarged | it has scale 0 |
| a share of 2^25 steps or more | refused |

Source: the components are those of XNoise (Jiang, Wang, Chen, 2024, arXiv:2209.12528).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.distributed import SMOOTHED
from cloister.privacy.accounting.events import DistributedGaussian
from cloister.privacy.mechanisms.discrete.tables import LARGEST, SMALLEST

THRESHOLD, COLLUDING = "secure-aggregation.threshold", "secure-aggregation.colluding"
"""The keys of t and c in a configuration, and among the parameters of a claim."""


DEVIATIONS = 10
"""Deviations of the noise that the ring has room for."""


def variance_of(multiplier: float, steps: int) -> int:
    """Of the noise of a sum, in steps²: (z·D)² + 25, so that it costs no more than a continuous Gaussian; 0 for z = 0.

    Args:
        multiplier: z ≥ 0.
        steps: D, by how much one client moves the sum.
    """
    return math.ceil((Fraction(multiplier) * steps) ** 2) + SMOOTHED if multiplier else 0


@dataclass(frozen=True)
class Parties:
    """How many there are of whom.

    Attributes:
        members: n, clients that are asked for a share.
        threshold: t: of fewer than these there is no sum.
        colluding: c: of those who are left in a sum, so many may have told the server their noise, or added none. At
            least 1 where the other clients see the release: each of them knows its own noise.
    """

    members: int
    threshold: int
    colluding: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.colluding < self.threshold <= self.members:
            raise PrivacyError(
                "colluding must be at least 0, threshold above it, and members at least threshold; found"
                f" {self.colluding}, {self.threshold} and {self.members}"
            )

    @property
    def honest(self) -> int:
        """h = t - c: at least so many honest shares are in every sum."""
        return self.threshold - self.colluding

    def survivors(self) -> range:
        """All numbers of clients that can be left in a sum."""
        return range(self.threshold, self.members + 1)


@dataclass(frozen=True)
class Shares:
    """The scales of what a client adds: a base, and components that may be taken off again.

    Attributes:
        parties: how many there are of whom.
        base: scale of the base, in steps; 0: there is no noise.
        components: scale of each component, the first of which has the number t + 1; empty: nothing is taken off.
    """

    parties: Parties
    base: int
    components: tuple[int, ...] = ()

    @classmethod
    def of(cls, variance: int, parties: Parties, removable: bool = True) -> "Shares":
        """The shares for a sum.

        Args:
            variance: σ² ≥ 0, in steps²: what honest noise there is in every sum, at least.
            parties: how many there are of whom.
            removable: whether there are components. Without, more noise than σ² is left where more than t clients are.

        Raises:
            PrivacyError: a share would have 2^25 steps or more.

        Examples:
            >>> shares = Shares.of(3_000_000, Parties(members=5, threshold=3))
            >>> shares.base, shares.components
            (775, (500, 387))
            >>> [shares.left(survivors) * survivors for survivors in (3, 4, 5)]
            [3001182, 3001576, 3003125]
        """

        def needed(survivors: int) -> int:
            return -(-variance // (survivors - parties.colluding))

        base = _scale(needed(parties.members if removable else parties.threshold))
        left, components = base**2, []
        for survivors in range(parties.members - 1, parties.threshold - 1, -1) if removable else ():
            components.append(_scale(needed(survivors) - left))
            left += components[-1] ** 2
        return cls(parties, base, tuple(reversed(components)))

    def scales(self) -> dict[int, int]:
        """The scale of each component that has noise, by its number."""
        return {number: scale for number, scale in enumerate(self.components, self.parties.threshold + 1) if scale}

    def left(self, survivors: int) -> int:
        """Variance of a client's share when components up to the number of survivors are taken off, in steps².

        Args:
            survivors: u, from t to n.

        Raises:
            PrivacyError: so many survivors cannot be.
        """
        if survivors not in self.parties.survivors():
            raise PrivacyError(
                f"survivors must be from {self.parties.threshold} to {self.parties.members}, found {survivors}"
            )
        return self.base**2 + sum(scale**2 for number, scale in self.scales().items() if number > survivors)

    def within(self, survivors: int, shown: int) -> int:
        """Variance of the noise in a sum, in steps², if everybody has added all of it.

        Args:
            survivors: u.
            shown: so many of them have shown the seeds of the components up to number u.
        """
        return shown * self.left(survivors) + (survivors - shown) * self.left(self.parties.threshold)

    @property
    def variance(self) -> int:
        """The least variance that honest noise has in any sum, in steps²."""
        return min(self._honest(survivors) * self.left(survivors) for survivors in self.parties.survivors())

    @property
    def terms(self) -> int:
        """The most discrete Gaussians that honest noise is the sum of."""
        return max(
            self._honest(survivors) * (1 + sum(number > survivors for number in self.scales()))
            for survivors in self.parties.survivors()
        )

    @property
    def smallest(self) -> int:
        """The least scale of one of them, in steps."""
        return min(self.base, *self.scales().values()) if self.scales() else self.base

    def event(self, sensitivity: int, parameters: int, single: bool = False) -> DistributedGaussian:
        """What a sum costs at worst, whoever is left: known before anything is sent.

        Args:
            sensitivity: D, in steps: by how much one client moves the sum.
            parameters: numbers of the sum.
            single: whether all members but one may collude. Then the base of one share counts: who plays all others
                tells this member that all n are left, and it shows all of its components.
        """
        if single:
            return DistributedGaussian(1, sensitivity, self.base, parameters)
        honest = self.parties.honest
        # Rounded down, to a number that doubles hold: a scale is below 2^25.
        scale = math.isqrt(self.variance * 4**24 // honest) / 2**24
        return DistributedGaussian(honest, sensitivity, scale, parameters, -(-self.terms // honest), self.smallest)

    def reach(self, steps: int) -> int:
        """What no number of a sum passes, but with probability 2·e^-50: n·D + 10·√(n·V), rounded up.

        Args:
            steps: D: what a client gives to a number at most.
        """
        members = self.parties.members
        most = members * self.left(self.parties.threshold)
        return members * steps + math.isqrt(DEVIATIONS**2 * most) + 1

    def require(self, seeds: Mapping[int, bytes], up_to: int) -> None:
        """Refuse seeds that are not those of the components from t + 1 up to a number.

        Args:
            seeds: of each component, by its number.
            up_to: the last number.

        Raises:
            PrivacyError: one is there that should not be, or the other way round.
        """
        expected = range(self.parties.threshold + 1, up_to + 1) if self.components else range(0)
        if set(seeds) != set(expected):
            raise PrivacyError(
                f"seeds must be those of the components {expected.start} to {expected.stop - 1}, found {sorted(seeds)}"
                if expected
                else f"no component is to be made here, found seeds for {sorted(seeds)}"
            )

    def _honest(self, survivors: int) -> int:
        return survivors - self.parties.colluding


def _scale(variance: int) -> int:
    """The least scale that has a variance, and that noise can be made of; 0 for no variance."""
    if variance <= 0:
        return 0
    scale = max(SMALLEST, math.isqrt(variance - 1) + 1)
    if scale >= LARGEST:
        raise PrivacyError(f"a share of the noise would have {scale} steps; at most {LARGEST - 1} can be made")
    return scale
