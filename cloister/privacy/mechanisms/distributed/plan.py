"""Plan of a round with distributed noise, and the encoding of a client's update by it.

The public parameters of a round are grid, noise, ring, and events.

**Grid.** C is D steps. Truncating p numbers toward zero moves an update by √(p/3) steps where their fractions are
evenly spread, and by less than √p steps always. D is the least power of two from 2^20 on for which √(p/3) ≤ D/1000: for
up to 3.2 million parameters D = 2^20, and no rotation is needed.

**Noise.** The variance is (z·D)² + 25 steps², so that the sum costs at most as much as with a continuous Gaussian of
multiplier z.

**Ring.** The sum is computed in a ring of 2^b integers and decoded to -2^(b-1) … 2^(b-1) - 1. The n updates contribute
at most n·m·D to a number of it; m is 1 for a mean. Let V be the variance of a share with all of its components. A
discrete Gaussian of scale s is s²-subgaussian (Canonne, Kamath, Steinke, 2020), so the noise of n shares is
n·V-subgaussian: a number of it exceeds 10·√(n·V) with probability at most 2·e^-50. So if

    n·m·D + 10·√(n·V) < 2^(b-1),

a sum of p numbers is decoded wrongly with probability at most 2p·e^-50, below 4.7e-16 for 1.2 million. A wrong
decoding costs accuracy, not privacy: it is a function of the noised sum.

**Auxiliary numbers** may be in the same sum, on grids and with noise of their own (`shares.Beside`). All numbers and
all noise are in steps, so they do not depend on C, which may change from round to round.

| edge case | result |
|---|---|
| a multiplier of 0 | no noise; the event is `Unaccounted` |
| noise of less than 2^8 steps a share | it is increased: see `shares` |
| a sum that may exceed the ring | refused |

**Encoding.** A client's update becomes noised integers; surplus noise is removed from their sum.

| edge case | result |
|---|---|
| an update with NaN, infinity, or squares that overflow | it counts as 0, and gets the same noise |
| several updates, or none | refused: a client has one |
| seeds of unexpected components | refused; the sum is unchanged |
| a client that reveals no seeds | its surplus stays in the sum, which has more noise than necessary |
| a client that reveals wrong seeds | noise that is not in the sum is subtracted: accuracy suffers, not privacy |
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.accounting.events import Event, Unaccounted
from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian
from cloister.privacy.mechanisms.distributed.shares import Beside, Parties, Shares, variance_of
from cloister.privacy.mechanisms.grid import FINEST, Grid
from cloister.privacy.mechanisms.release import Total
from cloister.utils import check
from cloister.utils.cohort import Cohort
from cloister.utils.errors import PrivacyError

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
        units: m, largest number of contributions of D steps in a client's vector.

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
    units: int = 1

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
        units: int = 1,
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
            units: m.

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
        return cls(bound, steps, shares, parameters, bits, beside, units)

    def __post_init__(self) -> None:
        members = self.shares.parties.members
        most = self.units * self.steps
        reach = max(self.shares.reach(most), *(one.shares.reach(one.steps) for one in self.beside), 0)
        if reach >= 1 << (self.bits - 1):
            raise PrivacyError(
                f"a sum of {members} updates of {most} steps with their noise reaches {reach}, and has no room in"
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
        return _terms(self)


@lru_cache(maxsize=64)
def _terms(plan: Plan) -> bytes:
    return json.dumps(asdict(plan), sort_keys=True).encode()


SECRET = 32
"""Bytes of a secret from which noise is derived."""
Seeds = Mapping[int, bytes]
"""Number of a component -> the secret from which its noise is derived."""


def quantize_update(cohort: Cohort, plan: Plan) -> NDArray[np.int64]:
    """Clip a client's update to C and truncate it toward zero to steps of the grid.

    Args:
        cohort: of this one client.
        plan: of the round.

    Returns:
        k, shape (p,), all arrays concatenated.

    Raises:
        PrivacyError: the cohort is not one update of p numbers.

    Guarantee: Σk² ≤ D², verified for these numbers.
    """
    if len(cohort) != 1 or cohort.layout.size != plan.parameters:
        raise PrivacyError(
            f"noise in shares is planned for one update of {plan.parameters} numbers, found {len(cohort)} of"
            f" {cohort.layout.size}"
        )
    total = Total(plan.grid, cohort.layout, cohort.sent)
    total.add(clip(cohort, plan.bound))
    return total.whole()


def encode_client_input(cohort: Cohort, plan: Plan) -> NDArray[np.int64]:
    """Return a client's input to a sum: its update and the auxiliary numbers.

    Noise is not included.

    Args:
        cohort: of this one client.
        plan: of the round.

    Returns:
        Whole numbers, shape (plan.length,).

    Raises:
        PrivacyError: the cohort is not one update of p numbers.

    Guarantee: each part is within the bound of its noise. If the update is 0, the whole input is 0.
    """
    beside = np.array([one.number(cohort, plan.bound) for one in plan.beside], np.int64)
    return np.concatenate((quantize_update(cohort, plan), beside))


def add_noise(numbers: NDArray[np.int64], plan: Plan, draw: Callable[[int], bytes], seeds: Seeds) -> None:
    """Add a client's shares of all noise, in place.

    Args:
        numbers: input from `encode_client_input`.
        plan: of the round.
        draw: returns this many secret bytes of the operating system, new ones in each call: every part has noise of
            its own.
        seeds: of the components of the update's noise, as in `add_share`.

    Raises:
        PrivacyError: a component has no seed, or a seed no component.
    """
    add_share(numbers[: plan.parameters], plan.shares, draw(SECRET), seeds)
    for place, one in enumerate(plan.beside, plan.parameters):
        add_share(numbers[place : place + 1], one.shares, draw(SECRET), {})


def add_share(numbers: NDArray[np.int64], shares: Shares, base: bytes, seeds: Seeds) -> None:
    """Add a client's share of the noise, in place.

    Args:
        numbers: of its update, shape (p,).
        shares: scales of the noise.
        base: a secret of 32 bytes from the operating system, for this call alone, that the client never reveals.
        seeds: separate secrets of all components; the client reveals only those up to the number of survivors.

    Raises:
        PrivacyError: a component has no seed, or a seed no component.
    """
    shares.require(seeds, shares.parties.members)
    if shares.base:
        DiscreteGaussian(shares.base, base).add(numbers)
    _add(numbers, shares, seeds)


def without_surplus(
    total: NDArray[np.int64], shares: Shares, survivors: int, revealed: Iterable[Seeds]
) -> NDArray[np.int64]:
    """Subtract the surplus noise of a sum with more survivors than the threshold.

    Args:
        total: sum of the survivors' numbers, shape (p,). It stays unchanged.
        shares: scales of each survivor's noise.
        survivors: u, their number.
        revealed: seeds of the components t + 1 to u, once for each survivor that revealed them.

    Returns:
        A new sum, shape (p,). If all survivors revealed their seeds, the noise of each in it has the variance
        `shares.left(survivors)`.

    Raises:
        PrivacyError: the number of survivors is out of range or below that of the revealed seeds, or seeds are of
            other components.

    Guarantee: post-processing of the sum and the seeds. The result has honest noise of `shares.variance` or more.
    """
    shares.left(survivors)
    shown = list(revealed)
    if len(shown) > survivors:
        raise PrivacyError(f"{len(shown)} clients show seeds, of {survivors} survivors")
    for seeds in shown:
        shares.require(seeds, survivors)
    surplus = np.zeros_like(total)
    for seeds in shown:
        _add(surplus, shares, seeds)
    return total - surplus


def _add(numbers: NDArray[np.int64], shares: Shares, seeds: Seeds) -> None:
    """Add the components that have seeds."""
    for number, scale in shares.scales().items():
        if number in seeds:
            DiscreteGaussian(scale, seeds[number]).add(numbers)
