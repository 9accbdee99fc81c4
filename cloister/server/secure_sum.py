"""Secure aggregation around a Flower strategy, which receives one model made from the sum of all updates.

    clients clip, add noise, mask → sum over survivors → remove surplus noise → mean → one virtual reply → strategy

The cost of the round is on disk before the first client is asked for its masked vector. If fewer clients than the
threshold finish a round, the model stays unchanged, and the round stays charged.

The steps are messages over a Flower grid:

    advertise ─▶ share ─▶ train and mask ─▶ sign ─▶ unmask

Each step asks the nodes that answered the previous one. A node without a valid answer has dropped out.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import NamedTuple, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.premises import KEYS, MAX_BYTES, known_by, size_and_checked
from cloister.privacy.mechanisms.distributed.plan import Plan, without_surplus
from cloister.privacy.mechanisms.distributed.shared import SharedRelease, SharedSum
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, THRESHOLD
from cloister.secure_aggregation import messages as protocol
from cloister.secure_aggregation.coordinator import Coordinator, Total
from cloister.secure_aggregation.primitives import out_of_ring, seeds
from cloister.secure_aggregation.roster import Roster, decode_roster
from cloister.secure_aggregation.session import Complete, Terms
from cloister.server.private_strategy import PrivateStrategy
from cloister.server.screening import Rejection, Screening, Unfit, fitting
from cloister.server.strategy_wrapper import Measurements, NamedArrays, Send
from cloister.utils.arrays import Layout, Row, State, from_record, view
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ConfigError, FederationError, ProtocolError, RoundAbandoned
from cloister.utils.keys import REMEDY, provisioner_of
from cloister.utils.registry import Aggregated, Messages
from cloister.utils.state import Coordinates
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
    SHARE,
    SIGN,
    UNMASK,
)

Said = TypeVar("Said")
Answer = TypeVar("Answer", bound=protocol.Message)
logger = logging.getLogger("cloister.server")
EXCHANGES = "exchanges"
"""Name in the state: exchanges of a round. A state without it has rounds that overlapped, and cannot be resumed."""
BY_PROVISIONER = "by-provisioner"
"""Name in the state: names of members whose keys the provisioner made, as JSON."""


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
        sizes: name -> the public size that the node attested with its vector; 0: none.
        roster: the roster of most nodes; None before the nodes have sent theirs.

    Guarantee: in the first two steps the server receives keys and rosters, and sees which nodes answer. None of these
        depends on data, so the two steps cost no privacy budget.

    Source: Bonawitz et al. (2017), AdvertiseKeys to Unmasking.
    """

    terms: Terms
    noise: bytes
    asked: Sequence[Message]
    send: Send
    rejected: list[Rejection] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
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
            self._reject(node, "protocol", "the node has keys that permit no key agreement, or those of another node")
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
        for node, (vector, size) in self._replied(messages, _vector_and_size):
            try:
                if vector.sender != self.names[node]:
                    raise ProtocolError("the vector names another sender")
                coordinator.add(vector)
                self.sizes[vector.sender] = size
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
        """Return the messages of a step without training, from the server's data for each node."""
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


def _vector_and_size(reply: Message) -> tuple[protocol.MaskedInput, int]:
    """Read a masked vector, and the public size in the attestation beside it; 0: there is none."""
    said = reply.content.config_records.get(ATTESTATION, ConfigRecord()).get(ATTESTATION)
    found = size_and_checked(said) if isinstance(said, bytes) and len(said) <= MAX_BYTES else None
    return decoded(reply, protocol.MaskedInput), found[0] if found else 0


def _bytes(reply: Message, name: str) -> bytes:
    """Return the bytes that a reply contains under a name."""
    try:
        array = view(reply.content.array_records[ARRAYS][name])
    except (KeyError, ValueError):
        raise Unfit("protocol", f"the reply must hold {name!r} as an array of bytes") from None
    if array.dtype != np.uint8 or array.ndim != 1:
        raise Unfit("protocol", f"the reply must hold {name!r} as an array of bytes")
    return array.tobytes()


@dataclass(frozen=True)
class Summed(Screening):
    """Result of a secure round: one sum, and no client's row.

    Attributes:
        total: sum of the survivors' integer vectors, shape (plan.length,), without surplus noise; None: there is no
            sum.
        survivors: number of survivors.
        shown: number of survivors that revealed their surplus noise.
        units: sum of the survivors' public sizes, as far as they attest any.
    """

    total: NDArray[np.int64] | None = None
    survivors: int = 0
    shown: int = 0
    units: int = 0


class SecureSum(PrivateStrategy):
    """A Flower strategy around the mean of a secure aggregation.

    Args:
        inner: the wrapped strategy; it must need only the mean.
        mechanism: defines the computation of clients, and the release from the sum.
        budget: as in `PrivateStrategy`.

    Guarantee: that of the mechanism, against this server too, if every client runs a bundle that its site has checked.
    """

    mechanism: SharedRelease

    def __init__(self, inner: Strategy, mechanism: SharedRelease, *, budget: PrivacyBudget | None = None) -> None:
        super().__init__(inner, mechanism, budget=budget)
        self._by_provisioner: frozenset[str] | None = None

    def promised(self, layout: Layout) -> tuple[Event, ...]:
        """Return the releases of a round by the configuration alone.

        Each node accounts for its own roster.

        Args:
            layout: of the model.
        """
        return super().events(layout)

    def events(self, layout: Layout) -> tuple[Event, ...]:
        """Return the worst-case releases of a round.

        Members whose keys the provisioner made count as colluding.

        Args:
            layout: of the model.
        """
        events = super().events(layout)
        if not self.is_accounted or not self._by_provisioner:
            return events
        return self.mechanism.events(layout, by_provisioner=len(self._by_provisioner))

    def claim(self) -> Claim:
        """Return the claim of `PrivateStrategy`, with the members whose keys the provisioner made."""
        base = super().claim()
        if self._by_provisioner is None:
            return base
        # The roster states who made each key. Members sign it with the terms of a round.
        premises = known_by(base.premises, [KEYS.known_as("attested")])
        return replace(base, premises=premises, by_provisioner=tuple(sorted(self._by_provisioner)))

    def state_dict(self) -> State:
        """Return the state, with the members whose keys the provisioner made."""
        known = None if self._by_provisioner is None else sorted(self._by_provisioner)
        names = np.frombuffer(json.dumps(known).encode(), np.uint8)
        return {**super().state_dict(), BY_PROVISIONER: names, EXCHANGES: np.array(5)}

    def load_state_dict(self, state: State) -> None:
        """Restore the state, with the members whose keys the provisioner made."""
        if state[EXCHANGES] != 5:
            raise ValueError(EXCHANGES)
        super().load_state_dict(state)
        known = json.loads(state[BY_PROVISIONER].tobytes())
        self._by_provisioner = None if known is None else frozenset(known)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Configure the round's messages; add C and the distance if they follow earlier rounds.

        Args:
            server_round, arrays, config, grid: as in `PrivateStrategy.configure_train`.

        Raises:
            BudgetExhausted: the budget does not cover the round.
            ConfigError: more nodes would be asked than the threshold permits. Two lists of survivors would be possible.
        """
        config.update(self.mechanism.stated())
        messages = list(super().configure_train(server_round, arrays, config, grid))
        parties = self.mechanism.plan(Layout.of(from_record(arrays)).size, server_round).shares.parties
        if len(messages) > parties.members:
            raise ConfigError(
                f"{len(messages)} nodes would train in round {server_round}; with {THRESHOLD} = {parties.threshold} "
                f"and {COLLUDING} = {parties.colluding} at most {parties.members} may; raise the threshold, or lower "
                "strategy.fraction-train"
            )
        return messages

    def needs_all_replies(self, layout: Layout, sent: Row) -> str:
        """Return an empty name: only the sum is kept.

        Args:
            layout, sent: as in `StrategyWrapper.screened`.
        """
        return ""

    def reply_bytes(self, sent: NamedArrays) -> int:
        """Return the bytes of a masked vector.

        Args:
            sent: as in `StrategyWrapper.reply_bytes`.
        """
        plan = self.mechanism.plan(Layout.of(sent).size)
        return plan.length * plan.bits // 8

    def collect(self, server_round: int, messages: Messages, send: Send) -> Summed:
        """Let the clients train, and compute the sum of their updates.

        Args:
            server_round, messages, send: as in `StrategyWrapper.collect`.

        Raises:
            BudgetExhausted: the budget does not cover the round; no vector was requested.
        """
        asked = list(messages)
        layout = Layout.of(from_record(self.sent))
        plan = self.mechanism.plan(layout.size, server_round)
        attempt = SecureRound(self._terms(server_round, plan, asked), plan.terms(), asked, send)

        def charged() -> AbstractContextManager[None]:
            """Record the provisioner's members on the roster; return the context that charges the round."""
            found = attempt.roster.by_provisioner if attempt.roster else ()
            if new := [name for name in found if name not in (self._by_provisioner or ())]:
                logger.log(WARNING, "counted as working with the server: %s; %s", provisioner_of(new), REMEDY)
            self._by_provisioner = (self._by_provisioner or frozenset()).union(found)
            return self.recorded(layout, server_round)

        try:
            total = attempt.total(charged)
        except (RoundAbandoned, ProtocolError) as error:
            logger.log(WARNING, "round %d was abandoned: %s", server_round, error)
            return self._summed(layout, attempt.rejected)
        units = sum(attempt.sizes[name] for name in total.survivors)
        return replace(self._summed(layout, attempt.rejected, total, plan), units=units)

    def receive(self, replies: Messages) -> Screening:
        """Refuse replies that came without the steps of the protocol.

        Args:
            replies: of clients.

        Raises:
            FederationError: always. `collect` runs a round.
        """
        raise FederationError("under secure aggregation a round has several steps; let Cloister's round loop drive it")

    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """Let the wrapped strategy aggregate the survivors' mean, and update the mechanism.

        Args:
            server_round: counted from 1.
            screening: result of `collect`.
        """
        found, asked = screening, len(self._asked)
        if not isinstance(found, Summed) or found.total is None:
            self.measured = Measurements(asked, 0, screening.rejected, epsilon=self.spent(), abandoned=True)
            return None, None
        layout, sent = found.cohort.layout, found.cohort.sent
        summed = SharedSum(found.total, found.survivors, found.shown, found.units)
        released = self.mechanism.released(summed, sent, layout, server_round)
        arrays, metrics = self._aggregated(server_round, layout, released)
        self.measured = self._measurements(found, released)
        self._follow(released.following, layout)
        return arrays, metrics

    def _terms(self, server_round: int, plan: Plan, asked: Sequence[Message]) -> Terms:
        parties = plan.shares.parties
        run = str(asked[0].metadata.run_id) if asked else ""
        graph = Complete(parties.threshold, parties.colluding)
        return Terms(run, server_round, graph, plan.length, plan.bits)

    def _summed(
        self, layout: Layout, rejected: Sequence[Rejection], total: Total | None = None, plan: Plan | None = None
    ) -> Summed:
        """Return the outcome of a round in the form of a screening."""
        count = len(total.survivors) if total else 0
        sent = Coordinates.of(layout, layout.rows(from_record(self.sent))).origin
        cohort = Cohort(layout, sent, (), np.zeros(count), np.ones(count))
        order = tuple(sorted(rejected, key=lambda one: one.node_id))
        numbers: NDArray[np.int64] | None = None
        if total and plan:
            # Subtract the surplus noise that the survivors revealed.
            lowest = plan.shares.parties.threshold + 1
            seen = [seeds(link, lowest, count) for link in total.revealed.values()]
            whole, update = out_of_ring(total.values), slice(plan.parameters)
            whole[update] = without_surplus(whole[update], plan.shares, count, seen)
            numbers = whole
        shown = len(total.revealed) if total else 0
        return Summed(cohort, (), (1.0,) * count, order, total=numbers, survivors=count, shown=shown)
