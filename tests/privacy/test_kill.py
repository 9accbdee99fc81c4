"""Killed at any point between intent and publication, a server has never recorded less than it released."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cloister.privacy.books import Books
from cloister.privacy.ledger import Ledger

MORTAL = Path(__file__).parent / "mortal.py"
RELEASES = {"global-dp": 1, "metric": 2}
POINTS = [
    "before open",
    "after open",
    "before sync",
    "half a line",
    "before noise",
    "after noise",
    "before done",
    "after done",
    "before publication",
    "after publication",
]


def run(folder, mechanism, point, count):
    command = [sys.executable, str(MORTAL), str(folder / "ledger.jsonl"), str(folder / "published"), mechanism, point]
    return subprocess.run([*command, str(count)], capture_output=True, timeout=60, check=False)


def published(folder):
    path = folder / "published"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("mechanism", ["global-dp", pytest.param("metric", marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", POINTS)
def test_nothing_released_is_missing(tmp_path, mechanism, point):
    died = run(tmp_path, mechanism, point, count=2)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()[-2000:]
    before = Ledger(tmp_path / "ledger.jsonl").entries
    assert len(before) >= RELEASES[mechanism] * published(tmp_path)

    lived = run(tmp_path, mechanism, point, count=10**6)
    assert lived.returncode == 0, lived.stderr.decode()[-2000:]
    after = Ledger(tmp_path / "ledger.jsonl").entries
    assert [entry.release for entry in after[: len(before)]] == [entry.release for entry in before]
    assert len(after) == len(before) + 3 * RELEASES[mechanism]
    assert Books(Ledger(tmp_path / "ledger.jsonl"), "reader").account().epsilon(1e-5) > 0
