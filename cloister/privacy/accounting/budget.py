"""Budgets: every release is recorded first, and none that would pass a limit is made.

    limits (ε, δ) ──▶ PrivacyBudget over a Store ──▶ require(events) ──▶ spend / release

A budget is about one unit: a client, an example or a group of examples under (ε, δ), or a neighbourhood under a limit
of leakage. What was spent is in a store: a ledger on disk, or the state that a simulated node keeps between messages.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import numpy as np

from cloister.core import check
from cloister.core.errors import BudgetExhausted, ConfigError, LedgerError
from cloister.core.state import State
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import Event, Unaccounted
from cloister.privacy.accounting.filters import (
    EXACT,
    Filter,
    FilterKind,
    LeakageFilter,
    OverflowFilter,
    cost,
    filter_for,
    largest_share,
)
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Relation, Unit

ID = 16
"""Bytes of a release's id."""


class Store(Protocol):
    """Where releases about units are recorded before they are made."""

    @property
    def name(self) -> str:
        """What to call it in a refusal."""

    def limit(self, run: str, unit: Unit, delta: float, epsilon: float, kind: FilterKind, relation: Relation) -> None:
        """Record under which budget a run begins, where budgets are recorded.

        Args: as `Ledger.limit`.
        """

    def filter_of(self, unit: Unit) -> Filter | None:
        """The filter that was recorded for this unit, if any."""

    def relation_of(self, unit: Unit, relation: Relation) -> Relation:
        """The relation that budgets about a unit are kept for.

        Args:
            unit: of which.
            relation: that a run asks for.
        """

    def account(self, unit: Unit, relation: Relation, insiders: bool) -> Account:
        """The composition of every release about a unit.

        Args:
            unit: of which.
            relation, insiders: as in `Account`.
        """

    def spent(self, unit: Unit, chosen: Filter, relation: Relation) -> float:
        """What all releases about a unit cost under a filter.

        Args:
            unit: of which.
            chosen: the filter.
            relation: which datasets are neighbours.
        """

    def open(
        self,
        event: Event,
        unit: Unit,
        run: str,
        server_round: int,
        allow: Callable[[], None],
        mechanism: str,
        clip: float,
    ) -> str:
        """Record that a release is about to be made, unless `allow` raises.

        Args: as `Ledger.open`.
        """

    def done(self, release: str) -> None:
        """Record that an opened release was handed on."""


AnyStore = TypeVar("AnyStore", bound=Store)


class PrivacyBudget(Generic[AnyStore]):
    """The releases of one run about one unit, and how many more may be made.

    Args:
        ledger: the store of the data this run is about; earlier runs on the same data count.
        run: the name of this one.
        unit: whose protection the releases are about. About a `neighbourhood` the budget is one of leakage.
        delta: at which ε is judged.
        max_epsilon: ε, or the leakage, that may not be passed; 0: no budget.
        relation: which datasets are neighbours.
        kind: of the filter, if the store has none for this unit yet; None: `gaussian` for clients, `renyi`, which
            counts draws, for other units.
        rule: what must hold of the ledger beside the budget; raises to refuse. It is asked whenever the budget is, and
            so again with the ledger locked, just before a release is entered.

    Guarantee: while the budget is not passed, everything in the store about this unit is together (`max_epsilon`,
        `delta`)-DP against the other clients and whoever sees the models, also where releases, and whole runs, were
        chosen by what earlier ones released; the budget itself must not have been (see `Ledger.limit`).

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from cloister.privacy.accounting.events import Gaussian
        >>> folder = TemporaryDirectory()
        >>> budget = PrivacyBudget(Ledger(Path(folder.name) / "data.jsonl"), "run-1", max_epsilon=2.0)
        >>> budget.begin("run-1")
        >>> with budget.release(Gaussian(4.0), server_round=1):
        ...     pass  # the release is made here: it is on disk
        >>> f"{budget.share():.0%} spent"
        '25% spent'
        >>> budget.require([Gaussian(1.0)])
        Traceback (most recent call last):
        cloister.core.errors.BudgetExhausted: ...
        >>> folder.cleanup()
    """

    def __init__(
        self,
        ledger: AnyStore,
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
        self._opened: set[str] = set()
        self.kind: FilterKind = kind or ("gaussian" if unit == "client" else "renyi")

    def begin(self, run: str) -> None:
        """Enter everything that follows under the name of this run, and the budget if it is a new one."""
        self.run = run
        self.ledger.limit(run, self.unit, self.delta, self.max_epsilon, self.kind, self.relation)

    def state_dict(self) -> State:
        """The ids of the releases that were opened here, 16 bytes each."""
        ids = b"".join(bytes.fromhex(release) for release in sorted(self._opened))
        return {"opened": np.frombuffer(ids, np.uint8).reshape(-1, ID)} if ids else {}

    def load_state_dict(self: "PrivacyBudget[Ledger]", state: State) -> None:
        """Go on after these releases, which the ledger must hold.

        Raises:
            LedgerError: it does not: it is another ledger than that of the run, or an older copy.
        """
        opened = {bytes(release).hex() for release in state.get("opened", ())}
        held = {entry.release for entry in self.ledger.entries}
        if lost := len(opened - held):
            raise LedgerError(
                f"{self.ledger.path} holds {len(opened) - lost} of the {len(opened)} releases that this run has made; "
                "resume it where it ran before, with its ledger as it left it"
            )
        self._opened |= opened

    def record_unprotected(self, reason: str) -> None:
        """Record that something leaves without a guarantee; no budget over the same data can cover it."""
        self.ledger.open(Unaccounted(reason), self.unit, self.run, 0, lambda: None, "", 0.0)

    def account(self) -> Account:
        """Everything in the store about this unit."""
        return self.ledger.account(self.unit, self.relation, insiders=True)

    def account_of_run(self: "PrivacyBudget[Ledger]", insiders: bool = True) -> Account:
        """What this run alone has released: under its name, or through this under another."""
        about = (entry for entry in self.ledger.entries if entry.unit == self.unit)
        own = (entry.event for entry in about if entry.run == self.run or entry.release in self._opened)
        return Account(own, self.relation, insiders)

    def opened(self: "PrivacyBudget[Ledger]") -> list[Event]:
        """What was released through this. Runs may share a name: it alone does not say whose a release is."""
        entries = self.ledger.entries
        return [entry.event for entry in entries if entry.release in self._opened and entry.unit == self.unit]

    def account_with(self: "PrivacyBudget[Ledger]", planned: Account) -> Account:
        """Everything in the ledger about this unit, with an account in the place of what was released through this.

        Runs may share a name. Only what was opened here is left out.
        """
        for entry in self.ledger.entries:
            own = entry.release in self._opened and entry.run == self.run
            if not own and entry.unit == self.unit:
                planned = planned.plus(entry.event)
        return planned

    def epsilon(self) -> float:
        """ε of everything in the store about this unit, at this δ; ∞ where nothing can be claimed.

        It holds if nothing was chosen by what was released before. Budgets do not rest on it.
        """
        return best_epsilon(self.account(), self.delta)[0]

    @property
    def filter(self) -> Filter:
        """What keeps the budget: the store's own, or where it has none, the one that `begin` would enter."""
        if self.unit == "neighbourhood":
            return LeakageFilter()
        return self.ledger.filter_of(self.unit) or filter_for(self.kind, self.max_epsilon, self.delta)

    @property
    def limit(self) -> float:
        """The most that may be spent under the filter."""
        return self.filter.limit(self.max_epsilon, self.delta)

    def spent(self) -> float:
        """What everything in the store about this unit comes to under the filter."""
        return self.ledger.spent(self.unit, self.filter, self.kept_for)

    def share(self) -> float:
        """Return the share of the budget that is spent: 1 is all of it."""
        relation = self.kept_for
        return largest_share(
            self.filter,
            lambda each: self.ledger.spent(self.unit, each, relation),
            self.max_epsilon,
            self.delta,
        )

    def cost(self, event: Event) -> float:
        """What a release would add to what is spent."""
        return cost(self.filter, event, self.kept_for)

    def fits(self, events: Sequence[Event]) -> int | None:
        """How many more times these events may happen together within the budget; None: there is no budget.

        Args:
            events: of a round.
        """
        if not self.max_epsilon:
            return None
        times = []
        for chosen in self._kept:
            spent, each = self._spent(chosen, events)
            # As calibration leaves a little of a limit: costs are added up one by one, and each addition rounds.
            room = (1 - EXACT) * (chosen.limit(self.max_epsilon, self.delta) - spent)
            times += [int(max(0.0, room / each))] if each else []
        return min(times, default=None)

    @property
    def kept_for(self) -> Relation:
        """The relation that the budget is kept for: a promise about replacing a client stays one in later runs."""
        return self.ledger.relation_of(self.unit, self.relation)

    @property
    def _kept(self) -> tuple[Filter, ...]:
        """Return all filters that keep the budget."""
        return (self.filter,) if self.unit == "neighbourhood" else (self.filter, OverflowFilter())

    def _spent(self, chosen: Filter, events: Iterable[Event]) -> tuple[float, float]:
        """Return what is spent under a filter, and what these events would add."""
        relation = self.kept_for
        return self.ledger.spent(self.unit, chosen, relation), sum(cost(chosen, event, relation) for event in events)

    def require(self, events: Sequence[Event]) -> None:
        """Refuse if these events would pass the budget.

        Raises:
            BudgetExhausted: they would; nothing was recorded.
        """
        self._rule()
        if not self.max_epsilon:
            return
        for chosen in self._kept:
            before, more = self._spent(chosen, events)
            after = before + more
            if math.isinf(after) or after > chosen.limit(self.max_epsilon, self.delta):
                raise BudgetExhausted(chosen.refusal(before, after, self.max_epsilon, self.delta, self.ledger.name))

    def spend(self, event: Event, server_round: int, mechanism: str = "", clip: float = 0.0) -> str:
        """Record a release that is about to be made: from here on it counts as spent.

        Args:
            event: what is about to happen.
            server_round: in which.
            mechanism: by which, for whoever reads the ledger.
            clip: largest L2 norm of one unit's contribution; 0: none.

        Returns:
            Its id in the store.

        Raises:
            BudgetExhausted: it would pass the budget; nothing was recorded.
            LedgerError: it cannot be recorded.
        """
        release = self.ledger.open(
            event, self.unit, self.run, server_round, lambda: self.require([event]), mechanism, clip
        )
        self._opened.add(release)
        return release

    @contextmanager
    def release(self, event: Event, server_round: int, mechanism: str = "", clip: float = 0.0) -> Iterator[None]:
        """Record a release around the block that makes it: as spent before, as handed on after.

        Args:
            event: what is about to happen.
            server_round: in which.
            mechanism: by which, for whoever reads the ledger.
            clip: largest L2 norm of one unit's contribution; 0: none.

        Raises:
            BudgetExhausted: it would pass the budget; the block is not entered.
            LedgerError: it cannot be recorded; the block is not entered.
        """
        release = self.spend(event, server_round, mechanism, clip)
        yield
        self.ledger.done(release)
