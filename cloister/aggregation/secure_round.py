"""The server's part in a secure aggregation, as messages over a grid.

    advertise ─▶ share ─▶ train and mask ─▶ sign ─▶ unmask
                                             │        │
                         the next round:  advertise  share

In each step the nodes that answered the one before are asked; a node that does not answer, or answers nonsense, has
dropped out. Where the next round will ask the same nodes, its first two steps come with the last two of this one: then
it needs three exchanges in place of five.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flwr.app import ConfigRecord, Message, RecordDict

from cloister.aggregation.decorator import Send
from cloister.aggregation.key_setup import Answer, KeySetup, decoded, introduction
from cloister.aggregation.screening import Rejection, Unfit, fitting
from cloister.core.errors import ProtocolError, RoundAbandoned
from cloister.core.wire import (
    ADVERTISE,
    ARRAYS,
    CLIPPING_NORM,
    CONFIG,
    DISTANCE,
    ROUND,
    SECURE,
    SECURE_EARLY,
    SECURE_MESSAGE,
    SECURE_STEP,
    SEED,
    SHARE,
    SIGN,
    UNMASK,
)
from cloister.secure_aggregation import messages as protocol
from cloister.secure_aggregation.coordinator import Total

Said = TypeVar("Said")


@dataclass
class _Piggyback(Generic[Said]):
    """A step of the next round that comes with one of this round.

    A reply without it, or with nonsense in its place, is none to it, and counts in this round all the same.

    Args:
        contents: node -> what it is told in it.
        parse: makes something of a reply; raises `Unfit`.

    Attributes:
        parsed: node -> what it answered.
    """

    contents: Mapping[int, bytes]
    parse: Callable[[Message], Said]
    parsed: dict[int, Said] = field(default_factory=dict)

    def hear(self, reply: Message) -> None:
        if reply.metadata.src_node_id in self.contents:
            with suppress(Unfit):
                self.parsed[reply.metadata.src_node_id] = self.parse(reply)


@dataclass
class SecureRound:
    """One attempt at one round. It is never made again.

    Args:
        setup: of the attempt; made already, or not begun.
        asked: the training messages of the round; they are sent to those who are left by then, with what the protocol
            adds to them.
        send: sends messages, and gives the replies that come before the deadline.
        following: the key setup of the next round, made on the way if everybody who was asked survives this one; None:
            it is not made.
    """

    setup: KeySetup
    asked: Sequence[Message]
    send: Send
    following: KeySetup | None = None

    @property
    def rejected(self) -> list[Rejection]:
        """The nodes that dropped out, each with the reason."""
        return self.setup.rejected

    def total(self, charged: Callable[[], AbstractContextManager[None]]) -> Total:
        """The sum of the vectors of those who are left.

        Args:
            charged: records what the round costs. It is entered before the first vector is asked for, and left when the
                sum is there.

        Raises:
            RoundAbandoned: fewer members than the threshold are left.
        """
        if not self.setup.deliveries:
            self._set_up()
        coordinator = self.setup.coordinator
        with charged():
            self._take_vectors()
            survivors = coordinator.survivors()
            told = {node: survivors.encode() for node, _ in self.setup.nodes_named(survivors.names)}
            signed = self._signed(told)
            signatures = coordinator.signatures(signed.values()).encode()
            return coordinator.total(self._unmasked(dict.fromkeys(signed, signatures)).values())

    def _set_up(self) -> None:
        """Make the key setup by itself."""
        nodes = dict.fromkeys((message.metadata.dst_node_id for message in self.asked), b"")
        self.setup.introduce(dict(self._replied(self._messages(ADVERTISE, nodes, {}), introduction)))
        told = dict.fromkeys(self.setup.names, self.setup.cohort)
        found = self._replied(self._messages(SHARE, told, {}), lambda reply: decoded(reply, protocol.SealedShares))
        self.setup.share(dict(found))

    def _take_vectors(self) -> None:
        """Let those who are left train; each vector is added as it comes, and dropped."""
        deliveries = self.setup.deliveries
        messages = [_with_delivery(one, deliveries) for one in self.asked if one.metadata.dst_node_id in deliveries]
        for node, vector in self._replied(messages, lambda reply: decoded(reply, protocol.MaskedInput)):
            try:
                if vector.sender != self.setup.names[node]:
                    raise ProtocolError("the vector names another sender")
                self.setup.coordinator.add(vector)
            except ProtocolError as error:
                self.rejected.append(Rejection(node, "protocol", str(error)))

    def _signed(self, told: Mapping[int, bytes]) -> dict[int, protocol.SurvivorSignature]:
        """The signatures on the list of survivors; with them come keys for the next round."""
        everybody_survived = len(told) == len(self.asked)
        if self.following is None or not everybody_survived:
            return self._answers(SIGN, told, protocol.SurvivorSignature)
        keys = _Piggyback(dict.fromkeys(told, b""), lambda reply: introduction(reply, SECURE_EARLY))
        signed = self._answers(SIGN, told, protocol.SurvivorSignature, keys)
        with suppress(RoundAbandoned, ProtocolError):
            self.following.introduce(keys.parsed)
        return signed

    def _unmasked(self, told: Mapping[int, bytes]) -> dict[int, protocol.Unmasking]:
        """What members show; with it come shares for the next round."""
        following = self.following
        if following is None or not following.cohort or set(following.names) != set(told):
            return self._answers(UNMASK, told, protocol.Unmasking)
        cohort = dict.fromkeys(told, following.cohort)
        shares = _Piggyback(cohort, lambda reply: decoded(reply, protocol.SealedShares, SECURE_EARLY))
        shown = self._answers(UNMASK, told, protocol.Unmasking, shares)
        with suppress(RoundAbandoned, ProtocolError):
            following.share(shares.parsed)
        return shown

    def _answers(
        self, step: str, told: Mapping[int, bytes], kind: type[Answer], piggyback: _Piggyback[Said] | None = None
    ) -> dict[int, Answer]:
        """What nodes answer in a step, under the names that they had before."""

        def read(reply: Message) -> Answer:
            answer = decoded(reply, kind)
            if piggyback is not None:
                piggyback.hear(reply)
            return answer

        messages = self._messages(step, told, piggyback.contents if piggyback else {})
        return self.setup.with_true_sender(dict(self._replied(messages, read)))

    def _replied(self, messages: list[Message], read: Callable[[Message], Said]) -> Iterator[tuple[int, Said]]:
        """Each node that answered, with what it said, as replies come."""

        def by_node(reply: Message) -> tuple[int, Said]:
            return reply.metadata.src_node_id, read(reply)

        return fitting(self.send(messages), messages, by_node, self.rejected)

    def _messages(self, step: str, told: Mapping[int, bytes], early: Mapping[int, bytes]) -> list[Message]:
        public = self.asked[0].content.config_records[CONFIG] if self.asked else {}
        common = {key: public[key] for key in (SEED, CLIPPING_NORM, DISTANCE) if key in public}
        made = []
        for node, content in told.items():
            fields = {ROUND: self.setup.terms.round, **common, SECURE_STEP: step, SECURE_MESSAGE: content}
            if node in early:
                fields[SECURE_EARLY] = early[node]
            made.append(Message(RecordDict({CONFIG: ConfigRecord(fields)}), node, SECURE))
        return made


def _with_delivery(message: Message, deliveries: Mapping[int, protocol.Delivery]) -> Message:
    """A training message with the shares for its node."""
    node, content = message.metadata.dst_node_id, message.content
    delivery = {SECURE_MESSAGE: deliveries[node].encode()}
    config = ConfigRecord({**content.config_records[CONFIG], **delivery})
    record = RecordDict({ARRAYS: content.array_records[ARRAYS], CONFIG: config})
    return Message(record, node, message.metadata.message_type)
