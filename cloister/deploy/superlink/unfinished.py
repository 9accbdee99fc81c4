"""Replies that Flower has and whose parts are on their way to it: the server's app is not told of them yet.

Flower tells the server's app of a reply before it has its parts. The app then asks for a part, sleeps for a second if
it is not there, and looks at nobody else's reply meanwhile. In a database a reply and its parts are one transaction; a
state in memory has none.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import ModuleType
from typing import ClassVar

from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkState
from flwr.superlink.servicer.runtime import runtime_handlers

from cloister.deploy.superlink.in_front import InFront


class Unfinished:
    """The messages to which a reply is being handed to Flower."""

    def __init__(self) -> None:
        self._messages: Counter[str] = Counter()
        self._lock = Lock()

    @contextmanager
    def arriving(self, message: str) -> Iterator[None]:
        """A reply to this message is handed to Flower inside of the block.

        Args:
            message: that the reply says it answers. Several nodes may say so of one.
        """
        self._add(message, 1)
        try:
            yield
        finally:
            self._add(message, -1)

    def _add(self, message: str, number: int) -> None:
        with self._lock:
            self._messages[message] += number
            if not self._messages[message]:
                del self._messages[message]

    def has(self, message: str) -> bool:
        """Whether parts of a reply to this message are on their way."""
        with self._lock:
            return message in self._messages


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
