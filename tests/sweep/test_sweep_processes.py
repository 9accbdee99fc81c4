"""A sweep with real processes: its runs are those of `cloister run`, and Ctrl-C ends them in order."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from cloister.simulation.simulate import simulate
from cloister.sweep.cells import Sweep, cells_of

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-c", "from cloister.cli import app; app()", "sweep"]
SMALL = """
clients = 3
seeds = [4]
[base]
num-rounds = {rounds}
task.name = "breast-cancer"
privacy.server = "none"
tensorboard = false
report = false
[grid]
client.local-epochs = [1, 2]
"""
SECONDS = 480
"""Until a process that does nothing is given up."""


def sweep_in(folder, rounds):
    (folder / "s.toml").write_text(SMALL.format(rounds=rounds))
    return Sweep(folder / "s.toml")


def test_each_cell_is_the_run_that_the_command_makes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = sweep_in(tmp_path, 2)
    done = subprocess.run([*COMMAND, "s.toml"], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "runs" / "s.sweep" / "results.json").read_text())
    for cell, group in zip(cells_of(sweep), found["groups"], strict=True):
        alike = simulate(cell.config.flat() | {"run-name": f"{cell.name}-alike"}, 3)
        assert group["final"]["mean"] == alike.rounds[-1].central["accuracy"]
        assert group["runs"][0]["directory"] == str(cell.directory) and group["seconds"]["mean"] > 0


def wait_for(path, process):
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def test_ctrl_c_ends_the_cell_that_runs_and_the_next_start_does_it_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = cells_of(sweep_in(tmp_path, 100_000))
    process = subprocess.Popen([*COMMAND, "s.toml"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(cells[0].directory / "rounds.jsonl", process)
    assert cells[0].state() == "running"
    os.killpg(process.pid, signal.SIGINT)
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and "1 cells are asked to end in order" in told
    ended = json.loads((cells[0].directory / "privacy.json").read_text())["ended"]
    assert ended["how"] == "operator" and (cells[0].directory / "model.npz").exists()
    assert [cell.state() for cell in cells] == ["broken", "absent"]


def test_a_cell_that_cannot_run_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep_in(tmp_path, 1)
    content = (tmp_path / "s.toml").read_text().replace('"breast-cancer"', '"hospital-charges"')
    (tmp_path / "s.toml").write_text(content.replace("[1, 2]", "[1]"))
    done = subprocess.run(
        [*COMMAND, "s.toml"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "CLOISTER_DATA": str(tmp_path)},
    )
    assert done.returncode == 1 and "failed with exit code 1: DataError: " in done.stdout
    assert "no cell has a result" in done.stdout
