"""Deletes what nobody will fetch any more: otherwise one node could fill the state database before the run ends.

Flower deletes the parts of a message when the node confirms it, and those of a reply when the server's app does. A node
that confirms nothing, or replies when the app does not ask any more, so leaves a model of each round. Of a message that
has expired Flower forgets everything but the parts.
"""

from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from types import ModuleType
from typing import ClassVar

from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.state.schema.objectstore_models import StoredObject
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import ColumnElement, delete, select

from cloister.deploy.superlink.in_front import InFront

AT_ONCE = 500
"""Names in one statement: SQLite limits them."""
MAX_UNREAD_REPLIES = 4
"""So many replies of a node to a run are kept that the server's app has not asked for; older ones are deleted."""


class DeletesExpired(InFront):
    """Deletes a run's expired messages when its app sends messages or asks for replies; not in a state in memory."""

    handlers: ClassVar[ModuleType] = runtime_handlers
    names = ("push_messages", "pull_messages")

    def push_messages(self, request: PushAppMessagesRequest, state: LinkState, task: Task) -> PushAppMessagesResponse:
        """Delete the run's expired messages, then announce new ones."""
        delete_expired(state, task.run_id)
        answer: PushAppMessagesResponse = self.inner["push_messages"](request, state, task)
        return answer

    def pull_messages(self, request: PullAppMessagesRequest, state: LinkState, task: Task) -> PullAppMessagesResponse:
        """Delete the run's expired messages, then give the replies that are there."""
        delete_expired(state, task.run_id, request.message_ids)
        answer: PullAppMessagesResponse = self.inner["pull_messages"](request, state, task)
        return answer


def delete_expired(state: LinkState, run: int, asked: Iterable[str] = ()) -> None:
    """Delete the messages of a run that have expired, the replies to them, and the parts of all of these.

    Args:
        state: Flower's.
        run: its id.
        asked: ids of messages that Flower has yet to call expired: their parts alone are deleted.
    """
    if not isinstance(state, SqlLinkState):
        return
    over = select(MessageIns.message_id).where(
        MessageIns.run_id == uint64_to_int64(run),
        MessageIns.created_at + MessageIns.ttl <= datetime.now(UTC).timestamp(),
    )
    with state.session() as session:
        if messages := {str(name) for name in session.scalars(over)}:
            _delete_replies(state, MessageRes.reply_to_message_id.in_(over))
            for name in messages:
                state.object_store.delete(name)
            state.delete_messages(messages.difference(asked))


def delete_objects_of(state: LinkState, message: str, parts: Collection[str]) -> None:
    """Delete the parts of a message that its node does not need any more, if it has not confirmed it.

    A message whose parts the server's app has not all sent yet stays until it expires.

    Args:
        state: Flower's.
        message: its id.
        parts: the names of all of its parts.
    """
    if message in state.object_store and are_sent(state, parts):
        state.object_store.delete(message)


def are_sent(state: LinkState, parts: Collection[str]) -> bool:
    """Whether the server's app has sent all of these parts. Flower takes none whose message is deleted before.

    Args:
        state: Flower's.
        parts: their names.
    """
    if not isinstance(state, SqlLinkState):
        return all(state.object_store.get(name) for name in parts)
    missing = select(StoredObject.object_id).where(StoredObject.is_available == 0)
    with state.session() as session:
        return all(
            session.scalar(missing.where(StoredObject.object_id.in_(names)).limit(1)) is None for names in pieces(parts)
        )


def pieces(names: Iterable[str]) -> Iterator[list[str]]:
    """The names, so many at a time as one statement may have.

    Args:
        names: of objects.
    """
    left = iter(names)
    while few := list(islice(left, AT_ONCE)):
        yield few


def delete_unread_replies(state: SqlLinkState, run: int, node: int) -> None:
    """Delete the oldest of a node's replies that the server's app has not asked for: `MAX_UNREAD_REPLIES` stay.

    Args:
        state: Flower's, in a database.
        run: of the replies.
        node: that sent them.
    """
    unheard = (
        select(MessageRes.message_id)
        .where(
            MessageRes.src_node_id == uint64_to_int64(node),
            MessageRes.run_id == uint64_to_int64(run),
            MessageRes.delivered_at == "",
        )
        .order_by(MessageRes.created_at.desc())
        .offset(MAX_UNREAD_REPLIES)
    )
    _delete_replies(state, MessageRes.message_id.in_(unheard))


def _delete_replies(state: SqlLinkState, which: ColumnElement[bool]) -> None:
    """Delete replies that the app is not reading, with their parts."""
    with state.session() as session:
        waiting = which & (MessageRes.delivered_at == "")
        for name in session.scalars(select(MessageRes.message_id).where(waiting)).all():
            state.object_store.delete(str(name))
            session.execute(delete(MessageRes).where(MessageRes.message_id == name))
