"""View of the dashboard: a snapshot of the federation and the states of its runs, cached for a few seconds."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from cloister.core.errors import ConfigError
from cloister.server.reports.rundir import RUN_NAME
from cloister.server.reports.status import RunState, run_directories, run_state
from cloister.watch.findings import Finding, findings
from cloister.watch.snapshot import Places, Snapshot, look

KEPT = 4.0
"""Seconds for which a view is valid, so that many open pages do not query the SuperLink more often."""
LISTED = 100
"""Maximum number of listed runs; the newest ones are listed."""


@dataclass(frozen=True)
class View:
    """State of a federation at one time.

    Attributes:
        snapshot: of nodes, warnings and ledgers.
        found: its problems.
        runs: name of the directory -> state of the run, newest first; None where its files are broken.
        older: number of runs that are not listed.
        when: of the snapshot, in seconds since 1970.
    """

    snapshot: Snapshot
    found: tuple[Finding, ...]
    runs: dict[str, RunState | None]
    older: int
    when: float


class CachedView:
    """Views of a federation, renewed on request after `KEPT` seconds.

    Args:
        places: sources of the snapshots.
        clock: in seconds.
    """

    def __init__(self, places: Places, clock: Callable[[], float] = time.monotonic) -> None:
        self._places, self._clock = places, clock
        self._last: tuple[float, View] | None = None
        self._lock = Lock()

    def view(self) -> View:
        """Return the last view, or a new one if that is too old; one thread at a time makes one."""
        with self._lock:
            if self._last is None or self._clock() - self._last[0] >= KEPT:
                seen = _seen(self._places)
                self._last = self._clock(), seen
            return self._last[1]


def _seen(places: Places) -> View:
    now, snapshot = time.time(), look(places)
    found = {path.resolve().name: path for path in (run_directories(places.runs) if places.runs else [])}
    # Other directories were not made by a run.
    named = {name: path for name, path in found.items() if RUN_NAME.fullmatch(name)}
    runs: dict[str, RunState | None] = {}
    for name, path in list(named.items())[:LISTED]:
        try:
            runs[name] = run_state(path)
        except ConfigError:
            runs[name] = None
    secret = {name for name, state in runs.items() if state is not None and state.hides_progress}
    for name, state in runs.items():
        # ε of a shared ledger would reveal the rounds of another running run that must hide them.
        if state is None or state.state != "running":
            continue
        if secret - {name} or (snapshot.hides_progress and not state.hides_progress):
            runs[name] = state.without_ledger()
    return View(snapshot, tuple(findings(snapshot, now)), runs, max(len(named) - LISTED, 0), now)
