"""Kill -9 at every point between the decision to release and publication: never less in the ledger than got out."""

import shutil
import subprocess
import sys
from pathlib import Path

import killed_rounds
import pytest
from killed_rounds import ROUNDS

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.utils.errors import BudgetExhausted

RELEASES = {"global-dp": 1, "metric": 2, "rule": 1, "node": 1}
"""Of a round."""
PLACES = {
    "before the ledger",
    "half of a line of kind open",
    "half of a line of kind done",
    "before a sync",
    "after a sync",
    "after the ledger",
    "after the noise",
    "before done",
    "after done",
    "before publication",
    "half of a publication",
    "after publication",
}


KILLED = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(RELEASES)]
"""Processes of their own; `tests/faults` kills virtual ones in the fast suite."""


@pytest.fixture(scope="module", params=KILLED)
def killed(request, tmp_path_factory):
    """The mechanism, and a folder for every point at which its process died."""
    folder = tmp_path_factory.mktemp(request.param)
    script = Path(killed_rounds.__file__)
    done = subprocess.run(
        [sys.executable, script, folder, request.param], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    folders = [folder / str(number) for number in range(1, int(done.stdout) + 1)]
    return request.param, folders


def released(folder):
    """The releases about the client: a node enters what its examples are worth beside each."""
    return [entry for entry in Ledger(folder / "ledger.jsonl").entries if entry.unit == "client"]


def published(folder):
    """Return the number of models that got out, a half-written one included."""
    path = folder / "published"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def noised(folder):
    """Return the number of releases for which noise was drawn: they may have been seen in memory."""
    path = folder / "noised"
    return len(path.read_bytes()) if path.exists() else 0


def least(folder):
    """ε of what got out, or less: with either mechanism every model has had a release at the multiplier itself."""
    return Account().plus(Gaussian(killed_rounds.Z), published(folder)).epsilon(1e-5, "pld")


def test_it_dies_everywhere_in_every_round(killed):
    mechanism, folders = killed
    died = [(folder / "died").read_text() for folder in folders]
    assert set(died) - {"half of a line of kind budget", "half of a line of kind place"} == PLACES
    assert died.count("after the noise") == ROUNDS * RELEASES[mechanism]
    assert died.count("before the ledger") == ROUNDS  # one write for all releases of a round
    assert died.count("half of a publication") == ROUNDS


def test_the_ledger_can_be_read_and_holds_whatever_got_out(killed):
    mechanism, folders = killed
    for folder in folders:
        ledger = Ledger(folder / "ledger.jsonl")
        where = (folder / "died").read_text()
        assert len(released(folder)) >= published(folder) * RELEASES[mechanism], where
        assert len(released(folder)) >= noised(folder), where
        assert PrivacyBudget(ledger, "").epsilon() >= least(folder), where


def test_the_ledger_does_not_invent_releases(killed):
    """At most those of the round that was under way are counted for nothing: all of a round are entered before any."""
    mechanism, folders = killed
    for folder in folders:
        assert len(released(folder)) <= noised(folder) + (2 if mechanism == "metric" else 1)


def test_a_new_run_goes_on_and_pays_for_what_was_open(killed, tmp_path):
    mechanism, folders = killed
    for left in folders:
        folder = shutil.copytree(left, tmp_path / left.name)
        before = released(folder)
        if mechanism == "node":
            killed_rounds.node_rounds(folder, "restarted")
        else:
            killed_rounds.rounds(mechanism, folder, "restarted")
        after = released(folder)
        assert after[: len(before)] == before
        new = after[len(before) :]
        assert len(new) == ROUNDS * RELEASES[mechanism] and all(
            entry.done and entry.run == "restarted" for entry in new
        )
        everything = Account(entry.event for entry in [*before, *new])
        assert PrivacyBudget(Ledger(folder / "ledger.jsonl"), "").epsilon() == pytest.approx(
            everything.epsilon(1e-5, "pld"), rel=1e-9
        )
        models = (folder / "published").read_bytes().splitlines()
        assert len(models) == len(set(models)), "noise was drawn twice: a difference of two models would be free of it"


def test_an_open_release_counts_against_the_budget(tmp_path):
    """A release that died between ledger and publication leaves no room for another in its place."""
    budget = PrivacyBudget(Ledger(tmp_path / "ledger.jsonl"), "killed", max_epsilon=1.0)
    with pytest.raises(KeyboardInterrupt), budget.release(Gaussian(5.0), 1):
        raise KeyboardInterrupt
    again = PrivacyBudget(Ledger(tmp_path / "ledger.jsonl"), "restarted", max_epsilon=1.0)
    with pytest.raises(BudgetExhausted), again.release(Gaussian(5.0), 1):
        pytest.fail("released past the budget")
