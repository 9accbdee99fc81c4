"""What the dashboard shows: what `cloister status` and `cloister watch` see, kept for a few seconds."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from cloister.core.errors import ConfigError
from cloister.server.reports.rundir import RUN_NAME
from cloister.server.reports.status import RunState, run_directories, run_state
from cloister.watch.findings import Finding, findings
from cloister.watch.snapshot import Places, Snapshot, look

KEPT = 4.0
"""Seconds for which a look is good: however many pages are open, the SuperLink is not asked more often."""
LISTED = 100
"""Runs that are listed; of more, those begun last."""


@dataclass(frozen=True)
class Run:
    """A run directory in `output-dir`.

    Attributes:
        name: of the directory.
        path: of the directory.
        state: None where its files are broken.
        hides_ledger: whether ε of its ledger is left out: another run goes on whose rounds must not be seen to end, and
            may spend of the same one.
    """

    name: str
    path: Path
    state: RunState | None
    hides_ledger: bool = False


@dataclass(frozen=True)
class View:
    """One look.

    Attributes:
        snapshot: of nodes, warnings and ledgers.
        found: what is wrong.
        runs: begun last first.
        older: how many runs are not listed.
        when: of the look, in seconds since 1970.
    """

    snapshot: Snapshot
    found: tuple[Finding, ...]
    runs: tuple[Run, ...]
    older: int
    when: float

    @property
    def hides_progress(self) -> bool:
        """Whether a run goes on whose rounds must not be seen to end."""
        return self.snapshot.hides_progress

    def run(self, name: str) -> Run | None:
        """The run of a name. What a request asks for is compared with what there is, and is never part of a path."""
        return next((run for run in self.runs if run.name == name), None)


class CachedView:
    """Looks at a federation when somebody asks, and not again for some seconds.

    Args:
        places: to look at.
        clock: in seconds.
    """

    def __init__(self, places: Places, clock: Callable[[], float] = time.monotonic) -> None:
        self._places, self._clock = places, clock
        self._last: tuple[float, View] | None = None
        self._lock = Lock()

    def view(self) -> View:
        """The last look, or a new one if that is too old; while one looks, others wait for what it sees."""
        with self._lock:
            if self._last is None or self._clock() - self._last[0] >= KEPT:
                seen = _seen(self._places, time.time())
                self._last = self._clock(), seen
            return self._last[1]


def _seen(places: Places, now: float) -> View:
    snapshot = look(places)
    directories = _named(places.runs) if places.runs else {}
    runs = [Run(name, path, _state(path)) for name, path in list(directories.items())[:LISTED]]
    shown = tuple(_fit_to_show(run, snapshot, runs) for run in runs)
    return View(snapshot, tuple(findings(snapshot, now)), shown, max(len(directories) - LISTED, 0), now)


def _fit_to_show(run: Run, snapshot: Snapshot, runs: Iterable[Run]) -> Run:
    """The run, without what would tell of another one."""
    if run.state is None or run.state.state != "running":
        return run
    others = (other.state for other in runs if other is not run)
    secret = any(state is not None and state.hides_progress for state in others)
    if not secret and (run.state.hides_progress or not snapshot.hides_progress):
        return run
    return replace(run, state=run.state.without_ledger(), hides_ledger=True)


def _named(output: Path) -> dict[str, Path]:
    """Run directories by name; those whose name no run has are none of ours."""
    found = {path.resolve().name: path for path in run_directories(output)}
    return {name: path for name, path in found.items() if RUN_NAME.fullmatch(name)}


def _state(path: Path) -> RunState | None:
    try:
        return run_state(path)
    except ConfigError:
        return None
