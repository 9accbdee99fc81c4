"""Nothing that a run tells others says how long a round took, where a draw is accounted for."""

import io
import json
import random
import re
import time
from itertools import count

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from cloister.client.app import app
from cloister.config.run import parse
from cloister.server.reports.console import ConsoleReporter, JsonReporter
from cloister.server.reports.status import run_state
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.utils.files import DAY

ROUNDS = 8
POISSON = {
    "task.model": "softmax",
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 1.0,
    "strategy.sampling": "poisson",
    "strategy.fraction-train": 0.5,
    "num-rounds": ROUNDS,
    "run-name": "r",
    "client.local-epochs": 1,
    "client.batch-size": 64,
}
MOMENT = re.compile(r"\d\d:\d\d|\d+(\.\d+)? s\b|seconds|\b1\d{9}\b")
"""A time of day, a duration, or seconds since 1970."""


@pytest.fixture(autouse=True)
def other_draws_each_time_and_the_same_in_every_test_run(monkeypatch):
    """Poisson draws come from the operating system, where two cohorts may happen to be equally large."""
    seeds = count()

    class Repeatable(random.Random):
        def __init__(self):
            super().__init__(next(seeds))

    monkeypatch.setattr(random, "SystemRandom", Repeatable)


class Hours:
    """A clock of its own for the server: every client takes an hour, so that the day tells something and no more."""

    def __init__(self, monkeypatch):
        self.skew = 0.0
        real_time, real_perf = time.time, time.perf_counter
        monkeypatch.setattr(time, "time", lambda: real_time() + self.skew)
        monkeypatch.setattr(time, "perf_counter", lambda: real_perf() + self.skew)


def go(tmp_path, monkeypatch, kind, settings):
    config = parse(POISSON | settings | {"output-dir": str(tmp_path)})
    clock, sizes = Hours(monkeypatch), []

    class Counting(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            sizes.append(len(messages))
            clock.skew += 0.5 * len(messages)
            return super().send_and_receive(messages, timeout=timeout)

    said = io.StringIO()
    console = Console(file=said, width=10**6, soft_wrap=True, markup=False, highlight=False)
    outcome = run(Counting.simulated(lambda *asked: app(*asked), config.flat(), 12), config, kind(ROUNDS, console))
    return outcome, said.getvalue(), sizes


@pytest.mark.usefixtures("runs_end_with_a_page")
@pytest.mark.parametrize("kind", [ConsoleReporter, JsonReporter])
def test_a_secret_cohort_leaves_no_times(tmp_path, monkeypatch, kind):
    outcome, said, sizes = go(tmp_path, monkeypatch, kind, {})
    assert len(set(sizes)) > 1
    assert not MOMENT.search(said.replace(str(tmp_path), ""))
    for path in outcome.directory.path.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".html") and path.name not in ("config.json", "ledger.jsonl"):
            assert not MOMENT.search(path.read_text()), path.name
    page = (outcome.directory.path / "report.html").read_text()
    assert "drawn in secret" in page and "replies</th>" not in page
    (events,) = (outcome.directory.path / "tensorboard").iterdir()
    assert int(events.name.split(".")[3]) % DAY == 0
    assert {event.wall_time % DAY for event in EventFileLoader(str(events)).Load()} == {0}
    state = run_state(outcome.directory.path)
    assert state.hides_times and state.seconds is None and state.written % DAY == 0


def test_all_messages_of_a_round_say_the_same_time(tmp_path):
    """Made one after another, those of two clients would tell whether one between them was drawn."""
    config = parse(POISSON | {"output-dir": str(tmp_path), "num-rounds": 3, "evaluation.federated": "on"})
    times = []

    class Noting(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            times.append({message.metadata.created_at for message in messages})
            return super().send_and_receive(messages, timeout=timeout)

    run(
        Noting.simulated(lambda *asked: app(*asked), config.flat(), 12),
        config,
        ConsoleReporter(3, Console(file=io.StringIO())),
    )
    assert len(times) >= 6 and {len(each) for each in times if each} == {1}
    moments = [min(each) for each in times if each]
    assert moments == sorted(set(moments)), "and each round its own"


@pytest.mark.parametrize("kind", [ConsoleReporter, JsonReporter])
def test_nothing_that_is_said_depends_on_how_many_were_drawn(tmp_path, monkeypatch, kind):
    """Two runs whose cohorts differ and whose clients fail: word for word the same."""
    monkeypatch.setattr("test_secret_times.app", _failing)
    unscored = {"evaluation.central": False}
    (first, said, drawn), (second, also_said, others) = (
        go(tmp_path / str(number), monkeypatch, kind, unscored) for number in range(2)
    )
    assert drawn != others
    assert said.replace(str(tmp_path / "0"), "") == _with_head(first, also_said, second).replace(
        str(tmp_path / "1"), ""
    )
    assert _rounds(first) == _rounds(second)


def _failing(message, context):
    raise MemoryError


def _with_head(outcome, said, other):
    """The head of the ledger depends on ids that say nothing."""
    return said.replace(other.privacy["ledger"]["head"], outcome.privacy["ledger"]["head"])


def _rounds(outcome):
    return (outcome.directory.path / "rounds.jsonl").read_text()


def test_where_no_draw_is_accounted_for_operators_are_told_how_long_it_took(tmp_path, monkeypatch):
    outcome, said, _ = go(tmp_path, monkeypatch, JsonReporter, {"strategy.sampling": "fixed"})
    lines = [json.loads(line) for line in said.splitlines()]
    assert all("seconds" in line for line in lines if line["event"] == "round" and line["round"])
    assert all(re.fullmatch(r"[\d-]{10}T[\d:]{8}Z", line["time"]) for line in lines)
    assert not run_state(outcome.directory.path).hides_times


@pytest.mark.slow
def test_batches_that_are_drawn_on_clients_leave_no_times_either(tmp_path, monkeypatch):
    dp_sgd = {"privacy.client": "dp-sgd", "privacy.server": "none", "strategy.sampling": "fixed", "num-rounds": 1}
    settings = {key: value for key, value in POISSON.items() if key != "privacy.noise-multiplier"}
    monkeypatch.setattr("test_secret_times.POISSON", settings)
    outcome, said, _ = go(tmp_path, monkeypatch, ConsoleReporter, dp_sgd)
    assert outcome.plan.hides_times and not MOMENT.search(said.replace(str(tmp_path), ""))
    assert "seconds" not in _rounds(outcome) and '"accepted"' in _rounds(outcome)
