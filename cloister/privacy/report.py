"""A ledger, for a person to read."""

import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cloister.core import check
from cloister.core.errors import PrivacyError
from cloister.privacy.accounting import Account
from cloister.privacy.events import Event, Gaussian, Laplace, Repeated
from cloister.privacy.ledger import Ledger


def print_ledger(ledger: Ledger, delta: float, relation: str) -> None:
    """A line a release, the budgets, and what the releases amount to, unit by unit and accountant by accountant.

    Against the other clients: what draws without replacement hide from strangers does not count.
    """
    check.one_of(("add-or-remove", "replace-one"), relation=relation)
    table = Table("opened", "run", "round", "unit", "mechanism", "event", "handed on", title=escape(str(ledger.path)))
    for entry in ledger.entries:
        opened = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
        done = "yes" if entry.done else "unknown: counts"
        table.add_row(
            opened,
            escape(entry.run),
            str(entry.round),
            entry.unit,
            escape(entry.mechanism),
            escape(in_words(entry.event)),
            done,
        )
    console = Console()
    console.print(table)
    for budget in ledger.budgets:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(budget.time))
        limit = f"ε = {budget.epsilon:g} at δ = {budget.delta:g}" if budget.epsilon else "none"
        console.print(f"budget from {since}, run {escape(budget.run)}, unit {budget.unit}: {limit}")
    for unit in sorted({entry.unit for entry in ledger.entries}):
        if unit == "neighbourhood":
            console.print(f"neighbourhood: leakage {ledger.leakage():.4g} within it")
            continue
        account = ledger.account(unit, relation, insiders=True)  # type: ignore[arg-type]
        console.print(f"{unit}, {relation}, δ = {delta:g}: {_epsilons(account, delta)}")


def in_words(event: Event) -> str:
    """An event in a few words."""
    if isinstance(event, Repeated):
        return f"{event.count} times {in_words(event.event)}"
    if isinstance(event, Laplace):
        return f"laplace, ε = {event.epsilon:.4g} per unit, leakage {event.leakage:.4g} within {event.radius:.4g}"
    if not isinstance(event, Gaussian):
        return f"no guarantee: {event.reason}"
    sampling = event.sampling
    drawn = {
        "none": "",
        "poisson": f", poisson {sampling.probability:g}",
        "without-replacement": f", {sampling.cohort} of {sampling.population}",
    }
    return f"gaussian, z = {event.noise_multiplier:.4g}{drawn[sampling.kind]}"


def _epsilons(account: Account, delta: float) -> str:
    parts = []
    for name in ("rdp", "pld"):
        try:
            parts.append(f"ε = {account.epsilon(delta, name):.4g} by {name}")  # type: ignore[arg-type]
        except PrivacyError as error:
            parts.append(f"{name}: {error}")
    return "; ".join(parts)
