"""Grids that report the state of every client during a round."""

from collections.abc import Callable
from typing import Literal

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from cloister.core.wire import SECURE

Standing = Literal["waiting", "training", "scoring", "sent", "rejected"]
"""State of a client: before its request; asked to train or to score; replied; replied with an error or too late."""
Watch = Callable[[int, Standing], None]
"""Function that receives the id of a node and its new state."""


class WatchedGrid(Grid):
    """Grid that reports messages and replies; its interface to strategies is Flower's.

    Attributes:
        watch: receives every message and every reply. These may reveal a secret draw, so that it is `noop` unless the
            run may show them.
    """

    watch: Watch


def noop(_: int, __: Standing) -> None:
    """Do nothing."""


def asked_to(message: Message) -> Standing:
    """Return the state of a client after a message."""
    return "training" if message.metadata.message_type in (MessageType.TRAIN, SECURE) else "scoring"


def answered(reply: Message) -> Standing:
    """Return `rejected` for an error reply, otherwise `sent`."""
    return "rejected" if reply.has_error() else "sent"
