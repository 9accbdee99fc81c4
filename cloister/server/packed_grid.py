"""Flower's grid over HTTP, with packed messages, and with replies that are fetched one by one.

Messages to nodes are packed (`cloister.utils.wire`): the model once for all messages of a round, and the rest of each
message by itself. A node whose app cannot open packed messages answers with an error of Flower. It then receives the
message with named arrays. After `MAX_REFUSED` such rounds it receives named arrays from the start. So clients of other
frameworks can take part. The run then no longer claims that all of its messages were packed.

A node whose app has its key signs its packed replies (`cloister.utils.keys`). The server checks each signature by the
key that the SuperLink lists for the asked node, before any part of the reply counts. After a node's first signed reply,
an unsigned reply in its name is refused. An unsigned error then reports only that this node failed. Replies of a node
that never signed count. The run then no longer claims that all of its replies were signed: for a node without
authentication, the SuperLink lists a key that its app cannot read.

Flower's own grid requests many replies at once, waits for the parts of each, and raises errors that a client caused. An
incomplete or malformed reply would then cost the replies of other nodes. This grid requests each reply by itself, a few
at a time. Missing parts are requested again at the next look. A reply that is too large or unreadable becomes an error
of its node alone. The request, not the reply, identifies the node.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from logging import WARNING
from threading import Lock
from typing import Any

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from httpx import HTTPStatusError

from cloister.flower.http_grid import HttpGrid, inflate_object_from_contents, runtime_pb2
from cloister.flower.messages import (
    OBJECT_PUSH_SESSION_TTL_SECONDS,
    SUPERLINK_NODE_ID,
    ErrorCode,
    ObjectPushError,
    make_message,
    message_pb2,
    names_in,
)
from cloister.server.polling_grid import MAX_METRICS, MAXIMUM, MaximumSize, Transport
from cloister.utils.errors import FederationError
from cloister.utils.keys import Answered
from cloister.utils.wire import GATE, PACKED, SHARED, Value, is_packed, opened, packed, signed_part

AT_ONCE = 4
"""Replies that are fetched together: each may take three times its size in memory."""
MAX_PARTS = 20_000
"""Objects of a reply: one of named arrays has two for each and more for long ones."""
MAX_REFUSED = 2
"""Messages of a node to which it answered with an error while they were packed, and rightly with named arrays. The
first time it may have been a failure of its own."""
MAX_FAILURES = 3
"""Looks for one reply at which the SuperLink may fail: Flower's fails at each where what a node announced is no
number."""
SAFE_TO_ANNOUNCE_AGAIN = OBJECT_PUSH_SESSION_TTL_SECONDS / 2
"""Seconds after the first announcement in which the SuperLink still knows the messages: half of Flower's limit."""

logger = logging.getLogger("cloister.server")


@dataclass
class _Asked:
    """Request to a node.

    Attributes:
        message: of the server.
        id: of the message that was sent last for it.
        is_packed: whether that message was packed.
        is_signed: whether the node signed its reply.
        failures: number of looks for its reply at which the SuperLink failed.
        reply: the announced reply, with the objects fetched so far; None: nothing was announced.
    """

    message: Message
    id: str
    is_packed: bool
    is_signed: bool = False
    failures: int = 0
    reply: "_Reply | None" = None

    @property
    def node(self) -> int:
        return int(self.message.metadata.dst_node_id)


@dataclass
class _Reply:
    """Reply that is being fetched.

    Attributes:
        announced: its metadata, as checked by the SuperLink.
        missing: names of the objects to be fetched, from the last to the first.
        contents: the fetched objects by name.
        size: bytes of the fetched objects together.
    """

    announced: message_pb2.Metadata
    missing: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class Unreadable(Exception):
    """Reason why a reply does not count. Its text contains nothing that a node wrote."""


class PackedGrid(HttpGrid):
    """Grid of Flower over HTTP that sends packed messages and fetches replies one by one.

    Attributes:
        maximum: of the size of a reply.
        transport: of this run until now.
    """

    maximum: MaximumSize
    transport: Transport
    _asked: dict[str, _Asked]
    _packs: set[int]
    _refused: Counter[int]
    _keys: dict[int, bytes]
    _signs: set[int]
    _lock: Lock

    @classmethod
    def over(cls, grid: Grid, maximum: MaximumSize = MAXIMUM) -> "PackedGrid":
        """Return a grid with the connection of another one.

        Args:
            grid: of Flower over HTTP, with its run. Flower closes it.
            maximum: of the size of a reply.
        """
        made = cls.__new__(cls)
        made.__dict__ = grid.__dict__
        made.maximum, made.transport = maximum, Transport(packed=True, gated=made._is_gated(), signed=True)
        made._asked, made._packs, made._refused = {}, set(), Counter()
        made._keys, made._signs, made._lock = {}, set(), Lock()
        return made

    def _is_gated(self) -> bool:
        """Return whether the SuperLink is `cloister superlink`, by its answer for a name without an object."""
        asked = message_pb2.PullObjectRequest(node=self.node, run_id=self.run.run_id, object_id=GATE)
        found = self._runtime_client.PullObject(asked)
        # Flower's SuperLink never answers like this, even if a node announces an object of this name: every stored
        # object has content.
        return bool(found.object_available and not found.object_content)

    def get_nodes(self) -> Iterable[Any]:
        """Return the connected nodes, and store the key that the SuperLink lists for each.

        A run sends messages only to nodes of such a list.
        """
        nodes = list(super().get_nodes())
        self._keys |= {node.node_id: node.public_key for node in nodes}
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return the id of each, or an empty one for a message that the SuperLink refuses.

        A SuperLink declines a part that it had stored when it was killed and did not confirm, and a part of a message
        that its node has confirmed by then. If it declines one, each message is announced again by itself. To the
        SuperLink it is then the same message.

        Raises:
            HTTPStatusError: the SuperLink refuses the announcement of all messages.
            ObjectPushError: it declines a part of each message, or does so for too long.
        """
        messages = list(messages)
        shared: dict[tuple[object, ...], Value] = {}
        sendable = [self._sendable(message, shared) for message in messages]
        begun = time.monotonic()
        try:
            ids = list(super().push_messages(sendable))
        except ObjectPushError:
            logger.log(WARNING, "the SuperLink declined a part of a message; each message is announced again")
            ids = []
            for message in sendable:
                # Later it may have given messages up, and would take them for new: a node may have a whole one.
                if time.monotonic() - begun > SAFE_TO_ANNOUNCE_AGAIN:
                    raise
                ids.append(self._sent_again(message))
            if not any(ids):
                raise
        self._asked = {
            found: _Asked(message, found, not self._is_plain(message.metadata.dst_node_id))
            for found, message in zip(ids, messages, strict=False)
            if found
        }
        return ids

    def _sent_again(self, message: Message) -> str:
        """Announce a message again; return its id, or an empty one if the SuperLink refuses a part."""
        try:
            return next(iter(super().push_messages([message])), "")
        except (ObjectPushError, HTTPStatusError) as error:
            node, kind = message.metadata.dst_node_id, type(error).__name__
            logger.log(WARNING, "the message to node %s was not sent: %s", node, kind)
            return ""

    def _sendable(self, message: Message, shared: dict[tuple[object, ...], Value]) -> Message:
        """Return the packed message for a message, with the same metadata and so the same id.

        Args:
            message: of the server.
            shared: the packed values of this round by their records; receives each new one.
        """
        if self._is_plain(message.metadata.dst_node_id):
            return message
        models = {name: record for name, record in message.content.items() if isinstance(record, ArrayRecord)}
        own = RecordDict({name: record for name, record in message.content.items() if name not in models})
        content = RecordDict({PACKED: packed(own)})
        if models:
            key = tuple((name, id(record)) for name, record in models.items())
            if key not in shared:
                shared[key] = packed(RecordDict({**models}))
            content[SHARED] = shared[key]
        return make_message(message.metadata, content)

    def _is_plain(self, node: int) -> bool:
        """Return whether a node receives named arrays from the start."""
        return self._refused[node] >= MAX_REFUSED

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the complete replies, each as soon as it is read.

        Raises:
            RunNotRunningException: the run is over.
            TransportError: the SuperLink is unreachable, and Flower has given up.
        """
        waiting = iter(message_ids)
        readers = ThreadPoolExecutor(AT_ONCE, "replies")
        try:
            looks = deque(readers.submit(self._look, name) for name in islice(waiting, AT_ONCE))
            while looks:
                found = looks.popleft().result()
                looks.extend(readers.submit(self._look, name) for name in islice(waiting, 1))
                if found is not None:
                    yield found
        finally:
            # An operator who stops the run does not wait for an unreachable SuperLink.
            readers.shutdown(wait=False, cancel_futures=True)

    def _look(self, name: str) -> Message | None:
        """Return the reply to a message, or an error of its node if it is unreadable; None if it is incomplete."""
        asked = self._asked[name]
        try:
            asked.reply = asked.reply or self._announced(asked)
            if asked.reply is None or not self._is_fetched(asked.reply):
                return None
            content = self._read(asked, asked.reply)
            if (
                asked.is_packed
                and asked.node not in self._packs
                and asked.reply.announced.src_node_id == asked.node
                and isinstance(content, Error)
                and content.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            ):  # perhaps its app does not support packed messages
                self._ask_plainly(asked)
                return None
            self._note(signed=asked.is_signed or asked.reply.announced.src_node_id == SUPERLINK_NODE_ID)
        except HTTPStatusError as error:
            # Fetched objects are kept for the next look: the SuperLink announces a reply once.
            asked.failures += 1
            if asked.failures < MAX_FAILURES:
                return None
            content = _error(f"the SuperLink cannot hand on the reply: {error.response.status_code}")
        except Unreadable as error:
            size = asked.reply.size if asked.reply else 0
            logger.log(WARNING, "a reply of node %s does not count, after %d bytes: %s", asked.node, size, error)
            content = _error(str(error))
        del self._asked[name]
        self._confirm(asked)
        metadata, announced = copy(asked.message.metadata), asked.reply.announced if asked.reply else None
        from_superlink = announced is not None and announced.src_node_id == SUPERLINK_NODE_ID
        metadata.__dict__.update(
            _message_id=announced.message_id if announced else "",
            _src_node_id=SUPERLINK_NODE_ID if from_superlink else asked.node,
            _dst_node_id=SUPERLINK_NODE_ID,
            _reply_to_message_id=name,  # the id that the round has for the message
        )
        if isinstance(content, Error):
            return make_message(metadata, error=content)
        return make_message(metadata, content)

    def _announced(self, asked: _Asked) -> _Reply | None:
        """Return the announced reply to a message; drop everything else that Flower returns.

        Raises:
            Unreadable: it has too many objects.
        """
        answer = self._runtime_client.PullMessages(runtime_pb2.PullAppMessagesRequest(message_ids=[asked.id]))
        for announced, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            if announced.metadata.reply_to_message_id == asked.id:
                return _Reply(announced.metadata, _names(tree))
        return None

    def _is_fetched(self, reply: _Reply) -> bool:
        """Fetch the available objects; return whether the reply is complete.

        Raises:
            Unreadable: the reply is too large, or one of its objects was removed.
        """
        while reply.missing:
            name = reply.missing[-1]
            request = message_pb2.PullObjectRequest(node=self.node, run_id=self.run.run_id, object_id=name)
            answer = self._runtime_client.PullObject(request)
            if not answer.object_found:
                raise Unreadable("its node did not send all of it")
            if not answer.object_available:
                # Incomplete replies together may have `AT_ONCE` times the bytes of one. A reply beyond that is fetched
                # again as soon as the missing object is available.
                with self._lock:
                    held = sum(asked.reply.size for asked in [*self._asked.values()] if asked.reply)
                    if held > AT_ONCE * self.maximum.total:
                        reply.missing, reply.contents, reply.size = [*reply.contents, *reply.missing], {}, 0
                return False
            reply.size += len(answer.object_content)
            if reply.size > self.maximum.total:
                raise Unreadable(f"a reply may have {self.maximum.total} bytes")
            reply.contents[reply.missing.pop()] = answer.object_content
        return True

    def _read(self, asked: _Asked, reply: _Reply) -> RecordDict | Error:
        """Return the content of a reply. The request, not the reply, determines the sender.

        Raises:
            Unreadable: it cannot be decoded, or its required signature is absent or invalid.
        """
        try:
            found = inflate_object_from_contents(reply.announced.message_id, reply.contents)
            if not isinstance(found, Message):
                raise Unreadable("a reply cannot be put together: it is no message")
            if reply.announced.src_node_id == SUPERLINK_NODE_ID:
                if not found.has_error():
                    raise Unreadable("a reply cannot be put together: it came in the name of the SuperLink")
                return Error(found.error.code, found.error.reason or "")
            self._require_signature(asked, found)
            if found.has_error():
                return Error(found.error.code, found.error.reason or "")
            if not is_packed(found.content):
                self._note(packed=False)
                self._refused[asked.node] += not asked.is_packed
                return found.content
            content = opened(found.content, MAX_METRICS)
        except Unreadable:
            raise
        except FederationError as error:
            raise Unreadable(f"a reply cannot be put together: {error}") from None
        except Exception as error:  # any bytes of a client may raise it; its text quotes them and is left out
            raise Unreadable(f"a reply cannot be put together: {type(error).__name__}") from None
        self._packs.add(asked.node)
        return content

    def _require_signature(self, asked: _Asked, reply: Message) -> None:
        """Refuse a reply with an invalid signature, or without one if the node has signed before.

        Raises:
            Unreadable: the reply is refused.
            FederationError: its packed value is invalid.
        """
        is_value = reply.has_content() and is_packed(reply.content)
        part = signed_part(reply.content[PACKED]) if is_value else None
        if part is None:
            if asked.node in self._signs:
                raise Unreadable("it is not signed, as replies of this node are")
            return
        answered = Answered(self.run.run_id, asked.node, asked.id)
        if not answered.is_signed(*part, self._keys.get(asked.node, b"")):
            raise Unreadable(
                "its signature is not one of this reply by the key with which its SuperNode authenticates; if the site "
                "did send it, its node-key has to name that key"
            )
        asked.is_signed = True
        self._signs.add(asked.node)

    def _ask_plainly(self, asked: _Asked) -> None:
        """Send a node the same message with named arrays.

        Raises:
            Unreadable: the SuperLink refuses it.
        """
        self._confirm(asked)
        logger.log(WARNING, "node %s has not opened a packed message: it is sent named arrays", asked.node)
        again = make_message(copy(asked.message.metadata), asked.message.content)
        asked.is_packed, asked.reply = False, None
        self._note(packed=False)
        asked.id = self._sent_again(again)
        if not asked.id:
            raise Unreadable("the message with named arrays could not be sent to it")

    def _note(self, packed: bool = True, signed: bool = True) -> None:
        """Record the transport of a message, or of a reply that counts."""
        with self._lock:
            now = self.transport
            self.transport = replace(now, packed=now.packed and packed, signed=now.signed and signed)

    def _confirm(self, asked: _Asked) -> None:
        """Ask the SuperLink to delete a reply. If it keeps the reply, that costs only space."""
        if asked.reply is None:
            return
        name = asked.reply.announced.message_id
        confirmed = message_pb2.ConfirmMessageReceivedRequest(
            node=self.node, run_id=self.run.run_id, message_object_id=name
        )
        try:
            self._runtime_client.ConfirmMessageReceived(confirmed)
        except HTTPStatusError as error:
            logger.log(WARNING, "the SuperLink keeps a reply of node %s: %s", asked.node, error.response.status_code)


def _names(tree: message_pb2.ObjectTree) -> list[str]:
    """Return the names of the objects of a reply, each once: a client decides how often it names one.

    Raises:
        Unreadable: there are too many.
    """
    names = list(islice(names_in(tree), MAX_PARTS + 1))
    if len(names) > MAX_PARTS:
        raise Unreadable(f"a reply may have {MAX_PARTS} objects")
    return list(dict.fromkeys(names))


def _error(reason: str) -> Error:
    return Error(ErrorCode.UNKNOWN, reason)
