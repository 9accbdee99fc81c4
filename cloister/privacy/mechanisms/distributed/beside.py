"""Auxiliary numbers that clients add to a secure sum beside their updates.

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
from dataclasses import dataclass

from cloister.core.cohort import Cohort
from cloister.privacy.accounting.events import DistributedGaussian
from cloister.privacy.mechanisms.clipping import AdaptiveClip, heaviest, whole_bits
from cloister.privacy.mechanisms.distributed.shares import Parties, Shares, variance_of
from cloister.privacy.mechanisms.grid import Grid

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
        inside, outside = whole_bits(self.grid, self.quantile)
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
