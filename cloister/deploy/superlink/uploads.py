"""The reply that a node is sending: Flower hears of it when all of it is there.

Flower believes an announcement. What a node says to be the parts of its reply, and the parts of these, Flower notes
before it has seen any of them. From then on it refuses whoever names the parts of the same object otherwise: a server's
app that sends it, or another node. And whoever is sent that object is given the parts that were announced. So a node
could end a run, void the replies of others, and hear whether somebody has sent an array that it guesses. Here the parts
are kept apart until the node has shown all of them, and each has shown which parts it has itself.
"""

import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any

from flwr.app import Message
from flwr.proto.message_pb2 import Message as WireMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_id,
    get_object_type_from_object_content,
    is_valid_sha256_hash,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import validate_object_content

SAID_TWICE = ("run_id", "src_node_id", "dst_node_id", "reply_to_message_id")
"""What a reply says when it is announced and in the part that names the others."""

TIMES = ("created_at", "ttl")
"""Of what is announced."""
MAX_ROOT = 2**18
"""Bytes of the part that names the others: who replies to what, or why there is an error. Parsed it takes 30 times as
much."""
MAX_HEAD, MAX_HEAD_OF_NAME = 128, 65
"""Bytes of the head of a part without names, and of each name in it: a SHA-256 in hexadecimal digits and a comma."""


class Upload:
    """The parts of a reply that have been shown.

    A thread that keeps a part, or hands all of them on, holds `turn`: a SuperNode sends parts in parallel.

    Args:
        request: the announcement.
        folder: of the file that keeps them; None: that of temporary files.

    Attributes:
        asked: names of the parts of the message that it answers.
        is_told: whether Flower has them all, or will never take them.

    Raises:
        ValueError: what is announced contradicts itself.
    """

    def __init__(self, request: Any, folder: Path | None) -> None:
        self.request, self.turn, self.is_told = request, Lock(), False
        self.asked: frozenset[str] = frozenset()
        tree = request.message_object_trees[0]
        self.root, self._announced = tree.object_id, request.messages_list[0]
        if self._announced.metadata.message_id != self.root:
            raise ValueError("the id of the message is not that of the object that names all others")
        if self._announced.content.items:
            raise ValueError("what is announced holds no content: that is in the parts")
        if self._announced.metadata.src_node_id != request.node.node_id:
            raise ValueError("src_node_id is not the node that sends the reply")
        # Flower compares times, which NaN passes, and its database keeps NaN as nothing: whoever reads the row fails.
        if not all(math.isfinite(getattr(self._announced.metadata, name)) for name in TIMES):
            raise ValueError("created_at and ttl must be finite")
        self._children = _children_of(tree)
        self._folder, self._size = folder, 0
        self._file: IO[bytes] | None = None
        self._places: dict[str, tuple[int, int]] = {}

    @property
    def names(self) -> list[str]:
        """Of all parts, in the order of their hashes."""
        return sorted(self._children)

    @property
    def run(self) -> int:
        """Of the message."""
        return int(self._announced.metadata.run_id)

    @property
    def replies_to(self) -> str:
        """The message that it says it answers."""
        return str(self._announced.metadata.reply_to_message_id)

    @property
    def is_whole(self) -> bool:
        """Whether every part has been kept."""
        return len(self._places) == len(self._children)

    def is_valid_part(self, name: str, content: bytes) -> bool:
        """Whether this is a part of the reply, and says itself what was announced of it."""
        if name not in self._children or get_object_id(content) != name:
            return False
        if name == self.root and len(content) > MAX_ROOT:
            return False
        # Parsed, a head of millions of names takes a hundred times its size, and everybody else waits.
        if content.find(HEAD_BODY_DIVIDER, 0, MAX_HEAD + MAX_HEAD_OF_NAME * len(self._children[name])) < 0:
            return False
        try:
            # Flower refuses what it finds invalid, after it was handed all the rest of the reply.
            validate_object_content(content)
            children = get_object_children_ids_from_object_content(content)
            is_message = get_object_type_from_object_content(content) == Message.__qualname__
        except Exception:  # whatever a hostile node makes a parser raise, it is no part
            return False
        if self._children[name] != {*children}:
            return False
        # A copy of the message to another node would be deleted with this reply, and with it the message.
        return _is_as_announced(self._announced, content) if name == self.root else not is_message

    def keep(self, name: str, content: bytes) -> None:
        """Keep a part, once.

        Raises:
            OSError: the disk does not take it.
        """
        if self.is_told or name in self._places:
            return
        if self._file is None:
            self._file = TemporaryFile(dir=self._folder)  # noqa: SIM115
        if os.pwrite(self._file.fileno(), content, self._size) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._places[name] = (self._size, len(content))
        self._size += len(content)

    def part(self, name: str) -> bytes:
        """The content of a part that was kept."""
        assert self._file is not None
        start, size = self._places[name]
        return os.pread(self._file.fileno(), size, start)

    def end(self) -> None:
        """Flower has it, or will never take it: give the space back."""
        self.is_told, self._file = True, None


def _children_of(tree: ObjectTree) -> Mapping[str, set[str]]:
    """The names of the parts of each part.

    Raises:
        ValueError: one part comes twice, with other parts or in one other, or has a name that is no SHA-256.
    """
    found: dict[str, set[str]] = {}
    for part in iterate_object_tree(tree):
        if not is_valid_sha256_hash(part.object_id):
            raise ValueError("the name of a part is no SHA-256")
        children = {child.object_id for child in part.children}
        if len(children) < len(part.children):
            raise ValueError("an object of the reply names another one twice")
        if found.setdefault(part.object_id, children) != children:
            raise ValueError("a reply names the parts of one part in two ways")
    return found


def _is_as_announced(announced: Any, content: bytes) -> bool:
    """Whether the part that names the others says who replies to what as the announcement does, and has a content."""
    try:
        found = WireMessage.FromString(get_object_body(content, Message))
    except Exception:  # whatever a hostile node makes a parser raise, it is no reply
        return False
    same = all(getattr(found.metadata, name) == getattr(announced.metadata, name) for name in SAID_TWICE)
    return same and bool(get_object_children_ids_from_object_content(content)) != found.HasField("error")
