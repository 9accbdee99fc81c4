"""What was going on when the SuperLink ended: the next one goes on with it, or gives it up at once.

Flower marks what it hands out as delivered before it answers, so that an answer which does not arrive is lost.

- A node that was fetching a message asks the next SuperLink for the parts that it lacks. One that was just being told
  of it asks for a message, and is told again.
- A reply that was being handed to the server's app is handed to it again: the app would wait for it in vain.
- A reply that a node was sending is lost: the next SuperLink does not have the parts that the node has shown, and
  refuses the others. The app hears so then. One that Flower has in part, as its own SuperLink leaves it, is given up
  too: the app would wait for its parts for three minutes, whatever its round-timeout.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.schema.linkstate_models import MessageIns
from flwr.supercore.utils import int64_to_uint64
from sqlalchemy import update

TABLES = ("message_ins", "message_res", "object_push_session_pending")
"""Without which nothing was begun; those of the objects are made with them."""
EXPIRE_PARTIAL_REPLIES = """
    UPDATE object_push_sessions SET expires_at = ?
    WHERE session_id IN (SELECT session_id FROM object_push_session_pending)
    AND session_id IN (
        SELECT session_id FROM object_push_session_roots JOIN message_res ON message_id = root_object_id
    )
"""
REDELIVER_REPLIES = "UPDATE message_res SET delivered_at = '' WHERE delivered_at != ''"
"""Flower deletes a reply between marking it and answering: one that is marked and there has not been heard."""
UNANSWERED_MESSAGES = """
    SELECT message_id, dst_node_id, message_id NOT IN (SELECT object_id FROM objects)
    FROM message_ins AS asked WHERE delivered_at != '' AND created_at + ttl > ?
    AND NOT EXISTS (
        SELECT 1 FROM message_res AS reply WHERE reply.reply_to_message_id = asked.message_id AND NOT EXISTS (
            SELECT 1 FROM object_push_session_roots AS root JOIN object_push_session_pending USING (session_id)
            WHERE root.root_object_id = reply.message_id
        )
    )
    ORDER BY delivered_at
"""
OBJECT_TREE = """
    WITH RECURSIVE part (name) AS (
        SELECT ? UNION SELECT child_id FROM object_children JOIN part ON parent_id = name
    ) SELECT name FROM part
"""


@dataclass(frozen=True)
class DeliveredMessage:
    """A message that a node was given, and has not answered with a whole reply.

    Attributes:
        message: its id.
        node: that may answer it.
        parts: names of its parts, itself among them, as far as they are there.
        is_fetched: whether the node has said that it has all of them.
    """

    message: str
    node: int
    parts: frozenset[str]
    is_fetched: bool = False


def recover(path: Path) -> list[DeliveredMessage]:
    """Give up the replies that are there in part, and have those heard that were on their way to the server's app.

    The server's app hears at once that the former are lost.

    Args:
        path: of a state database that no SuperLink has open.

    Returns:
        The messages that nodes were given and may still answer, in the order in which they were given.
    """
    now = datetime.now(UTC)
    with closing(sqlite3.connect(path)) as connection, connection:
        if not _has_tables(connection):
            return []
        connection.execute(EXPIRE_PARTIAL_REPLIES, (now.isoformat(sep=" "),))
        connection.execute(REDELIVER_REPLIES)
        rows = connection.execute(UNANSWERED_MESSAGES, (now.timestamp(),)).fetchall()
        return [
            DeliveredMessage(message, int64_to_uint64(node), _parts(connection, message), bool(is_fetched))
            for message, node, is_fetched in rows
        ]


def redeliver_message(state: SqlMixin, message: str) -> None:
    """Have a node that asks for a message be given this one, which was given before.

    Args:
        state: Flower's, in a database.
        message: its id.
    """
    with state.session() as session:
        session.execute(update(MessageIns).where(MessageIns.message_id == message).values(delivered_at=""))


def expire_message(state: SqlMixin, message: str) -> None:
    """Have the server's app hear that there will be no reply to a message: Flower says so of one that has expired.

    Args:
        state: Flower's, in a database.
        message: its id.
    """
    with state.session() as session:
        session.execute(update(MessageIns).where(MessageIns.message_id == message).values(ttl=0.0))


def _has_tables(connection: sqlite3.Connection) -> bool:
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return found.issuperset(TABLES)


def _parts(connection: sqlite3.Connection, message: str) -> frozenset[str]:
    rows: Sequence[tuple[str]] = connection.execute(OBJECT_TREE, (message,)).fetchall()
    return frozenset(name for (name,) in rows)
