"""Claims as `privacy.json` holds them: the one place that turns them into JSON."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from cloister.privacy.claims.claim import Claim, ClientClaim, DpSgdClaim, Figure, LedgerState, OfSize, Statement

NEIGHBOURS = (
    "one client's contributions count or not (or, under replace-one, are exchanged for others); the roster of "
    "connected nodes is public and the same in both"
)
SEE = "each client's own ledger: sizes in between may cost more"


def running(claim: Claim) -> dict[str, object]:
    """What `privacy.json` says until the run has ended: nothing that a crash could make false."""
    return {"status": "running", "mechanism": claim.mechanism, "claims": [], "see": "the ledger"}


def record(statement: Statement) -> dict[str, object]:
    """The content of `privacy.json`, but for how the run ended."""
    content = {
        **_mechanism(statement.claim),
        **_noise(statement.claim),
        "rounds": statement.rounds,
        "sampling": statement.sampling,
        "neighbours": NEIGHBOURS,
        "claims": _all(_kebab, statement.claim.figures),
        "unprotected": list(statement.claim.unprotected),
        "ledger": _kebab(statement.ledger),
    }
    return content if statement.clients is None else {**content, "clients": record_clients(statement.clients)}


def record_clients(claim: ClientClaim) -> dict[str, object]:
    """The part of `privacy.json` about the clients' own mechanism."""
    content = _mechanism(claim)
    if isinstance(claim, DpSgdClaim):
        sizes = _all(lambda size: _size(claim.unit, size), claim.sizes)
        return {**content, **_noise(claim), "see": SEE, "by-examples": sizes}
    if claim.mechanism == "laplace":
        content["leakage-of-a-release"] = claim.leakage_of_a_release
    return {
        **content,
        "unit": claim.unit,
        "adversary": claim.adversary,
        "claims": _all(_kebab, claim.figures),
        "unprotected": list(claim.unprotected),
    }


def _mechanism(claim: Claim) -> dict[str, object]:
    return {
        "status": claim.status,
        "mechanism": claim.mechanism,
        "reasons": list(claim.reasons),
        "parameters": claim.parameters,
    }


def _noise(claim: Claim) -> Mapping[str, str]:
    return {"noise": "seeded" if claim.seeded else "from the operating system's entropy"}


def _size(unit: str, size: OfSize) -> dict[str, object]:
    claimed = {"claims": _all(_kebab, size.figures), "heuristic": _all(_kebab, size.heuristic)}
    return {f"{unit}s": size.size, "rounds": size.rounds, **claimed}


def _all(one: Callable[[Any], dict[str, object]], items: tuple[Any, ...]) -> list[dict[str, object]]:
    return [one(item) for item in items]


def _kebab(value: Figure | LedgerState) -> dict[str, object]:
    """The fields that apply, by their names in `privacy.json`."""
    found = {field.name.replace("_", "-"): getattr(value, field.name) for field in fields(value)}
    return {name: list(item) if isinstance(item, tuple) else item for name, item in found.items() if item is not None}
