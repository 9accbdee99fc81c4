"""Ledgers that are cut, put back from a backup, or written from two machines whose locks do not reach each other."""

import errno
import fcntl
import os
import shutil

import pytest
from rich.console import Console

from cloister.deploy.credentials import new_node_key
from cloister.privacy.accounting.anchors import anchored, verify_anchors
from cloister.privacy.accounting.budget import PrivacyBudget
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
