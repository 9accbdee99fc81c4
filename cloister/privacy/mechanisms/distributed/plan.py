"""Public parameters of a round with distributed noise: grid, noise, ring, and events.

**Grid.** C is D steps. Truncating p numbers toward zero moves an update by √(p/3) steps where their fractions are
evenly spread, and by less than √p steps always. D is the least power of two from 2^20 on for which √(p/3) ≤ D/1000: for
up to 3.2 million parameters D = 2^20, and no rotation is needed.

**Noise.** The variance is (z·D)² + 25 steps², so that the sum costs at most as much as with a continuous Gaussian of
multiplier z.

**Ring.** The sum is computed in a ring of 2^b integers and decoded to -2^(b-1) … 2^(b-1) - 1. The n updates contribute
at most n·D to a number of it. Let V be the variance of a share with all of its components. A discrete Gaussian of
scale s is s²-subgaussian (Canonne, Kamath, Steinke, 2020), so the noise of n shares is n·V-subgaussian: a number of it
exceeds 10·√(n·V) with probability at most 2·e^-50. So if

    n·D + 10·√(n·V) < 2^(b-1),

a sum of p numbers is decoded wrongly with probability at most 2p·e^-50, below 4.7e-16 for 1.2 million. A wrong
decoding costs accuracy, not privacy: it is a function of the noised sum.

**Auxiliary numbers** may be in the same sum, on grids and with noise of their own (`beside`). All numbers and all noise
are in steps, so they do not depend on C, which may change from round to round.

| edge case | result |
|---|---|
| a multiplier of 0 | no noise; the event is `Unaccounted` |
| noise of less than 2^8 steps a share | it is increased: see `shares` |
| a sum that may exceed the ring | refused |
"""

import json
import math
from dataclasses import asdict, dataclass, replace

from cloister.core import check
from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.events import Event, Unaccounted
from cloister.privacy.mechanisms.distributed.beside import Beside
from cloister.privacy.mechanisms.distributed.shares import Parties, Shares, variance_of
from cloister.privacy.mechanisms.grid import FINEST, Grid

COARSEST = 20
"""Log₂ of the least number of steps in the bound of a client."""
ROUNDING = 1e-3
"""Largest L2 error of truncation, as a share of the bound."""


@dataclass(frozen=True)
class Plan:
    """Grid, noise and ring of a round with distributed noise.

    Attributes:
        bound: C > 0, in units of the weights.
        steps: D, a power of two: number of steps in C.
        shares: of the noise.
        parameters: p, numbers of an update.
        bits: of the ring, 32 or 64.
        beside: auxiliary numbers beside an update, one each.

    Guarantee: take any sum of at least t clients' numbers, without the components that belong to their number. It
        holds honest noise of variance (z·D)² + 25 steps² or more, and is decoded correctly except with probability
        2p·e^-50.

    Raises:
        PrivacyError: the sum might exceed the ring.
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
        """Return the plan of a round.

        Args:
            bound: C > 0, in units of the weights.
            multiplier: z ≥ 0: deviation of the sum's noise over C, of honest shares alone.
            parties: sizes of the cohort.
            parameters: p.
            bits: of the ring, 32 or 64.
            beside: auxiliary numbers beside an update.
            minimum_variance: of the noise, for any multiplier, in steps².

        Raises:
            PrivacyError: the sum might exceed the ring, or the noise is beyond the range of exact noise.

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
        fine = (1 << exponent for exponent in range(COARSEST, FINEST + 1))
        steps = next((each for each in fine if math.sqrt(parameters / 3) <= ROUNDING * each), None)
        if steps is None:
            raise PrivacyError(f"{parameters} parameters are more than a grid of 2^{FINEST} steps is fine enough for")
        shares = Shares.of(max(variance_of(multiplier, steps), minimum_variance), parties)
        return cls(bound, steps, shares, parameters, bits, beside)

    def __post_init__(self) -> None:
        members = self.shares.parties.members
        reach = max(self.shares.reach(self.steps), *(one.shares.reach(one.steps) for one in self.beside), 0)
        if reach >= 1 << (self.bits - 1):
            raise PrivacyError(
                f"a sum of {members} updates of {self.steps} steps with their noise reaches {reach}, and has no room in"
                f" {self.bits} bits; take 64 bits, fewer members or a smaller noise multiplier"
            )

    @property
    def grid(self) -> Grid:
        """Return the grid of a client's update, without noise.

        Shares are added to the truncated update.
        """
        return Grid(self.bound, float(self.steps), 0)

    @property
    def length(self) -> int:
        """Return the length of a client's vector: its update and the auxiliary numbers."""
        return self.parameters + len(self.beside)

    def at(self, bound: float) -> "Plan":
        """Return this plan with another clipping norm C, and the same steps.

        Args:
            bound: C > 0, in units of the weights.
        """
        return replace(self, bound=bound)

    def event(self, single: bool = False) -> Event:
        """Return the worst-case cost of the sum of updates, for any survivors.

        It is known before any client sends its update.

        Args:
            single: as in `Shares.event`.
        """
        if not self.shares.base:
            return Unaccounted("the noise multiplier is 0: there is no noise")
        return self.shares.event(self.steps, self.parameters, single)

    def events(self, single: bool = False) -> tuple[Event, ...]:
        """Return the worst-case cost of a round, with the sum of updates last.

        Each auxiliary number has an event of its own.

        Args:
            single: as in `Shares.event`.
        """
        return (*(one.event(single) for one in self.beside), self.event(single))

    def terms(self) -> bytes:
        """Return the plan as bytes, unique to this plan, for all parties to agree on."""
        return json.dumps(asdict(self), sort_keys=True).encode()
