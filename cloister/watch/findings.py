"""What is wrong with a federation: a few rules over one look at it.

| finding | level | when |
|---|---|---|
| `unreadable` | critical | the SuperLink does not answer, or a ledger, a run or the database cannot be read |
| `run-dead` | critical | the newest run recorded no end, and no process of this machine is at it |
| `run-failed` | critical | it ended by an error, a full disk, too few nodes or no replies |
| `budget-spent` | critical | it ended before its last round for want of budget, or 99 % of a ledger's budget is spent |
| `stalled` | critical | it runs, and nothing was written for longer than two rounds may take |
| `quorum-lost` | critical | it runs, and fewer nodes are online than a round needs |
| `budget-low` | warning | 90 % of a budget is spent |
| `no-ledger` | warning | a ledger is not there: nothing was recorded yet, or it was lost |
| `site-offline` | warning | a site that was online before is not |
| `rejected` | warning | replies of the last round did not count |
| `warning` | warning | a certificate ends within a month, or a clock is wrong |
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cloister.core.digits import at_most
from cloister.server.reports.status import RunState
from cloister.watch.snapshot import Snapshot

Level = Literal["warning", "critical"]
FAILURES = ("error", "disk", "no-replies", "too-few-nodes")
SPENT, LOW = 0.99, 0.9
"""Shares of a budget."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: a word of the table above.
        level: `critical` where nothing goes on without a person.
        text: for a person, one line.
        about: site, ledger or run that it is about; a finding of the same kind about the same thing is the same.
    """

    kind: str
    level: Level
    text: str
    about: str = ""


def findings(snapshot: Snapshot, now: float) -> list[Finding]:
    """Everything that is wrong, the critical first.

    Args:
        snapshot: of the federation.
        now: in seconds since 1970.
    """
    found = [
        *(Finding("unreadable", "critical", text, text) for text in snapshot.unreadable),
        *(_of_run(snapshot.run, now) if snapshot.run else ()),
        *_of_nodes(snapshot),
        # It is spent round by round.
        *(() if snapshot.hides_progress else _of_budgets(snapshot.spent)),
        *(Finding("no-ledger", "warning", f"there is no ledger {path}", path) for path in snapshot.missing),
        # A clock that is 3 s wrong now and 4 s at the next look is wrong once.
        *(Finding("warning", "warning", text, re.sub(r"\d+", "", text)) for text in snapshot.warnings),
    ]
    return sorted(found, key=lambda finding: finding.level != "critical")


def _of_run(run: RunState, now: float) -> Iterator[Finding]:
    where = f"run {run.path}, round {run.round} of {run.rounds}"
    if run.state == "dead":
        yield Finding("run-dead", "critical", f"{where}: no process is at it, and it did not end in order", run.path)
    if run.how in FAILURES:
        yield Finding("run-failed", "critical", f"{where}: {run.why or run.how}", run.path)
    if run.how == "budget":
        yield Finding("budget-spent", "critical", f"{where}: {run.why}", run.path)
    # Where times would tell of a draw, nothing can be read from the age of files, and nothing is told by the round.
    if run.state == "running" and not run.hides_times and now - run.written > 2 * run.timeout:
        text = f"{where}: nothing was written for {now - run.written:.0f} s, and a round may take {run.timeout:.0f} s"
        yield Finding("stalled", "critical", text, run.path)
    if run.rejected and not run.hides_progress:
        yield Finding("rejected", "warning", f"{where}: {len(run.rejected)} replies did not count", run.path)


def _of_nodes(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.nodes is None:
        return
    online = sum(node["status"] == "online" for node in snapshot.nodes)
    if snapshot.run and snapshot.run.state == "running" and online < snapshot.run.quorum:
        text = f"{online} nodes are online, and a round needs {snapshot.run.quorum}"
        yield Finding("quorum-lost", "critical", text, snapshot.run.path)
    for node in snapshot.nodes:
        if node["status"] == "offline":
            who = node["name"] or f"node {node['node-id']}"
            yield Finding("site-offline", "warning", f"{who} is offline since {node['since']}", who)


def _of_budgets(spent: Mapping[tuple[str, str], float]) -> Iterator[Finding]:
    for (ledger, unit), share in spent.items():
        if share >= LOW:
            kind, level = ("budget-spent", "critical") if share >= SPENT else ("budget-low", "warning")
            text = f"{at_most(100 * share, 3)} % of the budget for each {unit} is spent in {ledger}"
            yield Finding(kind, level, text, f"{ledger} {unit}")  # type: ignore[arg-type]
