"""Rounds that are steps of DP-SGD on a secure sum, around a Flower strategy.

    clients draw, clip, sum, add noise, mask → sum over the list of the epoch → one step → strategy

The first round of an epoch is two exchanges: nodes advertise keys, then train. Each later round is one. The cost of the
round is on disk before the first vector is requested.

The divisor is q·N, the expected batch of the members. N is the sum of the public sizes that they attest. A member that
attests a wrong size makes steps too short or too long, as one with a wrong vector could.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from flwr.serverapp.strategy import Strategy

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.claims.claim import Claim
from cloister.privacy.mechanisms.distributed.shared import SharedSum
from cloister.privacy.mechanisms.distributed.steps import DistributedStep
from cloister.secure_aggregation.epoch import EpochCoordinator, EpochKey, MaskedVector, RoundTerms, is_genuine
from cloister.secure_aggregation.primitives import out_of_ring
from cloister.secure_aggregation.roster import Roster
from cloister.secure_aggregation.session import Complete
from cloister.server.exchanges import Exchanges
from cloister.server.screening import Screening
from cloister.server.secure_sum import SecureSum, Summed
from cloister.server.strategy_wrapper import Measurements
from cloister.utils.arrays import Layout, from_record
from cloister.utils.errors import RoundAbandoned
from cloister.utils.registry import Aggregated


class Epoch(NamedTuple):
    """An epoch between two rounds.

    Attributes:
        coordinator: of its protocol.
        names: node -> name of the member.
        roster: of the members.
    """

    coordinator: EpochCoordinator
    names: Mapping[int, str]
    roster: Roster


class SecureSteps(SecureSum):
    """A Flower strategy around steps of DP-SGD with noise in shares.

    The server claims nothing about whole clients. The claim about an example or a group is that about the clients
    (`cloister.server.client_claims`). The same event is in this server's ledger, and in the ledger of each node.

    Args:
        inner: the wrapped strategy; it receives one model for each round. All it does with it is post-processing.
        mechanism: of a round.
        budget: names the ledger and the run.

    Guarantee: that of `SharedDpSgd`, against this server too, if every client runs a bundle that its site has checked.
    """

    mechanism: DistributedStep

    def __init__(self, inner: Strategy, mechanism: DistributedStep, *, budget: PrivacyBudget | None = None) -> None:
        super().__init__(inner, mechanism, budget=budget)
        self._epoch: Epoch | None = None
        self._silent: frozenset[int] = frozenset()

    @property
    def is_accounted(self) -> bool:
        """Return False: no guarantee of the server's is about whole clients."""
        return False

    @property
    def by_provisioner(self) -> tuple[str, ...] | None:
        """Return the members whose keys the provisioner made; None: no roster has been seen yet."""
        return None if self._by_provisioner is None else tuple(sorted(self._by_provisioner))

    def multiplier(self, layout: Layout) -> float:
        """Return the noise multiplier of a step that is charged.

        Args:
            layout: of the model.

        Raises:
            PrivacyError: no shares of this noise can be made.
        """
        return self.mechanism.dp_sgd.multiplier(layout.size, len(self.by_provisioner or ()))

    def event(self, layout: Layout) -> Event:
        """Return the cost of a round for one unit of one client.

        Args:
            layout: of the model.
        """
        (event,) = self.mechanism.unit_events(layout, len(self.by_provisioner or ()))
        return event

    def events(self, layout: Layout) -> tuple[Event, ...]:
        """Return no release: none is about a whole client.

        Args:
            layout: of the model.
        """
        return ()

    def promised(self, layout: Layout) -> tuple[Event, ...]:
        """Return no release: each node computes its own cost.

        Args:
            layout: of the model.
        """
        return ()

    def claim(self) -> Claim:
        """Return the empty claim about whole clients, with t and c."""
        return Claim("none", parameters={**self.mechanism.dp_sgd.parties.parameters()})

    @contextmanager
    def recorded(self, layout: Layout, server_round: int) -> Iterator[None]:
        """Record the cost of the round for one unit before the block runs.

        Args:
            layout: of the model.
            server_round: counted from 1.

        Raises:
            LedgerError: the release cannot be recorded; the block is not entered.
        """
        if self.budget is None:
            yield
            return
        own = self.mechanism.dp_sgd
        budget, bound = self.budget.without_limit(own.unit), own.clipping_norm_in(server_round)
        with budget.release(self.event(layout), server_round, self.mechanism.name, bound):
            yield

    def total(self, layout: Layout, exchanges: Exchanges) -> SharedSum:
        """Let the members of the epoch make one step, and return the sum of their vectors; see `SecureSum.total`.

        A round begins an epoch if there is none, if it has had all its rounds, or if one of its members is not asked.
        Other nodes that are asked wait for the next epoch. A round without a sum ends the epoch. The members that sent
        no vector then wait for the epoch after the next one, if the threshold permits it.

        Args:
            layout, exchanges: as there.

        Raises:
            RoundAbandoned, ProtocolError, BudgetExhausted: as there; or a member attests no size.
        """
        epoch, self._epoch = self._epoch, None
        silent, self._silent = self._silent, frozenset()
        asked = {message.metadata.dst_node_id for message in exchanges.asked}
        if epoch is None or not epoch.coordinator.takes(exchanges.round) or not epoch.names.keys() <= asked:
            roster, keys = exchanges.introduced(EpochKey, partial(is_genuine, run=exchanges.run, first=exchanges.round))
            heard = keys.keys() - silent
            if self.mechanism.dp_sgd.parties.threshold <= len(heard) < len(keys):
                for node in sorted(keys.keys() - heard):
                    exchanges.reject(node, "protocol", "the node sent no vector in the last round, and waits")
                    del keys[node], exchanges.names[node]
            coordinator = EpochCoordinator(exchanges.run, roster, exchanges.round, keys.values())
            exchanges.keep(coordinator.list.names)
            epoch = Epoch(coordinator, exchanges.names, roster)
        exchanges.names = dict(epoch.names)
        own, members = self.mechanism.dp_sgd, len(epoch.names)
        graph = Complete(own.parties.threshold, own.parties.colluding)
        graph.require(members)
        plan = own.plan(layout.size, exchanges.round, members)
        terms = RoundTerms.about(exchanges.round, graph, plan.length, plan.bits, plan.terms(), from_record(self.sent))
        told = epoch.coordinator.begin(terms)
        with self.charged(layout, exchanges.round, epoch.roster):
            exchanges.add_vectors(dict.fromkeys(epoch.names, told.encode()), MaskedVector, epoch.coordinator.add)
            self._silent = frozenset(node for node, name in epoch.names.items() if name not in exchanges.sizes)
            numbers = out_of_ring(epoch.coordinator.total())
        self._epoch = epoch
        if unread := [name for name, size in exchanges.sizes.items() if not size]:
            raise RoundAbandoned(f"no public size can be read of {', '.join(sorted(unread))}: state public-size there")
        return SharedSum(numbers, members, members, sum(exchanges.sizes.values()))

    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """Let the wrapped strategy take the step.

        A round without a sum leaves the model unchanged.

        Args:
            server_round, screening: as in `SecureSum.aggregate`.
        """
        if isinstance(screening, Summed) and screening.sum is None:
            self.measured = Measurements(len(self._asked), screening.arrived, screening.rejected, abandoned=True)
            return None, None
        return super().aggregate(server_round, screening)
