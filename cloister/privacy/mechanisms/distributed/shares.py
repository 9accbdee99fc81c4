"""Noise of a secure sum in shares, and the auxiliary numbers that clients add beside their updates.

**Shares.** The total of the noise stays the same for any number of survivors. A sum must hold noise of variance σ² from
honest clients alone. At least t of n clients survive, c of which may be dishonest. With u survivors, a share of
σ²/(u - c) suffices, but u is unknown when the noise is added. So each share is a sum itself: a base of variance
σ²/(n - c), and a component for each number j from t + 1 to n, of variance σ²/(j - 1 - c) - σ²/(j - c). When u is known,
each survivor reveals its components up to number u, and they are subtracted. The base and the components above u stay,
and together they have the variance σ²/(u - c).

Scales are whole numbers of steps: each component covers, rounded up, the variance that the base and the higher
components lack.

| edge case | result |
|---|---|
| no noise | base and components of scale 0 |
| t = n, or no removable components | a base alone, of variance σ²/(t - c) |
| a base or component below 2^8 steps | it has 2^8 steps: there is more noise than necessary |
| a component whose variance the enlarged higher ones cover already | it has scale 0 |
| a share of 2^25 steps or more | refused |

Source: the components are those of XNoise (Jiang, Wang, Chen, 2024, arXiv:2209.12528).

**Auxiliary numbers** are added to a secure sum beside the updates.

    bits       whether each update is within the clip: an adaptive clip follows their sum
    squares    the squared norm of each update: with the sum of updates, it yields their distance

Each number has its own grid and its own shares of noise, so that it is a separate release. Its surplus noise stays:
subtracting it would need further seeds, for one number.

| edge case | result |
|---|---|
| an update of 0, for instance of a client whose training failed | the number is 0, as without this client |
| an update with NaN, infinity, or squares that overflow | update and number count as 0 |
| a client that sends a wrong number | a clip moves by one step of its rule at most; a distance stays in its limits |
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from cloister.privacy.accounting.distributed import SMOOTHED
from cloister.privacy.accounting.events import DistributedGaussian
from cloister.privacy.mechanisms.clipping import AdaptiveClip, heaviest, quantized_indicators
from cloister.privacy.mechanisms.discrete.tables import LARGEST, SMALLEST
from cloister.privacy.mechanisms.grid import Grid
from cloister.utils.cohort import Cohort
from cloister.utils.errors import PrivacyError

THRESHOLD, COLLUDING = "secure-aggregation.threshold", "secure-aggregation.colluding"
"""Keys of t and c in a configuration, and in the parameters of a claim."""


DEVIATIONS = 10
"""Deviations of the noise that the ring must hold."""


def variance_of(multiplier: float, steps: int) -> int:
    """Return the variance of a sum's noise, in steps²: (z·D)² + 25; 0 for z = 0.

    With it the sum costs no more than a continuous Gaussian release.

    Args:
        multiplier: z ≥ 0.
        steps: D, sensitivity of the sum to one client.
    """
    return math.ceil((Fraction(multiplier) * steps) ** 2) + SMOOTHED if multiplier else 0


@dataclass(frozen=True)
class Parties:
    """Sizes of a cohort under secure aggregation.

    Attributes:
        members: n, clients that are asked for a share.
        threshold: t, least number of survivors for a sum.
        colluding: c, number of survivors that may have revealed their noise to the server, or added none. At least 1
            if the other clients see the release: each of them has its own noise.
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
        """Return h = t - c, the least number of honest shares in every sum."""
        return self.threshold - self.colluding

    def parameters(self) -> dict[str, int]:
        """Return t and c, by configuration key."""
        return {THRESHOLD: self.threshold, COLLUDING: self.colluding}

    def survivors(self) -> range:
        """Return all possible numbers of survivors in a sum."""
        return range(self.threshold, self.members + 1)


@dataclass(frozen=True)
class Shares:
    """Scales of a client's noise: a base, and components that may be subtracted again.

    Attributes:
        parties: sizes of the cohort.
        base: scale of the base, in steps; 0: there is no noise.
        components: scale of each component, numbered from t + 1; empty: no component is subtracted.
    """

    parties: Parties
    base: int
    components: tuple[int, ...] = ()

    @classmethod
    def of(cls, variance: int, parties: Parties, removable: bool = True) -> "Shares":
        """Return the shares for a sum.

        Args:
            variance: σ² ≥ 0, in steps²: least variance of the honest noise in every sum.
            parties: sizes of the cohort.
            removable: whether there are components. Without, a sum of more than t clients has more noise than σ².

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
        """Return the scale of each component that has noise, by its number."""
        return {number: scale for number, scale in enumerate(self.components, self.parties.threshold + 1) if scale}

    def left(self, survivors: int) -> int:
        """Return the variance of a client's remaining share, in steps².

        The components up to the number of survivors are subtracted.

        Args:
            survivors: u, from t to n.

        Raises:
            PrivacyError: the number of survivors is outside this range.
        """
        if survivors not in self.parties.survivors():
            raise PrivacyError(
                f"survivors must be from {self.parties.threshold} to {self.parties.members}, found {survivors}"
            )
        return self.base**2 + sum(scale**2 for number, scale in self.scales().items() if number > survivors)

    def within(self, survivors: int, shown: int) -> int:
        """Return the variance of a sum's noise with complete shares, in steps².

        Args:
            survivors: u.
            shown: number of survivors that revealed the seeds of their components up to number u.
        """
        return shown * self.left(survivors) + (survivors - shown) * self.left(self.parties.threshold)

    @property
    def variance(self) -> int:
        """Return the least variance of honest noise in any sum, in steps²."""
        return min(self._honest(survivors) * self.left(survivors) for survivors in self.parties.survivors())

    @property
    def terms(self) -> int:
        """Return the largest number of discrete Gaussians in the honest noise."""
        return max(
            self._honest(survivors) * (1 + sum(number > survivors for number in self.scales()))
            for survivors in self.parties.survivors()
        )

    @property
    def smallest(self) -> int:
        """Return the least scale of these discrete Gaussians, in steps."""
        return min(self.base, *self.scales().values()) if self.scales() else self.base

    def event(self, sensitivity: int, parameters: int, single: bool = False) -> DistributedGaussian:
        """Return the worst-case cost of a sum, for any survivors.

        It is known before any client sends its numbers.

        Args:
            sensitivity: D, in steps: sensitivity of the sum to one client.
            parameters: numbers of the sum.
            single: whether all other members may collude against one. Then only the base of its share counts: the
                colluding members can claim that all n survived, so that this member reveals all of its components.
        """
        if single:
            return DistributedGaussian(1, sensitivity, self.base, parameters)
        honest = self.parties.honest
        # Rounded down to a number that a double holds: a scale is below 2^25.
        scale = math.isqrt(self.variance * 4**24 // honest) / 2**24
        return DistributedGaussian(honest, sensitivity, scale, parameters, -(-self.terms // honest), self.smallest)

    def reach(self, steps: int) -> int:
        """Return n·D + 10·√(n·V), rounded up.

        A number of a sum exceeds it with probability at most 2·e^-50.

        Args:
            steps: D, largest contribution of a client to a number.
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
            PrivacyError: a seed is missing, or a seed has no component.
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
    """Return the least valid scale with this variance; 0 for no variance."""
    if variance <= 0:
        return 0
    scale = max(SMALLEST, math.isqrt(variance - 1) + 1)
    if scale >= LARGEST:
        raise PrivacyError(f"a share of the noise would have {scale} steps; at most {LARGEST - 1} can be made")
    return scale


STEPS = 1 << 16
"""Steps in the largest number of a client: the error of truncation is small beside any noise."""
LARGEST_MULTIPLIER = 256.0
"""Largest noise multiplier: shares stay below 2^25 steps for any t and c, and the sum fits into the narrow ring."""


@dataclass(frozen=True)
class Beside(ABC):
    """Auxiliary number that each client adds to the sum beside its update.

    Attributes:
        steps: D, steps in the largest number of a client.
        shares: of the noise.

    Guarantee: a client adds at most D steps, and 0 if its update is 0. So `event` is the cost of zeroing an update.
    """

    steps: int
    shares: Shares

    @abstractmethod
    def number(self, cohort: Cohort, bound: float) -> int:
        """Return the number that a client adds.

        Args:
            cohort: of this one client, before clipping.
            bound: C.
        """

    def event(self, single: bool = False) -> DistributedGaussian:
        """Return the worst-case cost of the sum of these numbers, for any survivors.

        Args:
            single: as in `Shares.event`.
        """
        return self.shares.event(self.steps, 1, single)


@dataclass(frozen=True)
class Bits(Beside):
    """Indicator of an update within the clip: 1 - γ if it is, -γ if not, 0 for an update of 0.

    Attributes:
        quantile: γ, between 0 and 1. D steps stand for max(γ, 1 - γ).
    """

    quantile: float

    @classmethod
    def of(cls, clip: AdaptiveClip, parties: Parties) -> "Bits":
        """Return the bits of a clip, with noise of deviation z_b·max(γ, 1 - γ) on their sum.

        Args:
            clip: the adaptive clip.
            parties: sizes of the cohort.

        Raises:
            PrivacyError: the noise is beyond the range of exact noise.
        """
        variance = variance_of(clip.bits_multiplier, STEPS)
        return cls(STEPS, Shares.of(variance, parties, removable=False), clip.quantile)

    @property
    def grid(self) -> Grid:
        """Return the grid of the bits, without noise."""
        return Grid(heaviest(self.quantile), float(self.steps), 0)

    def number(self, cohort: Cohort, bound: float) -> int:
        """Return the bit of a client, in steps; see `Beside.number`."""
        (norm,) = cohort.norms
        inside, outside = quantized_indicators(self.grid, self.quantile)
        if not 0 < norm < math.inf:
            return 0
        return inside if norm <= bound else outside

    def share(self, total: int, survivors: int) -> float:
        """Return the share of the survivors within the clip, less γ.

        Args:
            total: the noised sum of their numbers.
            survivors: their public number.
        """
        return total * self.grid.step / survivors


@dataclass(frozen=True)
class Squares(Beside):
    """Squared norm of each update after clipping, in units of C²: from 0 to 1, which is D steps."""

    @classmethod
    def of(cls, multiplier: float, parties: Parties) -> "Squares":
        """Return the squares of a round, with noise of deviation `multiplier`·C².

        Args:
            multiplier: z_d > 0.
            parties: sizes of the cohort.

        Raises:
            PrivacyError: the noise is beyond the range of exact noise.
        """
        return cls(STEPS, Shares.of(variance_of(multiplier, STEPS), parties, removable=False))

    def number(self, cohort: Cohort, bound: float) -> int:
        """Return the squared norm of a client's update, in steps; see `Beside.number`."""
        (norm,) = cohort.norms
        return int(min(norm / bound, 1.0) ** 2 * self.steps) if norm < math.inf else 0

    def apart(self, squares: int, summed: float, survivors: int) -> float:
        """Return the root mean squared distance of two updates, in units of C.

        It is 0 if noise makes its square negative.

        It is √(2·(u·Σ‖x‖² - ‖Σx‖²)/(u·(u - 1))), x being an update over C.

        Args:
            squares: the noised sum of their numbers.
            summed: estimate of ‖Σx‖².
            survivors: u ≥ 2, a public number.
        """
        pairs = survivors * squares / self.steps - summed
        return math.sqrt(max(0.0, 2 * pairs / (survivors * (survivors - 1))))
