"""Ledgers that are cut, put back from a backup, or written from two machines whose locks do not reach each other.

And a pair of releases with one write, which a fault may tear.
"""

import errno
import fcntl
import os
import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from schedules import memory
from virtual_disk import KILL, POWER, Disk, Killed

from cloister.deploy.credentials import new_node_key
from cloister.privacy.accounting.anchors import anchored, verify_anchors
from cloister.privacy.accounting.budget import PrivacyBudget, recorded
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate
from cloister.utils.errors import LedgerError

PRIVATE = {
    "task.name": "linear",
    "task.test-fraction": 0.0,
    "evaluation.central": False,
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 3.0,
    "privacy.max-epsilon": 6.0,
    "privacy.data-identity": "d",
    "num-rounds": 2,
    "tensorboard": False,
    "report": False,
}


class Places:
    """The ledger that all runs of a folder share, and the key that its heads are signed with."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "ledgers" / "d.jsonl"
        self.key, self.public = folder / "node.key", folder / "node.pub"
        private, public = new_node_key()
        self.key.write_bytes(private)
        self.public.write_bytes(public)

    def run(self, name):
        given = PRIVATE | {"output-dir": str(self.folder), "run-name": name}
        return simulate(given, 2, ConsoleReporter(2, Console(quiet=True)))

    def anchor(self):
        return anchored(Ledger(self.path), self.key)

    def verify(self, anchors):
        return verify_anchors(Ledger(self.path), anchors, self.public)


@pytest.fixture
def places(tmp_path):
    return Places(tmp_path)


def test_a_backup_from_before_the_last_run_goes_on_and_anchors_find_it(places, tmp_path):
    """Nothing in the old copy is wrong, so that the run is let in; whoever kept an anchor of the newer one can tell."""
    places.run("first")
    backup, early = shutil.copy(places.path, tmp_path / "backup"), places.anchor()
    places.run("second")
    late = places.anchor()
    shutil.copy(backup, places.path)
    third = places.run("third")
    assert third.ended == "as-asked"
    assert {entry.run for entry in Ledger(places.path).entries} == {"first", "third"}
    assert places.verify([early]) == 1
    with pytest.raises(LedgerError, match="an old copy was put in its place"):
        places.verify([early, late])


def test_the_newest_backup_is_the_ledger(places, tmp_path):
    places.run("first")
    backup, anchor = shutil.copy(places.path, tmp_path / "backup"), places.anchor()
    places.path.unlink()
    shutil.copy(backup, places.path)
    places.run("second")
    assert places.verify([anchor]) == 1
    assert {entry.run for entry in Ledger(places.path).entries} == {"first", "second"}


def test_a_copy_that_was_cut_within_a_line_has_lost_it_and_anchors_find_it(places):
    """It looks like the line of a process that died. The rest stays in force."""
    places.run("first")
    anchor, whole = places.anchor(), len(Ledger(places.path).entries)
    lines = places.path.read_bytes().splitlines(keepends=True)
    places.path.write_bytes(b"".join(lines[:-3]) + lines[-3][:-20])
    assert len(Ledger(places.path).entries) < whole
    with pytest.raises(LedgerError, match="lines were cut off"):
        places.verify([anchor])


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_folder_that_locks_nothing_is_refused(tmp_path, monkeypatch, code):
    def flock(file, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    budget = PrivacyBudget(Ledger(tmp_path / "d.jsonl"), "run")
    with pytest.raises(LedgerError, match="cannot be written"), budget.release(Gaussian(1.0), 1):
        pytest.fail("a release was made that is not recorded")


def test_a_second_machine_is_noticed_where_locks_end_at_the_machine(tmp_path, monkeypatch):
    """A network folder that takes locks and tells nobody: who comes second writes nothing and releases nothing."""
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
    path = tmp_path / "d.jsonl"
    here, there = Ledger(path), Ledger(path)
    here.open(Gaussian(1.0), "client", "here", 1, lambda: None)

    def meanwhile():
        there.open(Gaussian(1.0), "client", "there", 1, lambda: None)

    with pytest.raises(LedgerError, match=r"another process .* keep the ledger on a disk that one machine alone"):
        here.open(Gaussian(1.0), "client", "here", 2, meanwhile)
    assert [(entry.run, entry.round) for entry in Ledger(path).entries] == [("here", 1), ("there", 1)]
    here.open(Gaussian(1.0), "client", "here", 2, lambda: None)
    assert len(Ledger(path).entries) == 3, "what there is goes on unbroken"


class Pairs:
    """A process that makes two rounds of a pair of releases, and hands on the head after each."""

    UNITS = ("client", "example")

    def __init__(self, folder, seed):
        self.path = folder / "d.jsonl"
        self.disk = Disk(folder, random.Random(seed))
        self.made, self.heads = 0, []

    def live(self, faults):
        with self.disk.watched(faults), suppress(Killed):
            budgets = [PrivacyBudget(Ledger(self.path), "run", unit) for unit in self.UNITS]
            for number in (1, 2):
                with suppress(LedgerError, OSError):
                    self.round(budgets, number)
        self.disk.reboot()
        self.check()

    def round(self, budgets, number):
        with recorded([(budget, [budget.opening(Gaussian(1.0), number)]) for budget in budgets]):
            self.made += 1
        self.heads.append(budgets[0].ledger.head)

    def check(self):
        ledger = Ledger(self.path)
        for unit in self.UNITS:
            assert sum(entry.unit == unit for entry in ledger.entries) >= self.made, "made before it was recorded"
        assert ledger.heads().issuperset(self.heads), "a head left before its line was on disk"


def lives_of_pairs(fault, seeds=2):
    """Let a pair be disturbed at each effect, and then let the next process go on."""
    with tempfile.TemporaryDirectory(dir=memory()) as place:
        for seed in range(seeds):
            for effect in range(1, 100):
                (folder := Path(place) / f"{seed}-{effect}").mkdir()
                pairs = Pairs(folder, seed)
                pairs.live({effect: fault})
                if not pairs.disk.struck:
                    break
                pairs.live({})
                yield pairs


@pytest.mark.parametrize("fault", [KILL, POWER, "ENOSPC"])
def test_no_pair_is_made_before_both_are_on_disk_and_no_head_leaves_before_its_line(fault):
    lives = list(lives_of_pairs(fault))
    assert len(lives) > 20 and all(pairs.made >= 2 for pairs in lives)


def test_a_pair_that_is_synced_too_late_is_caught(monkeypatch):
    def write(self, file, data):
        file.write(data)
        file.flush()

    monkeypatch.setattr(Ledger, "_write", write)
    with pytest.raises(AssertionError, match=r"made before|a head left before"):
        list(lives_of_pairs(POWER, seeds=8))


def test_a_pair_has_one_sync_before_it_is_made_and_one_before_its_head_leaves(tmp_path, monkeypatch):
    budgets = [PrivacyBudget(Ledger(tmp_path / "d.jsonl"), "run", unit) for unit in Pairs.UNITS]
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(real(handle)))
    pairs = Pairs(tmp_path, 0)
    pairs.round(budgets, 1)
    del synced[:]
    pairs.round(budgets, 2)
    assert len(synced) == 2
