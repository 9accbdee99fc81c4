"""What a client's releases have leaked in all: on disk where its node keeps a ledger, else in its state."""

import math
from abc import ABC, abstractmethod

from flwr.app import Context, MetricRecord, UserConfig

from cloister.client.ledgers import MAX_LEAKAGE, keeps_ledger, ledger_of
from cloister.config.privacy import PrivacyConfig
from cloister.core.errors import BudgetExhausted, ConfigError
from cloister.core.wire import LEAKAGE
from cloister.privacy.accounting.events import Laplace, Unaccounted
from cloister.privacy.accounting.ledger import Ledger

SPENT, RELEASES = "spent", "releases"
ROUNDING = 1e-12
"""By which a sum of leakages may pass its limit: ten releases of 0.4 are 4."""


class Spending(ABC):
    """Leakage that adds up over the releases of one client (Galli et al., 2023, Theorem 4.2).

    Args:
        limit: Σ ε·radius that may not be passed; 0: no limit.
    """

    def __init__(self, limit: float = 0.0) -> None:
        self.limit = limit

    @property
    @abstractmethod
    def spent(self) -> float:
        """Σ ε·radius so far; ∞ once something left without noise."""

    @abstractmethod
    def release(self, event: Laplace | Unaccounted, run: str, server_round: int) -> None:
        """Count a release that is about to be made.

        Raises:
            BudgetExhausted: it would pass the limit; nothing was counted.
        """

    def require(self, leakage: float) -> None:
        """Refuse releases that leak so much together, if they would pass the limit.

        Raises:
            BudgetExhausted: they would. How much was spent is the client's own affair.
        """
        if self.limit and self.spent + leakage > self.limit * (1 + ROUNDING):
            raise BudgetExhausted("this client's limit of leakage would be passed")


class InLedger(Spending):
    """Counted on disk before anything is released, over all runs on this data."""

    def __init__(self, ledger: Ledger, limit: float = 0.0) -> None:
        super().__init__(limit)
        self._ledger = ledger

    @property
    def spent(self) -> float:
        """Of all runs on this data."""
        return self._ledger.leakage()

    def release(self, event: Laplace | Unaccounted, run: str, server_round: int) -> None:
        """A line of the ledger. Nothing tells it apart from one that was made and not handed on: both count."""
        self._ledger.open(event, "neighbourhood", run, server_round, lambda: self.require(_cost(event)), "laplace")


class InContext(Spending):
    """Counted in memory, for as long as a simulated client lives."""

    def __init__(self, context: Context, limit: float = 0.0) -> None:
        super().__init__(limit)
        self._record = context.state.metric_records.setdefault(LEAKAGE, MetricRecord({SPENT: 0.0, RELEASES: 0}))

    @property
    def spent(self) -> float:
        """Of this run."""
        return float(self._record[SPENT])  # type: ignore[arg-type]

    def release(self, event: Laplace | Unaccounted, run: str, server_round: int) -> None:
        """Add it up."""
        self.require(_cost(event))
        self._record[SPENT] = self.spent + _cost(event)
        self._record[RELEASES] = int(self._record[RELEASES]) + 1  # type: ignore[arg-type]


def _cost(event: Laplace | Unaccounted) -> float:
    return event.leakage if isinstance(event, Laplace) else math.inf


def spending_of(context: Context, task: str, limit: float = 0.0) -> Spending:
    """Where this client counts what it leaks."""
    if keeps_ledger(context.node_config):
        return InLedger(ledger_of(context.node_config, task), limit)
    return InContext(context, limit)


def limit_of(privacy: PrivacyConfig, node: UserConfig) -> float:
    """The smaller of the run's limit and the node's own; 0: neither has one."""
    return min((limit for limit in (privacy.client.max_leakage, own_limit(node)) if limit), default=0.0)


def own_limit(node: UserConfig) -> float:
    """The node's own limit; 0: it has none.

    Raises:
        ConfigError: it is no number of at least 0.
    """
    own = node.get(MAX_LEAKAGE, 0.0)
    if isinstance(own, bool) or not isinstance(own, int | float) or not 0 <= own < math.inf:
        raise ConfigError(f"{MAX_LEAKAGE} = {own!r} in the node configuration must be a number of at least 0")
    return float(own)
