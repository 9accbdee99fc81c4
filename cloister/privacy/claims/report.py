"""Reports on ledgers for a terminal: releases, budgets, and the composed leakage of clients."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
from rich.console import Console
from rich.markup import escape

from cloister.privacy.accounting.account import by_accountant
from cloister.privacy.accounting.events import Unaccounted
from cloister.privacy.accounting.filters import largest_share
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Relation
from cloister.privacy.claims.premises import UNCHOSEN, condition
from cloister.utils import check
from cloister.utils.files import JsonTable
from cloister.utils.terminal import table
from cloister.utils.text import at_most, counted

RUN_WIDTH = 20
"""Digits of the largest number that Flower gives a run."""


def print_ledger(ledger: Ledger, delta: float, relation: str) -> None:
    """Print a line a release, why some have no guarantee, the budgets, and what the releases amount to, unit by unit.

    Against the other clients: what draws without replacement hide from strangers does not count.

    Args:
        ledger: of a server or of a node.
        delta: at which ε is computed.
        relation: which datasets are neighbours.
    """
    check.one_of(("add-or-remove", "replace-one"), relation=relation)
    check.inner(delta=delta)
    found = Counter(
        (entry.unit, entry.event.reason) for entry in ledger.entries if isinstance(entry.event, Unaccounted)
    )
    # The table has the number of each reason for no guarantee; the reasons stand below it.
    numbers = {reason: number for number, reason in enumerate(dict.fromkeys(reason for _, reason in found), start=1)}
    console = Console()
    rows = (
        (
            _date(entry.time),
            str(entry.round),
            entry.unit,
            escape(entry.run),
            escape(entry.mechanism),
            f"no guarantee ({numbers[entry.event.reason]})"
            if isinstance(entry.event, Unaccounted)
            else escape(str(entry.event)),
            "yes" if entry.done else "unknown: counts",
        )
        for entry in ledger.entries
    )
    columns = ("opened", "round", "unit", "run", "mechanism", "event", "handed on")
    # For terminals of 80 columns. A run of Flower is a number, and does not wrap; names from users may be long.
    is_long = any(len(entry.run) > RUN_WIDTH for entry in ledger.entries)
    whole = (0, 1, 2, *([] if is_long else [3]), 6)
    console.print(table(columns, rows, escape(str(ledger.path)), whole=whole, box=None))
    amounts = _amounts(ledger, delta, relation)  # type: ignore[arg-type]
    others = [f"data at the same place has a ledger under another name: {name}" for name in ledger.others]
    budgets = []
    for each in ledger.budgets:
        limit = f"ε = {at_most(each.epsilon, 6)} at δ = {at_most(each.delta)}" if each.epsilon else "none"
        budgets.append(
            f"budget from {_date(each.time)}, run {each.run}, unit {each.unit}: {limit}, kept by {each.filter}"
        )
    reasons = [
        f"no guarantee ({numbers[reason]}), unit {unit}, {counted(count, 'release')}: {reason}"
        for (unit, reason), count in found.items()
    ]
    for line in (*reasons, *budgets, *others, *amounts):
        # Whole at any width: reasons are for reading, and lines for searching.
        console.print(escape(line), soft_wrap=True)


def _amounts(ledger: Ledger, delta: float, relation: Relation) -> list[str]:
    """Return the total of the releases about each unit, and its share of the budget."""
    lines = []
    # What has no bound comes last: a node with DP-SGD protects examples, and states none for the client as a whole.
    unbounded = {entry.unit for entry in ledger.entries if isinstance(entry.event, Unaccounted)}
    for unit in sorted({entry.unit for entry in ledger.entries}, key=lambda unit: (unit in unbounded, unit)):
        if unit == "neighbourhood":
            lines.append(f"neighbourhood: leakage {at_most(ledger.leakage())} within it")
            continue
        found = by_accountant(ledger.account(unit, relation, insiders=True), delta)
        if math.isinf(min(found.values())):
            lines.append(f"{unit}, {relation}: no ε bounds these releases")
        else:
            figures = "; ".join(f"ε = {at_most(epsilon)} by {name}" for name, epsilon in found.items())
            lines.append(f"{unit}, {relation}, δ = {at_most(delta)}: {figures}; {condition([UNCHOSEN])}")
        last = next((budget for budget in reversed(ledger.budgets) if budget.unit == unit), None)
        if last is None or not last.epsilon:
            continue
        spent = partial(ledger.spent, unit, relation=relation)
        share = largest_share(last.filter, spent, last.epsilon, last.delta)
        told = f"{at_most(last.epsilon, 6)} at δ = {at_most(last.delta)}"
        chosen = f"also if later runs were chosen by what earlier ones released; {at_most(100 * share, 3)} % spent"
        over = f"{unit}, {relation}: more is spent than the budget of ε = {told}"
        lines.append(over if share > 1 else f"{unit}, {relation}: ε ≤ {told}, {chosen}")
    return lines


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


BINS = 10
"""Bins of the histogram of composed leakage."""
BAR = 40
"""Characters of the longest printed bar."""


def leakage_report(spent: Sequence[float]) -> dict[str, object]:
    """Return median, maximum and histogram of the clients' composed leakage.

    Source: Galli et al. (2023), Table 1 and Figure 4.

    Args:
        spent: Σ ε·radius of each client; ∞ after a release without noise: such clients are only counted.
    """
    released = np.array([leakage for leakage in spent if 0 < leakage < math.inf])
    numbers: dict[str, object] = {
        "clients": len(spent),
        "that-released": len(released),
        "without-limit": sum(map(math.isinf, spent)),
    }
    if not len(released):
        return numbers
    # From 0: between leakages that are equal up to rounding, bins would have no width.
    counts, edges = np.histogram(released, BINS, range=(0.0, released.max()))
    return {
        **numbers,
        "median": float(np.median(released)),
        "maximum": float(released.max()),
        "histogram": {"edges": [float(edge) for edge in edges], "counts": [int(count) for count in counts]},
    }


def render_leakage(report: JsonTable) -> list[str]:
    """Return the report as lines of plain text, the histogram as bars."""
    lines = [f"{report['clients']} clients, of which {report['that-released']} released something with noise"]
    if report["without-limit"]:
        lines.append(f"{report['without-limit']} clients released something without noise: their leakage has no limit")
    if not report["that-released"]:
        return lines
    lines.append(f"composed leakage: median {at_most(report['median'])}, maximum {at_most(report['maximum'])}")
    edges, counts = report["histogram"]["edges"], report["histogram"]["counts"]
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        lines.append(f"  {low:9.4g} to {high:9.4g} {count:6} {'#' * math.ceil(count / max(counts) * BAR)}".rstrip())
    return lines
