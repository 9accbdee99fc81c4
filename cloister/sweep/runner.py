"""Execution of a sweep's cells, one or several at a time."""

import fcntl
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cloister.core.errors import ConfigError
from cloister.core.memory import free_memory
from cloister.core.text import clean
from cloister.server.stop import Stop
from cloister.sweep.cells import Cell
from cloister.sweep.process import Ended, Process

MAX_WORKERS = 2
"""Default limit of cells that run at a time."""
SPARE = 1.25
"""Assumed memory of a cell, relative to the peak of the first one."""
PAUSE = 0.1
"""Seconds between two polls of the processes."""
BUDGET, INTERRUPTED = 3, 130
"""Exit codes of a run that a budget ended, and of an interrupted run."""
Told = Callable[[str], None]


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
        if found.code == BUDGET:
            self._waiting.clear()
        if found.code == 0:
            self.jobs = self.jobs or jobs_for(found.peak)
        left = 0 if self._hides_times else len(self._waiting) + len(self._running)
        each = sum(found.seconds for found in self.ended) / len(self.ended)
        to_go = f"; {left} to go, about {duration(left * each / max(1, self.jobs))}" if left else ""
        self.told(f"{found.cell}: {how_ended(found)}{to_go}")


def how_ended(found: Ended) -> str:
    """Describe the result of a cell; for a failure, quote its last line."""
    if found.code == BUDGET:
        return "a budget ended it; no other cell is started"
    if found.code == 0:
        return "done"
    if found.code == INTERRUPTED:
        return "stopped in order; it will be done anew"
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
