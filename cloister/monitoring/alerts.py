"""Rules that find the problems of a federation in one snapshot.

| finding | level | when |
|---|---|---|
| `unreadable` | critical | the SuperLink does not answer, or a ledger, a run or the database cannot be read |
| `run-dead` | critical | the newest run recorded no end, and no process of this machine executes it |
| `run-failed` | critical | the newest run ended by an error, a full disk, too few nodes or no replies |
| `budget-spent` | critical | a budget ended the run before its last round, or 99 % of a ledger's budget is spent |
| `stalled` | critical | the run goes on, but has written no file for longer than two rounds may take |
| `quorum-lost` | critical | the run goes on, and fewer nodes are online than a round needs |
| `budget-low` | warning | 90 % of a budget is spent |
| `no-ledger` | warning | a ledger is absent: it has no entry yet, or it was lost |
| `site-offline` | warning | a site that was online before is offline |
| `rejected` | warning | replies of the last round did not count |
| `warning` | warning | a certificate ends within a month, or a clock is wrong |
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cloister.monitoring.snapshot import Snapshot
from cloister.server.reports.status import RunState
from cloister.utils.text import at_most

Level = Literal["warning", "critical"]
FAILURES = ("error", "disk", "no-replies", "too-few-nodes")
SPENT, LOW = 0.99, 0.9
"""Shares of a budget at which findings begin."""


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        kind: a word of the table above.
        level: `critical` if an operator has to act.
        text: for the operator, one line.
        about: affected site, ledger or run. Findings of the same kind about the same thing are the same.
    """

    kind: str
    level: Level
    text: str
    about: str = ""


def findings(snapshot: Snapshot, now: float) -> list[Finding]:
    """Return all problems, the critical ones first.

    Args:
        snapshot: of the federation.
        now: in seconds since 1970.
    """
    found = [Finding("unreadable", "critical", text, text) for text in snapshot.unreadable]
    found += _of_run(snapshot.run, now) if snapshot.run else ()
    online = sum(node["status"] == "online" for node in snapshot.nodes or ())
    if snapshot.nodes is not None and snapshot.run and snapshot.run.state == "running" and online < snapshot.run.quorum:
        text = f"{online} nodes are online, and a round needs {snapshot.run.quorum}"
        found.append(Finding("quorum-lost", "critical", text, snapshot.run.path))
    for node in snapshot.nodes or ():
        if node["status"] == "offline":
            who = node["name"] or f"node {node['node-id']}"
            found.append(Finding("site-offline", "warning", f"{who} is offline since {node['since']}", who))
    # Spending changes with every round, so it would reveal progress.
    spent: Mapping[tuple[str, str], float] = {} if snapshot.hides_progress else snapshot.spent
    for (ledger, unit), share in spent.items():
        about = f"{ledger} {unit}"
        text = f"{at_most(100 * share, 3)} % of the budget for each {unit} is spent in {ledger}"
        if share >= SPENT:
            found.append(Finding("budget-spent", "critical", text, about))
        elif share >= LOW:
            found.append(Finding("budget-low", "warning", text, about))
    found += (Finding("no-ledger", "warning", f"there is no ledger {path}", path) for path in snapshot.missing)
    # Without digits, so that a clock that is 3 s wrong, then 4 s, is one finding.
    found += (Finding("warning", "warning", text, re.sub(r"\d+", "", text)) for text in snapshot.warnings)
    return sorted(found, key=lambda finding: finding.level != "critical")


def _of_run(run: RunState, now: float) -> Iterator[Finding]:
    where = f"run {run.path}, round {run.round} of {run.rounds}"
    if run.state == "dead":
        yield Finding("run-dead", "critical", f"{where}: no process runs it, and it did not end in order", run.path)
    if run.how in FAILURES:
        yield Finding("run-failed", "critical", f"{where}: {run.why or run.how}", run.path)
    if run.how in ("budget", "site-budgets"):
        yield Finding("budget-spent", "critical", f"{where}: {run.why}", run.path)
    # If times would reveal the cohort, the age of files is meaningless, and findings must not change with the round.
    if run.state == "running" and not run.hides_times and now - run.written > 2 * run.timeout:
        text = f"{where}: nothing was written for {now - run.written:.0f} s, and a round may take {run.timeout:.0f} s"
        yield Finding("stalled", "critical", text, run.path)
    if run.rejected and not run.hides_progress:
        yield Finding("rejected", "warning", f"{where}: {len(run.rejected)} replies did not count", run.path)
