"""A client that hangs is interrupted, or ended, when nobody waits for it any more."""

import signal
import subprocess
import sys
import time

import pytest
from flwr.app import Context, Message, RecordDict

from cloister.client.deadline import within_deadline
from cloister.client.policy import CHECKED_BUNDLE
from cloister.core.errors import FederationError
from cloister.core.identity import assume_run


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
        "from cloister.client import deadline\n"
        "deadline.HARD_SECONDS = 0.2\n"
        "with deadline._alarm(0.1):\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "    while True: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Timeout" in done.stderr
