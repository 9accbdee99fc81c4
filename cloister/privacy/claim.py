"""What may be said about a run's privacy, and what not."""

import math
from dataclasses import dataclass, field
from typing import Any

from cloister.core.errors import PrivacyError
from cloister.privacy.accounting import Account, best_epsilon
from cloister.privacy.books import Books

BUDGET = "the budget, set beforehand"
OUTSIDERS = "the other clients, and whoever sees the models of the run"


@dataclass(frozen=True)
class Claim:
    """The guarantee of one mechanism, or why there is none.

    Attributes:
        mechanism: its name, as in `privacy.server`.
        reasons: why the claim is only heuristic; empty if it is sound.
        unit: whose data the claim is about.
        relation: which cohorts count as neighbours.
        unprotected: what leaves without noise.
        parameters: of the mechanism, by their configuration keys.
        adaptive: whether multipliers are chosen from earlier releases.
        seeded: whether the noise can be repeated by whoever knows its seed.
    """

    mechanism: str
    reasons: tuple[str, ...] = ()
    unit: str = "client"
    relation: str = "add-or-remove"
    unprotected: tuple[str, ...] = ()
    parameters: dict[str, float | str | bool] = field(default_factory=dict)
    adaptive: bool = False
    seeded: bool = False

    @property
    def status(self) -> str:
        """`none`, `sound` or `heuristic`."""
        if self.mechanism == "none":
            return "none"
        return "heuristic" if self.reasons else "sound"


def statement(claim: Claim, books: Books | None, worst: float, rounds: int, sampling: str) -> dict[str, Any]:
    """The content of `privacy.json`.

    Args:
        claim: of the run's decorator.
        books: of the run.
        worst: ε of this run's rounds, each with the least noise it could have had.
        rounds: how many there were.
        sampling: how their cohorts were drawn, in words.
    """
    facts = {
        "status": claim.status,
        "mechanism": claim.mechanism,
        "reasons": list(claim.reasons),
        "parameters": claim.parameters,
        "noise": "seeded" if claim.seeded else "from the operating system's entropy",
        "rounds": rounds,
        "sampling": sampling,
        "claims": [] if books is None or claim.status != "sound" else _claims(claim, books, worst),
        "unprotected": list(claim.unprotected),
    }
    if books is not None:
        releases = sum(entry.run == books.run for entry in books.ledger.entries)
        facts["ledger"] = {
            "file": "ledger.jsonl",
            "head": books.ledger.head,
            "releases-of-this-run": releases,
            "holds-releases-without-a-guarantee": math.isinf(books.epsilon()),
        }
    return facts


def _claims(claim: Claim, books: Books, worst: float) -> list[dict[str, Any]]:
    """One claim for this run, and one for everything the ledger holds about the same data."""
    common = {"adversary": OUTSIDERS, "unit": claim.unit, "relation": claim.relation, "delta": books.delta}
    run = {**common, "scope": "this run", **_numbers(books.account_of_run(), books.delta)}
    everything = {**common, "scope": "all runs in the ledger", **_numbers(books.account(), books.delta)}
    if claim.adaptive:
        # What multipliers that were chosen on the way happened to amount to is no guarantee: what they could is one.
        least = max(worst, run["epsilon"])
        if books.max_epsilon and books.max_epsilon < least:
            _rest_on(run, books.max_epsilon, BUDGET)
        else:
            _rest_on(run, least, "the least noise a round can have")
        _rest_on(everything, max(books.max_epsilon, everything["epsilon"]), BUDGET)
    unclaimed = math.isinf(everything["epsilon"]) or (claim.adaptive and not books.max_epsilon)
    return [run] if unclaimed else [run, everything]


def _rest_on(claimed: dict[str, Any], epsilon: float, basis: str) -> None:
    """Claim an ε that was known beforehand; keep the one that the releases amount to beside it."""
    claimed.update({"realised-epsilon": claimed["epsilon"], "epsilon": epsilon, "basis": basis})


def _numbers(account: Account, delta: float) -> dict[str, Any]:
    """ε by the accountant that is tightest quickly, and by every other that applies."""
    epsilon, accountant = best_epsilon(account, delta)
    others: dict[str, float] = {}
    for name in ("rdp", "pld"):
        try:
            others[name] = account.epsilon(delta, name)  # type: ignore[arg-type]
        except PrivacyError:
            continue
    tightest = min(others, key=lambda name: others[name]) if others else accountant
    return {"epsilon": others.get(tightest, epsilon), "accountant": tightest, "by-accountant": others}


def in_words(facts: dict[str, Any]) -> list[str]:
    """The statement as lines of plain text."""
    if facts["status"] == "none":
        return ["privacy: none. The server, and whoever sees its records, sees every client's model."]
    lines = [f"privacy: {facts['mechanism']}, {facts['status']}"]
    lines += [f"  not a guarantee: {reason}" for reason in facts["reasons"]]
    for claim in facts["claims"]:
        lines.append(
            f"  ε = {claim['epsilon']:.4g} at δ = {claim['delta']:g}, {claim['scope']}: against {claim['adversary']}; "
            f"unit {claim['unit']}, {claim['relation']}; by {claim.get('basis', claim['accountant'])}; "
            f"{facts['rounds']} rounds, sampling {facts['sampling']}"
        )
    if facts["status"] == "sound" and facts["ledger"]["holds-releases-without-a-guarantee"]:
        lines.append("  no claim over all runs: the ledger holds releases of earlier runs without a guarantee")
    lines.append("  no claim against the server, which sees every update before it is noised")
    return lines + [f"  leaves without noise: {item}" for item in facts["unprotected"]]
