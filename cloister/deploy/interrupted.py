"""What nodes were doing when the SuperLink ended: the next one lets them fetch on, and gives up replies they had begun.

A node that was fetching a message asks the next SuperLink for the parts that it lacks. A reply that was being sent is
lost: the next SuperLink does not know which of its parts the node has shown, and refuses them. Flower would wait three
minutes for the rest, and the server's app with it, whatever its round-timeout.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flwr.supercore.utils import int64_to_uint64

TABLES = ("message_ins", "message_res", "object_push_session_pending")
"""Without which nothing was begun; those of the objects are made with them."""
GIVE_UP = """
    UPDATE object_push_sessions SET expires_at = ?
    WHERE session_id IN (SELECT session_id FROM object_push_session_pending)
    AND session_id IN (
        SELECT session_id FROM object_push_session_roots JOIN message_res ON message_id = root_object_id
    )
"""
GIVEN = """
    SELECT message_id, dst_node_id FROM message_ins AS asked WHERE delivered_at != '' AND created_at + ttl > ?
    AND NOT EXISTS (
        SELECT 1 FROM message_res AS reply WHERE reply.reply_to_message_id = asked.message_id AND NOT EXISTS (
            SELECT 1 FROM object_push_session_roots AS root JOIN object_push_session_pending USING (session_id)
            WHERE root.root_object_id = reply.message_id
        )
    )
    ORDER BY delivered_at
"""
PARTS = """
    WITH RECURSIVE part (name) AS (
        SELECT ? UNION SELECT child_id FROM object_children JOIN part ON parent_id = name
    ) SELECT name FROM part
"""


@dataclass(frozen=True)
class Given:
    """A message that a node was given, and has not answered with a whole reply.

    Attributes:
        message: its id.
        node: that may answer it.
        parts: names of its parts, itself among them, as far as they are there.
    """

    message: str
    node: int
    parts: frozenset[str]


def take_up(path: Path) -> list[Given]:
    """Give up the replies that nodes were sending, so that the server's app hears at once that they are lost.

    Args:
        path: of a state database that no SuperLink has open.

    Returns:
        The messages that nodes were given and may still answer, in the order in which they were given.
    """
    now = datetime.now(UTC)
    with closing(sqlite3.connect(path)) as connection, connection:
        if not _has_tables(connection):
            return []
        connection.execute(GIVE_UP, (now.isoformat(sep=" "),))
        rows = connection.execute(GIVEN, (now.timestamp(),)).fetchall()
        return [Given(message, int64_to_uint64(node), _parts(connection, message)) for message, node in rows]


def _has_tables(connection: sqlite3.Connection) -> bool:
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return found.issuperset(TABLES)


def _parts(connection: sqlite3.Connection, message: str) -> frozenset[str]:
    rows: Sequence[tuple[str]] = connection.execute(PARTS, (message,)).fetchall()
    return frozenset(name for (name,) in rows)
