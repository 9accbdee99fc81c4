"""A client's whole numbers, and what a server makes of their sum.

| edge case | what happens |
|---|---|
| an update with NaN, infinity, or squares that overflow | it counts as 0, and gets the same noise |
| several updates, or none | refused: a client has one |
| seeds of other components than those that belong there | refused; nothing was changed |
| a client that shows no seeds | its surplus stays in the sum, which has more noise than it has to |
| a client that shows wrong seeds | noise that nobody has added is taken off: the sum is worth less, not the privacy |
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
"""Bytes of a secret that noise is made from."""
Seeds = Mapping[int, bytes]
"""Number of a component -> the secret that its noise is made from."""


def whole_update(cohort: Cohort, plan: Plan) -> NDArray[np.int64]:
    """Clip a client's update to C and truncate it toward zero to steps of the grid.

    Args:
        cohort: of this one client.
        plan: of the round.

    Returns:
        k, shape (p,), all arrays after one another.

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
    """Everything that a client puts into a sum, before its noise: its update, and what travels beside it.

    Args:
        cohort: of this one client.
        plan: of the round.

    Returns:
        Whole numbers, shape (plan.length,).

    Raises:
        PrivacyError: the cohort is not one update of p numbers.

    Guarantee: each part is within the bound that its noise is for. All of it is 0 if the update is.
    """
    beside = np.array([one.number(cohort, plan.bound) for one in plan.beside], np.int64)
    return np.concatenate((whole_update(cohort, plan), beside))


def add_noise(numbers: NDArray[np.int64], plan: Plan, draw: Callable[[int], bytes], seeds: Seeds) -> None:
    """Add a client's shares of all noise, in place.

    Args:
        numbers: as `whole_input` gives them.
        plan: of the round.
        draw: gives so many secret bytes of the operating system, new ones each time: every part has noise of its own.
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
        shares: what the noise is made of.
        base: a secret of 32 bytes from the operating system, for this call alone, that is never shown to anybody.
        seeds: of all components, secrets of their own; only those up to the number of survivors are ever shown.

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
    """Take the noise off a sum that is in it because more clients are left than had to be.

    Args:
        total: sum of the survivors' numbers, shape (p,). It is left as it is.
        shares: what the noise of each was made of.
        survivors: u, how many there are.
        revealed: seeds of the components t + 1 to u, of each survivor that has shown them, once.

    Returns:
        A new sum, shape (p,). Where everybody has shown the seeds, the noise of each survivor in it has the variance
        `shares.left(survivors)`.

    Raises:
        PrivacyError: so many survivors cannot be, they are fewer than those who have shown seeds, or seeds are of other
            components.

    Guarantee: post-processing of the sum and the seeds. What is taken off leaves honest noise of `shares.variance`.
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
    """Add the components that seeds are there for."""
    for number, scale in shares.scales().items():
        if number in seeds:
            DiscreteGaussian(scale, seeds[number]).add(numbers)
