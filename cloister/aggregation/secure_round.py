"""Server side of a secure aggregation, as messages over a Flower grid.

    advertise ─▶ share ─▶ train and mask ─▶ sign ─▶ unmask

Each step asks the nodes that answered the previous one. A node without a valid answer has dropped out.
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
from cloister.secure_aggregation.introduction import decode_roster
from cloister.secure_aggregation.roster import Roster
from cloister.secure_aggregation.terms import Terms

Said = TypeVar("Said")
Answer = TypeVar("Answer", bound=protocol.Message)


class Introduction(NamedTuple):
    """Introduction of a node: its keys for this round, and its roster."""

    advertisement: protocol.Advertisement
    roster: bytes


@dataclass
class SecureRound:
    """The one attempt at a round. It is never repeated.

    Args:
        terms: of the round.
        noise: terms of the noise.
        asked: the training messages of the round; the remaining members receive them, with the protocol's fields added.
        send: sends messages and returns the replies that come before the deadline.

    Attributes:
        rejected: the nodes that dropped out, each with the reason.
        names: node -> its name on the roster, as the node itself states it. The server holds no key, and no node relies
            on the server for the name of another node.
        roster: the roster of most nodes; None before the nodes have sent theirs.

    Guarantee: the first two steps show the server keys, rosters and which nodes answer, and nothing that depends on
        data. They cost no privacy budget.

    Source: Bonawitz et al. (2017), AdvertiseKeys to Unmasking.
    """

    terms: Terms
    noise: bytes
    asked: Sequence[Message]
    send: Send
    rejected: list[Rejection] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    roster: Roster | None = None

    def total(self, charged: Callable[[], AbstractContextManager[None]]) -> Total:
        """Return the sum of the surviving members' vectors.

        Args:
            charged: records the cost of the round. It is entered before the first vector is requested, and left when
                the sum is computed.

        Raises:
            RoundAbandoned: too few members are left for the threshold, or too many take part.
        """
        nodes = dict.fromkeys((message.metadata.dst_node_id for message in self.asked), b"")
        introduced = dict(self._replied(self._messages(ADVERTISE, nodes), introduction))
        coordinator = self._named(introduced)
        cohort = coordinator.cohort(introduced[node].advertisement for node in self.names)
        for node in [node for node, name in self.names.items() if name not in cohort.names]:
            self._reject(node, "protocol", "the node has keys that nobody can agree with, or those of another node")
            del self.names[node]
        shares = self._answers(SHARE, dict.fromkeys(self.names, cohort.encode()), protocol.SealedShares)
        deliveries = coordinator.deliveries(shares.values())
        with charged():
            self._take_vectors(coordinator, {node: deliveries[name] for node, name in self._nodes(deliveries)})
            survivors = coordinator.survivors()
            told = {node: survivors.encode() for node, _ in self._nodes(survivors.names)}
            signed = self._answers(SIGN, told, protocol.SurvivorSignature)
            signatures = coordinator.signatures(signed.values()).encode()
            shown = self._answers(UNMASK, dict.fromkeys(signed, signatures), protocol.Unmasking)
            return coordinator.total(shown.values())

    def _named(self, introduced: Mapping[int, Introduction]) -> Coordinator:
        """Assign names to nodes by the roster that most of them have, and return its coordinator."""
        if not introduced:
            raise RoundAbandoned("no node has advertised keys")
        usual = Counter(one.roster for one in introduced.values()).most_common(1)[0][0]
        self.roster = decode_roster(usual)
        coordinator = Coordinator(self.roster, self.terms, self.noise)
        for node, one in introduced.items():
            if one.roster != usual or not coordinator.is_genuine(one.advertisement):
                self._reject(node, "roster", "the node has another roster than most, or has not signed as who it says")
            elif one.advertisement.name in self.names.values():
                self._reject(node, "roster", "the node has the name of another node")
            else:
                self.names[node] = one.advertisement.name
        return coordinator

    def _take_vectors(self, coordinator: Coordinator, deliveries: Mapping[int, protocol.Delivery]) -> None:
        """Let the remaining members train; add each vector as it comes, and drop it."""
        messages = []
        for message in self.asked:
            if (node := message.metadata.dst_node_id) in deliveries:
                delivery = {SECURE_MESSAGE: deliveries[node].encode()}
                config = ConfigRecord({**message.content.config_records[CONFIG], **delivery})
                record = RecordDict({ARRAYS: message.content.array_records[ARRAYS], CONFIG: config})
                messages.append(Message(record, node, message.metadata.message_type))
        for node, vector in self._replied(messages, lambda reply: decoded(reply, protocol.MaskedInput)):
            try:
                if vector.sender != self.names[node]:
                    raise ProtocolError("the vector names another sender")
                coordinator.add(vector)
            except ProtocolError as error:
                self._reject(node, "protocol", str(error))

    def _answers(self, step: str, told: Mapping[int, bytes], kind: type[Answer]) -> dict[int, Answer]:
        """Return the nodes' answers in a step that name their own sender; reject the rest."""
        answers = dict(self._replied(self._messages(step, told), lambda reply: decoded(reply, kind)))
        found = {node: one for node, one in answers.items() if vars(one)["sender"] == self.names[node]}
        for node in answers.keys() - found.keys():
            self._reject(node, "protocol", "the message names another sender")
        return found

    def _replied(self, messages: list[Message], read: Callable[[Message], Said]) -> Iterator[tuple[int, Said]]:
        """Yield each node with its valid answer, as replies come."""

        def by_node(reply: Message) -> tuple[int, Said]:
            return reply.metadata.src_node_id, read(reply)

        return fitting(self.send(messages), messages, by_node, self.rejected)

    def _messages(self, step: str, told: Mapping[int, bytes]) -> list[Message]:
        """Return the messages of a step without training: node -> the server's data for it."""
        public = self.asked[0].content.config_records[CONFIG] if self.asked else {}
        common = {key: public[key] for key in (SEED, CLIPPING_NORM, DISTANCE) if key in public}
        made = []
        for node, content in told.items():
            fields = {ROUND: self.terms.round, **common, SECURE_STEP: step, SECURE_MESSAGE: content}
            made.append(Message(RecordDict({CONFIG: ConfigRecord(fields)}), node, SECURE))
        return made

    def _nodes(self, names: Iterable[str]) -> list[tuple[int, str]]:
        """Return the pairs of node and name for these members."""
        chosen = frozenset(names)
        return [(node, name) for node, name in self.names.items() if name in chosen]

    def _reject(self, node: int, code: str, detail: str) -> None:
        self.rejected.append(Rejection(node, code, detail))


def introduction(reply: Message) -> Introduction:
    """Read the introduction of a node from its reply.

    Args:
        reply: of the node.

    Raises:
        Unfit: the reply contains no valid introduction.
    """
    advertisement, roster = decoded(reply, protocol.Advertisement), _bytes(reply, ROSTER)
    try:
        decode_roster(roster)
    except ProtocolError as error:
        raise Unfit("protocol", str(error)) from None
    return Introduction(advertisement, roster)


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


def _bytes(reply: Message, name: str) -> bytes:
    """Return the bytes that a reply contains under a name."""
    try:
        array = view(reply.content.array_records[ARRAYS][name])
    except (KeyError, ValueError):
        raise Unfit("protocol", f"the reply must hold {name!r} as an array of bytes") from None
    if array.dtype != np.uint8 or array.ndim != 1:
        raise Unfit("protocol", f"the reply must hold {name!r} as an array of bytes")
    return array.tobytes()
