"""What accounting and the ledger cost: 15,000 different rounds, one more round, one release on disk.

python benchmarks/accounting.py
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import machine, table

from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling

ROUNDS = 15_000
RELEASES = 200
DELTA = 1e-5


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounds(sampling: Sampling) -> list[Gaussian]:
    """Rounds whose multipliers all differ, as those of a metric-aware mechanism do."""
    return [Gaussian(1 + number / ROUNDS, sampling) for number in range(ROUNDS)]


def release(budget: PrivacyBudget) -> None:
    """Open and finish a release, as a round does."""
    for number in range(RELEASES):
        with budget.release(Gaussian(1 + number / RELEASES), number):
            pass


def main() -> None:
    """Measure and print."""
    machine()
    lines = []
    best_epsilon(Account(rounds(UNSAMPLED)[:1]), DELTA)  # imports the accountant
    for name, sampling in (("no amplification", UNSAMPLED), ("Poisson 0.01", Sampling("poisson", 0.01))):
        events = rounds(sampling)
        lines.append(
            [f"{ROUNDS} rounds, {name}", f"{seconds(lambda e=events: best_epsilon(Account(e), DELTA)):.3f}", "10"]
        )
        account = Account(events)
        best_epsilon(account, DELTA)
        one = seconds(lambda a=account, e=events: best_epsilon(a.plus(e[777]), DELTA))
        lines.append([f"one round more, {name}", f"{one:.4f}", "0.05"])
    with tempfile.TemporaryDirectory(dir=".") as folder:
        budget = PrivacyBudget(Ledger(Path(folder) / "ledger.jsonl"), "benchmark", max_epsilon=1e9)
        spent = seconds(lambda: release(budget)) / RELEASES
    lines.append(["one release in the ledger, two syncs", f"{spent:.4f}", "0.005"])
    table(["what", "seconds", "target"], lines)


if __name__ == "__main__":
    main()
