"""The thesis' systems as `experiments/end_to_end.py` runs them, at a tiny scale."""

import argparse
import importlib.util
import os
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from cloister.config.run import parse
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
    assert (first["ended"], first["resumes"], script.suffix_of(first)) == ("operator", 0, "-stopped")
    whole = script.federated("proposed", arguments)
    assert [row[0] for row in whole["curve"]] == [0, 1, 2, 3]
    assert whole["curve"][:2] == first["curve"]
    assert (whole["ended"], whole["resumes"], script.suffix_of(whole)) == ("as-asked", 1, "")
    assert "resumed after round 1" in capsys.readouterr().out
    # The first counts all three that were planned, the second one more: that which may have been broken off.
    spent = [epsilon(result) for result in (first, whole)]
    assert spent[0] == pytest.approx(epsilon({"accounting": script.accounting(parsed(script, arguments), 3)}))
    assert spent[1] == pytest.approx(epsilon({"accounting": script.accounting(parsed(script, arguments), 4)}))
    assert spent[0] < spent[1]


def parsed(script, arguments):
    return parse(script.settings_of("proposed", arguments))


def epsilon(result):
    """Of an example of a client in every round."""
    return result["accounting"]["sound"]["client-in-every-round"][0]["epsilon"]


def test_a_run_with_seeded_noise_does_not_go_on(script, arguments):
    arguments.rounds, arguments.config = 1, [*TINY]
    script.federated("proposed", arguments)
    with pytest.raises(ConfigError, match=r"(?s)privacy\.noise-seed = 1.*is there: give --name or --output-dir"):
        script.federated("proposed", arguments)


def test_hours_are_said_first_and_after_each_round(script, arguments, monkeypatch, capsys):
    monkeypatch.setattr(script, "SECONDS", 3600)
    arguments.rounds = 2
    script.federated("proposed", arguments)
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith("hours to go")]
    assert said[0] == "about 8.0 hours to go" and len(said) == 3


def test_the_time_of_the_rounds_so_far_is_that_of_the_others(script, monkeypatch):
    """Rounds 8 and 9 of 10 took two hours each, in a process that began after round 7."""
    told = script.TimeLeft(10, Console(quiet=True), 4)
    now, said = [0.0], []
    monkeypatch.setattr(script.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(told, "note", said.append)
    for name in ("opening", "resuming", "__call__"):
        monkeypatch.setattr(script.Narrator, name, lambda *_: None)
    monkeypatch.setattr(script, "SECONDS", 3600)
    told.opening()
    told.resuming(SimpleNamespace(number=7))
    for number in (8, 9):
        now[0] += 7200
        told(SimpleNamespace(number=number), None)
    assert said == [
        "about 40.0 hours to go",
        "about 12.0 hours to go",
        "about 4.0 hours to go",
        "about 2.0 hours to go",
    ]


def test_a_result_says_its_command(script, arguments):
    arguments.data, arguments.config = "somewhere", ["task={name='digits'}", SECRET]
    words = shlex.split(script.provenance(arguments)["command"])
    assert words[:5] == ["python", "experiments/end_to_end.py", "proposed", "--data", "FOLDER_OF_MNIST_NPZ"]
    assert words[5:11] == ["--rounds", "3", "--clients", "4", "--partition", "iid"]
    assert words[11:] == ["-c", "task={name='digits'}", "-c", SECRET]
