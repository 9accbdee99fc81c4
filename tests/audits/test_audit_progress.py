"""Progress of an audit: output to a pipe and to a terminal, and the estimate of the rest."""

import io
import json

import pytest
from rich.console import Console

from cloister.audits.audit import LINES, FinishedRun, Progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said():
    return io.StringIO()


def told_to(said, clock, terminal=False):
    return Progress(Console(file=said, width=100, force_terminal=terminal, highlight=False), clock)


def test_a_pipe_gets_an_estimate_and_a_line_now_and_then(said, clock):
    progress = told_to(said, clock)
    with progress.audit("guesses"):
        progress.expect(40, "rounds", each=1.5)
        for _ in range(40):
            clock.now += 2.0
            progress.step()
    lines = said.getvalue().splitlines()
    assert lines[:3] == ["guesses ...", "guesses: 40 rounds, about 1:00", "guesses: 5 of 40, about 1:10 left"]
    assert lines[-1] == "guesses: 35 of 40, about 0:10 left" and len(lines) == LINES + 1
    assert progress.seconds == 80.0


def test_steps_of_any_size_and_more_of_them_than_were_expected(said, clock):
    progress = told_to(said, clock)
    with progress.audit("guesses"):
        progress.expect(10, "searches")
        assert progress.left() is None
        clock.now += 3.0
        progress.step(9)
        progress.step(9)
        assert progress.left() == 0.0
    assert said.getvalue().splitlines()[1:] == [
        "guesses: 10 searches, how long they take is seen at the first",
        "guesses: 9 of 10, about 0:00 left",
    ]


def test_before_the_first_step_the_estimate_runs_down(clock):
    progress = Progress(None, clock)
    with progress.audit("guesses"):
        progress.expect(10, "rounds", each=2.0)
        clock.now += 5.0
        assert progress.left() == 15.0
        clock.now += 50.0
        assert progress.left() == 0.0


def test_each_audit_begins_anew(clock):
    progress = Progress(None, clock)
    for _ in range(2):
        with progress.audit("guesses"):
            assert progress.left() is None and progress.seconds == 0.0
            progress.expect(2, "rounds", each=1.0)
            clock.now += 4.0
            progress.step()
            assert progress.left() == 4.0


def test_a_terminal_gets_a_bar_and_no_lines(said, clock):
    progress = told_to(said, clock, terminal=True)
    with progress.audit("guesses"):
        progress.expect(4, "rounds", each=1.0)
        clock.now += 60.0
        progress.step(2)
        drawn = io.StringIO()
        Console(file=drawn, width=100).print(progress)
        assert drawn.getvalue().split()[0] == "guesses" and "2 of 4, about 1:00 left" in drawn.getvalue()
    assert "guesses: 4 rounds, about 0:04" in said.getvalue() and "guesses: 2 of 4" not in said.getvalue()


def test_what_a_round_of_the_run_took(tmp_path):
    cases = [
        ([{"round": 0, "seconds": {"total": 9.0}}, *({"round": n, "seconds": {"total": n}} for n in (1, 2))], 1.5),
        ([{"round": n, "seconds": {"total": t, "evaluate": 1.0}} for n, t in ((1, 60.0), (2, 3.0), (3, 3.5))], 2.5),
        ([{"round": 1}], None),
        ([], None),
        (["?"], None),
        ([{"round": 1, "seconds": {"total": "x"}}], None),
    ]
    for lines, seconds in cases:
        (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert FinishedRun(tmp_path, None, 0, {}, 0).seconds_a_round == seconds
    assert FinishedRun(tmp_path / "gone", None, 0, {}, 0).seconds_a_round is None


def test_rounds_that_no_run_has_written_tell_no_seconds(tmp_path):
    """A damaged file does not end an audit that only wanted an estimate."""
    (tmp_path / "rounds.jsonl").write_text("[1]\n")
    assert FinishedRun(tmp_path, None, 0, {}, 0).seconds_a_round is None


def test_what_comes_before_the_units_says_nothing_about_them(clock):
    progress = Progress(None, clock)
    with progress.audit("guesses"):
        clock.now += 60.0  # a library is imported
        progress.expect(10, "rounds", 1.0)
        assert progress.left() == 10.0
        clock.now += 1.0
        progress.step()
        assert progress.left() == 9.0 and progress.seconds == 61.0
