"""What a node is told at a SuperLink: of its own messages everything, of what others send nothing.

Flower cuts messages into objects, names each by the SHA-256 of its content, and keeps it once. It gives an object to
any node that names it. It asks whoever sends a reply for those parts alone that nobody has sent yet, and refuses a
reply whose parts contradict what it has. Each of these would tell a client whether another one has sent a certain
array: an exact answer about an update without noise, and about who takes part in a round. So here

- a node fetches, and confirms, what belongs to the message that it was given last, and nothing else;
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
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from logging import WARNING
from pathlib import Path
from threading import Lock
from typing import Any

from fastapi import HTTPException
from flwr.common.serde import message_from_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest, PushMessagesResponse, Reconnect
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import log
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.schema.objectstore_models import StoredObject
from sqlalchemy import update

from cloister.deploy.fleet import InFront
from cloister.deploy.interrupted import Given, give_again, give_up
from cloister.deploy.leftovers import forget_message, forget_unheard
from cloister.deploy.unfinished import Unfinished
from cloister.deploy.uploads import Upload

TOTALS = ("bytes_sent", "bytes_recv", "clientapp_runtime")
"""What Flower adds up over all nodes of a run."""
AT_ONCE = 500
"""Names in one statement: SQLite limits them."""
MOST_TRIES = 20
"""How often Flower is handed replies to one message that its database does not take, before they are given up."""
LONGEST = 7 * 86_400.0
"""Seconds that a client may say it worked: operators are shown their sum."""
RECONNECT = 5
"""Seconds, as Flower answers."""


class OwnMessages(InFront):
    """Keeps every node to its own messages.

    A node works on one message at a time, and sends one reply at a time. A reply that it was sending when the SuperLink
    was restarted is lost: the server's app hears so when the node sends the next part of it.

    Args:
        before: what nodes were given before this SuperLink was started, the last one of each node last.
        folder: where replies are kept until they are whole; None: that of temporary files.

    Attributes:
        unfinished: the replies that are being handed to Flower.
        messages: the one that each node was given last.
        tries: how often replies to each of these messages were handed to Flower; `MOST_TRIES` once it has one, or has
            declined one.
        untold: the message of each node that was given one before, and may not have heard of it.
        unanswered: the message of each node that had fetched one before, and may have been sending its reply.

    Guarantee: no answer to a node depends on an object that it was not sent and has not sent itself.
    """

    names = ("get_run", "pull_messages", "pull_object", "confirm_message_received", "push_messages", "push_object")

    def __init__(self, before: Sequence[Given] = (), folder: Path | None = None) -> None:
        super().__init__()
        self.given = {each.node: set(each.parts) for each in before}
        self.folder = folder
        self.uploads: dict[int, Upload] = {}
        self.tries: Counter[str] = Counter()
        self.unfinished = Unfinished()
        last = {each.node: each for each in before}
        self.messages = {node: each.message for node, each in last.items()}
        self.untold = {node: each.message for node, each in last.items() if not each.is_fetched}
        self.unanswered = {node: each.message for node, each in last.items() if each.is_fetched}
        self.lock = Lock()

    def get_run(self, request: Any, **others: Any) -> Any:
        """Describe a run, without what its nodes have sent and how long they took."""
        answer = self.inner["get_run"](request=request, **others)
        for name in TOTALS:
            answer.run.ClearField(name)
        return answer

    def pull_messages(self, request: Any, **others: Any) -> Any:
        """Remember what belongs to the message that a node is given."""
        self._tell_again(request.node.node_id, others["state"])
        answer = self.inner["pull_messages"](request=request, **others)
        if answer.messages_list:
            before = self._note_given(request.node.node_id, answer)
            # Flower has marked the message as delivered: no trouble may keep the node from hearing of it.
            with suppress(HTTPException):
                for message in before:
                    forget_message(others["state"], message)
        return answer

    def _note_given(self, node: int, answer: PullMessagesResponse) -> set[str]:
        """Note the message that a node is given; the other one before it, of which it may fetch nothing any more."""
        message = answer.messages_list[0].metadata.message_id
        with self.lock:
            before = {self.messages.get(node, message)} - {message}
            self.messages[node] = message
            self.given[node] = _names(answer.message_object_trees)
            self.uploads.pop(node, None)
            self.unanswered.pop(node, None)
            for other in before:
                self.tries.pop(other, None)
        return before

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
        """Begin a reply: all its parts are asked for.

        Raises:
            HTTPException: 400, it replies to a message of another node, or contradicts itself.
        """
        self._pop_untold(request.node.node_id)
        if not all(0 <= seconds <= LONGEST for seconds in request.clientapp_runtime_list):  # nor NaN
            del request.clientapp_runtime_list[:]
        try:
            upload = Upload(request, self.folder)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        with self.lock:
            if self.messages.get(request.node.node_id) != upload.replies_to:
                raise HTTPException(400, "this is no reply to the message that the node was given last")
            self.unanswered.pop(request.node.node_id, None)
            begun = self.uploads.get(request.node.node_id)
            # Announced once more, since the answer was late or lost: parts may have come meanwhile.
            if begun is None or begun.request != request:
                self.uploads[request.node.node_id] = upload
        return PushMessagesResponse(
            reconnect=Reconnect(reconnect=RECONNECT),
            results={upload.root: 0},
            objects_to_push=upload.names,
            session_id=secrets.token_hex(16),
        )

    def push_object(self, request: Any, **others: Any) -> Any:
        """Take a part of the node's own reply; with the last one Flower is handed all of them.

        Raises:
            HTTPException: 503, the disk or the database did not take them; the node sends this part again.
        """
        node, name = request.node.node_id, request.object_id
        with self.lock:
            upload = self.uploads.get(node)
        if upload is None:
            self._lost(node, others["state"])
        # Looked at before others have to wait: megabytes are hashed.
        if upload is None or not upload.has(name, request.object_content):
            return PushObjectResponse(stored=False)
        with upload.turn:
            try:
                upload.keep(name, request.object_content)
            except OSError as error:
                raise HTTPException(503, f"the disk does not take a part of a reply: {error.strerror}") from None
            if upload.is_whole and not upload.is_told:
                self._finish(upload, others)
        return PushObjectResponse(stored=True)

    def _finish(self, upload: Upload, others: Any) -> None:
        """Hand on the one reply to a message: Flower takes it, or declines it, and then hears of no other one.

        Raises:
            HTTPException: 503, its database does not take it now.
            FlowerError: the run is over.
        """
        if self._may_try(upload.replies_to):
            try:
                self._hand_on(upload, others)
            except HTTPException:  # busy, or full: of the two a node asks again after the first alone
                raise HTTPException(503, "the database is busy or full: try again") from None
            except FlowerError:
                upload.end()
                raise
            with self.lock:
                self.tries[upload.replies_to] = MOST_TRIES
        else:
            reason = "it is a second one, or the database did not take it"
            log(WARNING, "a reply of node %s goes nowhere: %s", upload.request.node.node_id, reason)
        upload.end()

    def _hand_on(self, upload: Upload, others: Any) -> None:
        """Give Flower all of a reply or, if its database does not take it, nothing.

        Raises:
            HTTPException: 503, it does not.
        """
        state = others["state"]
        # A ValueError is a contradiction to what is there, or Flower has declined the reply. Nobody may hear of it: the
        # reply is taken, and goes nowhere.
        with self.unfinished.arriving(upload.replies_to), suppress(ValueError), _one_transaction(state):
            _check(state, upload.request)
            _take_out(state, upload.names)
            answer = self.inner["push_messages"](request=upload.request, state=state)
            wanted = dict.fromkeys(answer.objects_to_push)  # Flower names a part as often as it stands in the reply
            if isinstance(state, SqlMixin) and wanted.keys() != {*upload.names}:
                raise ValueError("Flower declines the reply: what was taken out has to be put back")
            for name in wanted:
                part = PushObjectRequest(
                    node=upload.request.node,
                    run_id=upload.run,
                    object_id=name,
                    object_content=upload.part(name),
                    session_id=answer.session_id,
                )
                if not self.inner["push_object"](request=part, **others).stored:
                    raise HTTPException(503, "the database is busy")
            forget_message(state, upload.replies_to)
            if isinstance(state, SqlLinkState):
                forget_unheard(state, upload.run, upload.request.node.node_id)

    def _may_try(self, message: str) -> bool:
        """Whether Flower is handed a reply to it once more: a node may announce ever new ones."""
        with self.lock:
            self.tries[message] += 1
            return self.tries[message] <= MOST_TRIES

    def _lost(self, node: int, state: Any) -> None:
        """Tell the server's app that the reply is lost which a node was sending when the SuperLink was restarted."""
        if message := self.unanswered.get(node):
            give_up(state, message)
            self.unanswered.pop(node, None)

    def _tell_again(self, node: int, state: Any) -> None:
        """Have a node that may not have been told of its message be given it once more."""
        if message := self._pop_untold(node):
            try:
                give_again(state, message)
            except Exception:
                with self.lock:
                    self.untold[node] = message
                raise

    def _pop_untold(self, node: int) -> str | None:
        """The message that a node may not have been told of, once: what it asks for first shows whether it was."""
        with self.lock:
            return self.untold.pop(node, None)

    def _was_given(self, node: int, name: str) -> bool:
        with self.lock:
            return name in self.given.get(node, ())


def _one_transaction(state: object) -> AbstractContextManager[object]:
    """What Flower writes inside of the block is written as a whole or not at all; a state in memory fails nowhere."""
    return state.session() if isinstance(state, SqlMixin) else nullcontext()


def _check(state: object, announced: PushMessagesRequest) -> None:
    """Have Flower decline a reply before any part is touched: the time of it then tells nothing of what others sent.

    Raises:
        ValueError: Flower declines it.
    """
    message = message_from_proto(announced.messages_list[0])
    if isinstance(state, SqlLinkState) and state.store_message_res(message) is None:
        raise ValueError("Flower declines the reply")


def _take_out(state: object, names: Sequence[str]) -> None:
    """Have Flower ask for these objects although it has them. Nobody sees it: the transaction puts them back."""
    if isinstance(state, SqlMixin):
        gone = update(StoredObject).values(content=b"", is_available=0)
        with state.session() as session:
            for start in range(0, len(names), AT_ONCE):
                session.execute(gone.where(StoredObject.object_id.in_(names[start : start + AT_ONCE])))


def _names(trees: Iterable[ObjectTree]) -> set[str]:
    return {part.object_id for tree in trees for part in iterate_object_tree(tree)}
