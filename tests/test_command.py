"""The `cloister` command: what it reads, what it says of errors, and how it ends."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from quick_runs import quick_runs  # noqa: F401
from support import failures
from typer.main import get_command

from cloister import cli
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.faults import SAMPLE
from cloister.utils.errors import BudgetExhausted, ConfigError, FederationError

CLOISTER = get_command(cli.app)
COMMAND = [sys.executable, "-c", "from cloister.cli import app; app()"]


def invoke(*arguments):
    return CliRunner().invoke(CLOISTER, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def quick(folder):
    return f"num-rounds=1 task.model='softmax' tensorboard=false output-dir='{folder}/runs'"


def settings_of(folder):
    (path,) = folder.glob("runs/*/config.json")
    return json.loads(path.read_text())["config"]


class TestSettings:
    def test_blanks_around_the_equals_sign_change_nothing(self, tmp_path):
        settings = "task.name='breast-cancer' privacy.server = 'global-dp'"
        result = invoke("run", "-c", f"{quick(tmp_path)} {settings}")
        assert result.exit_code == 0
        found = settings_of(tmp_path)
        assert (found["task.name"], found["privacy.server"]) == ("breast-cancer", "global-dp")

    def test_what_cannot_be_read_is_one_error_and_nothing_is_trained(self, tmp_path_factory, monkeypatch):
        def check(given):
            folder = tmp_path_factory.mktemp("case")
            monkeypatch.chdir(folder)
            result = invoke("run", "-c", given)
            assert result.exit_code == 2 and not list(folder.iterdir())
            (line,) = result.output.splitlines()
            assert line.startswith("SettingsError: -c (--run-config): ")

        assert failures(["foo", "nowhere.toml", "num-rounds=1 stray", "num-rounds=1 privacy.server ="], check) == []

    def test_files_and_pairs_are_mixed_and_the_later_win(self, tmp_path):
        path = tmp_path / "run.toml"
        path.write_text('num-rounds = 9\n[privacy]\nserver = "global-dp"\nclipping-norm = 3.0\n')
        result = invoke("run", "-c", path, "-c", quick(tmp_path), "-c", "privacy.clipping-norm=4.0")
        assert result.exit_code == 0
        found = settings_of(tmp_path)
        assert found["num-rounds"] == 1 and found["privacy.clipping-norm"] == 4.0
        assert found["privacy.server"] == "global-dp"


class TestUnexpectedErrors:
    """As a metric of a plugin would cause them."""

    def test_one_line_with_the_text_and_the_place_and_no_array(self, tmp_path, monkeypatch):
        shown = np.array2string(np.linspace(0, 1, 7), precision=8)

        def metrics(self, y, scores):
            if len(y) <= SAMPLE:  # the few that a task is tried on before a run
                return {"loss": 1.0}
            raise KeyError(f"no class {shown} {scores!r}")

        monkeypatch.setattr(Digits, "metrics", metrics)
        result = invoke("run", "-c", quick(tmp_path))
        assert result.exit_code == 1
        error = result.output.strip().splitlines()[-1]
        said = rf"KeyError: 'no class ... ...', at {re.escape(__file__)}:\d+"
        found = re.fullmatch(rf"{said}; the traceback, .*, is in (\S+)", error)
        assert found, result.output
        (run,) = (tmp_path / "runs").glob("*fedavg*")
        written = Path(found[1])
        assert written.parent == run
        for text in (result.output, written.read_text()):
            assert "0.16666667" not in text and "array(" not in text and len(text) < 10_000
        assert "in metrics" in written.read_text()

    def test_tracebacks_of_typer_show_no_variables_either(self):
        assert not cli.app.pretty_exceptions_enable and not cli.app.pretty_exceptions_show_locals

    def test_of_any_command(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        path = tmp_path / "ledger.jsonl"
        path.write_bytes(b"")
        monkeypatch.setattr("cloister.privacy.claims.report.print_ledger", lambda *_: {}["secret"])
        result = invoke("ledger", "show", path)
        assert result.exit_code == 1 and result.output.startswith("KeyError at ") and "secret" not in result.output
        assert len(result.output.splitlines()) == 1


class TestDisk:
    """With limits of the operating system, in processes of their own."""

    @pytest.mark.parametrize("buffered", [True, False])
    def test_a_full_disk_is_one_line(self, buffered, tmp_path):
        ledger = tmp_path / "ledger.jsonl"
        ledger.write_text("")
        command = [*COMMAND, "ledger", "leakage", str(ledger)]
        environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
        assert done.returncode == 1
        assert done.stderr.splitlines() == ["No space left on device; make room, and begin again"]

    def test_a_closed_output_is_no_error(self, tmp_path):
        ledger = tmp_path / "ledger.jsonl"
        ledger.write_text("")
        command = [*COMMAND, "ledger", "leakage", str(ledger)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, preexec_fn=lambda: os.close(1))
        assert done.returncode == 0 and not done.stderr

    @pytest.mark.slow
    def test_a_run_that_may_write_no_more_ends_in_one_line(self, tmp_path):
        done = subprocess.run(
            [*COMMAND, "run", "-c", quick(tmp_path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # it would be cut off, and never be imported again
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)),
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1


class TestExitCodes:
    def ended(self, monkeypatch, outcome):
        def simulate(*_):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr("cloister.simulation.simulate.simulate", simulate)
        return invoke("run").exit_code

    def test_each_end_has_its_own(self, monkeypatch):
        def check(ended, code):
            assert self.ended(monkeypatch, SimpleNamespace(ended=ended, stopped="why")) == code

        cases = [
            ("as-asked", 0),
            ("budget", 3),
            ("site-budgets", 3),
            ("operator", 130),
            ("too-few-nodes", 1),
            ("disk", 1),
            ("failed", 1),
            ("?", 1),
        ]
        assert failures(cases, check) == []

    def test_each_error_has_its_own(self, monkeypatch, tmp_path_factory):
        def check(error, code):
            folder = tmp_path_factory.mktemp("case")
            monkeypatch.setattr("tempfile.tempdir", str(folder))
            assert self.ended(monkeypatch, error) == code

        cases = [
            (BudgetExhausted("spent"), 3),
            (ConfigError("bad"), 1),
            (FederationError("nobody"), 1),
            (ZeroDivisionError(), 1),
            (OSError(28, "full"), 1),
            (KeyboardInterrupt(), 130),
        ]
        assert failures(cases, check) == []

    def test_a_run_as_asked(self, tmp_path):
        assert invoke("run", "-c", quick(tmp_path)).exit_code == 0

    def test_early_stopping_is_as_asked(self, tmp_path):
        stopping = "num-rounds=30 evaluation.patience=1 privacy.server='none' client.learning-rate=50.0"
        result = invoke("run", "-c", quick(tmp_path).replace("num-rounds=1", stopping))
        assert "stopped: 1 evaluations without" in " ".join(result.output.split()) and result.exit_code == 0

    def test_a_budget_that_no_round_fits(self, tmp_path):
        budget = "privacy.server='global-dp' privacy.noise-multiplier=1.0 privacy.max-epsilon=1.0"
        result = invoke("run", "-c", f"{quick(tmp_path)} {budget}")
        assert "not one round fits privacy.max-epsilon = 1" in " ".join(result.output.split()) and result.exit_code == 3

    def test_a_budget_that_is_spent_before_it_begins(self, tmp_path):
        budget = "privacy.server='global-dp' privacy.noise-multiplier=NOISE privacy.max-epsilon=5.0"
        assert invoke("run", "-c", f"{quick(tmp_path)} {budget.replace('NOISE', '1.0')}").exit_code == 0
        result = invoke("run", "-c", f"{quick(tmp_path)} {budget.replace('NOISE', '1.0')}")
        assert result.exit_code == 3, result.output

    def test_control_c(self, tmp_path, monkeypatch):
        original = Digits.metrics

        def metrics(self, y, scores):
            if len(y) <= SAMPLE:
                return original(self, y, scores)
            monkeypatch.setattr(Digits, "metrics", original)
            signal.raise_signal(signal.SIGINT)
            return original(self, y, scores)

        monkeypatch.setattr(Digits, "metrics", metrics)
        result = invoke("run", "-c", quick(tmp_path).replace("num-rounds=1", "num-rounds=9"))
        assert result.exit_code == 130, result.output
        assert list(tmp_path.glob("runs/*/model.npz")), "the model is kept"


def test_the_version_is_that_of_the_package():
    packaged = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    result = invoke("--version")
    assert result.exit_code == 0 and result.output.strip() == f"cloister {packaged['project']['version']}"


def test_a_setting_that_is_given_as_an_option_is_answered_with_its_key():
    def check(option, key):
        done = invoke("run", option, "3")
        assert done.exit_code == 2 and f"-c {key}=VALUE" in " ".join(done.output.replace("│", " ").split())
        assert "-c " not in invoke("run", "--colour", "3").output

    assert failures([("--rounds", "num-rounds"), ("--learning-rate", "client.learning-rate")], check) == []


def test_what_arguments_mean_is_in_the_help():
    for command, says in (("new", "what to write"), ("predict", "model-dir of a client"), ("compare", "run directory")):
        assert says in invoke(command, "--help").output
