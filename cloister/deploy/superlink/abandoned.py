"""Messages that a server's app began to send and will not finish: nodes do not wait for the rest of them.

A node that is told of a message waits for all its parts, and looks for no other one meanwhile. Flower gives a message
up three minutes after its last part. An app that is killed while it sends, and resumes its run, sends the round again:
its nodes did not hear of that, and a run without a guarantee ended because no replies came. Here a node is told that a
part does not exist, and looks for the next message, once the app has begun to send it another one in the same run.
"""

from collections.abc import Sequence
from threading import Lock
from types import ModuleType
from typing import ClassVar

from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkState
from flwr.superlink.servicer.runtime import runtime_handlers

from cloister.deploy.superlink.in_front import InFront
from cloister.deploy.superlink.interrupted import DeliveredMessage

RUNS = 64
"""Runs that are remembered: of more the one that began first is forgotten, and its nodes wait as Flower has them."""


class Abandoned(InFront):
    """Tells a node that a part which is missing will not come, if its message is not the last one sent to it.

    A message that is there as a whole can be fetched, whatever was sent after it. What was sent before the SuperLink
    was started is not known here.

    Args:
        before: what nodes were given before the SuperLink was started, the last one of each node last.
    """

    names = ("pull_messages", "pull_object")

    def __init__(self, before: Sequence[DeliveredMessage] = ()) -> None:
        super().__init__()
        self._given = {each.node: each.message for each in before}
        self._sent: dict[int, dict[int, frozenset[str]]] = {}
        self._noting = Lock()

    def sent(self, node: int, run: int, messages: frozenset[str]) -> None:
        """A server's app begins to send.

        Args:
            node: to which.
            run: of the app.
            messages: ids of all that it sends to that node at once.
        """
        with self._noting:
            self._sent.setdefault(run, {})[node] = messages
            if len(self._sent) > RUNS:
                del self._sent[next(iter(self._sent))]

    def pull_messages(self, request: PullMessagesRequest, **others: object) -> PullMessagesResponse:
        """Remember which message a node is given."""
        answer: PullMessagesResponse = self.inner["pull_messages"](request=request, **others)
        for tree in answer.message_object_trees:
            self._given[request.node.node_id] = tree.object_id
        return answer

    def pull_object(self, request: PullObjectRequest, **others: object) -> PullObjectResponse:
        """Give a part of a message; say that there is none where a newer message has taken its place."""
        answer: PullObjectResponse = self.inner["pull_object"](request=request, **others)
        if answer.object_available or not self._is_superseded(request.node.node_id, request.run_id):
            return answer
        return PullObjectResponse(object_found=False, object_available=False)

    def _is_superseded(self, node: int, run: int) -> bool:
        newest = self._sent.get(run, {}).get(node)
        return newest is not None and self._given.get(node) not in newest


class Sending(InFront):
    """Notes what a server's app sends to whom.

    Args:
        abandoned: is told.
    """

    handlers: ClassVar[ModuleType] = runtime_handlers
    names = ("push_messages",)

    def __init__(self, abandoned: Abandoned) -> None:
        super().__init__()
        self.abandoned = abandoned

    def push_messages(self, request: PushAppMessagesRequest, state: LinkState, task: Task) -> PushAppMessagesResponse:
        """Begin to send messages."""
        sent: dict[int, set[str]] = {}
        for message in request.messages_list:
            sent.setdefault(message.metadata.dst_node_id, set()).add(message.metadata.message_id)
        # Before a node can be given any of them.
        for node, messages in sent.items():
            self.abandoned.sent(node, task.run_id, frozenset(messages))
        answer: PushAppMessagesResponse = self.inner["push_messages"](request, state, task)
        return answer
