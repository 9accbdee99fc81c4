"""Deletion of expired messages: otherwise one node could fill the state database before the run ends.

Flower deletes the objects of a message when the node confirms it, and those of a reply when the server's app does. A
node that confirms nothing, or replies when the app does not ask any more, so leaves a model of each round. Of a message
that has expired Flower forgets everything but the objects.
"""

from datetime import UTC, datetime
from types import ModuleType
from typing import Any, ClassVar

from sqlalchemy import delete, select

from cloister.deploy.superlink.in_front import InFront
from cloister.flower.superlink import MessageIns, MessageRes, SqlLinkState, in_database, runtime_handlers


class DeletesExpired(InFront):
    """Deletes a run's expired messages when its app sends the next ones; not in a state in memory."""

    handlers: ClassVar[ModuleType] = runtime_handlers
    names = ("push_messages",)

    def push_messages(self, request: object, state: object, task: Any) -> object:
        """Delete the run's expired messages, then announce new ones."""
        delete_expired(state, task.run_id)
        return self.inner["push_messages"](request, state, task)


def delete_expired(state: object, run: int) -> None:
    """Delete the messages of a run that have expired, the replies to them, and the objects of all of these.

    Args:
        state: Flower's.
        run: its id.
    """
    if not isinstance(state, SqlLinkState):
        return
    over = select(MessageIns.message_id).where(
        MessageIns.run_id == in_database(run),
        MessageIns.created_at + MessageIns.ttl <= datetime.now(UTC).timestamp(),
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
