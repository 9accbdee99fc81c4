"""Open a packed message, and pack the reply to it."""

from flwr.app import Context, Error, Message, RecordDict

from cloister.core.errors import FederationError
from cloister.core.packing import PACKED, is_packed, opened, packed
from cloister.flower.messages import CallNext, ErrorCode, make_message

MAX_RECORDS = 2**26
"""Bytes of the settings that a server may send: those of a secure aggregation grow with its members."""


def open_and_pack(message: Message, context: Context, call_next: CallNext) -> Message:
    """Answer a packed message with one packed value: arrays, metrics, or the text of an error.

    A message that is not packed, from a server that packs none, is answered in the same way.
    """
    if not is_packed(message.content):
        return call_next(message, context)
    try:
        content = opened(message.content, MAX_RECORDS)
        if isinstance(content, Error):
            raise FederationError("the server sent an error in place of a message")
    except FederationError as error:
        return _sealed(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"FederationError: {error}"), message)
    reply = call_next(make_message(message.metadata, content), context)
    return _sealed(reply.error if reply.has_error() else reply.content, message)


def _sealed(content: RecordDict | Error, message: Message) -> Message:
    """Return the reply that leaves the node, which others attest or look at no more.

    A signature of the node over run, node, message id and value belongs here: everything that leaves is in the value.
    """
    return Message(RecordDict({PACKED: packed(content)}), reply_to=message)
