"""What several runs together need of the budgets that they share, before any of them begins."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.filters import Filter, cost
from cloister.privacy.accounting.vocabulary import Relation
from cloister.server.prepare import Prepared


@dataclass(frozen=True)
class _Spender:
    """Runs of one configuration: all of their rounds, and what each round releases."""

    budget: PrivacyBudget
    events: tuple[Event, ...]
    rounds: int


def share_needed(runs: Iterable[tuple[Prepared, int]]) -> float:
    """What runs spend at most, as a share of what is left of the budget; the largest, where there are several ledgers.

    Args:
        runs: each with a budget, and how many there are of it.

    Returns:
        1: all that is left; 0 without runs; infinite where nothing is left, or a release has no bound.

    Guarantee: it is not below what the ledger will count, in whatever order the runs begin.
    """
    ledgers: dict[Path, list[_Spender]] = {}
    for prepared, count in runs:
        plan = prepared.plan
        events = tuple(plan.strategy.events(prepared.layout))
        spender = _Spender(plan.budget, events, count * plan.config.num_rounds)
        ledgers.setdefault(plan.budget.ledger.path, []).append(spender)
    return max(map(_needed, ledgers.values()), default=0.0)


def _needed(spenders: Sequence[_Spender]) -> float:
    """The share of one ledger.

    The run that begins first chooses the filter of a new ledger, and the strictest relation of all runs counts. Which
    run that is depends on how many run at a time, so that the dearest filter is taken.
    """
    strict = any(spender.budget.kept_for == "replace-one" for spender in spenders)
    relation: Relation = "replace-one" if strict else "add-or-remove"
    return max(_share(spenders, chosen, relation) for chosen in {spender.budget.filter for spender in spenders})


def _share(spenders: Sequence[_Spender], chosen: Filter, relation: Relation) -> float:
    budget = spenders[0].budget
    room = chosen.limit(budget.max_epsilon, budget.delta) - budget.ledger.spent(budget.unit, chosen, relation)
    spent = sum(each.rounds * cost(chosen, event, relation) for each in spenders for event in each.events)
    return spent / room if room > 0 else math.inf
