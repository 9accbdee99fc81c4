"""Handlers in front of Flower's: the gate, and the deletion of expired messages.

The gate limits each node to its own messages and replies. Flower checks that a request
names the node that signed it, and little else. Any node may send a message that another one takes for the server's,
or a reply in another one's name; it may delete another one's message, and fetch any object whose name it has. What is
refused here is logged with the node that asked. Flower tells each node how much all nodes of a run have sent and how
long they took. Here nothing is added up (`record_no_totals`).

The names of others' objects are kept from a node by packing (`cloister.utils.wire`), not by the gate.

Expired messages are deleted, as one node could fill the state database before the run ends. Flower deletes the
objects of a message when the node confirms it, and those of a reply when the server's app does. A node that confirms
nothing, or replies when the app does not ask any more, so leaves a model of each round. Of a message that has expired
Flower forgets everything but the objects.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from datetime import UTC, datetime
from itertools import islice
from logging import WARNING
from types import ModuleType
from typing import Any, ClassVar

from fastapi import HTTPException
from sqlalchemy import delete, select, update

from cloister.flower import log
from cloister.flower.messages import SUPERLINK_NODE_ID, message_pb2, names_in
from cloister.flower.superlink import (
    ApiErrorCode,
    FlowerError,
    InMemoryLinkState,
    MessageIns,
    MessageRes,
    SqlLinkState,
    StoredObject,
    control_handlers,
    fleet_handlers,
    fleet_pb2,
    in_database,
    runtime_handlers,
)
from cloister.utils.wire import GATE

LinkState = SqlLinkState | InMemoryLinkState
REVOKED = "its node was unregistered"
"""Text of the answer for the key of a revoked node; `register.sh` looks for it."""
SECONDS = 1.0
"""Seconds for which a running run is remembered. So long after its end, nodes may still fetch and send parts."""


class HandlerOverride:
    """Methods that take the place of Flower's functions of the same names, which they call.

    Attributes:
        handlers: Flower's module of those functions.
        names: of those functions.
        inner: the functions by name, as they were when this was made.
    """

    handlers: ClassVar[ModuleType] = fleet_handlers
    names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.inner: dict[str, Callable[..., Any]] = {name: vars(self.handlers)[name] for name in self.names}

    def install(self) -> None:
        """Put this in front of the functions."""
        for name in self.inner:
            vars(self.handlers)[name] = getattr(self, name)


class RevokedKeys(HandlerOverride):
    """An answer that tells an operator that a key was revoked.

    Flower keeps an unregistered key in its database, and answers "already in use" for it and for a registered one.
    """

    handlers: ClassVar[ModuleType] = control_handlers
    names = ("register_node",)

    def register_node(self, request: Any, account: object, state: LinkState) -> object:
        """Register a node.

        Raises:
            FlowerError: as Flower's, with `REVOKED` in it for the key of a revoked node.
        """
        try:
            return self.inner["register_node"](request, account, state)
        except FlowerError as error:
            taken = error.code == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE
            if taken and state.get_node_id_by_public_key(request.public_key) is None:
                raise FlowerError(error.code, error.message, public_details=REVOKED) from None
            raise


class RunningRuns(HandlerOverride):
    """Memory of which runs are running, for `SECONDS`. Flower asks its database for each part of each message.

    Args:
        clock: gives seconds.
    """

    names = ("check_abort",)

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock = clock
        self.until: dict[int, float] = {}

    def check_abort(self, run_id: int, *others: object) -> str | None:
        """Return why a node gets nothing of a run; None while the run is running. An ended run is always looked up."""
        now = self.clock()
        if now < self.until.get(run_id, now):
            return None
        found: str | None = self.inner["check_abort"](run_id, *others)
        if found is None:
            self.until[run_id] = now + SECONDS
        return found


LOUD = 2**30
"""Bytes that a node sends in answer to one message, at each of which the log names it."""
AT_ONCE = 500
"""Names in one statement: SQLite limits them."""


class Gate(HandlerOverride):
    """Keeps every node to its own messages and replies.

    Most requests ask for a message when there is none. The database is asked only if apps have sent messages since.

    Attributes:
        given: the message that each node was given last, and the names of its objects.
        sent: bytes that each node has sent since.
        idle: `app.sent` when the database was asked for a node's next message and had none.

    Args:
        app: counts what apps send.
    """

    names = ("pull_messages", "pull_object", "confirm_message_received", "push_messages", "push_object")

    def __init__(self, app: "AppMessages") -> None:
        super().__init__()
        self.app = app
        self.given: dict[int, tuple[str, frozenset[str]]] = {}
        self.sent: Counter[int] = Counter()
        self.idle: dict[int, int] = {}

    def pull_messages(self, request: fleet_pb2.PullMessagesRequest, state: LinkState, store: object) -> object:
        """Give a node its next message, once all of it is there.

        A node that is told of a message waits for the rest of it, three minutes if its app was killed meanwhile.
        """
        node, cut, app_sent = request.node.node_id, [], self.app.sent
        if self.idle.get(node) == app_sent:
            return fleet_pb2.PullMessagesResponse()
        try:
            while (answer := self.inner["pull_messages"](request=request, state=state, store=store)).messages_list:
                (tree,) = answer.message_object_trees
                if isinstance(state, SqlLinkState) and not _is_whole(state, names_in(tree)):
                    cut.append(tree.object_id)
                    continue
                self.given[node] = tree.object_id, frozenset(names_in(tree))
                del self.sent[node]
                break
        finally:
            if cut and isinstance(state, SqlLinkState):
                with state.session() as session:
                    again = update(MessageIns).where(MessageIns.message_id.in_(cut))
                    session.execute(again.values(delivered_at=""))
        if not cut and not answer.messages_list:
            self.idle[node] = app_sent  # read before the database was: a message sent since then changes the number
        return answer if answer.messages_list else fleet_pb2.PullMessagesResponse()

    def pull_object(self, request: message_pb2.PullObjectRequest, state: LinkState) -> object:
        """Give a node an object of its own message, until it has begun its reply."""
        node = request.node.node_id
        message, names = self.given.get(node) or self._recalled(node, state)
        if request.object_id in names:
            answer = self.inner["pull_object"](request=request, state=state)
            # Looked at afterwards: a reply may have overtaken this request.
            if message in state.object_store:
                return answer
        log(WARNING, "refused node %s an object that is not of its own message", node)
        return message_pb2.PullObjectResponse(object_found=False, object_available=False)

    def _recalled(self, node: int, state: LinkState) -> tuple[str, frozenset[str]]:
        """Return the message that an earlier SuperLink gave a node last, and the names of its objects."""
        if isinstance(state, SqlLinkState):
            given = (MessageIns.dst_node_id == in_database(node)) & (MessageIns.delivered_at != "")
            with state.session() as session:
                last = select(MessageIns.message_id).where(given).order_by(MessageIns.delivered_at.desc()).limit(1)
                message = session.scalar(last)
            if message and message in state.object_store:
                self.given[node] = message, frozenset(names_in(state.object_store.get_object_tree(message)))
        return self.given.get(node, ("", frozenset()))

    def confirm_message_received(
        self, request: message_pb2.ConfirmMessageReceivedRequest, state: LinkState, store: Container[str]
    ) -> object:
        """Keep the message that a node has fetched until the node has begun its reply.

        Flower deletes it now, and then the shared model once no message has it. A node that announces the model as a
        part of its reply hears whether it is stored, and so whether another node was drawn. While the node's own
        message is kept, the model always is.
        """
        node, message = request.node.node_id, request.message_object_id
        own, _ = self.given.get(node) or self._recalled(node, state)
        if message != own and message in store:
            log(WARNING, "refused node %s the confirmation of a message that it was not given", node)
        return message_pb2.ConfirmMessageReceivedResponse()

    def push_messages(self, request: fleet_pb2.PushMessagesRequest, state: LinkState) -> object:
        """Begin the one reply of a node to a message.

        Raises:
            HTTPException: 400, the node announces something else.
        """
        why = "it is not one message"
        if len(request.messages_list) == len(request.message_object_trees) == 1:
            (announced,), (tree,) = request.messages_list, request.message_object_trees
            about = announced.metadata
            wrong = {
                "it comes in another name": about.src_node_id != request.node.node_id,
                "it is not to the SuperLink": about.dst_node_id != SUPERLINK_NODE_ID,
                "it answers no message": not about.reply_to_message_id,
                "its id is not that of its first object": about.message_id != tree.object_id,
                "a time is no number": not (math.isfinite(about.created_at) and math.isfinite(about.ttl)),
                "its content is not in its objects": bool(announced.content.items),
            }
            why = "; ".join(each for each, is_wrong in wrong.items() if is_wrong)
        if why:
            log(WARNING, "refused what node %s sent: %s", request.node.node_id, why)
            raise HTTPException(400, f"this is no reply of the node: {why}")
        answer = self.inner["push_messages"](request=request, state=state)
        message, _ = self.given.get(request.node.node_id, ("", frozenset()))
        if message == request.messages_list[0].metadata.reply_to_message_id:
            self.given.pop(request.node.node_id, None)
            state.object_store.delete(message)  # its node needs it no more
        return answer

    def push_object(self, request: message_pb2.PushObjectRequest, state: object) -> object:
        """Store an object of a reply, and say which node sends much."""
        node, before = request.node.node_id, self.sent[request.node.node_id]
        self.sent[node] += len(request.object_content)
        if self.sent[node] // LOUD > before // LOUD:
            log(WARNING, "node %s has sent %d MB in answer to one message", node, self.sent[node] // 10**6)
        return self.inner["push_object"](request=request, state=state)


class GateKnown(HandlerOverride):
    """Tells a server's app that this SuperLink has a gate: by an object under a name that no content has."""

    handlers: ClassVar[ModuleType] = runtime_handlers
    names = ("pull_object",)

    def pull_object(self, request: message_pb2.PullObjectRequest, state: object, task: object) -> object:
        """Give the app an object."""
        if request.object_id == GATE:
            return message_pb2.PullObjectResponse(object_found=True, object_available=True)
        return self.inner["pull_object"](request, state, task)


def _is_whole(state: SqlLinkState, names: Iterable[str]) -> bool:
    """Return whether the server's app has sent all of these objects."""
    left, missing = iter(names), select(StoredObject.object_id).where(StoredObject.is_available == 0)
    with state.session() as session:
        while few := list(islice(left, AT_ONCE)):
            if session.scalar(missing.where(StoredObject.object_id.in_(few)).limit(1)) is not None:
                return False
    return True


class AppMessages(HandlerOverride):
    """Counts how often apps send messages, and deletes a run's expired ones, except from a state in memory.

    Attributes:
        sent: the number.
    """

    handlers: ClassVar[ModuleType] = runtime_handlers
    names = ("push_messages",)

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def push_messages(self, request: object, state: object, task: Any) -> object:
        """Delete the run's expired messages, then announce new ones."""
        delete_expired(state, task.run_id)
        try:
            return self.inner["push_messages"](request, state, task)
        finally:
            self.sent += 1


def record_no_totals() -> None:
    """Have Flower add up no bytes and no seconds of the nodes of a run.

    It would tell each node the sums, and write to its database at each request.
    """
    for state in (SqlLinkState, InMemoryLinkState):
        for name in ("store_traffic", "add_clientapp_runtime"):
            setattr(state, name, lambda *_args, **_kwargs: None)


def delete_expired(state: object, run: int) -> None:
    """Delete the messages of a run that have expired, the replies to them, and the objects of all of these.

    Args:
        state: Flower's.
        run: its id.
    """
    if not isinstance(state, SqlLinkState):
        return
    over = select(MessageIns.message_id).where(
        MessageIns.run_id == in_database(run), MessageIns.created_at + MessageIns.ttl <= datetime.now(UTC).timestamp()
    )
    with state.session() as session:
        messages = {str(name) for name in session.scalars(over)}
        # A reply that the app is fetching is its own to delete.
        unread = MessageRes.reply_to_message_id.in_(messages) & (MessageRes.delivered_at == "")
        replies = session.scalars(select(MessageRes.message_id).where(unread)).all() if messages else []
        for name in (*messages, *map(str, replies)):
            state.object_store.delete(name)
        session.execute(delete(MessageRes).where(MessageRes.message_id.in_(replies)))
        state.delete_messages(messages)
