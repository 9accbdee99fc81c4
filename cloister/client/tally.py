"""Releases of a simulated client, which has no ledger: stores in the state that its node keeps between messages."""

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
"""The mechanism under which a choice among hypotheses is counted beside the noised model."""


class Tally:
    """What a simulated client has released about each unit: how often each event.

    Args:
        state: of the node, changed in place.
    """

    name = "this client"

    def __init__(self, state: RecordDict) -> None:
        self._state = state

    def catch_up(self, unit: Unit, events: Sequence[Event]) -> None:
        """Count, once for each unit, the earlier rounds of a run in which this client may have been drawn.

        Args:
            unit: that the events are about.
            events: what one round releases: the update, then a choice among hypotheses.
        """
        assumed = self._state.config_records.get(ASSUMED, ConfigRecord())
        if not assumed or assumed.get(unit):
            return
        for place, event in enumerate(events):
            self._count(event, unit, int(number(assumed, ASSUMED_ROUNDS)), is_choice=place > 0)
        assumed[unit] = True

    def limit(self, run: str, unit: Unit, delta: float, epsilon: float, kind: FilterKind, relation: Relation) -> None:
        """No line: there is one run in this state.

        Args: as `Store.limit`.
        """

    def filter_of(self, unit: Unit) -> Filter | None:
        """None is recorded: it is that of the run's budget."""
        return None

    def relation_of(self, unit: Unit, relation: Relation) -> Relation:
        """The relation asked for.

        Args: as `Store.relation_of`.
        """
        return relation

    def account(self, unit: Unit, relation: Relation = "add-or-remove", insiders: bool = False) -> Account:
        """Everything that was counted about a unit.

        Args: as `Store.account`.
        """
        account, counts = Account((), relation, insiders), self._counts(unit)
        for event in counts:
            account = account.plus(from_json(json.loads(event)), int(number(counts, event)))
        return account

    def spent(self, unit: Unit, chosen: Filter, relation: Relation = "add-or-remove") -> float:
        """What all releases about a unit cost under a filter.

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
        """Count a release that is about to be made, unless `allow` raises.

        Args: as `Store.open`.
        """
        allow()
        self._count(event, unit, is_choice=mechanism == CHOICE)
        return ""

    def done(self, release: str) -> None:
        """Nothing: what was counted stays counted."""

    def _counts(self, unit: Unit) -> ConfigRecord:
        return self._state.config_records.setdefault(f"{unit}-releases", ConfigRecord())

    def _count(self, event: Event, unit: Unit, times: int = 1, is_choice: bool = False) -> None:
        # A round of DP-SGD is the same release many times: counted, the state stays small.
        single, count = event.parts()
        count *= times
        name, counts = json.dumps(to_json(single), sort_keys=True), self._counts(unit)
        counts[name] = count + (int(number(counts, name)) if name in counts else 0)


class LeakageTally(Tally):
    """What a simulated client has leaked within its neighbourhood: in all, by noised models alone, and in how many."""

    @property
    def _record(self) -> MetricRecord:
        record = self._state.metric_records.setdefault(LEAKAGE, MetricRecord({SPENT: 0.0, RELEASES: 0}))
        record.setdefault(NOISED_LEAKAGE, number(record, SPENT))  # of a run that began without this number
        return record

    def spent(self, unit: Unit, chosen: Filter, relation: Relation = "add-or-remove") -> float:
        """The leakage of all releases; ∞ once something left without noise.

        Args: as `Store.spent`.
        """
        return number(self._record, SPENT)

    def _count(self, event: Event, unit: Unit, times: int = 1, is_choice: bool = False) -> None:
        record = self._record
        record[SPENT] = number(record, SPENT) + times * event.leakage
        if not is_choice:
            record[NOISED_LEAKAGE] = number(record, NOISED_LEAKAGE) + times * event.leakage
            record[RELEASES] = int(number(record, RELEASES)) + times
