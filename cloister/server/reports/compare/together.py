"""Composition of several runs on the same data: the guarantee for a choice among them."""

import math
from collections.abc import Sequence

from cloister.core.digits import at_most
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Relation
from cloister.privacy.claims.premises import BUDGET_FIXED
from cloister.privacy.claims.server import ALL_RUNS
from cloister.server.reports.compare.runs import Kind, RunSummary

LEDGER = "ledger.jsonl"
DATA = ("task.name", "task.data-path", "privacy.data-identity")
"""Keys that identify the data of a run."""
EACH = "Whoever chooses one of the runs by what they released has released all of them: their costs add up."


def told_together(runs: Sequence[RunSummary], kinds: Sequence[Kind]) -> str:
    """Return a sentence on the composition of runs that have an ε.

    Args:
        runs: two or more.
        kinds: of their ε.
    """
    epsilon = epsilon_together(runs, kinds)
    if epsilon is None:
        return EACH
    if math.isinf(epsilon):
        return "No ε bounds all runs together, nor a choice among them: some of them released without a guarantee."
    budget = _budget(runs)
    kept = f"; the budget of ε = {at_most(budget, 6)} holds whatever they were set up by" if budget else ""
    return (
        f"All of them together, with what else is in their ledgers, come to ε = {at_most(epsilon)} if none was set up, "
        "or resumed, because of what had been released, and no other run in those ledgers was ended because of "
        f"it{kept}. This holds for a run that is chosen among them; its own ε does not."
    )


def epsilon_together(runs: Sequence[RunSummary], kinds: Sequence[Kind]) -> float | None:
    """Return ε of all ledger entries; ∞ without a bound, None if unknown.

    Args:
        runs: on the same data. A run that its own releases ended counts with all planned rounds, as in its own claim.
        kinds: of their ε; they compose if they are one kind, and the server's.
    """
    paths = [run.directory / LEDGER for run in runs]
    said = [run.facts.statement for run in runs if run.facts.statement is not None]
    same = len({tuple(run.facts.config.get(key) for key in DATA) for run in runs}) == 1
    if len(kinds) != 1 or kinds[0].side != "server" or not same or not all(path.is_file() for path in paths):
        return None
    if len(said) < len(runs):
        return None  # the end of an unfinished run decides what it counts
    # Each run directory contains a copy of a shared ledger, taken at the end of that run.
    entries = {entry.release: entry for path in paths for entry in Ledger(path).entries if entry.unit == "client"}
    relation: Relation = "replace-one" if kinds[0].relation == "replace-one" else "add-or-remove"
    account = Account((entry.event for entry in entries.values()), relation, insiders=True)
    for event, count in (item for statement in said for item in statement.planned):
        account = account.plus(event, count)
    return best_epsilon(account, kinds[0].delta)[0]


def _budget(runs: Sequence[RunSummary]) -> float:
    """Return the budget that bounds all runs, even adaptive ones; 0: none.

    It was fixed before all releases, and all runs' ledgers are copies of one, at the end of each run. Then the longest
    contains the heads of all others. Separate ledgers have separate budgets, and both may be spent.
    """
    kept = []
    for run in runs:
        claimed = run.facts.statement.claim.figures if run.facts.statement is not None else ()
        fixed = (figure for figure in claimed if figure.budget and BUDGET_FIXED not in figure.premises)
        kept.append(next((figure.epsilon or 0.0 for figure in fixed if figure.scope == ALL_RUNS), 0.0))
    if not all(kept):
        return 0.0
    ledgers = [Ledger(run.directory / LEDGER) for run in runs]
    known = max((ledger.heads() for ledger in ledgers), key=len)
    return max(kept) if all(ledger.head in known for ledger in ledgers) else 0.0
