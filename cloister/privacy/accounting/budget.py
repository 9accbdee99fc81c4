"""The budget of one run: every release goes into the ledger first, and none that would pass the budget is made."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from cloister.core import check
from cloister.core.errors import BudgetExhausted, ConfigError
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import Event, Relation, Unaccounted, Unit
from cloister.privacy.accounting.filters import Filter, FilterKind, cost, filter_for
from cloister.privacy.accounting.ledger import Ledger


class PrivacyBudget:
    """The releases of one run about one unit.

    Args:
        ledger: of the data this run is about; earlier runs on the same data count.
        run: the name of this one.
        unit: whose protection the releases are about.
        delta: at which ε is judged.
        max_epsilon: that may not be passed; 0: no budget.
        relation: which datasets are neighbours.
        kind: of the filter, if the ledger has none for this unit yet; None: `gaussian` for clients, `renyi`, which
            counts draws, for other units.
        rule: what must hold of the ledger beside the budget; raises to refuse. It is asked whenever the budget is, and
            so again with the ledger locked, just before a release is entered.

    Guarantee: while the budget is not passed, everything in the ledger about this unit is together (`max_epsilon`,
        `delta`)-DP against the other clients and whoever sees the models, also where releases, and whole runs, were
        chosen by what earlier ones released; the budget itself must not have been (see `Ledger.limit`).
    """

    def __init__(
        self,
        ledger: Ledger,
        run: str,
        unit: Unit = "client",
        delta: float = 1e-5,
        max_epsilon: float = 0.0,
        relation: Relation = "add-or-remove",
        kind: FilterKind | None = None,
        rule: Callable[[], None] = lambda: None,
    ) -> None:
        if not 0 < delta < 1:
            raise ConfigError(f"target_delta must be above 0 and below 1, got {delta}")
        check.non_negative(max_epsilon=max_epsilon)
        self.ledger = ledger
        self.run = run
        self.unit: Unit = unit
        self.delta = delta
        self.max_epsilon = max_epsilon
        self.relation: Relation = relation
        self._rule = rule
        self.kind: FilterKind = kind or ("gaussian" if unit == "client" else "renyi")

    def begin(self, run: str) -> None:
        """Enter everything that follows under the name of this run, and the budget if it is a new one."""
        self.run = run
        self.ledger.limit(run, self.unit, self.delta, self.max_epsilon, self.kind, self.relation)

    def record_unprotected(self, reason: str) -> None:
        """Record that something leaves without a guarantee; no budget over the same data can cover it."""
        self.ledger.open(Unaccounted(reason), self.unit, self.run, 0, allow=lambda: None)

    def account(self) -> Account:
        """Everything in the ledger about this unit."""
        return self.ledger.account(self.unit, self.relation, insiders=True)

    def account_of_run(self, insiders: bool = True) -> Account:
        """What this run alone has released."""
        own = (entry.event for entry in self.ledger.entries if entry.run == self.run and entry.unit == self.unit)
        return Account(own, self.relation, insiders)

    def account_with(self, planned: Account) -> Account:
        """Everything in the ledger about this unit, with an account in the place of what this run has released."""
        for entry in self.ledger.entries:
            if entry.run != self.run and entry.unit == self.unit:
                planned = planned.plus(entry.event)
        return planned

    def epsilon(self) -> float:
        """ε of everything in the ledger about this unit, at this δ; ∞ where nothing can be claimed.

        It holds if nothing was chosen by what was released before. Budgets do not rest on it.
        """
        return best_epsilon(self.account(), self.delta)[0]

    @property
    def filter(self) -> Filter:
        """What keeps the budget: the ledger's own, or where it has none, the one that `begin` would enter."""
        return self.ledger.filter_of(self.unit) or filter_for(self.kind, self.max_epsilon, self.delta)

    @property
    def limit(self) -> float:
        """The most that may be spent under the filter."""
        return self.filter.limit(self.max_epsilon, self.delta)

    def spent(self) -> float:
        """What everything in the ledger about this unit comes to under the filter."""
        return self.ledger.spent(self.unit, self.filter, self._kept_for)

    def share(self) -> float:
        """Spent of the limit, where there is a budget: 1 is all of it."""
        return _share(self.spent(), self.limit)

    def cost(self, event: Event) -> float:
        """What a release would add to what is spent."""
        return cost(self.filter, event, self._kept_for)

    @property
    def _kept_for(self) -> Relation:
        """The relation that the budget is kept for: a promise about replacing a client stays one in later runs."""
        return self.ledger.relation_of(self.unit, self.relation)

    def require(self, events: Iterable[Event]) -> None:
        """Refuse if these events would pass the budget.

        Raises:
            BudgetExhausted: they would; nothing was recorded.
        """
        self._rule()
        if self.max_epsilon:
            after = self.spent() + sum(self.cost(event) for event in events)
            _refuse(self.spent(), after, self.filter, self.max_epsilon, self.delta, str(self.ledger.path))

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
    """Refuse if an account that no ledger holds would pass a budget with these events, by a Rényi filter.

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
    chosen = filter_for("renyi", max_epsilon, delta)
    before = chosen.spent(account)
    after = before + sum(cost(chosen, event, account.relation) for event in events)
    _refuse(before, after, chosen, max_epsilon, delta, keeper)


def _refuse(before: float, after: float, chosen: Filter, max_epsilon: float, delta: float, keeper: str) -> None:
    """Raises BudgetExhausted if what is spent after some events is more than the limit."""
    if math.isinf(after):
        raise BudgetExhausted(
            f"{keeper} holds, or would hold, releases for which nothing can be claimed: no ε up to {max_epsilon:g} "
            "covers them; if this is other data, give it another data-identity"
        )
    limit = chosen.limit(max_epsilon, delta)
    if after > limit:
        raise BudgetExhausted(
            f"the next release would bring what is spent from {100 * _share(before, limit):.4g} % to "
            f"{100 * _share(after, limit):.4g} %, past the budget of {max_epsilon:g} at δ = {delta:g} (by {chosen})"
        )


def _share(spent: float, limit: float) -> float:
    return spent / limit if limit else math.inf if spent else 0.0
