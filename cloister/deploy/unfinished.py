"""Replies that are announced and not all there: the server's app is not told of them, and waits for no client.

Flower tells the server's app of a reply as soon as a node has announced it. The app then waits for the parts, and looks
at nobody else's reply meanwhile: for three minutes if the node sends none, for up to two hours if it sends one now and
then. Replies that came in time are void by then, so that one client decides whose count. Here a reply comes when Flower
has all its parts. One whose node has sent nothing for so long that Flower gives it up is shown: Flower says so at once.

Two things are accepted. A node that sends one part again and again hides its own reply for as long as it likes: that
reply misses its deadline, and no other does. A node that announces a reply and dies is reported as lost after
`GIVEN_UP` seconds instead of the 60 after which Flower misses its heartbeats.
"""

import time
from collections.abc import Set
from dataclasses import dataclass, field
from threading import Lock
from types import ModuleType
from typing import ClassVar

from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS
from flwr.superlink.servicer.runtime import runtime_handlers

from cloister.deploy.fleet import InFront

GIVEN_UP = OBJECT_PUSH_SESSION_TTL_SECONDS + 5.0
"""Seconds without a part after which Flower takes a reply for lost, and some for the clock."""


@dataclass(frozen=True)
class _Begun:
    """A reply of which something is missing: its root, and when something of it came last."""

    root: str
    moved: float = field(default_factory=lambda: time.monotonic())


class Unfinished:
    """The messages to which a reply has been announced that is not all there.

    A node can have its own messages listed alone. The memory that this takes is that of the names of messages which
    were fetched and not answered.
    """

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        self._begun: dict[str, _Begun] = {}
        self._lock = Lock()

    def given(self, message: str, node: int) -> None:
        """A node has fetched a message.

        Args:
            message: its id.
            node: that may answer it.
        """
        with self._lock:
            self._asked[message] = node

    def holds_any(self, names: Set[str]) -> bool:
        """Whether one of these objects is a message that a node has fetched and not answered.

        Args:
            names: of objects.
        """
        with self._lock:
            return not self._asked.keys().isdisjoint(names)

    def announced(self, message: str, node: int, root: str) -> None:
        """A node begins a reply; nothing happens if it was not asked, or has replied.

        Args:
            message: that it says it replies to.
            node: that says so.
            root: the part that names the others. Flower takes one reply to a message: another root is none.
        """
        with self._lock:
            if self._asked.get(message) == node:
                self._begun.setdefault(message, _Begun(root))

    def moved(self, message: str, root: str, is_whole: bool) -> None:
        """A part of a reply has come.

        Args:
            message: that is replied to.
            root: of the reply.
            is_whole: whether Flower has all parts now.
        """
        with self._lock:
            begun = self._begun.get(message)
            if begun is None or begun.root != root:
                return
            if is_whole:
                del self._begun[message], self._asked[message]
            else:
                self._begun[message] = _Begun(root)

    def has(self, message: str) -> bool:
        """Whether parts of a reply to this message are still to come."""
        with self._lock:
            begun = self._begun.get(message)
        return begun is not None and time.monotonic() - begun.moved < GIVEN_UP


class WholeReplies(InFront):
    """Tells the server's app of a reply when all of it is there.

    Args:
        unfinished: the replies that are not.
    """

    handlers: ClassVar[ModuleType] = runtime_handlers
    names = ("pull_messages",)

    def __init__(self, unfinished: Unfinished) -> None:
        super().__init__()
        self.unfinished = unfinished

    def pull_messages(self, request: PullAppMessagesRequest, state: LinkState, task: Task) -> PullAppMessagesResponse:
        """The replies that are there to some of the server's messages."""
        asked = PullAppMessagesRequest()
        asked.CopyFrom(request)
        del asked.message_ids[:]
        asked.message_ids.extend(name for name in request.message_ids if not self.unfinished.has(name))
        answer: PullAppMessagesResponse = self.inner["pull_messages"](asked, state, task)
        return answer
