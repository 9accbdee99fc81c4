"""A client that hangs is interrupted, or ended, when nobody waits for it; and none answers too soon."""

import signal
import subprocess
import sys
import time
from datetime import UTC, datetime

import flwr.app.message.message as flwr_message
import pytest
from asking import DP_SGD, OPEN, answer, context_of, message_of, own_node, policy_file
from flwr.app import Context, Message, RecordDict
from flwr.common.serde_utils import metadata_to_proto

from cloister.client import mods
from cloister.client.mods import contain_errors, no_sooner_than, within_deadline
from cloister.client.policy import CHECKED_BUNDLE
from cloister.flower.messages import assume_run
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.utils.errors import DataError, FederationError, PolicyError

RULES = {"mechanisms": [], "min_server_noise_multiplier": None}


def asked(seconds):
    assume_run()
    return Message(RecordDict(), 1, "train", ttl=seconds), Context(1, 1, {}, RecordDict(), {})


def hang(*_):
    time.sleep(30)


def test_a_client_that_hangs_is_interrupted(monkeypatch):
    monkeypatch.setenv(CHECKED_BUNDLE, "x")
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(FederationError, match=r"gave up after 0.05 s"):
        within_deadline(*asked(0.05), hang)
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_contains_exceptions_does_not_contain_the_deadline(monkeypatch):
    """An example whose gradient was being computed would count for nothing, and the others go on."""
    monkeypatch.setenv(CHECKED_BUNDLE, "x")
    went_on = []

    def contain(*_):
        try:
            time.sleep(30)
        except Exception:
            went_on.append(True)

    with pytest.raises(FederationError, match=r"gave up after 0.05 s"):
        within_deadline(*asked(0.05), contain)
    assert not went_on


def test_no_example_is_left_out_because_the_time_is_over(monkeypatch, tmp_path):
    monkeypatch.setenv(CHECKED_BUNDLE, "x")
    began, contributed = [], []

    def slow(self, x, y):
        began.append(True)
        if len(began) == 2:
            signal.raise_signal(signal.SIGALRM)  # the time is over now, however long it took to come here
        contributed.append(len(x))
        return 0.0, {name: array + 1 for name, array in self.weights.items()}

    monkeypatch.setattr(SoftmaxRegression, "loss_and_gradients", slow)
    settings = DP_SGD | {"client.batch-size": 40}
    reply = answer(settings, own_node(tmp_path), message_of(ttl=600))
    assert reply.error.reason.startswith("FederationError: this client gave up") and contributed == [1]


def test_a_server_that_waits_for_less_than_the_rule_is_refused(monkeypatch, tmp_path):
    """A time that is too short for training would tell how long that took."""
    monkeypatch.setenv(CHECKED_BUNDLE, "x")
    node = {"policy": str(policy_file(tmp_path, **RULES, min_reply_seconds=3.0))}
    with pytest.raises(PolicyError, match=r"waits 2 s, and min-reply-seconds = 3"):
        within_deadline(message_of(ttl=2), context_of(node=node), hang)
    within_deadline(message_of(ttl=3), context_of(node=node), lambda *_: None)


def test_a_client_in_time_is_left_alone(monkeypatch):
    monkeypatch.setenv(CHECKED_BUNDLE, "x")
    assert within_deadline(*asked(30), lambda message, _: message).metadata.ttl == 30
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_process_of_many_messages_is_not_touched():
    message, context = asked(0.01)

    def look(*_):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        return message

    assert within_deadline(message, context, look) is message


def test_what_does_not_let_itself_be_interrupted_is_ended():
    script = (
        "import os, signal, sys; sys.argv[0] = 'flwr-clientapp'\n"
        "from cloister.client import mods\n"
        "mods.HARD_SECONDS = 0.2\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "with mods._alarm(0.1):\n"
        "    while True: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "Timeout" in done.stderr


class Clock:
    """Time that passes only where somebody waits or works."""

    def __init__(self, monkeypatch):
        self.now, self.waits = 1000.0, []
        monkeypatch.setattr(mods.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(mods.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


class Work:
    """A handler that takes its time."""

    def __init__(self, clock, seconds, fails):
        self.clock, self.seconds, self.fails = clock, seconds, fails

    def __call__(self, message, _):
        self.clock.now += self.seconds
        if self.fails:
            raise DataError("no rows")
        return Message(RecordDict(), reply_to=message)


class TestNoSooner:
    @pytest.fixture
    def clock(self, monkeypatch):
        return Clock(monkeypatch)

    def reply(self, clock, node, worked, kind="train", fails=False):
        message, work = message_of(kind=kind), Work(clock, worked, fails)
        started = clock.now
        no_sooner_than(message, context_of(node=node), lambda *call: contain_errors(*call, work))
        return clock.now - started

    @pytest.mark.parametrize(("worked", "took"), [(0.0, 30.0), (29.0, 30.0), (30.0, 30.0), (31.0, 31.0)])
    @pytest.mark.parametrize("fails", [False, True])
    def test_a_reply_takes_at_least_so_long_and_no_longer_than_it_must(self, tmp_path, clock, worked, took, fails):
        node = {"policy": str(policy_file(tmp_path, **RULES, min_reply_seconds=30.0))}
        assert self.reply(clock, node, worked, fails=fails) == pytest.approx(took)

    @pytest.mark.parametrize("kind", ["evaluate", "query"])
    def test_other_messages_too(self, tmp_path, clock, kind):
        """The choice of the model that is kept takes the longer the more examples there are."""
        node = {"policy": str(policy_file(tmp_path, **RULES, min_reply_seconds=30.0))}
        assert self.reply(clock, node, 1.0, kind) == pytest.approx(30.0)

    def test_without_the_rule_too(self, tmp_path, clock):
        rule, none = str(policy_file(tmp_path, **RULES)), str(tmp_path / "none.toml")
        for node in ({}, {"policy": rule}, {"policy": none}, {"policy": rule, "max-epsilom": 1.0}):
            assert self.reply(clock, node, 0.25) == pytest.approx(0.25)

    def test_every_answer_of_the_app_is_held_back(self, tmp_path, clock):
        """Refused at the door, by the policy, for the budget, or trained: each after the same time."""
        rules = RULES | {"min_reply_seconds": 30.0, "max_hypotheses": 1}
        node = own_node(tmp_path, policy=str(policy_file(tmp_path, **rules)))
        asked = [
            (OPEN, node, message_of()),
            (OPEN, node, message_of(more=1)),
            (OPEN | {"task.name": "mnist"}, node, message_of()),
            (OPEN, node | {"max-epsilon": 1.0}, message_of()),
            (OPEN, node | {"data-path": "/nowhere.npz"}, message_of()),
        ]
        failed = []
        for settings, configured, message in asked:
            started = clock.now
            failed.append(answer(settings, configured, message).has_error())
            assert clock.now - started == pytest.approx(30.0)
        assert failed == [False, True, True, True, True]

    @pytest.mark.parametrize("fails", [False, True])
    @pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
    def test_nothing_on_the_wire_tells_how_long_it_took(self, tmp_path, clock, monkeypatch, kind, fails):
        """A reply's metadata says when it was made, and how long it may live."""
        monkeypatch.setattr(flwr_message, "now", lambda: datetime.fromtimestamp(clock.now, UTC))
        node = {"policy": str(policy_file(tmp_path, **RULES, min_reply_seconds=30.0))}
        found = set()
        for worked in (0.0, 7.0, 29.0):
            clock.now = 1000.0
            message, work = message_of(kind=kind), Work(clock, worked, fails)
            message.metadata.__dict__["_message_id"] = "asked"
            reply = no_sooner_than(message, context_of(node=node), lambda *call, work=work: contain_errors(*call, work))
            assert reply.has_error() == fails and reply.metadata.reply_to_message_id == "asked"
            found.add(metadata_to_proto(reply.metadata).SerializeToString(deterministic=True))
            assert reply.metadata.created_at == 1030.0
        assert len(found) == 1

    def test_a_deadline_counts_the_work_and_not_the_wait(self, tmp_path, clock, monkeypatch):
        """Nothing is given up while its answer is held back."""
        monkeypatch.setenv(CHECKED_BUNDLE, "x")
        node = {"policy": str(policy_file(tmp_path, **RULES, min_reply_seconds=1e4))}
        message, context = message_of(ttl=2e4), context_of(node=node)
        timers = []
        monkeypatch.setattr(mods.time, "sleep", lambda _: timers.append(signal.getitimer(signal.ITIMER_REAL)))
        no_sooner_than(message, context, lambda *call: within_deadline(*call, lambda message, _: message))
        assert timers == [(0.0, 0.0)]
