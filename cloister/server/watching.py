"""Grids that tell where every client is while a round goes on."""

from collections.abc import Callable
from typing import Literal

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from cloister.core.wire import SECURE

Standing = Literal["waiting", "training", "scoring", "sent", "rejected"]
"""Not its turn yet; asked to train, or to score, and no reply so far; replied; with an error or too late."""
Watch = Callable[[int, Standing], None]
"""Is told the id of a node, and where it is now."""


class WatchedGrid(Grid):
    """A grid of ours, which is asked for nothing more than Flower's.

    Attributes:
        watch: is told of every message and every reply. It sees what a draw may have to keep secret, so that it is
            `nobody` unless the run may show it.
    """

    watch: Watch


def nobody(_: int, __: Standing) -> None:
    """Take no notice."""


def asked_to(message: Message) -> Standing:
    """What a client does with a message."""
    return "training" if message.metadata.message_type in (MessageType.TRAIN, SECURE) else "scoring"


def answered(reply: Message) -> Standing:
    """Whether a reply is one; that it counts is judged later."""
    return "rejected" if reply.has_error() else "sent"
