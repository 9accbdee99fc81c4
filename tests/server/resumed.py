"""Runs that are stopped or die, and go on: what tests of it share."""

import filecmp
import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cloister.privacy.accounting.account import composed
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.utils.arrays import Layout, from_record

LINEAR = {
    "task.name": "linear",
    "task.test-fraction": 0.0,
    "tensorboard": False,
    "report": False,
    "run-name": "r",
    "seed": 1,
    "num-rounds": 3,
    "privacy.server": "none",
}
PRIVATE = LINEAR | {"privacy.server": "global-dp", "privacy.noise-multiplier": 2.0}
CLIENTS = 4


def go(folder, settings, clients=CLIENTS):
    return simulate(settings | {"output-dir": str(folder)}, clients, ConsoleReporter(3, Console(quiet=True)))


def resume(folder, settings=None, clients=None, narrator=None):
    given = {"resume": str(folder / "r")} | (settings or {})
    return simulate(given, clients, narrator or ConsoleReporter(3, Console(quiet=True)))


def numbers(outcome):
    return {name: array.numpy() for name, array in outcome.arrays.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def lines(folder):
    """The rounds as they were written, but for how long they took."""
    written = [json.loads(line) for line in (folder / "r" / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in written]


def claims(folder):
    path = folder / "r" / "privacy.json"
    return json.loads(path.read_text()) if path.exists() else {}


class Deaths:
    """Copies of the disk at every instant of a run at which a process that dies leaves something else.

    Args:
        folder: the output-dir.
        store: where copies of it go.
    """

    def __init__(self, folder, store):
        self.folder, self.store, self.count = folder, store, 0
        store.mkdir()

    @contextmanager
    def recorded(self):
        """The block, with a copy before and after every change of a name, every sync, every exchange of messages."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (LocalGrid, "send_and_receive")):
                patch.setattr(owner, name, self._watched(getattr(owner, name)))
            yield self

    def _watched(self, call):
        def watched(*arguments, **options):
            self._copy()
            try:
                return call(*arguments, **options)
            finally:
                self._copy()

        return watched

    def _copy(self):
        if (self.folder / "r" / "config.json").exists():
            shutil.copytree(self.folder, self.store / str(self.count), copy_function=self._keep)
            self.count += 1

    def _keep(self, source, target):
        """A file of the copy, or a link to that of the copy before: hundreds of copies fill a small disk."""
        before = self.store / str(self.count - 1) / Path(source).relative_to(self.folder)
        if before.exists() and filecmp.cmp(source, before, shallow=False):
            os.link(before, target)
        else:
            shutil.copy2(source, target)

    def at(self, instant):
        """Put the disk back to what it was."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.store / str(instant), self.folder)

    def different(self):
        """Instants, but those that left the same files as an earlier one."""
        seen = set()
        for instant in range(self.count):
            root = self.store / str(instant)
            files = sorted(path for path in root.rglob("*") if path.is_file())
            found = tuple((str(path.relative_to(root)), path.read_bytes()) for path in files if path.name != ".reserve")
            if found not in seen:
                seen.add(found)
                yield instant


def state_round(folder):
    path = folder / "r" / "state.json"
    return json.loads(path.read_text())["round"] if path.exists() else -1


def layout_of(outcome):
    return Layout.of(from_record(outcome.arrays))


def planned_account(outcome):
    return composed(outcome.plan.planned(layout_of(outcome)), "add-or-remove", insiders=True)


def stopped_after(folder, settings, rounds):
    """A run that the operator ends after so many more rounds."""

    class Stopping(ConsoleReporter):
        seen = 0

        def __call__(self, done, arrays):
            super().__call__(done, arrays)
            self.seen += done.number > 0
            if self.seen == rounds:
                signal.raise_signal(signal.SIGTERM)

    given = settings if "resume" in settings else settings | {"output-dir": str(folder)}
    outcome = simulate(given, None if "resume" in settings else CLIENTS, Stopping(3, Console(quiet=True)))
    assert outcome.ended == "operator"
    return outcome


def died(folder, settings):
    """A run to its end: its output-dir, its outcome, and every instant at which it could have died."""
    deaths = Deaths(folder / "runs", folder / "deaths")
    with deaths.recorded():
        outcome = go(folder / "runs", settings)
    return folder / "runs", outcome, deaths
