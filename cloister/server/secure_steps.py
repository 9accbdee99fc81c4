"""Rounds that are steps of DP-SGD on a secure sum, around a Flower strategy.

    clients draw, clip, sum, add noise, mask → sum over survivors → remove surplus noise → one step → strategy

The divisor is q·N, the expected batch of the survivors. N is the sum of the public sizes that they attest. A member
that attests a wrong size makes steps too short or too long, as one with a wrong vector could.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from flwr.serverapp.strategy import Strategy

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.claims.claim import Claim
from cloister.privacy.mechanisms.distributed.steps import DistributedStep
from cloister.server.screening import Screening
from cloister.server.secure_sum import SecureSum, Summed
from cloister.server.strategy_wrapper import Measurements
from cloister.utils.arrays import Layout
from cloister.utils.registry import Aggregated


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

    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """Let the wrapped strategy take the step; a round whose survivors attest no size leaves the model unchanged.

        Args:
            server_round, screening: as in `SecureSum.aggregate`.
        """
        if isinstance(screening, Summed) and screening.total is not None and not screening.units:
            self.measured = Measurements(len(self._asked), 0, screening.rejected, abandoned=True)
            return None, None
        return super().aggregate(server_round, screening)
