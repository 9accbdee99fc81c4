"""Execution of a sweep, from its file to its results, as a comparison of its cells.

Cells run one or several at a time, each in a process that frees its memory at its end.
"""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cloister.config.io import Scalar, toml_of
from cloister.config.run import changed, shown
from cloister.server.reports.compare.comparison import Comparison, Group, compared, lines, markdown, record
from cloister.server.reports.compare.page import pictures, write_page, write_png
from cloister.server.reports.compare.runs import better, differing, read_runs
from cloister.server.stopping import Stop
from cloister.sweep.cells import Cell, Sweep, cells_of, refuse_past_budget
from cloister.utils.crash import INTERRUPTED
from cloister.utils.errors import ConfigError
from cloister.utils.files import atomic_path
from cloister.utils.text import clean
from cloister.utils.threads import free_memory

COMMAND = "from cloister.__main__ import main; main()"
"""Code of the installed command, which may not be on the path."""
MAX_WORKERS = 2
"""Default limit of cells that run at a time."""
SPARE = 1.25
"""Assumed memory of a cell, relative to the peak of the first one."""
PAUSE = 0.1
"""Seconds between two polls of the processes."""
BUDGET = 3
"""Exit code of a run that a budget ended."""
Told = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """Result of a cell's process.

    Attributes:
        cell: of the process.
        code: exit code; below 0: the signal that killed it.
        seconds: that it took.
        peak: largest resident memory in bytes.
        last: last line of its output.
    """

    cell: Cell
    code: int
    seconds: float
    peak: int
    last: str

    @property
    def outcome(self) -> int:
        """Return the exit code; 0 if the budgets of its own clients ended the run, for the cell is finished then."""
        return 0 if self.code == BUDGET and self.cell.is_ended_by_clients() else self.code


class Process:
    """Process of a running cell.

    Args:
        cell: to run.
        folder: for its settings and its output.
    """

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell = cell
        self._log = folder / f"{cell.name}.log"
        settings = folder / f"{cell.name}.toml"
        settings.write_text(as_toml(changed(cell.config.flat())), encoding="utf-8")
        command = [sys.executable, "-c", COMMAND, "run", "--clients", str(cell.clients), "-c", str(settings)]
        self._started = time.monotonic()
        with self._log.open("wb") as log:
            # In a separate session, Ctrl-C reaches only the sweep, which then asks each cell to stop.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def ended(self) -> Ended | None:
        """Return the result of the process; None while it runs."""
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - self._started
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else ""
        return Ended(self.cell, self._process.returncode, seconds, 1024 * usage.ru_maxrss, last)

    def stop(self) -> None:
        """Ask the process to stop: it finishes the current aggregation, and saves."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()


def as_toml(settings: Mapping[str, Scalar]) -> str:
    """Format settings as TOML for `cloister run -c FILE`.

    Args:
        settings: dotted keys.
    """
    return "".join(f"{key} = {toml_of(value)}\n" for key, value in settings.items())


class Runner:
    """Runner of cells.

    Args:
        folder: for the settings and the output of the cells.
        jobs: number of cells that run at a time; 0: as memory allows, from the peak of the first one.
        told: receives progress lines for the user.

    Attributes:
        ended: results of the cells, in the order of their ends.
        stopped: whether the user has stopped the sweep.
    """

    def __init__(self, folder: Path, jobs: int, told: Told) -> None:
        self.folder, self.jobs, self.told = folder, jobs, told
        self.ended: list[Ended] = []
        self.stopped = False
        self._hides_times = False
        self._waiting: deque[Cell] = deque()
        self._running: list[Process] = []

    def run(self, cells: Sequence[Cell]) -> None:
        """Run cells that have no result yet.

        When the user stops the sweep, running cells are asked to stop.

        Args:
            cells: none of which is running.
        """
        for cell in cells:
            put_aside(cell.directory)
        self._waiting.extend(cells)
        self._hides_times = any(cell.hides_times for cell in cells)
        try:
            with Stop().listening() as stop:
                while self._waiting or self._running:
                    if stop.asked and not self.stopped:
                        self.stopped = True
                        self._waiting.clear()
                        self.told(f"stopped: {len(self._running)} cells are asked to end in order; what is done stays")
                        for process in self._running:
                            process.stop()
                    while self._waiting and len(self._running) < (self.jobs or 1):
                        self._running.append(Process(self._waiting.popleft(), self.folder))
                    time.sleep(PAUSE)
                    for process in list(self._running):
                        if (found := process.ended()) is not None:
                            self._running.remove(process)
                            self._note(found)
        finally:
            for process in self._running:
                process.kill()

    def _note(self, found: Ended) -> None:
        """Record the end of a cell, and tell it with the remaining time, by the mean time of finished cells."""
        self.ended.append(found)
        if found.outcome == BUDGET:
            self._waiting.clear()
        if found.outcome == 0:
            self.jobs = self.jobs or jobs_for(found.peak)
        left = 0 if self._hides_times else len(self._waiting) + len(self._running)
        each = sum(found.seconds for found in self.ended) / len(self.ended)
        to_go = f"; {left} to go, about {duration(left * each / max(1, self.jobs))}" if left else ""
        self.told(f"{found.cell}: {how_ended(found)}{to_go}")


def how_ended(found: Ended) -> str:
    """Describe the result of a cell; for a failure, quote its last line."""
    if found.outcome == BUDGET:
        return "a budget ended it; no other cell is started"
    if found.outcome == 0:
        return "done: the budgets of its clients are spent" if found.code else "done"
    if found.code == INTERRUPTED:
        return "stopped in order; it will be done anew"
    if found.code == -signal.SIGTERM:
        return "stopped before it began; it will be done anew"
    return f"failed with exit code {found.code}: {clean(found.last) or 'it wrote nothing'}"


def jobs_for(peak: int) -> int:
    """Return the number of cells to run at a time.

    Args:
        peak: largest resident memory in bytes of one of them.
    """
    fitting = int((free_memory() or 0) / (SPARE * peak)) if peak else 1
    return max(1, min(MAX_WORKERS, os.cpu_count() or 1, fitting))


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def put_aside(directory: Path) -> None:
    """Rename the directory of an unfinished run, so that its name is free again.

    Nothing is deleted.

    Args:
        directory: of the run; it may be absent.
    """
    if directory.exists():
        numbered = (directory.with_name(f"{directory.name}.{number}") for number in range(1, 1000))
        directory.rename(next(path for path in numbered if not path.exists()))


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of this sweep's folder during the block.

    Raises:
        ConfigError: another process holds it.
    """
    with (folder / ".running").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process works on this sweep") from None
        yield


FAILED = 1
"""Exit code if a cell has no result."""


def results_of(sweep: Sweep, cells: Sequence[Cell]) -> Comparison | None:
    """Compare the finished cells, grouped over their seeds; None without any.

    Args:
        sweep: as its file describes it.
        cells: all of its cells.
    """
    finished = [cell for cell in cells if cell.state() == "done"]
    if not finished:
        return None
    runs = {run.name: run for run in read_runs([cell.directory for cell in finished])}
    together: dict[str, list[Cell]] = {}  # cells with the same values of the grid
    for cell in cells:
        together.setdefault(repr(sorted(cell.settings.items())), []).append(cell)
    varied, select, groups = differing([cell.settings for cell in cells]), sweep.description.select, []
    for number, same in enumerate(together.values(), 1):
        settings = shown({key: same[0].settings[key] for key in varied})
        if those := tuple(runs[cell.name] for cell in same if cell.name in runs):
            groups.append(Group(str(number), settings, those))
    scores = {name for run in runs.values() for done in run.facts.rounds for name in done.central}
    found = compared(groups, select if select in scores else "")
    missing = len(cells) - len(finished)
    remarks = [f"Of {len(cells)} runs, {missing} have no result."] if missing else []
    if select:
        best = best_of(found, select)
        if found.on_clients or found.score != select:
            remark = f"No cell is chosen: no run has a score {select!r} on the server's own examples."
        elif best is None:
            remark = f"No cell is chosen: of each, a run has no final {select}."
        else:
            chosen = f"cell {best.name}, {found.labels[best.name]}"
            remark = f"Chosen by the final {select} on the server's own examples: {chosen}."
            if tied := ", ".join(group.name for group in _tied(found, select) if group is not best):
                remark += f" Equally good: {tied}; of these the smallest ε decides, then the order."
        remarks.append(remark)
    return replace(found, heading="cell", remarks=tuple(remarks))


def best_of(comparison: Comparison, select: str) -> Group | None:
    """Return the group with the best final score on the server's own examples.

    None: there is none. Ties go to the smallest ε, if all ε are of the same kind, then to the first group. A group with
    a diverged run is excluded: the mean over its other runs would be biased upwards.

    Args:
        comparison: of the cells.
        select: the score; empty: none is selected.
    """

    def epsilon(group: Group) -> float:
        """Return the claimed ε of a group; ∞ if part of its cost is unbounded, and 0 if kinds of ε differ."""
        costs = (math.inf if cost.epsilon is None else cost.epsilon for cost in group.costs)
        return sum(costs) if len(comparison.kinds) == 1 else 0.0

    return min(_tied(comparison, select), key=epsilon, default=None)


def _tied(comparison: Comparison, select: str) -> list[Group]:
    """Return the groups with the best final score, in their order."""
    if not select or comparison.on_clients or select != comparison.score:
        return []
    finals = [(group.final(select, False), group) for group in comparison.groups]
    scored = [(final.mean, group) for final, group in finals if final and final.count == len(group.runs)]
    best = better(select, [mean for mean, _ in scored]) if scored else None
    return [group for mean, group in scored if mean == best]


def write_results(sweep: Sweep, comparison: Comparison, folder: Path) -> None:
    """Write `results.json`, `.md`, `.html` and `.png`.

    Args:
        sweep: of the results.
        comparison: of its cells.
        folder: that exists.

    Raises:
        ConfigError: a file cannot be written.
    """
    best = best_of(comparison, sweep.description.select)
    content = {"sweep": sweep.name, "selected": best.name if best else None, **record(comparison)}
    texts = {"results.json": json.dumps(content, indent=2) + "\n", "results.md": markdown(comparison)}
    try:
        for name, text in texts.items():
            with atomic_path(folder / name) as partial:
                partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    write_page(comparison, folder / "results.html", f"Sweep {sweep.name}")
    if pictures(comparison):
        write_png(comparison, folder / "results.png")


def conduct(path: Path, told: Told, only_check: bool = False) -> int:
    """Run the cells of a sweep that have no result yet, and write all results.

    Args:
        path: of the file that describes the sweep.
        told: receives lines for the user.
        only_check: validate the sweep and start nothing.

    Returns:
        0: every cell is done; 1: some failed; 3: a budget ended one; 130: the user stopped the sweep.

    Raises:
        CloisterError: a cell cannot run, or together they exceed their budget. Nothing was started.
    """
    sweep = Sweep(path)
    cells = cells_of(sweep)
    todo = _todo(cells)
    told(f"sweep {sweep.name}: {len(cells)} runs, {len(cells) - len(todo)} of them done before")
    refuse_past_budget(todo)
    if only_check:
        for cell in todo:
            told(f"  {cell.name}  {cell}")
        return 0
    folder = cells[0].directory.parent / f"{sweep.name}.sweep"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    jobs = sweep.description.jobs
    with held(folder):
        runner = Runner(folder, 0 if jobs == "auto" else jobs, told)
        runner.run(_todo(cells))
        found = results_of(sweep, cells)
        if found is not None:
            write_results(sweep, found, folder)
        for line in lines(found) if found is not None else ["no cell has a result"]:
            told(line)
        if found is not None:
            told(f"results  {folder}")
    codes = {ended.outcome for ended in runner.ended}
    if runner.stopped:
        return INTERRUPTED
    return FAILED if codes - {0, BUDGET} else BUDGET if BUDGET in codes else 0


def _todo(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells without a result.

    Raises:
        ConfigError: another process executes one of them.
    """
    states = {cell.name: cell.state() for cell in cells}
    if busy := [name for name, state in states.items() if state == "running"]:
        raise ConfigError(f"{busy[0]} is under way in another process; wait for its end, or stop it")
    return [cell for cell in cells if states[cell.name] != "done"]
