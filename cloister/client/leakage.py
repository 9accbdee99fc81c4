"""What a client's releases have leaked in all: on disk where its node keeps books, in its context where it does not."""

from typing import Protocol

from flwr.app import Context, MetricRecord

from cloister.client.books import books_of, keeps_books
from cloister.core.errors import BudgetExhausted
from cloister.core.wire import LEAKAGE
from cloister.privacy.events import Laplace
from cloister.privacy.ledger import Ledger

SPENT, RELEASES = "spent", "releases"


class Spending(Protocol):
    """Leakage that adds up over the releases of one client (Galli et al., 2023, Theorem 4.2)."""

    @property
    def spent(self) -> float:
        """Σ ε·radius so far."""
        ...

    def release(self, event: Laplace, run: str, server_round: int) -> None:
        """Count a release that is about to be made."""
        ...


class InLedger:
    """Counted on disk before anything is released."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def spent(self) -> float:
        """Of all runs on this data."""
        return self._ledger.leakage()

    def release(self, event: Laplace, run: str, server_round: int) -> None:
        """A line of the ledger. Nothing tells it apart from one that was made and not handed on: both count."""
        self._ledger.open(event, "neighbourhood", run, server_round, lambda: None, "laplace")


class InContext:
    """Counted in memory, for as long as a simulated client lives."""

    def __init__(self, context: Context) -> None:
        self._record = context.state.metric_records.setdefault(LEAKAGE, MetricRecord({SPENT: 0.0, RELEASES: 0}))

    @property
    def spent(self) -> float:
        """Of this run."""
        return float(self._record[SPENT])  # type: ignore[arg-type]

    def release(self, event: Laplace, run: str, server_round: int) -> None:
        """Add it up."""
        self._record[SPENT] = self.spent + event.leakage
        self._record[RELEASES] = int(self._record[RELEASES]) + 1  # type: ignore[arg-type]


def spending_of(context: Context, task: str) -> Spending:
    """The books of this client about what it leaks."""
    if keeps_books(context.node_config):
        return InLedger(books_of(context.node_config, task, "").ledger)
    return InContext(context)


def require(spending: Spending, leakage: float, most: float) -> None:
    """Refuse a release that would pass the limit.

    Args:
        spending: so far.
        leakage: of the release.
        most: Σ ε·radius that may not be passed; 0: no limit.

    Raises:
        BudgetExhausted: it would. How much was spent is the client's own affair.
    """
    if most and spending.spent + leakage > most * (1 + 1e-12):
        raise BudgetExhausted("this client's limit of leakage would be passed")
