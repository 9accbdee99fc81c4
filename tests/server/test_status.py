"""Facts that `cloister status` reads from a run directory and from Flower's answers."""

import json
import subprocess
import sys

import pytest
from rich.console import Console
from support import failures
from typer.testing import CliRunner

from cloister import cli
from cloister.deploy import sites
from cloister.deploy.provision import rosters
from cloister.deploy.warm import probe
from cloister.server.reports import status
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.rundir import RunDirectory
from cloister.simulation.simulate import simulate
from cloister.utils.errors import ConfigError, FederationError

SETTINGS = {
    "task.model": "softmax",
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 2.0,
    "privacy.max-epsilon": 10.0,
    "num-rounds": 2,
    "tensorboard": False,
}
NODES = [
    {"node-id": "7", "name": "", "status": "online", "since": "2026-01-01T10:00:00Z"},
    {"node-id": "8", "name": "berlin", "status": "offline", "since": "2026-01-01T09:00:00Z"},
    {"node-id": "9", "name": "lyon", "status": "registered", "since": ""},
]
RUNS = {"success": True, "runs": [{"run-id": "5", "status": "running"}]}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    simulate(SETTINGS | {"output-dir": str(folder), "run-name": "a"}, 3, ConsoleReporter(2, Console(quiet=True)))
    return folder


def test_a_finished_run(output):
    state = status.run_state(status.newest_run(output))
    assert (state.task, state.round, state.rounds, state.replies, state.ended) == ("digits", 2, 2, (3, 3), True)
    assert (state.state, state.how, state.why) == ("ended", "as-asked", "")
    assert 0 < state.epsilon < 10 and state.budget_left == pytest.approx(10 - state.epsilon)


def test_a_run_under_way_whose_last_line_is_not_whole(output, tmp_path):
    lines = (output / "a" / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "config.json").write_text((output / "a" / "config.json").read_text())
    (tmp_path / "rounds.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    state = status.run_state(status.newest_run(tmp_path))
    assert (state.round, state.ended, state.state) == (1, False, "dead")


def test_a_run_whose_cohorts_are_secret(tmp_path):
    """The numbers of drawn nodes and of replies are not written down, so they cannot be shown."""
    poisson = {"strategy.sampling": "poisson", "strategy.fraction-train": 0.9}
    simulate(
        SETTINGS | poisson | {"output-dir": str(tmp_path), "run-name": "a"}, 5, ConsoleReporter(2, Console(quiet=True))
    )
    state = status.run_state(tmp_path / "a")
    assert state.replies is None and state.rejected == () and state.round == 2
    assert state.hides_times and not state.written % 86_400
    assert not any("replies" in line for line in status.told(state, None))


def test_a_run_under_way_that_cannot_be_read_is_taken_for_one_that_hides_its_progress(tmp_path):
    with RunDirectory(tmp_path).held():
        for content, hidden in (('{"hides-times": true}', True), ("{}", False), ("[]", True), ("{", True)):
            (tmp_path / "config.json").write_text(content)
            assert status.hides_progress(tmp_path) == hidden
        (tmp_path / "config.json").unlink()
        assert not status.hides_progress(tmp_path)
    (tmp_path / "config.json").write_text('{"hides-times": true}')
    assert not status.hides_progress(tmp_path), "its process is gone"


def test_the_end_is_what_the_statement_about_privacy_says(output, tmp_path_factory):
    """For any names of the models: those of several hypotheses have other names."""

    def check(content, ended):
        folder = tmp_path_factory.mktemp("case")
        (folder / "config.json").write_text((output / "a" / "config.json").read_text())
        (folder / "privacy.json").write_text(content)
        assert status.run_state(folder).ended is ended

    assert failures([('{"status": "running"}', False), ('{"status": "sound"}', True), ("{", False)], check) == []


def test_a_run_before_its_first_round(output, tmp_path):
    (tmp_path / "config.json").write_text((output / "a" / "config.json").read_text())
    state = status.run_state(tmp_path)
    assert (state.round, state.replies, state.budget_left) == (0, None, None)


HOLD = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_run_whose_process_was_killed_is_told_from_one_that_lives(output, tmp_path):
    (tmp_path / "config.json").write_text((output / "a" / "config.json").read_text())
    (tmp_path / "privacy.json").write_text('{"status": "running"}')
    lock = tmp_path / status.RUNNING
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        alive = status.run_state(tmp_path)
        assert alive.state == "running" and any("last written" in line for line in status.told(alive, None))
        holder.kill()
    dead = status.run_state(tmp_path)
    assert dead.state == "dead" and not dead.ended and lock.exists()
    assert any("dead: no process" in line for line in status.told(dead, None))
    assert json.loads(status.as_json(dead, None))["run"]["state"] == "dead"


def test_a_run_holds_its_lock_until_its_last_words(tmp_path):
    seen = []

    class Looking(ConsoleReporter):
        def __call__(self, done, arrays):
            seen.append(status.run_state(tmp_path / "a").state)

        def closing(self, *_):
            seen.append(status.run_state(tmp_path / "a").state)

    simulate(SETTINGS | {"output-dir": str(tmp_path), "run-name": "a"}, 3, Looking(2, Console(quiet=True)))
    assert seen == ["running"] * 3 + ["ended"]
    assert not (tmp_path / "a" / status.RUNNING).exists()


def test_why_a_run_ended_early_is_told(tmp_path):
    spent = {"privacy.max-epsilon": 2.5}
    outcome = simulate(SETTINGS | spent | {"output-dir": str(tmp_path)}, 3, ConsoleReporter(2, Console(quiet=True)))
    state = status.run_state(outcome.directory.path)
    assert (state.state, state.how, state.why) == ("ended", "budget", outcome.stopped)
    assert any("ended: budget" in line for line in status.told(state, None))


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match="no run directory in"):
        status.newest_run(tmp_path)
    with pytest.raises(ConfigError, match="is no run directory"):
        status.run_state(tmp_path)


ROSTERED = {"name": "lyon", "fingerprint": "SHA256:abc", "made-by": "the site"}


def test_the_command(output, monkeypatch):
    monkeypatch.setattr(sites, "living_nodes", lambda connection: NODES)
    monkeypatch.setattr(status, "superlink_runs", lambda connection: RUNS["runs"])
    monkeypatch.setattr(probe, "warnings_of", lambda connection: [f"the certificate of {connection} ends"])
    monkeypatch.setattr(rosters, "on_roster", lambda: [ROSTERED])
    shown = CliRunner().invoke(cli.app, ["status", "hospital", "--runs", str(output)]).stdout
    for words in (
        "warning: the certificate of hospital ends",
        "node 7  online  since 2026",
        "berlin  offline  since 2026",
        "lyon  registered\n",
        "on the roster: lyon  SHA256:abc  made by the site\n",
        "run 5  running",
        "round 2/2  ended",
    ):
        assert words in shown
    assert "left of the budget" in shown
    told = json.loads(CliRunner().invoke(cli.app, ["status", "hospital", "--runs", str(output), "--json"]).stdout)
    assert told["run"]["round"] == 2 and told["nodes"] == NODES and told["runs"] == RUNS["runs"]
    assert told["warnings"] == ["the certificate of hospital ends"]
    assert told["roster"] == [ROSTERED]


def test_a_superlink_that_does_not_answer(monkeypatch, tmp_path):
    program = tmp_path / "flwr"
    program.write_text('#!/bin/sh\necho \'{"success": false, "error-message": "no such connection"}\'\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(FederationError, match="no such connection"):
        status.superlink_runs("nowhere")
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(FederationError, match="gave no answer"):
        status.superlink_runs("nowhere")
