"""A number that travels beside an update in a sum that nobody sees a part of.

    bits       whether each update is within the clip: what an adaptive clip follows
    squares    how long each update is, squared: with the sum of updates it says how far they lie apart

It has a grid of its own and shares of noise of its own, so that it is a release of its own. Their surplus is not taken
off: it would take seeds of its own, for one number.

| edge case | what happens |
|---|---|
| an update of 0, as that of a client whose training failed | the number is 0: the client is as if it were not there |
| an update with NaN, infinity, or squares that overflow | it counts as 0, and so does the number |
| a client that sends another number than it should | a clip moves by one step of its rule at most; a distance is held |
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
"""That the most which a client adds has: truncation moves it by less than any noise shows."""
LARGEST_MULTIPLIER = 256.0
"""Of the noise on either: shares of it are below 2^25 steps, whatever t and c are, and the narrow ring has room."""


@dataclass(frozen=True)
class Beside(ABC):
    """A number that each client adds beside its update.

    Attributes:
        steps: D, that the most which a client adds has.
        shares: of the noise.

    Guarantee: a client adds at most D steps, and 0 where its update is 0: what zeroing an update costs is `event`.
    """

    steps: int
    shares: Shares

    @abstractmethod
    def number(self, cohort: Cohort, bound: float) -> int:
        """What a client adds.

        Args:
            cohort: of this one client, as it was trained.
            bound: C.
        """

    def event(self, single: bool = False) -> DistributedGaussian:
        """What the sum of these numbers costs at worst, whoever is left.

        Args:
            single: as in `Shares.event`.
        """
        return self.shares.event(self.steps, 1, single)


@dataclass(frozen=True)
class Bits(Beside):
    """Whether each update is within the clip: 1 - γ if it is, -γ if not, 0 for an update of 0.

    Attributes:
        quantile: γ, between 0 and 1. D is what max(γ, 1 - γ) has.
    """

    quantile: float

    @classmethod
    def of(cls, clip: AdaptiveClip, parties: Parties) -> "Bits":
        """The bits of a clip, with noise of deviation z_b·max(γ, 1 - γ) on their sum.

        Args:
            clip: that follows them.
            parties: how many there are of whom.

        Raises:
            PrivacyError: the noise is more than can be made.
        """
        variance = variance_of(clip.bits_multiplier, STEPS)
        return cls(STEPS, Shares.of(variance, parties, removable=False), clip.quantile)

    @property
    def grid(self) -> Grid:
        """What bits are counted in, without noise."""
        return Grid(heaviest(self.quantile), float(self.steps), 0)

    def number(self, cohort: Cohort, bound: float) -> int:
        """As in `Beside`."""
        (norm,) = cohort.norms
        inside, outside = whole_bits(self.grid, self.quantile)
        if not 0 < norm < math.inf:
            return 0
        return inside if norm <= bound else outside

    def share(self, total: int, survivors: int) -> float:
        """The share of the survivors within the clip, less γ.

        Args:
            total: the sum of their numbers, with its noise.
            survivors: how many there are: a public number.
        """
        return total * self.grid.step / survivors


@dataclass(frozen=True)
class Squares(Beside):
    """The squared norm of each update after clipping, in units of C²: 0 to 1, which has D steps."""

    @classmethod
    def of(cls, multiplier: float, parties: Parties) -> "Squares":
        """The squares of a round, with noise of a deviation of so many C² on their sum.

        Args:
            multiplier: z_d > 0.
            parties: how many there are of whom.

        Raises:
            PrivacyError: the noise is more than can be made.
        """
        return cls(STEPS, Shares.of(variance_of(multiplier, STEPS), parties, removable=False))

    def number(self, cohort: Cohort, bound: float) -> int:
        """As in `Beside`."""
        (norm,) = cohort.norms
        return int(min(norm / bound, 1.0) ** 2 * self.steps) if norm < math.inf else 0

    def apart(self, squares: int, summed: float, survivors: int) -> float:
        """The root mean squared distance of two updates, in units of C; 0 where noise takes its square below 0.

        It is √(2·(u·Σ‖x‖² - ‖Σx‖²)/(u·(u - 1))), x being an update over C.

        Args:
            squares: the sum of their numbers, with its noise.
            summed: ‖Σx‖², as it is estimated.
            survivors: u ≥ 2: a public number.
        """
        pairs = survivors * squares / self.steps - summed
        return math.sqrt(max(0.0, 2 * pairs / (survivors * (survivors - 1))))
