"""Releases of a simulated client, which has no ledger, counted in the state that its node keeps between messages."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flwr.app import ConfigRecord, RecordDict

from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.budget import refuse_beyond
from cloister.privacy.accounting.events import Event, Unit, from_json, to_json


class Tally:
    """What a simulated client has released about one unit.

    Args:
        state: of the node, changed in place.
        unit: whose protection the releases are about.
        delta: at which ε is judged.
        max_epsilon: that may not be passed by all releases in this state; 0: no budget.
    """

    def __init__(self, state: RecordDict, unit: Unit, delta: float, max_epsilon: float) -> None:
        self.delta = delta
        self.max_epsilon = max_epsilon
        name = f"{unit}-releases"
        if name not in state:
            state[name] = ConfigRecord()
        self._counts = state.config_records[name]

    def account(self) -> Account:
        """Everything that was counted."""
        account = Account()
        for event, count in self._counts.items():
            account = account.plus(from_json(json.loads(event)), count)  # type: ignore[arg-type]
        return account

    def require(self, events: Iterable[Event]) -> None:
        """Raise BudgetExhausted if these would pass the budget."""
        refuse_beyond(self.account(), events, self.delta, self.max_epsilon, "this client")

    @contextmanager
    def release(self, event: Event, server_round: int, mechanism: str = "", clip: float = 0.0) -> Iterator[None]:
        """Count a release, then let the block make it."""
        self.require([event])
        single, count = event.parts()
        name = json.dumps(to_json(single), sort_keys=True)
        self._counts[name] = self._counts.get(name, 0) + count  # type: ignore[operator]
        yield
