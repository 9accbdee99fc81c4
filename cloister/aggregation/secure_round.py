"""Server side of a secure aggregation, as messages over a Flower grid.

    advertise ─▶ share ─▶ train and mask ─▶ sign ─▶ unmask
                                             │        │
                         the next round:  advertise  share

Each step asks the nodes that answered the previous one. A node without a valid answer has dropped out. If the next
round will ask the same nodes, its first two steps travel with the last two of this round. It then needs three exchanges
instead of five.
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
    """A step of the next round that travels with a step of this round.

    If a reply lacks this part, or the part is malformed, the reply still counts in this round.

    Args:
        contents: node -> content sent to it for the step.
        parse: reads a reply; raises `Unfit`.

    Attributes:
        parsed: node -> its answer.
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
    """One attempt at one round. It is never repeated.

    Args:
        setup: of the attempt; complete, or not begun.
        asked: the training messages of the round; the remaining members receive them, with the protocol's fields added.
        send: sends messages and returns the replies that come before the deadline.
        following: the key setup of the next round, made during this one if all asked nodes survive; None: no setup is
            made.
    """

    setup: KeySetup
    asked: Sequence[Message]
    send: Send
    following: KeySetup | None = None

    @property
    def rejected(self) -> list[Rejection]:
        """Return the nodes that dropped out, each with the reason."""
        return self.setup.rejected

    def total(self, charged: Callable[[], AbstractContextManager[None]]) -> Total:
        """Return the sum of the surviving members' vectors.

        Args:
            charged: records the cost of the round. It is entered before the first vector is requested, and left when
                the sum is computed.

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
        """Run the two steps of the key setup."""
        nodes = dict.fromkeys((message.metadata.dst_node_id for message in self.asked), b"")
        self.setup.introduce(dict(self._replied(self._messages(ADVERTISE, nodes, {}), introduction)))
        told = dict.fromkeys(self.setup.names, self.setup.cohort)
        found = self._replied(self._messages(SHARE, told, {}), lambda reply: decoded(reply, protocol.SealedShares))
        self.setup.share(dict(found))

    def _take_vectors(self) -> None:
        """Let the remaining members train; add each vector as it comes, and drop it."""
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
        """Collect the signatures on the list of survivors, with keys for the next round."""
        everybody_survived = len(told) == len(self.asked)
        if self.following is None or not everybody_survived:
            return self._answers(SIGN, told, protocol.SurvivorSignature)
        keys = _Piggyback(dict.fromkeys(told, b""), lambda reply: introduction(reply, SECURE_EARLY))
        signed = self._answers(SIGN, told, protocol.SurvivorSignature, keys)
        with suppress(RoundAbandoned, ProtocolError):
            self.following.introduce(keys.parsed)
        return signed

    def _unmasked(self, told: Mapping[int, bytes]) -> dict[int, protocol.Unmasking]:
        """Collect the secrets that members reveal, with shares for the next round."""
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
        """Return the nodes' answers in a step that name their own sender."""

        def read(reply: Message) -> Answer:
            answer = decoded(reply, kind)
            if piggyback is not None:
                piggyback.hear(reply)
            return answer

        messages = self._messages(step, told, piggyback.contents if piggyback else {})
        return self.setup.with_true_sender(dict(self._replied(messages, read)))

    def _replied(self, messages: list[Message], read: Callable[[Message], Said]) -> Iterator[tuple[int, Said]]:
        """Yield each node with its valid answer, as replies come."""

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
    """Return a training message with the shares for its node."""
    node, content = message.metadata.dst_node_id, message.content
    delivery = {SECURE_MESSAGE: deliveries[node].encode()}
    config = ConfigRecord({**content.config_records[CONFIG], **delivery})
    record = RecordDict({ARRAYS: content.array_records[ARRAYS], CONFIG: config})
    return Message(record, node, message.metadata.message_type)
