"""Server side of the first two steps of a secure aggregation: advertising keys and sharing secrets.

    advertise ─▶ share

They are separate messages, or travel with the last two steps of the previous round (`SecureRound`).
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from flwr.app import Message

from cloister.aggregation.screening import Rejection, Unfit
from cloister.core.arrays import view
from cloister.core.errors import ProtocolError, RoundAbandoned
from cloister.core.wire import ARRAYS, ROSTER, SECURE_MESSAGE
from cloister.secure_aggregation import messages as protocol
from cloister.secure_aggregation.coordinator import Coordinator
from cloister.secure_aggregation.introduction import read_told
from cloister.secure_aggregation.roster import Roster
from cloister.secure_aggregation.terms import Terms

Answer = TypeVar("Answer", bound=protocol.Message)
MAXIMUM_AGE = 300.0
"""Seconds for which a key setup is used. A node that restarts meanwhile has dropped out of it. If too many have, the
round is charged and has no sum."""


class Introduction(NamedTuple):
    """Introduction of a node: its keys for this attempt, and its roster."""

    advertisement: protocol.Advertisement
    roster: bytes


@dataclass
class KeySetup:
    """The key setup of one attempt at a round: its members, and the shares of their secrets. It is used once.

    Args:
        terms: of the attempt.
        noise: terms of the noise.

    Attributes:
        rejected: the nodes that dropped out, each with the reason.
        names: node -> its name on the roster, as the node itself states it. The server holds no key, and no node relies
            on the server for the name of another node.
        roster: the roster of most nodes; None before the nodes have sent theirs.
        cohort: the keys of all members, for all members; empty before they exist.
        deliveries: node -> the shares it needs to mask its vector; empty before all shares exist.

    Guarantee: it shows the server keys, rosters and which nodes answer, and nothing that depends on data. It costs no
        privacy budget.

    Source: Bonawitz et al. (2017), AdvertiseKeys and ShareKeys.
    """

    terms: Terms
    noise: bytes
    rejected: list[Rejection] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    roster: Roster | None = None
    cohort: bytes = b""
    deliveries: Mapping[int, protocol.Delivery] = field(default_factory=dict)
    _coordinator: Coordinator | None = field(default=None, init=False)
    _made: float = field(default=0.0, init=False)

    @property
    def coordinator(self) -> Coordinator:
        """Return the coordinator of the attempt.

        Raises:
            RoundAbandoned: no node takes part.
        """
        if self._coordinator is None:
            raise RoundAbandoned("no node has advertised keys")
        return self._coordinator

    def introduce(self, introduced: Mapping[int, Introduction]) -> None:
        """Determine the members of the attempt.

        Args:
            introduced: node -> its introduction.

        Raises:
            RoundAbandoned: too few nodes take part, or too many.
        """
        self._name(introduced)
        cohort = self.coordinator.cohort(introduced[node].advertisement for node in self.names)
        for node in [node for node, name in self.names.items() if name not in cohort.names]:
            self._reject(node, "protocol", "the node has keys that nobody can agree with, or those of another node")
            del self.names[node]
        self.cohort = cohort.encode()

    def share(self, shares: Mapping[int, protocol.SealedShares]) -> None:
        """Sort the shares by receiver.

        Args:
            shares: node -> its sealed shares for its peers.

        Raises:
            RoundAbandoned: fewer members than the threshold have sent shares.
        """
        deliveries = self.coordinator.deliveries(self.with_true_sender(shares).values())
        self.deliveries = {node: deliveries[name] for node, name in self.nodes_named(deliveries)}
        self._made = time.monotonic()

    def is_usable_for(self, nodes: Collection[int]) -> bool:
        """Return True if exactly these nodes completed the setup within `MAXIMUM_AGE`.

        Args:
            nodes: node ids.
        """
        is_young = time.monotonic() - self._made < MAXIMUM_AGE
        return bool(self.deliveries) and set(self.deliveries) == set(nodes) and is_young

    def with_true_sender(self, answers: Mapping[int, Answer]) -> dict[int, Answer]:
        """Return the answers that name their own sender; reject the rest.

        Args:
            answers: node -> its answer in a step.
        """
        found = {node: one for node, one in answers.items() if vars(one)["sender"] == self.names.get(node)}
        for node in answers.keys() - found.keys():
            self._reject(node, "protocol", "the message names another sender")
        return found

    def nodes_named(self, names: Iterable[str]) -> list[tuple[int, str]]:
        """Return the pairs of node and name for these members.

        Args:
            names: of members.
        """
        chosen = frozenset(names)
        return [(node, name) for node, name in self.names.items() if name in chosen]

    def _name(self, introduced: Mapping[int, Introduction]) -> None:
        """Assign names to nodes by the roster that most of them have."""
        if not introduced:
            return
        usual = Counter(one.roster for one in introduced.values()).most_common(1)[0][0]
        self.roster = read_told(usual)
        self._coordinator = Coordinator(self.roster, self.terms, self.noise)
        for node, one in introduced.items():
            if one.roster != usual or not self._coordinator.is_genuine(one.advertisement):
                self._reject(node, "roster", "the node has another roster than most, or has not signed as who it says")
            elif one.advertisement.name in self.names.values():
                self._reject(node, "roster", "the node has the name of another node")
            else:
                self.names[node] = one.advertisement.name

    def _reject(self, node: int, code: str, detail: str) -> None:
        self.rejected.append(Rejection(node, code, detail))


def introduction(reply: Message, name: str = SECURE_MESSAGE) -> Introduction:
    """Read the introduction of a node from its reply.

    Args:
        reply: of the node.
        name: of the array with its keys.

    Raises:
        Unfit: the reply contains no valid introduction.
    """
    advertisement, roster = decoded(reply, protocol.Advertisement, name), _bytes(reply, ROSTER)
    try:
        read_told(roster)
    except ProtocolError as error:
        raise Unfit("protocol", str(error)) from None
    return Introduction(advertisement, roster)


def decoded(reply: Message, kind: type[Answer], name: str = SECURE_MESSAGE) -> Answer:
    """Read the protocol message in a reply.

    Args:
        reply: of a node.
        kind: of the message.
        name: of the array that contains it.

    Raises:
        Unfit: the reply contains no message of this kind.
    """
    try:
        return kind.decode(_bytes(reply, name))
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
