"""Secure aggregation around a Flower strategy, which receives one model made from the sum of all updates.

    clients clip, add noise, mask → sum over survivors → remove surplus noise → mean → one virtual reply → strategy

The cost of the round is on disk before the first client is asked for its masked vector. If fewer clients than the
threshold finish a round, the model stays unchanged, and the round stays charged.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from logging import WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from cloister.aggregation.decorator import Measurements, Send
from cloister.aggregation.private_strategy import PrivateStrategy
from cloister.aggregation.screening import Rejection, Screening
from cloister.aggregation.secure_round import SecureRound
from cloister.core.arrays import Layout, Row, from_record
from cloister.core.capabilities import Aggregated, Messages
from cloister.core.cohort import Cohort
from cloister.core.errors import ConfigError, FederationError, ProtocolError, RoundAbandoned
from cloister.core.keys import REMEDY, provisioner_of
from cloister.core.state import State
from cloister.core.wire import CLIPPING_NORM, DISTANCE
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.premises import KEYS, known_by
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.plan import Plan
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, THRESHOLD
from cloister.privacy.mechanisms.distributed.whole import without_surplus
from cloister.secure_aggregation.chain import seeds
from cloister.secure_aggregation.coordinator import Total
from cloister.secure_aggregation.graph import Complete
from cloister.secure_aggregation.ring import out_of_ring
from cloister.secure_aggregation.terms import Terms

logger = logging.getLogger("cloister.server")
BY_PROVISIONER = "by-provisioner"
"""Name in the state: names of members whose keys the provisioner made, as JSON."""


@dataclass(frozen=True)
class Summed(Screening):
    """Result of a secure round: one sum, and no client's row.

    Attributes:
        total: sum of the survivors' integer vectors, shape (plan.length,), without surplus noise; None: there is no
            sum.
        survivors: number of survivors.
        shown: number of survivors that revealed their surplus noise.
    """

    total: NDArray[np.int64] | None = None
    survivors: int = 0
    shown: int = 0


class SecureSum(PrivateStrategy):
    """A Flower strategy around the mean of a secure aggregation.

    Args:
        inner: the wrapped strategy; it must need only the mean.
        mechanism: defines the computation of clients, and the release from the sum.
        budget: as in `PrivateStrategy`.

    Guarantee: that of the mechanism, against this server too, if every client runs a bundle that its site has checked.
    """

    mechanism: DistributedMean

    def __init__(self, inner: Strategy, mechanism: DistributedMean, *, budget: PrivacyBudget | None = None) -> None:
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
        """As in `PrivateStrategy`, with the members whose keys the provisioner made."""
        base = super().claim()
        if self._by_provisioner is None:
            return base
        # Members sign the roster, which says who made each key, with the terms of a round.
        premises = known_by(base.premises, [KEYS.known_as("attested")])
        return replace(base, premises=premises, by_provisioner=tuple(sorted(self._by_provisioner)))

    def state_dict(self) -> State:
        """Return the state, with the members whose keys the provisioner made."""
        known = None if self._by_provisioner is None else sorted(self._by_provisioner)
        return {**super().state_dict(), BY_PROVISIONER: np.frombuffer(json.dumps(known).encode(), np.uint8)}

    def load_state_dict(self, state: State) -> None:
        """Restore the state, with the members whose keys the provisioner made."""
        super().load_state_dict(state)
        known = json.loads(state[BY_PROVISIONER].tobytes())
        self._by_provisioner = None if known is None else frozenset(known)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Configure the round's messages; add C and the distance if they follow earlier rounds.

        Args:
            server_round, arrays, config, grid: as in `PrivateStrategy.configure_train`.

        Raises:
            BudgetExhausted: the budget does not cover the round.
            ConfigError: more nodes would be asked than the threshold permits: two lists of survivors would be possible.
        """
        if self.mechanism.bits:
            config[CLIPPING_NORM] = self.mechanism.clipping_norm
        if self.mechanism.squares:
            config[DISTANCE] = self.mechanism.distance
        messages = list(super().configure_train(server_round, arrays, config, grid))
        parties = self.mechanism.parties
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
            layout, sent: as in `Decorator.screened`.
        """
        return ""

    def collect(self, server_round: int, messages: Messages, send: Send) -> Summed:
        """Let the clients train, and compute the sum of their updates.

        Args:
            server_round, messages, send: as in `Decorator.collect`.

        Raises:
            BudgetExhausted: the budget does not cover the round; no vector was requested.
        """
        asked = list(messages)
        layout = Layout.of(from_record(self.sent))
        plan = self.mechanism.plan(layout.size)
        attempt = SecureRound(self._terms(server_round, plan, asked), plan.terms(), asked, send)
        try:
            total = attempt.total(lambda: self._charged(attempt, layout, server_round))
        except (RoundAbandoned, ProtocolError) as error:
            logger.log(WARNING, "round %d was abandoned: %s", server_round, error)
            return self._summed(layout, attempt.rejected)
        return self._summed(layout, attempt.rejected, total, plan)

    def _charged(self, attempt: SecureRound, layout: Layout, server_round: int) -> AbstractContextManager[None]:
        """Record the provisioner's members on the roster; return the context that charges the round."""
        found = attempt.roster.by_provisioner if attempt.roster else ()
        if new := [name for name in found if name not in (self._by_provisioner or ())]:
            logger.log(WARNING, "counted as working with the server: %s; %s", provisioner_of(new), REMEDY)
        self._by_provisioner = (self._by_provisioner or frozenset()).union(found)
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
        if not isinstance(found, Summed) or found.total is None:
            self.measured = Measurements(asked, 0, screening.rejected, epsilon=self.spent(), abandoned=True)
            return None, None
        layout, sent = found.cohort.layout, found.cohort.sent
        released = self.mechanism.released(found.total, layout, sent, found.survivors, found.shown)
        arrays, metrics = self._aggregated(server_round, layout, released)
        self.measured = self._measurements(found, released)
        self._follow(released.following, layout)
        return arrays, metrics

    def _terms(self, server_round: int, plan: Plan, asked: Sequence[Message]) -> Terms:
        parties = self.mechanism.parties
        run = str(asked[0].metadata.run_id) if asked else ""
        graph = Complete(parties.threshold, parties.colluding)
        return Terms(run, server_round, graph, plan.length, plan.bits)

    def _summed(
        self, layout: Layout, rejected: Sequence[Rejection], total: Total | None = None, plan: Plan | None = None
    ) -> Summed:
        """Return the outcome of a round in the form of a screening."""
        count = len(total.survivors) if total else 0
        sent = layout.rows(from_record(self.sent))
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
