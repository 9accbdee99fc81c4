"""Privacy budgets: every release is recorded first, and refused if it would exceed the limit.

    limits (ε, δ) ──▶ PrivacyBudget over a Store ──▶ require(events) ──▶ spend / release / recorded

A budget is about one unit: a client, an example or a group of examples under (ε, δ), or a neighbourhood under a limit
of leakage. A store contains the spending: a ledger on disk, or the state that a simulated node keeps between messages.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import (
    DistributedGaussian,
    Event,
    Gaussian,
    Pure,
    Repeated,
    Unaccounted,
    from_json,
    to_json,
)
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
from cloister.privacy.accounting.ledger import Ledger, Opening
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Relation, Unit
from cloister.utils import check
from cloister.utils.arrays import State
from cloister.utils.errors import BudgetExhausted, ConfigError, LedgerError, PrivacyError

ID = 16
"""Bytes of a release's id."""


class Store(Protocol):
    """Store of releases about units, which are recorded before they are made."""

    @property
    def name(self) -> str:
        """Return the name of the store in refusals."""

    def limit(self, run: str, unit: Unit, delta: float, epsilon: float, kind: FilterKind, relation: Relation) -> None:
        """Record the budget of a run at its beginning, if the store records budgets.

        Args: as `Ledger.limit`.
        """

    def filter_of(self, unit: Unit) -> Filter | None:
        """Return the recorded filter of this unit, if any."""

    def relation_of(self, unit: Unit, relation: Relation) -> Relation:
        """Return the relation for which budgets about a unit are kept.

        Args:
            unit: of privacy.
            relation: of the run.
        """

    def account(self, unit: Unit, relation: Relation, insiders: bool) -> Account:
        """Return the composition of every release about a unit.

        Args:
            unit: of privacy.
            relation, insiders: as in `Account`.
        """

    def spent(self, unit: Unit, chosen: Filter, relation: Relation) -> float:
        """Return the cost of all releases about a unit under a filter.

        Args:
            unit: of privacy.
            chosen: the filter.
            relation: neighbouring relation of datasets.
        """

    def open_all(self, openings: Sequence[Opening], allow: Callable[[], None]) -> list[str]:
        """Record releases that are about to be made, unless `allow` raises.

        Args: as `Ledger.open_all`.
        """

    def done(self, *releases: str) -> None:
        """Record that opened releases were handed on."""


AnyStore = TypeVar("AnyStore", bound=Store)


class PrivacyBudget(Generic[AnyStore]):
    """Releases of one run about one unit, and the remaining budget.

    Args:
        ledger: the store for the data of this run; earlier runs on the same data count.
        run: the name of this run.
        unit: of privacy. For a `neighbourhood` the budget is one of leakage.
        delta: δ of the budget.
        max_epsilon: upper limit of ε, or of the leakage; 0: no budget.
        relation: neighbouring relation of datasets.
        kind: of the filter, if the store has none for this unit yet; None: `gaussian` for clients, and `renyi`, which
            accounts for draws, for other units.
        rule: further condition on the ledger; raises to refuse. It is checked together with the budget, and so again
            with the ledger locked, just before a release is entered.

    Guarantee: within the budget, all releases in the store about this unit are together (`max_epsilon`, `delta`)-DP
        against the other clients and every recipient of the models. That holds also if releases, and whole runs,
        depend on earlier releases; the budget itself must not depend on them (see `Ledger.limit`).

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
        cloister.utils.errors.BudgetExhausted: ...
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
        """Enter following releases under this run's name, and a new budget."""
        self.run = run
        self.ledger.limit(run, self.unit, self.delta, self.max_epsilon, self.kind, self.relation)

    def without_limit(self: "PrivacyBudget[Ledger]", unit: Unit) -> "PrivacyBudget[Ledger]":
        """Return a budget for another unit over the same ledger; a release that it opens counts as opened by this one.

        Args:
            unit: of its releases.
        """
        other = PrivacyBudget(self.ledger, self.run, unit)
        other._opened = self._opened
        return other

    def state_dict(self) -> State:
        """Return the ids of the releases opened by this budget, 16 bytes each."""
        ids = b"".join(bytes.fromhex(release) for release in sorted(self._opened))
        return {"opened": np.frombuffer(ids, np.uint8).reshape(-1, ID)} if ids else {}

    def load_state_dict(self: "PrivacyBudget[Ledger]", state: State) -> None:
        """Continue after these releases, which the ledger must contain.

        Raises:
            LedgerError: the ledger lacks a release: it is another ledger than that of the run, or an older copy.
        """
        opened = {bytes(release).hex() for release in state.get("opened", ())}
        held = {entry.release for entry in self.ledger.entries}
        if lost := len(opened - held):
            raise LedgerError(
                f"{self.ledger.path} holds {len(opened) - lost} of the {len(opened)} releases that this run has made; "
                "resume it where it ran before, with its ledger as it left it"
            )
        self._opened |= opened

    def record_unprotected(self: "PrivacyBudget[Ledger]", reason: str) -> None:
        """Record a release without a guarantee; no budget over the same data can cover it."""
        self.ledger.open(Unaccounted(reason), self.unit, self.run, 0, lambda: None)

    def account(self) -> Account:
        """Return the composition of all releases in the store about this unit."""
        return self.ledger.account(self.unit, self.relation, insiders=True)

    def account_of_run(self: "PrivacyBudget[Ledger]", insiders: bool = True) -> Account:
        """Return the composition of releases of this run or opened by this budget."""
        return Account(self.of_run(), self.relation, insiders)

    def of_run(self: "PrivacyBudget[Ledger]") -> list[Event]:
        """Return the releases of this run or opened by this budget."""
        about = (entry for entry in self.ledger.entries if entry.unit == self.unit)
        return [entry.event for entry in about if entry.run == self.run or entry.release in self._opened]

    def opened(self: "PrivacyBudget[Ledger]") -> list[Event]:
        """Return the releases opened by this budget; a run's name may be shared."""
        entries = self.ledger.entries
        return [entry.event for entry in entries if entry.release in self._opened and entry.unit == self.unit]

    def account_with(self: "PrivacyBudget[Ledger]", planned: Account) -> Account:
        """Return an account plus the unit's other releases in the ledger.

        The account replaces the releases that this budget opened under its run name. Runs may share a name.
        """
        for entry in self.ledger.entries:
            own = entry.release in self._opened and entry.run == self.run
            if not own and entry.unit == self.unit:
                planned = planned.plus(entry.event)
        return planned

    def epsilon(self) -> float:
        """Return ε of all releases about this unit; ∞ if one has no guarantee.

        It holds if no release depends on earlier ones. Budgets do not rely on it.
        """
        return best_epsilon(self.account(), self.delta)[0]

    @property
    def filter(self) -> Filter:
        """Return the store's filter, or by default the one that `begin` would enter."""
        if self.unit == "neighbourhood":
            return LeakageFilter()
        return self.ledger.filter_of(self.unit) or filter_for(self.kind, self.max_epsilon, self.delta)

    @property
    def limit(self) -> float:
        """Return the largest spending under the filter."""
        return self.filter.limit(self.max_epsilon, self.delta)

    def spent(self) -> float:
        """Return the cost of all releases in the store about this unit, under the filter."""
        return self.ledger.spent(self.unit, self.filter, self.kept_for)

    def share(self) -> float:
        """Return the spent share of the budget; 1: all of it."""
        relation = self.kept_for
        return largest_share(
            self.filter, lambda each: self.ledger.spent(self.unit, each, relation), self.max_epsilon, self.delta
        )

    def cost(self, event: Event) -> float:
        """Return the additional cost of a release."""
        return cost(self.filter, event, self.kept_for)

    def fits(self, events: Sequence[Event]) -> int | None:
        """Return how often these events together still fit; None: no budget.

        Args:
            events: of a round.
        """
        if not self.max_epsilon:
            return None
        times = []
        for chosen in self._kept:
            spent, each = self._spent(chosen, events)
            # A margin, as in calibration: costs are added one by one, and each addition rounds.
            room = (1 - EXACT) * (chosen.limit(self.max_epsilon, self.delta) - spent)
            times += [int(max(0.0, room / each))] if each else []
        return min(times, default=None)

    @property
    def kept_for(self) -> Relation:
        """Return the relation of the budget; `replace-one` persists in later runs."""
        return self.ledger.relation_of(self.unit, self.relation)

    @property
    def _kept(self) -> tuple[Filter, ...]:
        """Return all filters that keep the budget."""
        return (self.filter,) if self.unit == "neighbourhood" else (self.filter, OverflowFilter())

    def _spent(self, chosen: Filter, events: Iterable[Event]) -> tuple[float, float]:
        """Return the spending under a filter, and the cost of these events."""
        relation = self.kept_for
        return self.ledger.spent(self.unit, chosen, relation), sum(cost(chosen, event, relation) for event in events)

    def require(self, events: Sequence[Event]) -> None:
        """Refuse if these events would exceed the budget.

        Raises:
            BudgetExhausted: they would exceed it; nothing is recorded.
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
        """Record a release that is about to be made, and charge it.

        Args:
            event: of the release.
            server_round: of the release.
            mechanism: name of the mechanism, for readers of the ledger.
            clip: largest L2 norm of one unit's contribution; 0: no bound.

        Returns:
            Its id in the store.

        Raises:
            BudgetExhausted: it would exceed the budget; nothing is recorded.
            LedgerError: it cannot be recorded.
        """
        (release,) = _open([(self, [self.opening(event, server_round, mechanism, clip)])])
        return release

    def opening(self, event: Event, server_round: int, mechanism: str = "", clip: float = 0.0) -> Opening:
        """Return a release about this unit in this run, for `recorded`.

        Args: as `spend`.
        """
        return Opening(event, self.unit, self.run, server_round, mechanism, clip)

    @contextmanager
    def release(self, event: Event, server_round: int, mechanism: str = "", clip: float = 0.0) -> Iterator[None]:
        """Record a release around the block that makes it.

        It is charged on entry, and marked as handed on at exit.

        Args:
            event: of the release.
            server_round: of the release.
            mechanism: name of the mechanism, for readers of the ledger.
            clip: largest L2 norm of one unit's contribution; 0: no bound.

        Raises:
            BudgetExhausted: it would exceed the budget; the block is not entered.
            LedgerError: it cannot be recorded; the block is not entered.
        """
        with recorded([(self, [self.opening(event, server_round, mechanism, clip)])]):
            yield


Planned = Sequence[tuple[PrivacyBudget[AnyStore], Sequence[Opening]]]
"""Releases that are about to be made together, by the budget that covers them. All budgets are over one store."""


@contextmanager
def recorded(planned: Planned[AnyStore]) -> Iterator[None]:
    """Record releases about one unit or several around the block that makes them.

    All are charged before the block, by one write to the store. If a budget refuses, none is. If the process or the
    disk fails within the write, some may be charged. They are marked as handed on after the block, by one more write.

    Args:
        planned: the releases; possibly none.

    Raises:
        BudgetExhausted: a budget does not cover its releases; the block is not entered.
        LedgerError: they cannot be recorded, and the block is not entered; or they cannot be marked after it.
    """
    if not any(openings for _, openings in planned):
        yield
        return
    releases = _open(planned)
    yield
    planned[0][0].ledger.done(*releases)


def _open(planned: Planned[AnyStore]) -> list[str]:
    """Record releases that are about to be made, and return their ids in the store."""

    def allow() -> None:
        together = [opening for _, openings in planned for opening in openings]
        for budget, _ in planned:
            budget.require([opening.event for opening in together if opening.unit == budget.unit])

    releases = planned[0][0].ledger.open_all([opening for _, openings in planned for opening in openings], allow)
    budgets = [budget for budget, openings in planned for _ in openings]
    for budget, release in zip(budgets, releases, strict=True):
        budget._opened.add(release)
    return releases


MAX_EVENTS = 16
"""Most releases of one round that a node reads."""
MAX_LENGTH = 1000
"""Most characters of one release."""


def to_wire(events: Iterable[Event]) -> list[str]:
    """Return the releases of a round as strings for a message, without draws."""
    return [json.dumps(to_json(undrawn(event))) for event in events]


def from_wire(content: object) -> tuple[Event, ...]:
    """Return the releases of a message from the server, the strict inverse of `to_wire`.

    Raises:
        PrivacyError: the content is no list of releases with noise, or one of them claims a draw.
    """
    if not isinstance(content, Sequence) or isinstance(content, str) or not 0 < len(content) <= MAX_EVENTS:
        raise PrivacyError(f"what the server promises must be a list of 1 to {MAX_EVENTS} events")
    events = []
    for item in content:
        if not isinstance(item, str) or len(item) > MAX_LENGTH:
            raise PrivacyError(f"an event that the server promises must be a string of at most {MAX_LENGTH} characters")
        try:
            event = from_json(json.loads(item))
        except (ValueError, RecursionError):
            raise PrivacyError("an event that the server promises is no JSON") from None
        if not _has_noise(event) or undrawn(event) != event:
            raise PrivacyError("an event that the server promises must have noise, and count no draw of clients")
        events.append(event)
    return tuple(events)


def multiplier_of(promise: Iterable[Event]) -> float:
    """Return z of one Gaussian release with this total cost; 0: no bound.

    Gaussians add up by 1/z² = Σ 1/zᵢ². A pure ε counts as the Gaussian that bounds it (`Account.mu_squared`).
    """
    account = Account(promise)
    return 0.0 if account.is_empty else account.mu_squared() ** -0.5


def _has_noise(event: Event) -> bool:
    if isinstance(event, Repeated):
        return _has_noise(event.event)
    return isinstance(event, Pure | DistributedGaussian) or (isinstance(event, Gaussian) and event.noise_multiplier > 0)


def undrawn(event: Event) -> Event:
    """Return the event without a draw, which costs at least as much."""
    if isinstance(event, Repeated):
        return replace(event, event=replace(event.event, sampling=UNSAMPLED))
    return replace(event, sampling=UNSAMPLED) if isinstance(event, Gaussian) else event
