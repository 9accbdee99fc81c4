"""Exchanges of a secure aggregation over a Flower grid: messages to nodes, and their valid answers by name.

A node without a valid answer has dropped out. The caller runs the protocol (`secure_sum`, `secure_steps`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from cloister.privacy.claims.premises import MAX_BYTES, size_and_checked
from cloister.secure_aggregation.messages import FromMember
from cloister.secure_aggregation.roster import Roster, decode_roster
from cloister.server.screening import Rejection, Unfit, fitting
from cloister.server.strategy_wrapper import Send
from cloister.utils.arrays import view
from cloister.utils.errors import ProtocolError, RoundAbandoned
from cloister.utils.wire import (
    ADVERTISE,
    ARRAYS,
    ATTESTATION,
    CLIPPING_NORM,
    CONFIG,
    DISTANCE,
    ROSTER,
    ROUND,
    SECURE,
    SECURE_MESSAGE,
    SECURE_STEP,
    SEED,
    config_of,
)

Said = TypeVar("Said")
Answer = TypeVar("Answer", bound=FromMember)


@dataclass
class Exchanges:
    """Exchanges of one round.

    Args:
        round: its number.
        asked: the training messages of the round; members receive them, with the protocol's fields added.
        send: sends messages and returns the replies that come before the deadline.

    Attributes:
        rejected: the nodes that dropped out, each with the reason.
        names: node -> its name on the roster, as the node itself states it. The server holds no key, and no node relies
            on the server for the name of another node.
        sizes: name -> the public size that the node attested with its vector; 0: none that can be read.
    """

    round: int
    asked: Sequence[Message]
    send: Send
    rejected: list[Rejection] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """Return the id of the run; empty if no node is asked."""
        return str(self.asked[0].metadata.run_id) if self.asked else ""

    def introduced(
        self, kind: type[Answer], is_genuine: Callable[[Answer, Roster], bool]
    ) -> tuple[Roster, dict[int, Answer]]:
        """Ask all nodes for keys, and name the nodes with genuine ones.

        Args:
            kind: of the keys.
            is_genuine: returns True if a member on the roster has signed its keys.

        Returns:
            The roster of most nodes, and each named node's keys.

        Raises:
            RoundAbandoned: no node has replied.
        """
        nodes = dict.fromkeys((message.metadata.dst_node_id for message in self.asked), b"")
        found = dict(self.answers(ADVERTISE, nodes, lambda reply: _introduction(reply, kind)))
        if not found:
            raise RoundAbandoned("no node has advertised keys")
        usual = Counter(own for _, own in found.values()).most_common(1)[0][0]
        roster, keys = decode_roster(usual), dict[int, Answer]()
        for node, (one, own) in found.items():
            name = one.name
            if own != usual or not is_genuine(one, roster):
                self.reject(node, "roster", "the node has another roster than most, or has not signed as who it says")
            elif name in self.names.values():
                self.reject(node, "roster", "the node has the name of another node")
            else:
                self.names[node], keys[node] = name, one
        return roster, keys

    def keep(self, names: Iterable[str]) -> None:
        """Reject the named nodes whose keys the protocol does not accept.

        Args:
            names: of those with accepted keys.
        """
        accepted = frozenset(names)
        for node in [node for node, name in self.names.items() if name not in accepted]:
            self.reject(node, "protocol", "the node has keys that permit no key agreement, or those of another node")
            del self.names[node]

    def add_vectors(self, told: Mapping[int, bytes], kind: type[Answer], add: Callable[[Answer], None]) -> None:
        """Let nodes train; add each vector as it comes, and drop it.

        Args:
            told: node -> the protocol's data for it, beside the training message.
            kind: of the vectors.
            add: adds one; it raises ProtocolError for an unfit one.
        """
        messages = []
        for message in self.asked:
            if (node := message.metadata.dst_node_id) in told:
                config = ConfigRecord({**config_of(message.content, CONFIG), SECURE_MESSAGE: told[node]})
                record = RecordDict({ARRAYS: message.content.array_records[ARRAYS], CONFIG: config})
                messages.append(Message(record, node, message.metadata.message_type))
        for node, (vector, size) in self._replied(messages, lambda reply: (decoded(reply, kind), _size(reply))):
            try:
                if vector.name != self.names[node]:
                    raise ProtocolError("the vector names another sender")
                add(vector)
                self.sizes[vector.name] = size
            except ProtocolError as error:
                self.reject(node, "protocol", str(error))

    def answers(
        self, step: str, told: Mapping[int, bytes], read: Callable[[Message], Said]
    ) -> Iterator[tuple[int, Said]]:
        """Yield each node with its valid answer in a step without training, as replies come.

        Args:
            step: its name.
            told: node -> the server's data for it.
            read: reads a reply; it raises `Unfit` for an invalid one.
        """
        public = config_of(self.asked[0].content, CONFIG) if self.asked else {}
        common = {key: public[key] for key in (SEED, CLIPPING_NORM, DISTANCE) if key in public}
        made = []
        for node, content in told.items():
            fields = {ROUND: self.round, **common, SECURE_STEP: step, SECURE_MESSAGE: content}
            made.append(Message(RecordDict({CONFIG: ConfigRecord(fields)}), node, SECURE))
        return self._replied(made, read)

    def reject(self, node: int, code: str, detail: str) -> None:
        """Record that a node has dropped out.

        Args:
            node: its id.
            code: kind of the reason.
            detail: the reason.
        """
        self.rejected.append(Rejection(node, code, detail))

    def _replied(self, messages: list[Message], read: Callable[[Message], Said]) -> Iterator[tuple[int, Said]]:
        def by_node(reply: Message) -> tuple[int, Said]:
            return reply.metadata.src_node_id, read(reply)

        return fitting(self.send(messages), messages, by_node, self.rejected)


def decoded(reply: Message, kind: type[Answer]) -> Answer:
    """Read the protocol message in a reply.

    Args:
        reply: of a node.
        kind: of the message.

    Raises:
        Unfit: the reply contains no message of this kind.
    """
    try:
        return kind.decode(_bytes(reply, SECURE_MESSAGE))
    except ProtocolError as error:
        raise Unfit("protocol", str(error)) from None


def _introduction(reply: Message, kind: type[Answer]) -> tuple[Answer, bytes]:
    """Read a node's keys, and its roster."""
    keys, roster = decoded(reply, kind), _bytes(reply, ROSTER)
    try:
        decode_roster(roster)
    except ProtocolError as error:
        raise Unfit("protocol", str(error)) from None
    return keys, roster


def _size(reply: Message) -> int:
    """Read the public size in the attestation beside a vector; 0: there is none, or none that can be read."""
    said = config_of(reply.content, ATTESTATION).get(ATTESTATION)
    found = size_and_checked(said) if isinstance(said, bytes) and len(said) <= MAX_BYTES else None
    return found[0] if found else 0


def _bytes(reply: Message, name: str) -> bytes:
    """Return the bytes that a reply contains under a name."""
    try:
        array = view(reply.content.array_records[ARRAYS][name])
    except (KeyError, ValueError):
        raise Unfit("protocol", f"the reply must hold {name!r} as an array of bytes") from None
    if array.dtype != np.uint8 or array.ndim != 1:
        raise Unfit("protocol", f"the reply must hold {name!r} as an array of bytes")
    return array.tobytes()
