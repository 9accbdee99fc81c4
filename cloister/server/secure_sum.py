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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from logging import WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.premises import KEYS, known_by
from cloister.privacy.mechanisms.distributed.plan import Plan, without_surplus
from cloister.privacy.mechanisms.distributed.shared import SharedRelease, SharedSum
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, THRESHOLD
from cloister.secure_aggregation import messages as protocol
from cloister.secure_aggregation.coordinator import Coordinator, Total
from cloister.secure_aggregation.primitives import out_of_ring, seeds
from cloister.secure_aggregation.roster import Roster
from cloister.secure_aggregation.session import Complete, Terms
from cloister.server.exchanges import Answer, Exchanges, decoded
from cloister.server.private_strategy import PrivateStrategy
from cloister.server.screening import Screening
from cloister.server.strategy_wrapper import Measurements, NamedArrays, Send
from cloister.utils.arrays import Layout, Row, State, from_record
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ConfigError, FederationError, ProtocolError, RoundAbandoned
from cloister.utils.keys import REMEDY, provisioner_of
from cloister.utils.registry import Aggregated, Messages
from cloister.utils.state import Coordinates
from cloister.utils.wire import SHARE, SIGN, UNMASK

logger = logging.getLogger("cloister.server")
EXCHANGES = "exchanges"
"""Name in the state: exchanges of a round. A state without it has rounds that overlapped, and cannot be resumed."""
BY_PROVISIONER = "by-provisioner"
"""Name in the state: names of members whose keys the provisioner made, as JSON."""


@dataclass(frozen=True)
class SecureRound:
    """The one attempt at a round. It is never repeated.

    Args:
        terms: of the round.
        noise: terms of the noise.
        exchanges: with the nodes of the round.

    Guarantee: in the first two steps the server receives keys and rosters, and sees which nodes answer. None of these
        depends on data, so the two steps cost no privacy budget.

    Source: Bonawitz et al. (2017), AdvertiseKeys to Unmasking.
    """

    terms: Terms
    noise: bytes
    exchanges: Exchanges

    def total(self, charged: Callable[[Roster], AbstractContextManager[None]]) -> Total:
        """Return the sum of the surviving members' vectors.

        Args:
            charged: records the cost of the round, with the members' roster. It is entered before the first vector is
                requested, and left when the sum is computed.

        Raises:
            RoundAbandoned: too few members are left for the threshold, or too many take part.
        """
        nodes, terms = self.exchanges, self.terms

        def genuine(one: protocol.Advertisement, roster: Roster) -> bool:
            return Coordinator(roster, terms, self.noise).is_genuine(one)

        roster, advertised = nodes.introduced(protocol.Advertisement, genuine)
        coordinator = Coordinator(roster, terms, self.noise)
        cohort = coordinator.cohort(advertised.values())
        nodes.keep(cohort.names)
        shares = self._answers(SHARE, dict.fromkeys(nodes.names, cohort.encode()), protocol.SealedShares)
        deliveries = coordinator.deliveries(shares.values())
        with charged(roster):
            told = {node: deliveries[name].encode() for node, name in self._nodes(deliveries)}
            nodes.add_vectors(told, protocol.MaskedInput, coordinator.add)
            survivors = coordinator.survivors()
            told = {node: survivors.encode() for node, _ in self._nodes(survivors.names)}
            signed = self._answers(SIGN, told, protocol.SurvivorSignature)
            signatures = coordinator.signatures(signed.values()).encode()
            shown = self._answers(UNMASK, dict.fromkeys(signed, signatures), protocol.Unmasking)
            return coordinator.total(shown.values())

    def _answers(self, step: str, told: Mapping[int, bytes], kind: type[Answer]) -> dict[int, Answer]:
        """Return the nodes' answers in a step that name their own sender; reject the rest."""
        answers = dict(self.exchanges.answers(step, told, lambda reply: decoded(reply, kind)))
        found = {node: one for node, one in answers.items() if one.name == self.exchanges.names[node]}
        for node in answers.keys() - found.keys():
            self.exchanges.reject(node, "protocol", "the message names another sender")
        return found

    def _nodes(self, names: Iterable[str]) -> list[tuple[int, str]]:
        """Return the pairs of node and name for these members."""
        chosen = frozenset(names)
        return [(node, name) for node, name in self.exchanges.names.items() if name in chosen]


@dataclass(frozen=True)
class Summed(Screening):
    """Result of a secure round: one sum, and no client's row.

    Attributes:
        sum: of the survivors' vectors; None: there is none.
        arrived: number of valid vectors that have arrived.
    """

    sum: SharedSum | None = None
    arrived: int = 0


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
        most = self.mechanism.plan(Layout.of(from_record(arrays)).size, server_round).shares.parties.members
        if len(messages) > most:
            raise ConfigError(
                f"{len(messages)} nodes would train in round {server_round}, and {THRESHOLD} and {COLLUDING} permit at "
                f"most {most}; raise the threshold, or lower strategy.fraction-train"
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
        layout, exchanges = Layout.of(from_record(self.sent)), Exchanges(server_round, list(messages), send)
        found: SharedSum | None = None
        try:
            found = self.total(layout, exchanges)
        except (RoundAbandoned, ProtocolError) as error:
            logger.log(WARNING, "round %d was abandoned: %s", server_round, error)
        sent = Coordinates.of(layout, layout.rows(from_record(self.sent))).origin
        count, arrived = found.survivors if found else 0, len(exchanges.sizes)
        cohort = Cohort(layout, sent, (), np.zeros(count), np.ones(count))
        order = tuple(sorted(exchanges.rejected, key=lambda one: one.node_id))
        return Summed(cohort, (), (1.0,) * count, order, None, found, arrived)

    def total(self, layout: Layout, exchanges: Exchanges) -> SharedSum:
        """Let the clients of a round train, and return the sum of their vectors.

        Args:
            layout: of the model.
            exchanges: of the round.

        Raises:
            RoundAbandoned, ProtocolError: there is no sum.
            BudgetExhausted: the budget does not cover the round; no vector was requested.
        """
        plan = self.mechanism.plan(layout.size, exchanges.round)
        attempt = SecureRound(self._terms(exchanges.round, plan, exchanges.asked), plan.terms(), exchanges)
        found = attempt.total(lambda roster: self.charged(layout, exchanges.round, roster))
        # Subtract the surplus noise that the survivors revealed.
        survivors, lowest = len(found.survivors), plan.shares.parties.threshold + 1
        seen = [seeds(link, lowest, survivors) for link in found.revealed.values()]
        whole, update = out_of_ring(found.values), slice(plan.parameters)
        whole[update] = without_surplus(whole[update], plan.shares, survivors, seen)
        return SharedSum(whole, survivors, len(found.revealed))

    def charged(self, layout: Layout, server_round: int, roster: Roster) -> AbstractContextManager[None]:
        """Record the provisioner's members on the roster; return the context that charges the round.

        Args:
            layout: of the model.
            server_round: counted from 1.
            roster: of the members.
        """
        if new := [name for name in roster.by_provisioner if name not in (self._by_provisioner or ())]:
            logger.log(WARNING, "counted as working with the server: %s; %s", provisioner_of(new), REMEDY)
        self._by_provisioner = (self._by_provisioner or frozenset()).union(roster.by_provisioner)
        return self.recorded(layout, server_round)

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
        if not isinstance(found, Summed) or found.sum is None:
            self.measured = Measurements(asked, 0, screening.rejected, epsilon=self.spent(), abandoned=True)
            return None, None
        layout, sent = found.cohort.layout, found.cohort.sent
        released = self.mechanism.released(found.sum, sent, layout, server_round)
        arrays, metrics = self._aggregated(server_round, layout, released)
        self.measured = self._measurements(found, released)
        self._follow(released.following, layout)
        return arrays, metrics

    def _terms(self, server_round: int, plan: Plan, asked: Sequence[Message]) -> Terms:
        parties = plan.shares.parties
        run = str(asked[0].metadata.run_id) if asked else ""
        graph = Complete(parties.threshold, parties.colluding)
        return Terms(run, server_round, graph, plan.length, plan.bits)
