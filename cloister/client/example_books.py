"""What a client's own training costs each of its examples: in the node's ledger, or where it has none, in its state.

Unlike what a server promises, this a node knows: it draws the batches and adds the noise itself.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from flwr.app import ConfigRecord, Context, Message, RecordDict

from cloister.client.handlers import examples_and_plan, run_config
from cloister.core.config import PrivacyConfig
from cloister.core.wire import CONFIG, HYPOTHESES, ROUND
from cloister.privacy.accounting import Account
from cloister.privacy.books import refuse_beyond
from cloister.privacy.events import Event, Repeated, Unaccounted, from_json, to_json
from cloister.privacy.local_steps import LocalSteps, clipping_norm_of, recorded_event

STATE = "example-releases"
"""The record of a node's state that a tally is kept in."""


class Spending(Protocol):
    """Where releases are counted before they are made."""

    def require(self, events: Iterable[Event]) -> None:
        """Raise BudgetExhausted if these would pass the budget."""

    def release(
        self, event: Event, server_round: int, mechanism: str = "", clip: float = 0.0
    ) -> AbstractContextManager[None]:
        """Count a release, then let the block make it."""


class Tally:
    """Releases of a simulated client, which has no place for a ledger, in the state its node keeps between messages.

    Args:
        state: of the node, changed in place.
        delta: at which ε is judged.
        max_epsilon: that may not be passed by all releases in this state; 0: no budget.
    """

    def __init__(self, state: RecordDict, delta: float, max_epsilon: float) -> None:
        self.delta = delta
        self.max_epsilon = max_epsilon
        if STATE not in state:
            state[STATE] = ConfigRecord()
        self._counts = state.config_records[STATE]

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
        single, count = (event.event, event.count) if isinstance(event, Repeated) else (event, 1)
        name = json.dumps(to_json(single), sort_keys=True)
        self._counts[name] = self._counts.get(name, 0) + count  # type: ignore[operator]
        yield


def training_event(message: Message, context: Context) -> Event:
    """What answering a training message costs one of this client's examples, against everybody, the server included."""
    config = run_config(context)
    if config.privacy.client != "dp-sgd":
        return recorded_event(config.privacy, LocalSteps(1, 1, 1))
    if message.content.config_records[CONFIG].get(HYPOTHESES, 0) not in (0, 1):
        return Unaccounted("which hypothesis suits the examples best is found out without noise")
    examples, plan = examples_and_plan(message, context)
    steps = LocalSteps(len(examples), plan.batch_size, plan.epochs, config.privacy.batch_sampling)
    return recorded_event(config.privacy, steps)


def mechanism_of(message: Message, context: Context) -> tuple[str, float]:
    """The mechanism that protects this client's examples while it trains, and its clip; nothing and 0 without one."""
    privacy = run_config(context).privacy
    if privacy.client != "dp-sgd":
        return "", 0.0
    number = int(message.content.config_records[CONFIG][ROUND])  # type: ignore[arg-type]
    return "dp-sgd", clipping_norm_of(privacy, number)


def limits(privacy: PrivacyConfig, own_delta: float, own_epsilon: float) -> tuple[float, float]:
    """δ and the largest ε for one example that satisfy the run's budget and the node's own; ε 0: there is neither.

    Args:
        privacy: of the run.
        own_delta, own_epsilon: of the node; ε 0: it has no budget of its own.
    """
    run = [(privacy.target_delta, privacy.client_max_epsilon)] if privacy.client_max_epsilon else []
    own = [(own_delta, own_epsilon)] if own_epsilon else []
    both = run + own
    if not both:
        return privacy.target_delta if privacy.client == "dp-sgd" else own_delta, 0.0
    return min(delta for delta, _ in both), min(epsilon for _, epsilon in both)
