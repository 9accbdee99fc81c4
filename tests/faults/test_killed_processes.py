"""Processes of `cloister run` that are killed at random moments, and resumed by the next one."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import killed_processes
import numpy as np
import pytest
from killed_processes import PLAIN, PRIVATE

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.reports.html.data import Facts
from cloister.server.reports.status import run_state

KILLS, SEED = int(os.environ.get("CLOISTER_KILLS", "20")), 0
pytestmark = pytest.mark.slow


def model(folder):
    with np.load(folder / "r" / "model.npz") as archive:
        return dict(archive)


def test_killed_at_random(tmp_path):
    script = Path(killed_processes.__file__)
    command = [sys.executable, script, tmp_path / "runs", str(KILLS), str(SEED)]
    (tmp_path / "runs").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=24 * KILLS, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == KILLS
    for folder in sorted(path for path in (tmp_path / "runs").iterdir() if path.name.isdecimal()):
        state = run_state(folder / "r")
        assert (state.how, state.round) == ("as-asked", PLAIN["num-rounds"])
        Facts.read(folder / "r")
        if (folder / "ledgers").exists():
            assert_recorded(folder)
        else:
            whole = model(tmp_path / "runs" / "whole")
            assert all((model(folder)[name] == array).all() for name, array in whole.items())


def assert_recorded(folder):
    """Each round at least once, what was handed on as such, and all within the budget."""
    ledger = Ledger(folder / "ledgers" / "d.jsonl")
    made = Counter(entry.round for entry in ledger.entries)
    handed_on = Counter(entry.round for entry in ledger.entries if entry.done)
    assert set(made) == set(handed_on) == set(range(1, PLAIN["num-rounds"] + 1))
    budget = PrivacyBudget(ledger, "", max_epsilon=PRIVATE["privacy.max-epsilon"])
    assert budget.epsilon() <= PRIVATE["privacy.max-epsilon"]
