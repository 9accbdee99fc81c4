"""Flower mods around every message: packing and signature, minimum delay, contained errors, deadline."""

import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, WARNING
from pathlib import Path
from typing import NoReturn

from flwr.app import Context, Error, Message, RecordDict

from cloister.client.node import Node
from cloister.client.policy import CHECKED_BUNDLE
from cloister.flower.messages import CallNext, ErrorCode, make_message
from cloister.utils.crash import WITHHELD, note_failure, trace_without_values
from cloister.utils.errors import (
    BudgetExhausted,
    CloisterError,
    ConfigError,
    DataError,
    FederationError,
    NodeConfigError,
    PolicyError,
)
from cloister.utils.files import expanded
from cloister.utils.keys import Answered, Sign, node_key
from cloister.utils.text import clean
from cloister.utils.wire import PACKED, is_packed, opened, packed

logger = logging.getLogger("cloister.client")
MAX_RECORDS = 2**26
"""Bytes of the settings that a server may send: those of a secure aggregation grow with its members."""
HARD_SECONDS = 10.0
"""Seconds after the deadline at which an uninterruptible process is ended."""
PROGRAM = "flwr-clientapp"


def open_and_pack(message: Message, context: Context, call_next: CallNext) -> Message:
    """Answer a packed message with one packed value: arrays, metrics, or the text of an error.

    Where the node's configuration names its key, the node signs the value. A message that is not packed, from a server
    that packs none, is answered in the same way.
    """
    if not is_packed(message.content):
        return call_next(message, context)
    sign: Sign | None = None
    try:
        if path := str(context.node_config.get("node-key", "")):
            try:
                key = node_key(expanded(path).read_bytes(), f"node-key {path}")
            except OSError as error:
                raise ConfigError(f"node-key {path}: {error.strerror}") from None
            sign = Answered(message.metadata.run_id, context.node_id, message.metadata.message_id).signer(key)
        content = opened(message.content, MAX_RECORDS)
        if isinstance(content, Error):
            raise FederationError("the server sent an error in place of a message")
    except ConfigError as error:
        # What is said of the node's configuration is for its operator alone.
        logger.log(ERROR, "run %s: this client failed: %s", message.metadata.run_id, error)
        return _sealed(_failed(f"NodeConfigError: {WITHHELD}"), message, None)
    except FederationError as error:
        return _sealed(_failed(f"FederationError: {error}"), message, sign)
    reply = call_next(make_message(message.metadata, content), context)
    return _sealed(reply.error if reply.has_error() else reply.content, message, sign)


def _failed(reason: str) -> Error:
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)


def _sealed(content: RecordDict | Error, message: Message, sign: Sign | None) -> Message:
    """Return the reply that leaves the node: one value, which nothing adds to."""
    return Message(RecordDict({PACKED: packed(content, sign)}), reply_to=message)


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


def contain_errors(message: Message, context: Context, call_next: CallNext) -> Message:
    """Answer an exception with an error reply that carries no data.

    Messages about keys, names and budgets leave the node. Errors about data contain file names and row counts. Errors
    about the node's configuration quote it, and any other exception may quote an example. Of these only the type
    leaves, and the rest is logged on the node. In a simulation its log has the text of any exception.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        # Text from the server must not add lines to this node's log.
        place = f"run {message.metadata.run_id}, round {clean(message.metadata.group_id)}, node {context.node_id}"
        text = note_failure(error)
        logged = log_text(error) or (f": {text}" if text else "")
        if isinstance(error, BudgetExhausted):
            # An abstention is the purpose of a budget, not a failure.
            logger.log(WARNING, "%s: this client abstains%s", place, logged)
        else:
            trace = "\n".join(f"  {clean(line)}" for line in trace_without_values(error).splitlines())
            logger.log(ERROR, "%s: this client failed%s\n%s", place, logged, trace)
        told = isinstance(error, CloisterError) and not isinstance(error, DataError | NodeConfigError)
        reason = f"{type(error).__name__}: {error if told else WITHHELD}"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def log_text(error: Exception) -> str:
    """Return the text for this node's log: the message of a Cloister error.

    It is empty for other errors, which may quote an example. If the cause is a spent budget, the text is that of the
    cause; the text that leaves is equal for all budgets.
    """
    told = error.__cause__ if isinstance(error.__cause__, BudgetExhausted) else error
    lines = map(clean, str(told).splitlines())
    return f": {'; '.join(lines)}" if isinstance(told, CloisterError) else ""


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
