"""A client takes as long as the server waits for its reply, and no longer; and no less than its node's policy says.

A SuperNode handles one message at a time and waits for its client as long as that lives: a client that hangs would
keep its node from every later round.
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
"""How long after its deadline a process that did not let itself be interrupted is ended."""
PROGRAM = "flwr-clientapp"


class _TimeIsOver(BaseException):
    """No `Exception`: what contains those, down to a single example, must not take the deadline for one."""


def within_deadline(message: Message, context: Context, call_next: CallNext) -> Message:
    """Give up when the message's time to live is over, counted from now: clocks of two machines may differ.

    Python code is interrupted. A process that hangs elsewhere is ended a little later; its SuperNode notices within a
    minute and answers for it. In a process that serves several messages nothing is done.

    Raises:
        FederationError: the time is over.
        PolicyError: it is shorter than the policy's `min-reply-seconds`. Whether it was enough for training would tell
            what these hide.
    """
    if not _is_own_process():
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

    How long training takes tells how much there is to train on, and whether a refusal came before or after it; so does
    the choice of the model that is kept. What leaves is made after the wait: its metadata says when that was.
    """
    started = time.monotonic()
    reply = call_next(message, context)
    time.sleep(max(0.0, _minimum_seconds(context) - (time.monotonic() - started)))
    return Message(reply.error if reply.has_error() else reply.content, reply_to=message)


def _minimum_seconds(context: Context) -> float:
    try:
        policy = Node.of(context).policy
    except (NodeConfigError, PolicyError):
        return 0.0  # it was refused for that
    return policy.min_reply_seconds if policy else 0.0


def _is_own_process() -> bool:
    """Whether this process was made for this message, by Flower or by a warm node."""
    return Path(sys.argv[0]).name == PROGRAM or CHECKED_BUNDLE in os.environ


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
