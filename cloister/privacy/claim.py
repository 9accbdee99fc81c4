"""What may be said about a run's privacy, and what not."""

import math
from dataclasses import dataclass, field
from typing import Any

from cloister.core.errors import PrivacyError
from cloister.privacy.accounting import Account, best_epsilon
from cloister.privacy.books import Books

RUN = "this run"
STRANGERS = "whoever sees the models of the run, is no client, and knows of no draw"
NEIGHBOURS = (
    "one client's contributions count or not (or, under replace-one, are exchanged for others); the roster of "
    "connected nodes is public and the same in both"
)
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
        seeded: whether the noise can be repeated by whoever knows its seed.
    """

    mechanism: str
    reasons: tuple[str, ...] = ()
    unit: str = "client"
    relation: str = "add-or-remove"
    unprotected: tuple[str, ...] = ()
    parameters: dict[str, float | str | bool] = field(default_factory=dict)
    seeded: bool = False

    @property
    def status(self) -> str:
        """`none`, `sound` or `heuristic`."""
        if self.mechanism == "none":
            return "none"
        return "heuristic" if self.reasons else "sound"


def running(claim: Claim) -> dict[str, Any]:
    """What `privacy.json` says until the run has ended: nothing that a crash could make false."""
    return {"status": "running", "mechanism": claim.mechanism, "claims": [], "see": "the ledger"}


def statement(
    claim: Claim, books: Books, rounds: int, sampling: str, clients: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of `privacy.json`.

    Args:
        claim: of the run's decorator.
        books: of the run.
        rounds: how many there were.
        sampling: how their cohorts were drawn, in words.
        clients: what may be said about a mechanism on the clients; None without one.
    """
    facts: dict[str, Any] = {
        "status": claim.status,
        "mechanism": claim.mechanism,
        "reasons": list(claim.reasons),
        "parameters": claim.parameters,
        "noise": "seeded" if claim.seeded else "from the operating system's entropy",
        "rounds": rounds,
        "sampling": sampling,
        "neighbours": NEIGHBOURS,
        "claims": _claims(claim, books) if claim.status == "sound" else [],
        "unprotected": list(claim.unprotected),
        "ledger": {
            "file": "ledger.jsonl",
            "head": books.ledger.head,
            "releases-of-this-run": sum(entry.run == books.run for entry in books.ledger.entries),
            "holds-releases-without-a-guarantee": math.isinf(books.epsilon()),
        },
    }
    return facts if clients is None else {**facts, "clients": clients}


def _claims(claim: Claim, books: Books) -> list[dict[str, Any]]:
    """One claim for this run, one for everything in the ledger, and one against those who are no clients."""
    common = {"unit": claim.unit, "relation": claim.relation, "delta": books.delta}
    run = _numbers(books.account_of_run(), books.delta)
    everything = _numbers(books.account(), books.delta)
    claims = [{**common, "adversary": OUTSIDERS, "scope": RUN, **run}]
    if math.isfinite(everything["epsilon"]):
        claims.append({**common, "adversary": OUTSIDERS, "scope": "all runs in the ledger", **everything})
    strangers = _numbers(books.account_of_run(insiders=False), books.delta)
    if strangers["epsilon"] < run["epsilon"]:
        claims.append({**common, "adversary": STRANGERS, "scope": RUN, **strangers})
    return claims


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
        seen = "what every client sends" if "clients" in facts else "every client's model"
        first = f"privacy on the server: none. The server, and whoever sees its records, sees {seen}."
        return [first, *(f"  leaves without noise: {item}" for item in facts["unprotected"])]
    lines = [f"privacy: {facts['mechanism']}, {facts['status']}"]
    lines += [f"  not a guarantee: {reason}" for reason in facts["reasons"]]
    for claim in facts["claims"]:
        line = (
            f"  ε = {claim['epsilon']:.4g} at δ = {claim['delta']:g}, {claim['scope']}: against {claim['adversary']}; "
            f"unit {claim['unit']}, {claim['relation']}; by {claim['accountant']}"
        )
        how = f"; {facts['rounds']} rounds, sampling {facts['sampling']}" if claim["scope"] == RUN else ""
        lines.append(line + how)
    if facts["status"] == "sound" and facts["ledger"]["holds-releases-without-a-guarantee"]:
        lines.append("  no claim over all runs: the ledger holds releases of earlier runs without a guarantee")
    lines.append("  no claim against the server, which sees every update before it is noised")
    return lines + [f"  leaves without noise: {item}" for item in facts["unprotected"]]
