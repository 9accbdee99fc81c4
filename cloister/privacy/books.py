"""The books of one run: every release goes into the ledger first, and none that would pass the budget is made."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cloister.core import check
from cloister.core.errors import BudgetExhausted
from cloister.privacy.accounting import Account, best_epsilon
from cloister.privacy.events import Event, Relation, Unaccounted, Unit
from cloister.privacy.ledger import Ledger


class Books:
    """The releases of one run about one unit.

    Args:
        ledger: of the data this run is about; earlier runs on the same data count.
        run: the name of this one.
        unit: whose protection the releases are about.
        delta: at which ε is judged.
        max_epsilon: that may not be passed; 0: no budget.
        relation: which datasets are neighbours.

    Guarantee: while the budget is not passed, everything in the ledger about this unit is together (`max_epsilon`,
        `delta`)-DP against the other clients and whoever sees the models. Events are recorded with the least noise
        that they can have, whatever was released before: their composition is that of multipliers fixed beforehand.
    """

    def __init__(
        self,
        ledger: Ledger,
        run: str,
        unit: Unit = "client",
        delta: float = 1e-5,
        max_epsilon: float = 0.0,
        relation: Relation = "add-or-remove",
    ) -> None:
        check.positive(target_delta=delta)
        check.non_negative(max_epsilon=max_epsilon)
        self.ledger = ledger
        self.run = run
        self.unit: Unit = unit
        self.delta = delta
        self.max_epsilon = max_epsilon
        self.relation: Relation = relation

    def begin(self, run: str) -> None:
        """Enter everything that follows under the name of this run, and the budget if it is a new one."""
        self.run = run
        self.ledger.limit(run, self.unit, self.delta, self.max_epsilon)

    def confess(self, reason: str) -> None:
        """Record that something leaves without a guarantee; no budget over the same data can cover it."""
        self.ledger.open(Unaccounted(reason), self.unit, self.run, 0, allow=lambda: None)

    def account(self) -> Account:
        """Everything in the ledger about this unit."""
        return self.ledger.account(self.unit, self.relation, insiders=True)

    def account_of_run(self, insiders: bool = True) -> Account:
        """What this run alone has released."""
        own = (entry.event for entry in self.ledger.entries if entry.run == self.run and entry.unit == self.unit)
        return Account(own, self.relation, insiders)

    def epsilon(self) -> float:
        """ε of everything in the ledger about this unit, at this δ; ∞ where nothing can be claimed."""
        return best_epsilon(self.account(), self.delta)[0]

    def require(self, events: Iterable[Event]) -> None:
        """Refuse if these events would pass the budget.

        Raises:
            BudgetExhausted: they would; nothing was recorded.
        """
        refuse_beyond(self.account(), events, self.delta, self.max_epsilon, str(self.ledger.path))

    @contextmanager
    def release(self, event: Event, server_round: int, mechanism: str = "", clip: float = 0.0) -> Iterator[None]:
        """Record a release around the block that makes it: on disk as spent before, as handed on after.

        Raises:
            BudgetExhausted: it would pass the budget; the block is not entered.
            LedgerError: it cannot be recorded; the block is not entered.
        """
        release = self.ledger.open(
            event, self.unit, self.run, server_round, lambda: self.require([event]), mechanism, clip
        )
        yield
        self.ledger.done(release)


def refuse_beyond(account: Account, events: Iterable[Event], delta: float, max_epsilon: float, keeper: str) -> None:
    """Refuse if an account would pass a budget with these events.

    Args:
        account: of what was released before.
        events: that are about to happen.
        delta: at which ε is judged.
        max_epsilon: that may not be passed; 0: no budget.
        keeper: whose account it is, for the message.

    Raises:
        BudgetExhausted: it would.
    """
    if not max_epsilon:
        return
    after = account
    for event in events:
        after = after.plus(event)
    epsilon = best_epsilon(after, delta)[0]
    if math.isinf(epsilon):
        raise BudgetExhausted(
            f"{keeper} holds, or would hold, releases for which nothing can be claimed: no ε up to {max_epsilon:g} "
            "covers them; if this is other data, give it another data-identity"
        )
    if epsilon > max_epsilon:
        raise BudgetExhausted(
            f"the next release would bring ε from {best_epsilon(account, delta)[0]:.4g} to {epsilon:.4g} at "
            f"δ = {delta:g}, past the budget of {max_epsilon:g}"
        )
