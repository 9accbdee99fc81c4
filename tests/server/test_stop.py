"""A run that is asked to end: what it finishes, what it abandons, and what it leaves."""

import io
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from rich.console import Console

from cloister.client.app import app
from cloister.config.run import parse
from cloister.privacy.accounting.ledger import Ledger
from cloister.server import evaluation
from cloister.server.build import build
from cloister.server.reports.console import ConsoleReporter
from cloister.server.round import Round, why_no_replies
from cloister.server.run import run
from cloister.server.screening import Rejection
from cloister.server.stopping import Stop, StopAsked
from cloister.server.strategy_wrapper import Measurements
from cloister.simulation.grid import LocalGrid
from cloister.utils.errors import ConfigError, FederationError

SOUND = {
    "task.model": "softmax",
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 2.0,
    "tensorboard": False,
    "num-rounds": 3,
    "privacy.data-identity": "digits",
}


class Asking(LocalGrid):
    """Sends this process a signal while round `when` waits for its replies."""

    when = 2
    asked = 0

    def pull_messages(self, message_ids):
        self.asked += 1
        if self.asked == self.when:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().pull_messages(message_ids)


def go(tmp_path, settings, grid=Asking, clients=3):
    config = parse(settings | {"output-dir": str(tmp_path)})
    return run(grid.simulated(app, config.flat(), clients), config, ConsoleReporter(3, Console(quiet=True)))


def test_a_waiting_round_is_abandoned_and_everything_is_left_whole(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    outcome = go(tmp_path, SOUND)
    path = outcome.directory.path
    assert outcome.stopped.startswith("stopped by SIGTERM: round 2 was abandoned; the server released nothing of it")
    assert [done.number for done in outcome.rounds] == [0, 1]
    with np.load(path / "model.npz") as saved, np.load(path / "checkpoints" / "round-00001.npz") as first:
        for name in first:
            np.testing.assert_array_equal(saved[name], first[name])
    assert json.loads((path / "privacy.json").read_text())["rounds"] == 1
    entries = Ledger(tmp_path / "ledgers" / "digits.jsonl").entries
    assert len(entries) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_round_that_is_being_aggregated_is_finished(tmp_path, monkeypatch):
    scored = evaluation.CentralEvaluation.__call__
    calls = []

    def score(self, arrays):
        calls.append(1)
        if len(calls) == 2:  # the first is of the initial model
            os.kill(os.getpid(), signal.SIGTERM)
        return scored(self, arrays)

    monkeypatch.setattr(evaluation.CentralEvaluation, "__call__", score)
    outcome = go(tmp_path, SOUND, LocalGrid)
    assert [done.number for done in outcome.rounds] == [0, 1] and "round 2 was abandoned" in outcome.stopped
    assert outcome.privacy["rounds"] == 1


def test_a_model_is_kept_when_its_scores_are_not_waited_for(tmp_path):
    settings = {"task.model": "softmax", "privacy.server": "none", "tensorboard": False, "num-rounds": 3}
    outcome = go(tmp_path, settings)  # the second wait is for the scores of the first round
    assert [done.number for done in outcome.rounds] == [0, 1] and not outcome.rounds[1].federated
    first = np.load(outcome.directory.checkpoints / "round-00001.npz")
    assert any(np.abs(first[name]).sum() for name in first)


def test_a_request_raised_by_another_thread_interrupts_a_wait_without_a_timeout():
    """As in Flower while it sends objects to a SuperLink that is gone."""
    finished = threading.Event()
    rescue = threading.Timer(60, finished.set)
    threads = threading.active_count()
    with Stop().listening() as stop:
        rescue.start()
        raising = threading.Thread(target=lambda: (time.sleep(0.3), signal.raise_signal(signal.SIGINT)))
        raising.start()
        with pytest.raises(StopAsked), stop.waiting():
            finished.wait()
        raising.join()
    rescue.cancel()
    rescue.join()
    assert stop.asked == "SIGINT" and not finished.is_set()
    assert threading.active_count() <= threads and signal.set_wakeup_fd(-1) == -1


def test_a_request_that_another_handler_hears_in_the_last_moment_holds_nothing_up():
    with Stop().listening() as stop:
        rescue = threading.Timer(20, setattr, (stop, "asked", "the rescue"))
        rescue.start()
        wakes = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakes)
        os.write(wakes, bytes([signal.SIGINT]))
    rescue.cancel()
    assert not stop.asked


def test_a_second_request_is_not_held_back():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("old handler"))
    try:
        with Stop().listening() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked == "SIGTERM" and not heard
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == ["old handler"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_the_echo_that_flower_sends_after_the_first_request_is_none(monkeypatch, first):
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append("old handler"))
    try:
        with Stop().listening() as stop:
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.asked == first.name and not heard
            monkeypatch.setattr("cloister.server.stopping.ECHO_SECONDS", -1.0)
            os.kill(os.getpid(), signal.SIGINT)
            assert heard == ["old handler"]
        os.kill(os.getpid(), signal.SIGINT)
        assert heard == ["old handler"] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_request_from_before_the_wait_ends_it():
    with Stop().listening() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StopAsked, match="SIGINT"), stop.waiting():
            pass


class Refusing(LocalGrid):
    """The last two of its nodes fail in the rounds of `bad`."""

    bad = (1, 2)
    round = 0

    def push_messages(self, messages):
        self.round += 1
        return super().push_messages(messages)

    def _answer(self, message):
        if message.metadata.dst_node_id > 1 and self.round in self.bad:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no"), reply_to=message)
        return super()._answer(message)


HEURISTIC = {"task.model": "softmax", "tensorboard": False, "num-rounds": 3, "strategy.min-replies": 2}


@pytest.mark.parametrize("server", ["metric", "none"])
def test_a_round_with_too_few_replies_is_abandoned_and_the_run_goes_on(tmp_path, server):
    outcome = go(tmp_path, HEURISTIC | {"privacy.server": server, "evaluation.federated": "off"}, Refusing)
    zero, one, two, three = outcome.rounds
    assert one.central == zero.central == two.central != three.central
    assert [done.measured.abandoned for done in (one, two, three)] == [True, True, False]
    assert one.measured.accepted == 1


def test_too_few_replies_in_three_rounds_end_the_run(tmp_path):
    class Hopeless(Refusing):
        bad = (1, 2, 3)

    with pytest.raises(FederationError, match=r"too few replies \(1\) counted in round 3"):
        go(tmp_path, HEURISTIC, Hopeless)


@pytest.mark.parametrize("secret", [False, True])
def test_why_a_run_ends_does_not_tell_whom_a_secret_draw_hit(secret):
    rejected = (Rejection(7, "error", "disk full"),)
    done = Round(3, measured=Measurements(asked=2, accepted=1, rejected=rejected))
    told = why_no_replies(3, done, secret)
    assert "round 3" in told and ("disk full" in told) is not secret and ("(1)" in told) is not secret


HYPOTHESES = {
    "task.name": "linear",
    "privacy.server": "laplace-clustering",
    "task.test-fraction": 0.0,
    "tensorboard": False,
    "num-rounds": 2,
}


@pytest.mark.parametrize("trouble", ["error", "signal"])
def test_what_goes_wrong_when_nodes_get_their_last_models_costs_the_run_nothing(tmp_path, monkeypatch, trouble):
    def personalise(*_):
        if trouble == "error":
            raise ConnectionError("the SuperLink is gone")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("cloister.server.run.personalise", personalise)
    outcome = go(tmp_path, HYPOTHESES, LocalGrid, clients=6)
    assert len(list(outcome.directory.path.glob("hypothesis-*"))) > 1 and len(outcome.rounds) == 3


def test_who_is_stopped_hands_out_no_models(tmp_path, monkeypatch):
    monkeypatch.setattr("cloister.server.run.personalise", lambda *_: pytest.fail("it was asked to stop"))
    outcome = go(tmp_path, HYPOTHESES, clients=6)
    assert outcome.stopped and list(outcome.directory.path.glob("hypothesis-*"))


def test_a_rejected_reply_is_told_with_its_round(tmp_path):
    said = io.StringIO()
    config = parse(HEURISTIC | {"output-dir": str(tmp_path)})
    run(Refusing.simulated(app, config.flat(), 3), config, ConsoleReporter(3, Console(file=said, width=200)))
    told = [line.strip() for line in said.getvalue().splitlines() if "rejected:" in line]
    assert [line[:32] for line in told] == [
        f"rejected: round {n}, node {k}, error"[:32] for n in (1, 2) for k in (2, 3)
    ]


def test_a_guarantee_does_not_let_replies_decide_over_a_release():
    with pytest.raises(ConfigError, match=r"strategy.min-replies = 2 contradicts the guarantee"):
        build(parse(SOUND | {"strategy.min-replies": 2}))


def test_a_log_for_machines(tmp_path, capsys):
    config = parse(HEURISTIC | {"output-dir": str(tmp_path), "run-name": "x", "log-format": "json"})
    run(Refusing.simulated(app, config.flat(), 3), config)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines if line["event"] != "rejected"] == ["start", *["round"] * 4, "end"]
    assert {line["run"] for line in lines} == {"x"} and all(line["time"] for line in lines)
    rejected = [line for line in lines if line["event"] == "rejected"]
    assert [(line["round"], line["node"], line["code"]) for line in rejected] == [
        (1, "2", "error"), (1, "3", "error"), (2, "2", "error"), (2, "3", "error"),
    ]  # fmt: skip
    assert [line["abandoned"] for line in lines if line["event"] == "round" and line["round"]] == [True, True, False]
