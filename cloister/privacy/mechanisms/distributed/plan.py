"""What all parties fix before a round with noise in shares: grid, noise, room, and what the round costs.

**Grid.** C is D steps. Truncating p numbers toward zero moves an update by √(p/3) steps where their fractions are
evenly spread, and by less than √p steps always. D is the least power of two from 2^20 on for which √(p/3) ≤ D/1000: for
up to 3.2 million parameters D = 2^20, and nothing has to be rotated.

**Noise.** z·D steps, and 25 steps² more, so that the sum costs no more than with a continuous Gaussian of multiplier z.

**Room.** The sum is taken in a ring of 2^b whole numbers and read as one from -2^(b-1) to 2^(b-1) - 1. The n updates
give at most n·D to a number of it. Let V be the variance of a share with all of its components. A discrete Gaussian of
scale s is s²-subgaussian (Canonne, Kamath, Steinke, 2020), so the noise of n shares is n·V-subgaussian: a number of it
passes 10·√(n·V) with probability at most 2·e^-50. So where

    n·D + 10·√(n·V) < 2^(b-1),

a sum of p numbers is read wrongly with probability at most 2p·e^-50, below 4.7e-16 for 1.2 million. What is read
wrongly costs accuracy, not privacy: it is a function of the noised sum.

**Beside the update** other numbers may travel in the same sum, on grids and with noise of their own (`beside`). All of
them are in steps, and so is the noise: what C is, which may change from round to round, decides neither.

| edge case | what happens |
|---|---|
| a multiplier of 0 | no noise; the event is `Unaccounted` |
| noise of less than 2^8 steps a share | there is more of it: see `shares` |
| a sum that may leave the ring | refused |
"""

import json
import math
from dataclasses import asdict, dataclass, replace

from cloister.core import check
from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.events import Event, Unaccounted
from cloister.privacy.mechanisms.distributed.beside import Beside
from cloister.privacy.mechanisms.distributed.shares import DEVIATIONS, Parties, Shares, variance_of
from cloister.privacy.mechanisms.grid import FINEST, Grid

COARSEST = 20
"""The bound of a client is at least 2 to this power of steps."""
ROUNDING = 1e-3
"""What truncation moves an update by, as a share of the bound, at most."""


@dataclass(frozen=True)
class Plan:
    """What a round with noise in shares counts in.

    Attributes:
        bound: C > 0, in units of the weights.
        steps: D, a power of two: how many steps C is.
        shares: of the noise.
        parameters: p, numbers of an update.
        bits: of the ring, 32 or 64.
        beside: what travels beside an update, a number each.

    Guarantee: every sum of at least t clients' numbers, with the components taken off that belong to their number,
        holds honest noise of variance (z·D)² + 25 steps² or more, and is read as what it is but for a probability
        of 2p·e^-50.
    """

    bound: float
    steps: int
    shares: Shares
    parameters: int
    bits: int
    beside: tuple[Beside, ...] = ()

    @classmethod
    def of(
        cls,
        bound: float,
        multiplier: float,
        parties: Parties,
        parameters: int,
        bits: int = 32,
        beside: tuple[Beside, ...] = (),
        minimum_variance: int = 0,
    ) -> "Plan":
        """The plan of a round.

        Args:
            bound: C > 0, in units of the weights.
            multiplier: z ≥ 0: deviation of the sum's noise over C, of honest shares alone.
            parties: how many there are of whom.
            parameters: p.
            bits: of the ring, 32 or 64.
            beside: what travels beside an update.
            minimum_variance: of the noise, whatever the multiplier is, in steps².

        Raises:
            PrivacyError: the sum might leave the ring, or the noise is more than can be made.

        Examples:
            >>> plan = Plan.of(0.5, 1.0, Parties(members=20, threshold=14, colluding=2), parameters=1_206_590)
            >>> plan.steps, plan.shares.base, len(plan.shares.components)
            (1048576, 247152, 6)
            >>> print(plan.event())
            distributed gaussian, 12 shares, z = 1
        """
        check.positive(bound=bound, parameters=parameters)
        check.non_negative(multiplier=multiplier)
        check.one_of({"32", "64"}, bits=str(bits))
        steps = _steps(parameters)
        shares = Shares.of(max(variance_of(multiplier, steps), minimum_variance), parties)
        plan = cls(bound, steps, shares, parameters, bits, beside)
        plan._require_space_in_ring()
        return plan

    @property
    def grid(self) -> Grid:
        """The grid that a client's update is truncated to. It has no noise: the shares are added to what it gives."""
        return Grid(self.bound, float(self.steps), 0)

    @property
    def length(self) -> int:
        """Numbers of a client's vector: those of its update, and what travels beside them."""
        return self.parameters + len(self.beside)

    def at(self, bound: float) -> "Plan":
        """The same plan with updates that are clipped to another C: numbers and noise in steps stay as they are.

        Args:
            bound: C > 0, in units of the weights.
        """
        return replace(self, bound=bound)

    @property
    def misread(self) -> float:
        """The probability, at most, that some number of an update's sum is read as another: 2p·e^-50."""
        return 2 * self.parameters * math.exp(-(DEVIATIONS**2) / 2) if self.shares.base else 0.0

    def event(self, single: bool = False) -> Event:
        """What the sum of updates costs at worst, whoever is left: known before anything is sent.

        Args:
            single: as in `Shares.event`.
        """
        if not self.shares.base:
            return Unaccounted("the noise multiplier is 0: there is no noise")
        return self.shares.event(self.steps, self.parameters, single)

    def events(self, single: bool = False) -> tuple[Event, ...]:
        """What a round costs at worst: what travels beside the update is released first, each number by itself.

        Args:
            single: as in `Shares.event`.
        """
        return (*(one.event(single) for one in self.beside), self.event(single))

    def terms(self) -> bytes:
        """The plan as bytes, which are the same only for the same plan: for all parties to agree on."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    def _require_space_in_ring(self) -> None:
        members = self.shares.parties.members
        reach = max(self.shares.reach(self.steps), *(one.shares.reach(one.steps) for one in self.beside), 0)
        if reach >= 1 << (self.bits - 1):
            raise PrivacyError(
                f"a sum of {members} updates of {self.steps} steps with their noise reaches {reach}, and has no room in"
                f" {self.bits} bits; take 64 bits, fewer members or a smaller noise multiplier"
            )


def _steps(parameters: int) -> int:
    """D for p parameters.

    Raises:
        PrivacyError: they are so many that no grid is fine enough.
    """
    for exponent in range(COARSEST, FINEST + 1):
        if math.sqrt(parameters / 3) <= ROUNDING * (1 << exponent):
            return 1 << exponent
    raise PrivacyError(f"{parameters} parameters are more than a grid of 2^{FINEST} steps is fine enough for")
