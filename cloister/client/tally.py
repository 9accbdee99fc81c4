"""Accounting of a simulated client without a ledger, in the state of its node."""

import json
from collections.abc import Callable, Sequence

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from cloister.core.wire import ASSUMED, ASSUMED_ROUNDS, LEAKAGE, NOISED_LEAKAGE, number
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Event, from_json, to_json
from cloister.privacy.accounting.filters import Filter, FilterKind
from cloister.privacy.accounting.vocabulary import Relation, Unit

SPENT, RELEASES = "spent", "releases"
CHOICE = "choice"
"""Mechanism of a choice among hypotheses that is counted beside the noised model."""


class Tally:
    """Counts of the events that a simulated client has released about each unit.

    Args:
        state: of the node, changed in place.
    """

    name = "this client"

    def __init__(self, state: RecordDict) -> None:
        self._state = state

    def catch_up(self, unit: Unit, events: Sequence[Event]) -> None:
        """Count, once per unit, earlier rounds that may have drawn this client.

        Args:
            unit: that the events are about.
            events: of one round: the update, then a choice among hypotheses.
        """
        assumed = self._state.config_records.get(ASSUMED, ConfigRecord())
        if not assumed or assumed.get(unit):
            return
        for place, event in enumerate(events):
            self._count(event, unit, int(number(assumed, ASSUMED_ROUNDS)), is_choice=place > 0)
        assumed[unit] = True

    def limit(self, run: str, unit: Unit, delta: float, epsilon: float, kind: FilterKind, relation: Relation) -> None:
        """Do nothing, since this state contains one run only.

        Args: as `Store.limit`.
        """

    def filter_of(self, unit: Unit) -> Filter | None:
        """Return None: no filter is recorded, and that of the run's budget applies."""
        return None

    def relation_of(self, unit: Unit, relation: Relation) -> Relation:
        """Return the requested relation.

        Args: as `Store.relation_of`.
        """
        return relation

    def account(self, unit: Unit, relation: Relation = "add-or-remove", insiders: bool = False) -> Account:
        """Return the account of all counted events about a unit.

        Args: as `Store.account`.
        """
        account, counts = Account((), relation, insiders), self._counts(unit)
        for event in counts:
            account = account.plus(from_json(json.loads(event)), int(number(counts, event)))
        return account

    def spent(self, unit: Unit, chosen: Filter, relation: Relation = "add-or-remove") -> float:
        """Return the cost of all releases about a unit under a filter.

        Args: as `Store.spent`.
        """
        return chosen.spent(self.account(unit, relation, insiders=True))

    def open(
        self,
        event: Event,
        unit: Unit,
        run: str,
        server_round: int,
        allow: Callable[[], None],
        mechanism: str = "",
        clip: float = 0.0,
    ) -> str:
        """Count a release before it is made, unless `allow` raises.

        Args: as `Store.open`.
        """
        allow()
        self._count(event, unit, is_choice=mechanism == CHOICE)
        return ""

    def done(self, release: str) -> None:
        """Do nothing, since a counted release stays counted."""

    def _counts(self, unit: Unit) -> ConfigRecord:
        return self._state.config_records.setdefault(f"{unit}-releases", ConfigRecord())

    def _count(self, event: Event, unit: Unit, times: int = 1, is_choice: bool = False) -> None:
        # A round of DP-SGD repeats one release many times: a count keeps the state small.
        single, count = event.parts()
        count *= times
        name, counts = json.dumps(to_json(single), sort_keys=True), self._counts(unit)
        counts[name] = count + (int(number(counts, name)) if name in counts else 0)


class LeakageTally(Tally):
    """Leakage of a simulated client within its neighbourhood: in total, by noised models, and their number."""

    @property
    def _record(self) -> MetricRecord:
        record = self._state.metric_records.setdefault(LEAKAGE, MetricRecord({SPENT: 0.0, RELEASES: 0}))
        record.setdefault(NOISED_LEAKAGE, number(record, SPENT))  # state of a run that began without this number
        return record

    def spent(self, unit: Unit, chosen: Filter, relation: Relation = "add-or-remove") -> float:
        """Return the leakage of all releases; ∞ after a release without noise.

        Args: as `Store.spent`.
        """
        return number(self._record, SPENT)

    def _count(self, event: Event, unit: Unit, times: int = 1, is_choice: bool = False) -> None:
        record = self._record
        record[SPENT] = number(record, SPENT) + times * event.leakage
        if not is_choice:
            record[NOISED_LEAKAGE] = number(record, NOISED_LEAKAGE) + times * event.leakage
            record[RELEASES] = int(number(record, RELEASES)) + times
