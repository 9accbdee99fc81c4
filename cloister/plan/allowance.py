"""Budgets of the server, the clients and a site's policy: the planned rounds that fit, and the remaining share."""

from collections.abc import Iterator
from dataclasses import dataclass

from cloister.client.mods.budget import planned_charges
from cloister.client.mods.local_noise import leakage_budget, leaked
from cloister.plan.nodes import Asked
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.filters import share
from cloister.privacy.accounting.vocabulary import Unit
from cloister.server.forecast import Forecast


@dataclass(frozen=True)
class Allowance:
    """Planned rounds that a budget covers.

    Attributes:
        whose: owner of the budget, in words.
        unit: of the budget.
        limit: ε; for a neighbourhood, the leakage.
        delta: at which ε is computed.
        before, after: share that is spent before the run, and after it.
        rounds: number of planned rounds that the budget covers.
        more: number of further such rounds that would fit afterwards; None: they cost nothing.
    """

    whose: str
    unit: Unit
    limit: float
    delta: float
    before: float
    after: float
    rounds: int
    more: int | None


def allowance_of_server(forecast: Forecast) -> Iterator[Allowance]:
    """Yield the allowance of `privacy.max-epsilon`, if that is set."""
    budget = forecast.prepared.plan.budget
    if forecast.before is None or forecast.after is None:
        return
    yield Allowance(
        "the server's, privacy.max-epsilon",
        budget.unit,
        budget.max_epsilon,
        budget.delta,
        forecast.before,
        forecast.after,
        forecast.rounds,
        forecast.more,
    )


def allowances_of_node(node: Asked, whose: str, rounds: int) -> Iterator[Allowance]:
    """Yield the allowances of a node's budgets.

    They are the budgets of its policy, `privacy.client-max-epsilon` and `privacy.max-leakage`.

    Args:
        node: as it is before the run.
        whose: owner of the budget, in words.
        rounds: number of rounds in which the node is asked to train.
    """
    for budget, charge in planned_charges(node.request, node.node):
        yield from _of(budget, charge.events, whose, rounds)
    if node.request.config.privacy.client.counts_leakage:
        yield from _of(leakage_budget(node.request, node.node), leaked(node.request), whose, rounds)


def _of(budget: PrivacyBudget, events: tuple[Event, ...], whose: str, rounds: int) -> Iterator[Allowance]:
    if not budget.max_epsilon:
        return
    fits, spent = budget.fits(events), budget.spent()
    covered = rounds if fits is None else min(rounds, fits)
    after = spent + covered * sum(map(budget.cost, events)) if covered else spent
    yield Allowance(
        whose,
        budget.unit,
        budget.max_epsilon,
        budget.delta,
        share(spent, budget.limit),
        share(after, budget.limit),
        covered,
        None if fits is None else fits - covered,
    )
