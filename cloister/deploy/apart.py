"""What a node is told at a SuperLink: of its own messages everything, of what others send nothing.

Flower cuts messages into objects, names each by the SHA-256 of its content, and keeps it once. It gives an object to
any node that names it. It asks whoever sends a reply for those parts alone that nobody has sent yet, and refuses a
reply whose parts contradict what it has. Each of these would tell a client whether another one has sent a certain
array: an exact answer about an update without noise, and about who takes part in a round. So here

- a node fetches, and confirms, what belongs to the message that it was given last, and nothing else;
- a node sends all parts of its reply, whatever is there already. The part that names the others reaches Flower last,
  when the node has shown that it has all of them. It says who replies to what, once more: the server's app believes it,
  so it has to be what Flower checked when the reply was announced;
- a node that asks about a run hears nothing of the bytes and the seconds of all nodes together. Flower counts them
  reply by reply: they would tell how many take part in a round, and how long each of them trains.

How long a request takes may still depend on what is there, by the time of a line in a database.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from flwr.app import Message
from flwr.proto.fleet_pb2 import PushMessagesResponse, Reconnect
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse, PushObjectResponse
from flwr.proto.message_pb2 import Message as WireMessage
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_id,
    iterate_object_tree,
)

from cloister.deploy.fleet import InFront
from cloister.deploy.interrupted import Given, give_again
from cloister.deploy.unfinished import Unfinished

TOTALS = ("bytes_sent", "bytes_recv", "clientapp_runtime")
"""What Flower adds up over all nodes of a run."""
SAID_TWICE = ("run_id", "src_node_id", "dst_node_id", "reply_to_message_id")
"""What a reply says when it is announced and in the part that names the others."""
RECONNECT = 5
"""Seconds, as Flower answers."""


@dataclass
class _Upload:
    """The reply that a node is sending.

    Attributes:
        announced: the reply without its content, as Flower checked it.
        root: the part that names the others.
        missing: parts that Flower does not have yet. The node has to show the others all the same.
        awaited: parts that the node has not shown yet, but for the root.
        shown: parts that it has shown.
        last: the request with the root, until the others have come.
    """

    announced: Any
    root: str
    missing: set[str]
    awaited: set[str]
    shown: set[str] = field(default_factory=set)
    last: Any = None

    def has(self, request: Any) -> bool:
        """Whether a request shows a part of this reply."""
        if request.object_id == self.root:
            return _is_as_announced(self.announced, request.object_content)
        return request.object_id in self.awaited or request.object_id in self.shown

    def on(self, request: Any) -> list[Any]:
        """The requests that may reach Flower now that this part has been shown."""
        name = request.object_id
        self.awaited.discard(name)
        is_new = name in self.missing and name not in self.shown
        self.shown.add(name)
        if is_new and name == self.root:
            self.last, is_new = request, False
        ready = [request] if is_new else []
        if self.last is not None and not self.awaited:
            ready, self.last = [*ready, self.last], None
        return ready

    @property
    def is_whole(self) -> bool:
        """Whether every part has been shown, and Flower has all of them: what was shown may be on its way yet."""
        return not self.awaited and self.root in self.shown and not self.missing

    def undo(self, requests: list[Any]) -> None:
        """Expect these parts once more: they have not reached Flower."""
        for request in requests:
            if request.object_id == self.root:
                self.last = request
            else:
                self.shown.discard(request.object_id)
                self.awaited.add(request.object_id)


class OwnMessages(InFront):
    """Keeps every node to its own messages.

    A node works on one message at a time, and sends one reply at a time. A reply that it was sending when the SuperLink
    was restarted is lost.

    Args:
        before: what nodes were given before this SuperLink was started, the last one of each node last.

    Attributes:
        unfinished: the replies that nodes have announced and not sent yet.
        untold: the message of each node that was given one before, and may not have heard of it.

    Guarantee: no answer to a node depends on an object that it was not sent and has not sent itself.
    """

    names = ("get_run", "pull_messages", "pull_object", "confirm_message_received", "push_messages", "push_object")

    def __init__(self, before: Sequence[Given] = ()) -> None:
        super().__init__()
        self.given = {each.node: set(each.parts) for each in before}
        self.uploads: dict[int, _Upload] = {}
        self.unfinished = Unfinished()
        for each in before:
            self.unfinished.given(each.message, each.node)
        last = {each.node: each for each in before}
        self.untold = {node: each.message for node, each in last.items() if not each.is_fetched}
        self.lock = Lock()

    def get_run(self, request: Any, **others: Any) -> Any:
        """Describe a run, without what its nodes have sent and how long they took."""
        answer = self.inner["get_run"](request=request, **others)
        for name in TOTALS:
            answer.run.ClearField(name)
        return answer

    def pull_messages(self, request: Any, **others: Any) -> Any:
        """Remember what belongs to the message that a node is given."""
        if message := self._pop_untold(request.node.node_id):
            give_again(others["state"], message)
        answer = self.inner["pull_messages"](request=request, **others)
        if answer.messages_list:
            with self.lock:
                self.given[request.node.node_id] = _names(answer.message_object_trees)
            for tree in answer.message_object_trees:
                self.unfinished.given(tree.object_id, request.node.node_id)
        return answer

    def pull_object(self, request: Any, **others: Any) -> Any:
        """Give a part of the node's own message; of any other the answer is that there is none."""
        self._pop_untold(request.node.node_id)
        if not self._was_given(request.node.node_id, request.object_id):
            return PullObjectResponse(object_found=False, object_available=False)
        return self.inner["pull_object"](request=request, **others)

    def confirm_message_received(self, request: Any, **others: Any) -> Any:
        """Let a node confirm, and so delete, its own message alone."""
        self._pop_untold(request.node.node_id)
        if not self._was_given(request.node.node_id, request.message_object_id):
            return ConfirmMessageReceivedResponse()
        return self.inner["confirm_message_received"](request=request, **others)

    def push_messages(self, request: Any, state: Any) -> Any:
        """Begin a reply: all its parts are asked for."""
        self._pop_untold(request.node.node_id)
        announced, root = request.messages_list[0], request.message_object_trees[0].object_id
        # Before Flower knows of it: the server's app may ask at any time.
        self.unfinished.announced(announced.metadata.reply_to_message_id, request.node.node_id, root)
        answer, names = self._registered(request, state), _names(request.message_object_trees[:1])
        missing = names & set(answer.objects_to_push)
        with self.lock:
            self.uploads[request.node.node_id] = _Upload(announced, root, missing, names - {root})
        del answer.objects_to_push[:]
        answer.objects_to_push.extend(sorted(names))
        return answer

    def _registered(self, request: Any, state: Any) -> Any:
        try:
            if self.unfinished.holds_any(_names(request.message_object_trees)):
                # Flower would note its parts as this node names them, and give them to it after a restart.
                raise ValueError("a message of the server's app is no part of a reply")
            return self.inner["push_messages"](request=request, state=state)
        except ValueError:
            # A contradiction to what is there, which nobody is to hear of: the reply is taken, and goes nowhere.
            metadata = request.messages_list[0].metadata
            session, results = state.start_session(metadata.run_id), {metadata.message_id: 0}
            return PushMessagesResponse(reconnect=Reconnect(reconnect=RECONNECT), results=results, session_id=session)

    def push_object(self, request: Any, **others: Any) -> Any:
        """Take a part of the node's own reply, once: shown again, or there before, it is taken and not stored."""
        # Looked at before others have to wait: megabytes are hashed.
        is_genuine = get_object_id(request.object_content) == request.object_id
        with self.lock:
            upload = self.uploads.get(request.node.node_id)
            if upload is None or not is_genuine or not upload.has(request):
                return PushObjectResponse(stored=False)
            ready = upload.on(request)
        stored = self._handed_on(upload, ready, others)
        with self.lock:
            is_whole = upload.is_whole
        self.unfinished.moved(upload.announced.metadata.reply_to_message_id, upload.root, is_whole)
        return PushObjectResponse(stored=stored)

    def _handed_on(self, upload: _Upload, ready: list[Any], others: Mapping[str, Any]) -> bool:
        """Whether Flower took all of these; what a busy database did not take, the node will send again."""
        stored = True
        for number, request in enumerate(ready):
            try:
                stored &= self.inner["push_object"](request=request, **others).stored
            except Exception:
                with self.lock:
                    upload.undo(ready[number:])
                raise
            with self.lock:
                # Also if it was not stored: Flower has it from another node, or has given the reply up and says so.
                upload.missing.discard(request.object_id)
        return stored

    def _pop_untold(self, node: int) -> str | None:
        """The message that a node may not have been told of, once: what it asks for first shows whether it was."""
        with self.lock:
            return self.untold.pop(node, None)

    def _was_given(self, node: int, name: str) -> bool:
        with self.lock:
            return name in self.given.get(node, ())


def _names(trees: Any) -> set[str]:
    return {part.object_id for tree in trees for part in iterate_object_tree(tree)}


def _is_as_announced(announced: Any, content: bytes) -> bool:
    """Whether the part that names the others says who replies to what as the announcement does, and has a content."""
    try:
        found = WireMessage.FromString(get_object_body(content, Message))
        children = get_object_children_ids_from_object_content(content)
    except Exception:  # whatever a hostile node makes a parser raise, it is no reply
        return False
    same = all(getattr(found.metadata, name) == getattr(announced.metadata, name) for name in SAID_TWICE)
    return same and bool(children) != found.HasField("error")
