"""Budget needs of several runs with shared ledgers, computed before any of them begins."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.filters import cost
from cloister.privacy.accounting.vocabulary import Relation
from cloister.server.prepare import Prepared


@dataclass(frozen=True)
class _Spender:
    """Runs of one configuration: all of their rounds, and the events of each round."""

    budget: PrivacyBudget
    events: tuple[Event, ...]
    rounds: int


def share_needed(runs: Iterable[tuple[Prepared, int]]) -> float:
    """Return the largest share of a remaining budget that runs spend at most.

    Args:
        runs: each with a budget, and its number of repetitions.

    Returns:
        1: the whole remainder; 0 without runs; infinite if nothing remains, or a release has no bound.

    Guarantee: the share is at least the one that the ledger will count, for any order of the runs.
    """
    ledgers: dict[Path, list[_Spender]] = {}
    for prepared, count in runs:
        plan = prepared.plan
        events = tuple(plan.strategy.events(prepared.layout))
        spender = _Spender(plan.budget, events, count * plan.config.num_rounds)
        ledgers.setdefault(plan.budget.ledger.path, []).append(spender)
    needed = [0.0]
    for spenders in ledgers.values():
        # The first run chooses the filter of a new ledger, and the strictest relation of all runs counts. The first run
        # depends on the degree of parallelism, so that the most expensive filter is used.
        strict, budget = any(each.budget.kept_for == "replace-one" for each in spenders), spenders[0].budget
        relation: Relation = "replace-one" if strict else "add-or-remove"
        for chosen in {spender.budget.filter for spender in spenders}:
            room = chosen.limit(budget.max_epsilon, budget.delta) - budget.ledger.spent(budget.unit, chosen, relation)
            spent = sum(each.rounds * cost(chosen, event, relation) for each in spenders for event in each.events)
            needed.append(spent / room if room > 0 else math.inf)
    return max(needed)
