"""Separate process for each cell, which frees its memory at its end."""

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
"""Code of the installed command, which may not be on the path."""


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
