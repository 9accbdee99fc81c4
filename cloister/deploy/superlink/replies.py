"""How much a node may send back: in proportion to the message it replies to.

Flower takes objects of any number and keeps them in the SuperLink's database, which is busy for some milliseconds
with each. A reply of ours is a model of the size of the one that was sent, in single or double precision, and scores.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from logging import WARNING
from threading import Lock
from typing import Any

from fastapi import HTTPException
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_object import is_valid_sha256_hash, iterate_object_tree

from cloister.deploy.superlink.in_front import InFront

FACTOR = 2
"""A reply may be in double precision where the message was in single."""
SLACK = 8 * 2**20
"""Bytes for scores and the like, and for a reply to a message without a model."""
UNKNOWN = 2 * 2**30
"""Bytes of a reply to a message that was fetched before this SuperLink was started."""
MORE_PARTS = 200
"""Parts that a reply may have beyond `FACTOR` times those of its message."""
UNKNOWN_PARTS = 2000
"""Parts of a reply to a message that was fetched before this SuperLink was started."""


class _Objects:
    """Objects by name with their sizes: the largest counts of one that comes more than once.

    Attributes:
        total: bytes of all of them.
    """

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def note(self, name: str, size: int) -> None:
        """Note that one of this size came."""
        before = self._sizes.get(name, 0)
        self._sizes[name] = max(before, size)
        self.total += self._sizes[name] - before


@dataclass
class _Exchange:
    """One message and the reply to it.

    Args:
        fetched: objects of the message.
        sent: objects of the reply; its announcement is one too.
        is_known: whether the message was fetched from this SuperLink.
    """

    fetched: _Objects = field(default_factory=_Objects)
    sent: _Objects = field(default_factory=_Objects)
    is_known: bool = True

    @property
    def limit(self) -> int:
        return FACTOR * self.fetched.total + SLACK if self.is_known else UNKNOWN + SLACK

    @property
    def max_parts(self) -> int:
        return FACTOR * len(self.fetched) + MORE_PARTS if self.is_known else UNKNOWN_PARTS


class ReplyLimit(InFront):
    """Counts what a node fetches and sends.

    A node works on one message at a time: what it sends between two messages is the reply to the first.
    """

    names = ("pull_messages", "pull_object", "push_messages", "push_object")

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: dict[int, _Exchange] = {}
        self.lock = Lock()

    def pull_messages(self, request: Any, **others: Any) -> Any:
        """Begin to count anew for a node that is given a message."""
        answer = self.inner["pull_messages"](request=request, **others)
        if answer.messages_list:
            with self.lock:
                self.exchanges[request.node.node_id] = _Exchange()
        return answer

    def pull_object(self, request: Any, **others: Any) -> Any:
        """Note the size of what a node fetches; fetched twice it counts once, and what is not there does not."""
        answer = self.inner["pull_object"](request=request, **others)
        with self.lock:
            if answer.object_content and (exchange := self.exchanges.get(request.node.node_id)):
                exchange.fetched.note(request.object_id, len(answer.object_content))
        return answer

    def push_messages(self, request: Any, **others: Any) -> Any:
        """Begin a reply.

        Raises:
            HTTPException: 413, it has too many parts, or what is said of them is too large; 400, it is not one reply.
        """
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise HTTPException(400, "a node sends one reply at a time")
        with self.lock:
            max_parts = self._exchange(request.node.node_id).max_parts
        # Not one more is looked at: there may be millions.
        if sum(1 for _ in islice(iterate_object_tree(request.message_object_trees[0]), max_parts + 1)) > max_parts:
            raise HTTPException(413, f"a reply to this message may have {max_parts} parts")
        self._count(request.node.node_id, "", request.ByteSize())
        return self.inner["push_messages"](request=request, **others)

    def push_object(self, request: Any, **others: Any) -> Any:
        """Store a part of a reply.

        Raises:
            HTTPException: 413, the reply is too large; 400, what is said to be the name of the part is none.
        """
        # Names are kept, and count for nothing.
        if not is_valid_sha256_hash(request.object_id):
            raise HTTPException(400, "the name of a part is no SHA-256")
        self._count(request.node.node_id, request.object_id, len(request.object_content))
        return self.inner["push_object"](request=request, **others)

    def _exchange(self, node: int) -> _Exchange:
        return self.exchanges.setdefault(node, _Exchange(is_known=False))

    def _count(self, node: int, name: str, size: int) -> None:
        """Count an object of a reply, once however often it is sent: one that was not taken is sent again.

        Raises:
            HTTPException: 413, the reply has too many objects by now, or is too large.
        """
        with self.lock:
            exchange = self._exchange(node)
            before, limit, max_parts = exchange.sent.total, exchange.limit, exchange.max_parts
            if name not in exchange.sent and len(exchange.sent) > max_parts:  # the announcement is one too
                raise HTTPException(413, f"a reply to this message may have {max_parts} parts")
            exchange.sent.note(name, size)
            sent = exchange.sent.total
        if sent > limit:
            # Once a reply, not once an object.
            report: Callable[..., None] = log if before <= limit else lambda *_: None
            report(WARNING, "refused a reply of node %s: more than %d bytes", node, limit)
            raise HTTPException(413, f"a reply to this message may have {limit} bytes")
