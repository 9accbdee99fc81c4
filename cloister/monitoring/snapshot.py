"""Snapshot of a federation from outside, and the rules that find its problems.

All data comes from files and from Flower's interface for operators; training processes are not queried. If a run hides
its cohorts and times from its own files, they are hidden here too.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from cloister.deploy.sites import living_nodes
from cloister.deploy.warm.probe import warnings_of
from cloister.privacy.accounting.events import Unaccounted
from cloister.privacy.accounting.filters import largest_share
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.reports.rundir import LEDGER
from cloister.server.reports.status import RunState, hides_progress, run_directories, run_state
from cloister.utils.errors import CloisterError, ConfigError
from cloister.utils.text import at_most

Level = Literal["warning", "critical"]
FAILURES = ("error", "disk", "no-replies", "too-few-nodes")
SPENT, LOW = 0.99, 0.9
"""Shares of a budget at which findings begin."""


@dataclass(frozen=True)
class Places:
    """Sources of a snapshot.

    Attributes:
        connection: of Flower's `config.toml`; empty: no SuperLink is queried.
        runs: an `output-dir`; None: no run is read.
        ledgers: of a server or a node; empty: the ledgers beside the runs, used without `privacy.ledger-dir`.
        database: the SuperLink's state; None: its size is not measured.
    """

    connection: str = ""
    runs: Path | None = None
    ledgers: tuple[Path, ...] = ()
    database: Path | None = None


@dataclass(frozen=True)
class Snapshot:
    """State of a federation at one time.

    Attributes:
        run: the newest one; None: there is no run, or runs are not read.
        nodes: all registered nodes, as `cloister status --json` prints them; None: no SuperLink was queried.
        warnings: about clocks and certificates.
        spent: ledger and unit -> share of the budget that is spent.
        database_bytes: size of the state database with its log; None: not measured.
        unreadable: messages about unreadable sources.
        missing: absent ledgers: named ones, and the copy in a run that has ended.
        secret_runs: whether any running run, not only the newest, must hide the ends of its rounds.
        closed: ledger and unit for which some releases have no guarantee, so that no budget can be kept.
    """

    run: RunState | None = None
    nodes: tuple[Mapping[str, str], ...] | None = None
    warnings: tuple[str, ...] = ()
    spent: Mapping[tuple[str, str], float] = field(default_factory=dict)
    database_bytes: int | None = None
    unreadable: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    secret_runs: bool = False
    closed: tuple[tuple[str, str], ...] = ()

    @property
    def hides_progress(self) -> bool:
        """Return whether any running run must hide the ends of its rounds.

        If so, shared data is hidden too.
        """
        return self.secret_runs or (self.run is not None and self.run.hides_progress)


def look(places: Places) -> Snapshot:
    """Take a snapshot.

    Each unreadable source gives one message in `unreadable`; the others are read.
    """
    unreadable: list[str] = []
    nodes: tuple[Mapping[str, str], ...] | None = None
    warnings: tuple[str, ...] = ()
    if places.connection:
        with _noted(unreadable):
            found = tuple(living_nodes(places.connection))
            nodes, warnings = found, tuple(warnings_of(places.connection))
    run, spent, size = None, dict[tuple[str, str], float](), None
    closed: list[tuple[str, str]] = []
    secret = False
    with _noted(unreadable):
        if places.runs is not None:
            directories = run_directories(places.runs)
            secret = any(map(hides_progress, directories))
            if not places.runs.is_dir():
                raise ConfigError(f"there is no folder {places.runs}")
            run = run_state(directories[0]) if directories else None
    # Runs share the ledgers beside them without `privacy.ledger-dir`.
    for path in places.ledgers or ([] if places.runs is None else sorted((places.runs / "ledgers").glob("*.jsonl"))):
        with _noted(unreadable):
            ledger = Ledger(path)
            spent |= _spent(ledger)
            units = {entry.unit for entry in ledger.entries if isinstance(entry.event, Unaccounted)}
            closed += ((ledger.name, unit) for unit in sorted(units))
    if places.database is not None:
        with _noted(unreadable):
            size = places.database.stat().st_size
            with suppress(FileNotFoundError):  # SQLite removes its log when it closes
                size += places.database.with_name(f"{places.database.name}-wal").stat().st_size
    # A run that has charged an ε copies its ledger when it ends.
    copies = [Path(run.path) / LEDGER] if run and run.state == "ended" and run.epsilon is not None else []
    missing = tuple(str(path) for path in (*places.ledgers, *copies) if not path.exists())
    return Snapshot(run, nodes, warnings, spent, size, tuple(unreadable), missing, secret, tuple(closed))


@contextmanager
def _noted(unreadable: list[str]) -> Iterator[None]:
    """Append errors of the block to `unreadable`.

    Files may change while they are read.
    """
    try:
        yield
    except CloisterError as error:
        unreadable.append(str(error))
    except OSError as error:
        unreadable.append(f"{error.filename}: {error.strerror}")


def _spent(ledger: Ledger) -> dict[tuple[str, str], float]:
    """Return the spent share of every budget in force; an absent ledger has none."""
    found: dict[tuple[str, str], float] = {}
    for budget in ledger.budgets:  # the last one about a unit is in force
        relation = ledger.relation_of(budget.unit, budget.relation)
        found.pop((ledger.name, budget.unit), None)
        if budget.epsilon:
            spent = partial(ledger.spent, budget.unit, relation=relation)
            found[ledger.name, budget.unit] = largest_share(budget.filter, spent, budget.epsilon, budget.delta)
    return found


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        kind: first column of the module's table.
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
