"""A cell in a process of its own, so that its memory is given back, and what it took."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloister.config.run import changed
from cloister.config.section import Scalar
from cloister.config.settings import toml_of
from cloister.sweep.cells import Cell

COMMAND = "from cloister.cli import app; app()"
"""As the installed command, which may not be on the path."""


@dataclass(frozen=True)
class Ended:
    """What became of the process of a cell.

    Attributes:
        cell: that it ran.
        code: with which it ended; below 0: the signal that killed it.
        seconds: that it took.
        peak: bytes of memory that it held at most.
        last: the last line that it wrote.
    """

    cell: Cell
    code: int
    seconds: float
    peak: int
    last: str


class Process:
    """A cell that runs.

    Args:
        cell: to run.
        folder: for its settings and what it prints.
    """

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell = cell
        self._log = folder / f"{cell.name}.log"
        settings = folder / f"{cell.name}.toml"
        settings.write_text(as_toml(changed(cell.config.flat())), encoding="utf-8")
        command = [sys.executable, "-c", COMMAND, "run", "--clients", str(cell.clients), "-c", str(settings)]
        self._started = time.monotonic()
        with self._log.open("wb") as log:
            # In a session of its own: Ctrl-C reaches the sweep alone, which then asks each cell to end in order.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def ended(self) -> Ended | None:
        """What became of it; None while it runs."""
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - self._started
        return Ended(self.cell, self._process.returncode, seconds, 1024 * usage.ru_maxrss, self._last_line())

    def stop(self) -> None:
        """Ask it to end in order: it finishes what it is aggregating, and saves."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self._process.kill()

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def as_toml(settings: Mapping[str, Scalar]) -> str:
    """Settings as `cloister run -c FILE` reads them.

    Args:
        settings: dotted keys.
    """
    return "".join(f"{key} = {toml_of(value)}\n" for key, value in settings.items())
