"""Encoding of a client's update as noised integers, and removal of surplus noise from their sum.

| edge case | result |
|---|---|
| an update with NaN, infinity, or squares that overflow | it counts as 0, and gets the same noise |
| several updates, or none | refused: a client has one |
| seeds of unexpected components | refused; the sum is unchanged |
| a client that reveals no seeds | its surplus stays in the sum, which has more noise than necessary |
| a client that reveals wrong seeds | noise that is not in the sum is subtracted: accuracy suffers, not privacy |
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from cloister.core.cohort import Cohort
from cloister.core.errors import PrivacyError
from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian
from cloister.privacy.mechanisms.distributed.plan import Plan
from cloister.privacy.mechanisms.distributed.shares import Shares
from cloister.privacy.mechanisms.total import Total

SECRET = 32
"""Bytes of a secret from which noise is derived."""
Seeds = Mapping[int, bytes]
"""Number of a component -> the secret from which its noise is derived."""


def whole_update(cohort: Cohort, plan: Plan) -> NDArray[np.int64]:
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


def whole_input(cohort: Cohort, plan: Plan) -> NDArray[np.int64]:
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
    return np.concatenate((whole_update(cohort, plan), beside))


def add_noise(numbers: NDArray[np.int64], plan: Plan, draw: Callable[[int], bytes], seeds: Seeds) -> None:
    """Add a client's shares of all noise, in place.

    Args:
        numbers: input from `whole_input`.
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
