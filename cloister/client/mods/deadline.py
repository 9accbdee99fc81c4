"""Deadline and minimum delay of a client's reply.

A client stops when the server no longer waits, and replies no sooner than its node's policy permits. A SuperNode
handles one message at a time and waits for its client without limit. A hanging client would exclude its node from all
later rounds.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from flwr.app import Context, Message

from cloister.client.node import Node
from cloister.client.policy import CHECKED_BUNDLE
from cloister.core.errors import FederationError, NodeConfigError, PolicyError
from cloister.flower.messages import CallNext

HARD_SECONDS = 10.0
"""Seconds after the deadline at which an uninterruptible process is ended."""
PROGRAM = "flwr-clientapp"


class _TimeIsOver(BaseException):
    """Passed deadline. It is no `Exception`, so that handlers of errors do not catch it."""


def within_deadline(message: Message, context: Context, call_next: CallNext) -> Message:
    """Give up when the message's time to live is over.

    The time counts from now, since the clocks of two machines may differ. Python code is interrupted. A process that
    hangs elsewhere is ended a little later; its SuperNode notices that within a minute and replies for it. A process
    that serves several messages has no deadline.

    Raises:
        FederationError: the time is over.
        PolicyError: the time is shorter than the policy's `min-reply-seconds`. A timeout during training would reveal
            what that delay hides.
    """
    # Flower or a warm node starts a process for one message only.
    if Path(sys.argv[0]).name != PROGRAM and CHECKED_BUNDLE not in os.environ:
        return call_next(message, context)
    seconds, minimum = message.metadata.ttl, _minimum_seconds(context)
    if seconds < minimum:
        raise PolicyError(
            f"refused by the policy of this node: the server waits {seconds:g} s, and min-reply-seconds = {minimum:g}"
        )
    try:
        with _alarm(seconds):
            return call_next(message, context)
    except _TimeIsOver:
        raise FederationError(f"this client gave up after {seconds:g} s: the server waits no longer") from None


def no_sooner_than(message: Message, context: Context, call_next: CallNext) -> Message:
    """Hold the answer to any message back for `min-reply-seconds` of the node's policy, errors included.

    The duration of training reveals the amount of data, and whether a refusal came before or after it. The choice of
    the kept model does so too. The reply is created after the delay, since its metadata contains the time.
    """
    started = time.monotonic()
    reply = call_next(message, context)
    time.sleep(max(0.0, _minimum_seconds(context) - (time.monotonic() - started)))
    return Message(reply.error if reply.has_error() else reply.content, reply_to=message)


def _minimum_seconds(context: Context) -> float:
    try:
        policy = Node.of(context).policy
    except (NodeConfigError, PolicyError):
        return 0.0  # the message is refused for this error
    return policy.min_reply_seconds if policy else 0.0


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def give_up(*_: object) -> NoReturn:
        raise _TimeIsOver

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + HARD_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
