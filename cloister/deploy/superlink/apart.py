"""What a node is told at a SuperLink: of its own messages everything, of what others send nothing.

Flower cuts messages into objects, names each by the SHA-256 of its content, and keeps it once. It gives an object to
any node that names it. It asks whoever sends a reply for those parts alone that nobody has sent yet, and refuses a
reply whose parts contradict what it has. Each of these would tell a client whether another one has sent a certain
array: an exact answer about an update without noise, and about who takes part in a round. So here

- a node fetches, and confirms, what belongs to the message that it was given last, and nothing else, and that for as
  long as this message is there;
- a node sends all parts of its reply, whatever is there already, and Flower hears of the reply when it has shown all of
  them (`uploads.py`). The part that names the others says who replies to what, once more: the server's app believes it,
  so it has to be what was announced;
- a node that asks about a run hears nothing of the bytes and the seconds of all nodes together. Flower counts them
  reply by reply: they would tell how many take part in a round, and how long each of them trains.

Time would tell as much if Flower stored those parts alone that it does not have: a reply of new parts took twice as
long. So all parts are stored each time, in the same transaction. No claim counts the time that is left; a state in
memory has no transactions, and tells more by time (docs/privacy.md).
"""

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from fastapi import HTTPException
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesResponse, Reconnect
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from cloister.core.files import DAY
from cloister.deploy.superlink.cleanup import are_sent, delete_objects_of
from cloister.deploy.superlink.handover import Handover
from cloister.deploy.superlink.in_front import InFront
from cloister.deploy.superlink.interrupted import DeliveredMessage, expire_message, redeliver_message
from cloister.deploy.superlink.uploads import Upload

TOTALS = ("bytes_sent", "bytes_recv", "clientapp_runtime")
"""What Flower adds up over all nodes of a run."""
MAX_RUNTIME = 7.0 * DAY
"""Seconds that a client may say it worked: operators are shown their sum."""
RECONNECT = 5
"""Seconds, as Flower answers."""


@dataclass
class _Node:
    """The message that a node was given last, and its reply.

    Attributes:
        message: id of the message; "": the node was given none.
        objects: names of the objects of the message.
        upload: the reply that the node is sending.
        may_be_untold: an earlier SuperLink gave the message, and the node may not have heard of it.
        may_be_replying: an earlier SuperLink gave the message, and the node may have been sending its reply.
        is_done: the node has confirmed the message, or has sent all of its reply.
    """

    message: str = ""
    objects: frozenset[str] = frozenset()
    upload: Upload | None = field(default=None, repr=False)
    may_be_untold: bool = False
    may_be_replying: bool = False
    is_done: bool = False


class OwnMessages(InFront):
    """Keeps every node to its own messages.

    A node works on one message at a time, and sends one reply at a time. A reply that it was sending when the SuperLink
    was restarted is lost: the server's app hears so when the node sends the next part of it.

    Args:
        before: what nodes were given before this SuperLink was started, the last one of each node last.
        folder: where replies are kept until they are whole; None: that of temporary files.

    Attributes:
        handover: of whole replies to Flower.
        nodes: by id.

    Guarantee: no answer to a node depends on an object that it was not sent and has not sent itself.
    """

    names = ("get_run", "pull_messages", "pull_object", "confirm_message_received", "push_messages", "push_object")

    def __init__(self, before: Sequence[DeliveredMessage] = (), folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.handover = Handover(self.inner)
        self.nodes = {
            each.node: _Node(
                each.message, each.parts, may_be_untold=not each.is_fetched, may_be_replying=each.is_fetched
            )
            for each in before
        }
        self.lock = Lock()

    def get_run(self, request: Any, **others: Any) -> Any:
        """Describe a run, without what its nodes have sent and how long they took."""
        answer = self.inner["get_run"](request=request, **others)
        for name in TOTALS:
            answer.run.ClearField(name)
        return answer

    def pull_messages(self, request: Any, **others: Any) -> Any:
        """Remember what belongs to the message that a node is given."""
        self._redeliver(request.node.node_id, others["state"])
        answer = self.inner["pull_messages"](request=request, **others)
        if answer.messages_list and (before := self._note_given(request.node.node_id, answer)):
            # Flower has marked the message as delivered: no trouble may keep the node from hearing of it.
            with suppress(HTTPException):
                delete_objects_of(others["state"], before.message, before.objects)
        return answer

    def _note_given(self, number: int, answer: PullMessagesResponse) -> _Node | None:
        """Note the message that a node is given; the other one before it, of which it may fetch nothing any more."""
        message = answer.messages_list[0].metadata.message_id
        with self.lock:
            before = self._node(number)
            self.nodes[number] = _Node(message, _names(answer.message_object_trees))
        if before.message in ("", message):
            return None
        self.handover.forget(before.message)
        return before

    def pull_object(self, request: Any, **others: Any) -> Any:
        """Give a part of the node's own message, while the message is there; else the answer is that there is none.

        Flower keeps a part for as long as any message has it: after its own message a node would learn whether another
        one has not fetched the same model yet, and so whether it takes part.
        """
        node = self._told(request.node.node_id)
        if request.object_id in node.objects:
            answer = self.inner["pull_object"](request=request, **others)
            # Looked at afterwards: where the message is there now, the part was there for it, whoever else has it.
            if not node.is_done and node.message in others["state"].object_store:
                return answer
        return PullObjectResponse(object_found=False, object_available=False)

    def confirm_message_received(self, request: Any, **others: Any) -> Any:
        """Let a node confirm, and so delete, its own message alone, and that when all of it is there.

        Flower takes no part of a message that is deleted: the server's app would be told that it cannot be stored.
        """
        node = self._told(request.node.node_id)
        if request.message_object_id != node.message or not are_sent(others["state"], node.objects):
            return ConfirmMessageReceivedResponse()
        # At once: how long Flower takes to delete the message tells whether another one has the same model.
        node.is_done = True
        return self.inner["confirm_message_received"](request=request, **others)

    def _told(self, number: int) -> _Node:
        """A node that has heard of its message, since it asks for it."""
        with self.lock:
            node = self._node(number)
            node.may_be_untold = False
            return node

    def push_messages(self, request: Any, state: Any) -> Any:
        """Begin a reply: all its parts are asked for.

        Raises:
            HTTPException: 400, it replies to a message of another node, or contradicts itself.
        """
        if not all(0 <= seconds <= MAX_RUNTIME for seconds in request.clientapp_runtime_list):  # nor NaN
            del request.clientapp_runtime_list[:]
        try:
            upload = Upload(request, self.folder)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        self._begin(request.node.node_id, upload)
        return PushMessagesResponse(
            reconnect=Reconnect(reconnect=RECONNECT),
            results={upload.root: 0},
            objects_to_push=upload.names,
            session_id=secrets.token_hex(16),
        )

    def _begin(self, number: int, upload: Upload) -> None:
        """Note the reply that a node is sending.

        Raises:
            HTTPException: 400, it replies to another message than the one that the node was given last.
        """
        with self.lock:
            node = self._node(number)
            node.may_be_untold = False
            if not node.message or node.message != upload.replies_to:
                raise HTTPException(400, "this is no reply to the message that the node was given last")
            node.may_be_replying = False
            upload.asked = node.objects
            # Announced once more, since the answer was late or lost: parts may have come meanwhile.
            if node.upload is None or node.upload.request != upload.request:
                node.upload = upload

    def push_object(self, request: Any, **others: Any) -> Any:
        """Take a part of the node's own reply; with the last one Flower is handed all of them.

        Raises:
            HTTPException: 503, the disk or the database did not take them; the node sends this part again.
        """
        with self.lock:
            node = self._node(request.node.node_id)
            upload = node.upload
        if upload is None:
            self._expire_lost_reply(request.node.node_id, others["state"])
        # Looked at before others have to wait: megabytes are hashed.
        if upload is None or not upload.is_valid_part(request.object_id, request.object_content):
            return PushObjectResponse(stored=False)
        with upload.turn:
            try:
                upload.keep(request.object_id, request.object_content)
            except OSError as error:
                raise HTTPException(503, f"the disk does not take a part of a reply: {error.strerror}") from None
            if upload.is_whole and not upload.is_told:
                node.is_done = True
                self.handover.finish(upload, **others)
        return PushObjectResponse(stored=True)

    def _expire_lost_reply(self, number: int, state: Any) -> None:
        """Tell the server's app that the reply is lost which a node was sending when the SuperLink was restarted."""
        with self.lock:
            node = self._node(number)
        if node.may_be_replying:
            expire_message(state, node.message)
            node.may_be_replying = False

    def _redeliver(self, number: int, state: Any) -> None:
        """Have a node that may not have been told of its message be given it once more."""
        with self.lock:
            node = self._node(number)
            untold, node.may_be_untold = node.may_be_untold, False
        if untold:
            try:
                redeliver_message(state, node.message)
            except Exception:
                node.may_be_untold = True
                raise

    def _node(self, number: int) -> _Node:
        return self.nodes.get(number, _Node())


def _names(trees: Iterable[ObjectTree]) -> frozenset[str]:
    return frozenset(part.object_id for tree in trees for part in iterate_object_tree(tree))
