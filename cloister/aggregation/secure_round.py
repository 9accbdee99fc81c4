"""The server's part in a secure aggregation, as messages over a grid.

    advertise ─▶ share ─▶ train and mask ─▶ sign ─▶ unmask

In each step the nodes that answered the one before are asked; a node that does not answer, or answers nonsense, has
dropped out. Nodes are known by their names on the roster, which they tell themselves: the server holds no key, and no
node believes it about another (`cloister.secure_aggregation.member`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from cloister.aggregation.decorator import Send
from cloister.aggregation.screening import Rejection, Unfit, fitting
from cloister.core.arrays import view
from cloister.core.errors import ProtocolError, RoundAbandoned
from cloister.core.wire import (
    ADVERTISE,
    ARRAYS,
    CLIPPING_NORM,
    CONFIG,
    DISTANCE,
    ROSTER,
    ROUND,
    SECURE,
    SECURE_MESSAGE,
    SECURE_STEP,
    SEED,
    SHARE,
    SIGN,
    UNMASK,
)
from cloister.secure_aggregation import messages as protocol
from cloister.secure_aggregation.coordinator import Coordinator, Total
from cloister.secure_aggregation.introduction import read_told
from cloister.secure_aggregation.terms import Terms

Answer = TypeVar("Answer", bound=protocol.Message)
Said = TypeVar("Said")


class Introduction(NamedTuple):
    """What a node says of itself: its keys for this attempt, and the roster that it has."""

    advertisement: protocol.Advertisement
    roster: bytes


@dataclass
class SecureRound:
    """One attempt at one round. It is never made again.

    Args:
        terms: of the attempt.
        noise: terms of the noise.
        asked: the training messages of the round; they are sent to those who are left by then, with what the protocol
            adds to them.
        send: sends messages, and gives the replies that come before the deadline.

    Attributes:
        rejected: the nodes that dropped out, each with the reason.
    """

    terms: Terms
    noise: bytes
    asked: Sequence[Message]
    send: Send
    rejected: list[Rejection] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)

    def total(self, charged: Callable[[], AbstractContextManager[None]]) -> Total:
        """The sum of the vectors of those who are left.

        Args:
            charged: records what the round costs. It is entered before the first vector is asked for, and left when the
                sum is there.

        Raises:
            RoundAbandoned: fewer members than the threshold are left.
        """
        coordinator, cohort = self._begun()
        shares = self._answers(SHARE, self._each(cohort.encode()), protocol.SealedShares)
        deliveries = coordinator.deliveries(shares.values())
        with charged():
            self._take_vectors(coordinator, {node: deliveries[name] for node, name in self._of(deliveries)})
            survivors = coordinator.survivors()
            told = {node: survivors.encode() for node, _ in self._of(survivors.names)}
            signed = self._answers(SIGN, told, protocol.SurvivorSignature)
            signatures = coordinator.signatures(signed.values()).encode()
            shown = self._answers(UNMASK, dict.fromkeys(signed, signatures), protocol.Unmasking)
            return coordinator.total(shown.values())

    def _begun(self) -> tuple[Coordinator, protocol.Cohort]:
        """What takes the attempt on, and who takes part."""
        nodes = dict.fromkeys((message.metadata.dst_node_id for message in self.asked), b"")
        introduced = dict(self._replied(self._messages(ADVERTISE, nodes), _introduction))
        if not introduced:
            raise RoundAbandoned("no node has advertised keys")
        usual = Counter(one.roster for one in introduced.values()).most_common(1)[0][0]
        coordinator = Coordinator(read_told(usual), self.terms, self.noise)
        for node, one in introduced.items():
            if one.roster != usual or not coordinator.is_genuine(one.advertisement):
                self._reject(node, "roster", "the node has another roster than most, or has not signed as who it says")
            elif one.advertisement.name in self._names.values():
                self._reject(node, "roster", "the node has the name of another node")
            else:
                self._names[node] = one.advertisement.name
        cohort = coordinator.cohort(introduced[node].advertisement for node in self._names)
        for node in [node for node, name in self._names.items() if name not in cohort.names]:
            self._reject(node, "protocol", "the node has keys that nobody can agree with, or those of another node")
            del self._names[node]
        return coordinator, cohort

    def _take_vectors(self, coordinator: Coordinator, deliveries: Mapping[int, protocol.Delivery]) -> None:
        """Let those who are left train; each vector is added as it comes, and dropped."""
        messages = [_with_delivery(one, deliveries) for one in self.asked if one.metadata.dst_node_id in deliveries]
        for node, vector in self._replied(messages, lambda reply: _decoded(reply, protocol.MaskedInput)):
            try:
                if vector.sender != self._names[node]:
                    raise ProtocolError("the vector names another sender")
                coordinator.add(vector)
            except ProtocolError as error:
                self._reject(node, "protocol", str(error))

    def _answers(self, step: str, told: Mapping[int, bytes], kind: type[Answer]) -> dict[int, Answer]:
        """What nodes answer in a step, under the names that they had before."""
        found = dict(self._replied(self._messages(step, told), lambda reply: _decoded(reply, kind)))
        for node in [node for node, one in found.items() if vars(one)["sender"] != self._names[node]]:
            self._reject(node, "protocol", "the message names another sender")
            del found[node]
        return found

    def _replied(self, messages: list[Message], read: Callable[[Message], Said]) -> Iterator[tuple[int, Said]]:
        """Each node that answered, with what it said, as replies come."""

        def by_node(reply: Message) -> tuple[int, Said]:
            return reply.metadata.src_node_id, read(reply)

        return fitting(self.send(messages), messages, by_node, self.rejected)

    def _messages(self, step: str, told: Mapping[int, bytes]) -> list[Message]:
        public = self.asked[0].content.config_records[CONFIG] if self.asked else {}
        common = {key: public[key] for key in (SEED, CLIPPING_NORM, DISTANCE) if key in public}
        made = []
        for node, content in told.items():
            fields = {ROUND: self.terms.round, **common, SECURE_STEP: step, SECURE_MESSAGE: content}
            made.append(Message(RecordDict({CONFIG: ConfigRecord(fields)}), node, SECURE))
        return made

    def _each(self, content: bytes) -> dict[int, bytes]:
        return dict.fromkeys(self._names, content)

    def _of(self, names: Iterable[str]) -> list[tuple[int, str]]:
        """The nodes that have some names, and these."""
        chosen = frozenset(names)
        return [(node, name) for node, name in self._names.items() if name in chosen]

    def _reject(self, node: int, code: str, detail: str) -> None:
        self.rejected.append(Rejection(node, code, detail))


def _with_delivery(message: Message, deliveries: Mapping[int, protocol.Delivery]) -> Message:
    """A training message with the shares for its node."""
    node, content = message.metadata.dst_node_id, message.content
    delivery = {SECURE_MESSAGE: deliveries[node].encode()}
    config = ConfigRecord({**content.config_records[CONFIG], **delivery})
    record = RecordDict({ARRAYS: content.array_records[ARRAYS], CONFIG: config})
    return Message(record, node, message.metadata.message_type)


def _introduction(reply: Message) -> Introduction:
    advertisement, roster = _decoded(reply, protocol.Advertisement), _bytes(reply, ROSTER)
    try:
        read_told(roster)
    except ProtocolError as error:
        raise Unfit("protocol", str(error)) from None
    return Introduction(advertisement, roster)


def _decoded(reply: Message, kind: type[Answer]) -> Answer:
    """The message of the protocol that a reply holds."""
    try:
        return kind.decode(_bytes(reply, SECURE_MESSAGE))
    except ProtocolError as error:
        raise Unfit("protocol", str(error)) from None


def _bytes(reply: Message, name: str) -> bytes:
    """The bytes that a reply holds under a name."""
    try:
        array = view(reply.content.array_records[ARRAYS][name])
    except (KeyError, ValueError):
        raise Unfit("protocol", f"the reply must hold {name!r} as an array of bytes") from None
    if array.dtype != np.uint8 or array.ndim != 1:
        raise Unfit("protocol", f"the reply must hold {name!r} as an array of bytes")
    return array.tobytes()
