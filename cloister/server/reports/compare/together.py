"""What several runs on the same data come to together: what holds for whoever chooses one of them."""

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
"""Keys that say which data a run is about."""
EACH = "Whoever chooses one of the runs by what they released has released all of them: their costs add up."


def told_together(runs: Sequence[RunSummary], kinds: Sequence[Kind]) -> str:
    """What runs with an ε come to together, in a sentence.

    Args:
        runs: two or more.
        kinds: what their ε are about.
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
    """ε of everything in the ledgers of runs: ∞ where there is no bound, None where it cannot be told.

    Args:
        runs: on the same data. One that was ended by what it had released counts with all rounds that were planned,
            as in its own claim.
        kinds: what their ε are about; they add up where they are of one kind, and the server's.
    """
    paths = [run.directory / LEDGER for run in runs]
    said = [run.facts.statement for run in runs if run.facts.statement is not None]
    same = len({tuple(run.facts.config.get(key) for key in DATA) for run in runs}) == 1
    if len(kinds) != 1 or kinds[0].side != "server" or not same or not all(path.is_file() for path in paths):
        return None
    if len(said) < len(runs):
        return None  # how a run ends that has not ended decides what it counts
    # A ledger that several runs share is in the directory of each, as it was at its end.
    entries = {entry.release: entry for path in paths for entry in Ledger(path).entries if entry.unit == "client"}
    relation: Relation = "replace-one" if kinds[0].relation == "replace-one" else "add-or-remove"
    account = Account((entry.event for entry in entries.values()), relation, insiders=True)
    for event, count in (item for statement in said for item in statement.planned):
        account = account.plus(event, count)
    return best_epsilon(account, kinds[0].delta)[0]


def _budget(runs: Sequence[RunSummary]) -> float:
    """The budget that was kept over all of them, whatever they were set up by; 0 where there is none."""
    kept = [_kept(run) for run in runs]
    return max(kept) if all(kept) and _share_a_ledger(runs) else 0.0


def _kept(run: RunSummary) -> float:
    """The budget of a run; 0 without one, and where it may have been set because of what had been released."""
    claimed = run.facts.statement.claim.figures if run.facts.statement is not None else ()
    kept = (figure for figure in claimed if figure.budget and BUDGET_FIXED not in figure.premises)
    everything = (figure for figure in kept if figure.scope == ALL_RUNS)
    return next((figure.epsilon or 0.0 for figure in everything), 0.0)


def _share_a_ledger(runs: Sequence[RunSummary]) -> bool:
    """Whether the ledgers of all runs are one, as it was at the end of each: the longest has the heads of all others.

    Each of two ledgers has a budget of its own, and both may be spent.
    """
    ledgers = [Ledger(run.directory / LEDGER) for run in runs]
    known = max((ledger.heads() for ledger in ledgers), key=len)
    return all(ledger.head in known for ledger in ledgers)
