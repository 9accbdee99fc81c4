"""The thesis' systems as `experiments/end_to_end.py` runs them, at a tiny scale."""

import argparse
import importlib.util
import os
import shlex
import signal
from pathlib import Path

import pytest

from cloister.core.errors import ConfigError

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "experiments" / "end_to_end.py"
TINY = ("task={name='digits', model='auto', examples-per-client=0}", "client.batch-size=50")
SECRET = "privacy.noise-seed=-1"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, which keeps its results in a folder of the test and knows federations of four."""
    spec = importlib.util.spec_from_file_location("end_to_end", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "PARTICIPATION", {4: 1.0})
    return module


@pytest.fixture
def arguments(tmp_path):
    return argparse.Namespace(
        system="proposed",
        data="",
        rounds=3,
        clients=4,
        partition="iid",
        epochs=1,
        output_dir=str(tmp_path / "runs"),
        quiet=False,
        name="",
        config=[*TINY, SECRET],
    )


def stopped_after(script, number):
    """The class that tells of rounds, whose process is asked to stop after one of them."""

    class Stopped(script.TimeLeft):
        def __call__(self, done, arrays):
            super().__call__(done, arrays)
            if done.number == number:
                os.kill(os.getpid(), signal.SIGTERM)

    return Stopped


def test_a_stopped_run_goes_on_when_it_is_asked_for_again(script, arguments, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(script, "TimeLeft", stopped_after(script, 1))
        first = script.federated("proposed", arguments)
    assert [row[0] for row in first["curve"]] == [0, 1]
    whole = script.federated("proposed", arguments)
    assert [row[0] for row in whole["curve"]] == [0, 1, 2, 3]
    assert whole["curve"][:2] == first["curve"]
    assert "resumed after round 1" in capsys.readouterr().out


def test_a_run_with_seeded_noise_does_not_go_on(script, arguments):
    arguments.rounds, arguments.config = 1, [*TINY]
    script.federated("proposed", arguments)
    with pytest.raises(ConfigError, match=r"privacy\.noise-seed = 1"):
        script.federated("proposed", arguments)


def test_hours_are_said_first_and_after_each_round(script, arguments, capsys):
    arguments.rounds = 2
    script.federated("proposed", arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"about {0.3 * 4 * 2 / 3600:.1f} hours to go"
    assert sum(line.endswith("hours to go") for line in lines) == 3


def test_a_result_says_its_command(script, arguments):
    arguments.data, arguments.config = "somewhere", ["task={name='digits'}", SECRET]
    words = shlex.split(script.provenance(arguments)["command"])
    assert words[:5] == ["python", "experiments/end_to_end.py", "proposed", "--data", "FOLDER_OF_MNIST_NPZ"]
    assert words[5:11] == ["--rounds", "3", "--clients", "4", "--partition", "iid"]
    assert words[11:] == ["-c", "task={name='digits'}", "-c", SECRET]
