"""Open a packed message, and pack and sign the reply to it."""

import logging
from logging import ERROR

from flwr.app import Context, Error, Message, RecordDict

from cloister.core.errors import ConfigError, FederationError
from cloister.core.files import expanded
from cloister.core.keys import node_key
from cloister.core.packing import PACKED, is_packed, opened, packed
from cloister.core.signatures import Answered, Sign
from cloister.flower.messages import CallNext, ErrorCode, make_message

MAX_RECORDS = 2**26
"""Bytes of the settings that a server may send: those of a secure aggregation grow with its members."""

logger = logging.getLogger("cloister.client")


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
        return _sealed(_failed("NodeConfigError: details are in the log of the node"), message, None)
    except FederationError as error:
        return _sealed(_failed(f"FederationError: {error}"), message, sign)
    reply = call_next(make_message(message.metadata, content), context)
    return _sealed(reply.error if reply.has_error() else reply.content, message, sign)


def _failed(reason: str) -> Error:
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)


def _sealed(content: RecordDict | Error, message: Message, sign: Sign | None) -> Message:
    """Return the reply that leaves the node: one value, which nothing adds to."""
    return Message(RecordDict({PACKED: packed(content, sign)}), reply_to=message)
