"""Claims as `privacy.json` holds them: the one place that turns them into JSON, and back.

Schema 2 states premises of claims and of figures. A file without `schema` had conditions as text; it is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from cloister.privacy.accounting.events import from_json, to_json
from cloister.privacy.claims import premises
from cloister.privacy.claims.claim import (
    Claim,
    ClientClaim,
    DpSgdClaim,
    Figure,
    LedgerState,
    LocalClaim,
    OfSize,
    Statement,
)
from cloister.privacy.claims.render import EARLIER_ADD, NOBODY_TRAINED
from cloister.utils.errors import PrivacyError
from cloister.utils.files import Json

SCHEMA = 2
NEIGHBOURS = (
    "one client's contributions count or not (or, under replace-one, are exchanged for others); the roster of "
    "connected nodes is public and the same in both"
)
SEE = f"each client's own ledger: sizes in between may cost more, and {EARLIER_ADD}"
SEE_KNOWN = (
    f"each client's own ledger, as {EARLIER_ADD}; the sizes are the smallest, the middle, the largest and, by "
    "Rényi DP, the costliest that clients have"
)


def running(claim: Claim) -> dict[str, object]:
    """Return the content of `privacy.json` until the run ends, with nothing that a crash could make false."""
    return {"status": "running", "mechanism": claim.mechanism, "claims": [], "see": "the ledger"}


def record(statement: Statement) -> dict[str, object]:
    """Return the content of `privacy.json`, without the end of the run."""
    content = {
        "schema": SCHEMA,
        **_mechanism(statement.claim),
        **_noise(statement.claim),
        "rounds": statement.rounds,
        "sampling": statement.sampling,
        "neighbours": NEIGHBOURS,
        "claims": _all(statement.claim.figures),
        "unprotected": list(statement.claim.unprotected),
        "ledger": _kebab(statement.ledger),
    }
    if statement.simulated:
        content = {"simulation": True, **content}
    if statement.claim.by_provisioner is not None:
        content["keys-by-provisioner"] = list(statement.claim.by_provisioner)
    if statement.planned:
        content["planned"] = [{"event": to_json(event), "count": count} for event, count in statement.planned]
    return content if statement.clients is None else {**content, "clients": record_clients(statement.clients)}


def record_clients(claim: ClientClaim) -> dict[str, object]:
    """Return the part of `privacy.json` about the clients' own mechanism."""
    content = _mechanism(claim)
    if isinstance(claim, DpSgdClaim):
        sizes = [
            {
                f"{claim.unit}s": size.size,
                "rounds": size.rounds,
                "claims": _all(size.figures),
                "heuristic": _all(size.heuristic),
            }
            for size in claim.sizes
        ]
        see = NOBODY_TRAINED if claim.nobody_trained and claim.is_guaranteed else SEE_KNOWN if claim.known else SEE
        known = {"sizes-are-known": claim.known, "see": see}
        return {**content, **_noise(claim), **known, "by-examples": sizes, "unprotected": list(claim.unprotected)}
    if claim.mechanism == "laplace":
        content["leakage-of-a-release"] = claim.leakage_of_a_release
    return {
        **content,
        "unit": claim.unit,
        "adversary": claim.adversary,
        "claims": _all(claim.figures),
        "unprotected": list(claim.unprotected),
    }


def _mechanism(claim: Claim) -> dict[str, object]:
    content: dict[str, object] = {
        "status": claim.status,
        "mechanism": claim.mechanism,
        "reasons": list(claim.reasons),
        "parameters": claim.parameters,
    }
    if claim.not_covered:
        content["not-covered"] = claim.not_covered
    if claim.premises:
        content["premises"] = premises.to_json(claim.premises)
    return content


def _noise(claim: Claim) -> Mapping[str, str]:
    return {"noise": "seeded" if claim.seeded else "from the operating system's entropy"}


def _all(figures: Iterable[Figure]) -> list[dict[str, object]]:
    return [_kebab(figure) for figure in figures]


def _kebab(value: Figure | LedgerState) -> dict[str, object]:
    """Return the fields that apply, by their names in `privacy.json`."""
    found = {field.name.replace("_", "-"): getattr(value, field.name) for field in fields(value)}
    if "premises" in found:
        found["premises"] = tuple(premises.to_json(found["premises"])) or None
    return {name: list(item) if isinstance(item, tuple) else item for name, item in found.items() if item is not None}


def statement_of(content: Json) -> Statement:
    """Read the statement that `record` wrote: `record(statement_of(content))` is the content.

    Args:
        content: of the `privacy.json` of a run that has ended, with or without how it ended.

    Raises:
        ValueError: it is no such content.
    """
    if refused := schema_refused(content):
        raise ValueError(f"no statement about a run's privacy: {refused}")
    try:
        names = content.get("keys-by-provisioner")
        claim = Claim(
            **_read_mechanism(content),
            figures=_read(content["claims"]),
            unprotected=tuple(content["unprotected"]),
            by_provisioner=None if names is None else tuple(names),
        )
        ledger = LedgerState(**_snake(content["ledger"]))
        clients = _read_clients(content["clients"]) if "clients" in content else None
        planned = tuple((from_json(item["event"]), int(item["count"])) for item in content.get("planned", ()))
        simulated = bool(content.get("simulation"))
        return Statement(claim, content["rounds"], content["sampling"], ledger, clients, planned, simulated)
    except (KeyError, TypeError, AttributeError, PrivacyError) as error:
        raise ValueError(f"no statement about a run's privacy: {type(error).__name__}") from None


def schema_refused(content: Mapping[str, object]) -> str:
    """Return why this version does not read a claim; empty if it does.

    Args:
        content: of the `privacy.json` of a run that has ended.
    """
    found = content.get("schema", 1)
    if found == SCHEMA:
        return ""
    why = "its claims state no premises" if found == 1 else "another version of Cloister wrote it"
    return f"schema {found} was found and {SCHEMA} is read: {why}; use the version that config.json beside it names"


def _read_clients(content: Json) -> ClientClaim:
    common = _read_mechanism(content)
    if "by-examples" in content:
        units = [unit for unit in ("example", "group") for size in content["by-examples"] if f"{unit}s" in size]
        unit = units[0] if units else ""
        sizes = tuple(
            OfSize(size[f"{unit}s"], size["rounds"], _read(size["claims"]), _read(size["heuristic"]))
            for size in content["by-examples"]
        )
        known = bool(content.get("sizes-are-known"))
        unprotected = tuple(content.get("unprotected", ()))
        return DpSgdClaim(**common, sizes=sizes, known=known, unit=unit or "client", unprotected=unprotected)
    return LocalClaim(
        **common,
        unit=content["unit"],
        adversary=content["adversary"],
        figures=_read(content["claims"]),
        unprotected=tuple(content["unprotected"]),
        leakage_of_a_release=content.get("leakage-of-a-release"),
    )


def _read_mechanism(content: Json) -> dict[str, Any]:
    return {
        "mechanism": content["mechanism"],
        "reasons": tuple(content["reasons"]),
        "parameters": dict(content["parameters"]),
        "seeded": content.get("noise") == "seeded",
        "not_covered": content.get("not-covered", ""),
        "premises": premises.from_json(content.get("premises", ())),
    }


def _read(figures: Iterable[Json]) -> tuple[Figure, ...]:
    return tuple(
        Figure(**_snake(figure) | {"premises": premises.from_json(figure.get("premises", ()))}) for figure in figures
    )


def _snake(content: Mapping[str, object]) -> dict[str, Any]:
    """Invert `_kebab`."""
    return {name.replace("-", "_"): tuple(item) if isinstance(item, list) else item for name, item in content.items()}
