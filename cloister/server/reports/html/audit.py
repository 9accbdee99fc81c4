"""Results of attacks on a run, read from `audit.json`; unknown content is ignored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cloister.core.digits import at_least, percent_at_least

FIRST = ("epsilon", "auc", "similarity")
"""Quantities that summarise an attack."""
NAMES = {"auc": "AUC", "epsilon": "ε at least", "tpr": "members found", "similarity": "SSIM"}
"""Names of quantities, as a terminal shows them."""
# Round down: a larger δ, or more confidence, would overstate a measured lower bound.
NOTES: Mapping[str, Callable[[float], str]] = {
    "alarms": lambda rate: f"at {100 * rate:.3g} % false alarms",
    "confidence": lambda share: f"{percent_at_least(share)} sure",
    "delta": lambda delta: f"δ = {at_least(delta)}",
}


@dataclass(frozen=True)
class Figure:
    """One number of an attack.

    Attributes:
        attack: name of the attack, in a few words.
        quantity: name of the quantity.
        value: the number, with its interval if there is one, in words.
        notes: further details.
        holds: whether the controls of the attack gave the expected result; if not, the number shows nothing.
    """

    attack: str
    quantity: str
    value: str
    notes: str
    holds: bool


@dataclass(frozen=True)
class Finding:
    """Result of one audit.

    Attributes:
        name: of the audit.
        meaning: one or two sentences.
        figures: most important first.
    """

    name: str
    meaning: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Audit:
    """Content of `audit.json`.

    Attributes:
        lines: summary.
        findings: of the completed audits.
        skipped: the audits that did not run, each with the reason.
        contradicted: whether a lower bound on ε exceeds the claimed one.
    """

    lines: tuple[str, ...]
    findings: tuple[Finding, ...]
    skipped: tuple[str, ...]
    contradicted: bool


def audit_of(content: Any) -> Audit | None:
    """Read the content of `audit.json`; return None for None.

    Args:
        content: as JSON; unknown parts are ignored.
    """
    if content is None:
        return None
    table = content if isinstance(content, Mapping) else {"findings": content}
    findings = tuple(
        Finding(
            str(item.get("name", "unnamed")),
            str(item.get("meaning", "")),
            tuple(map(_figure, sorted(_tables(item.get("measured", item.get("figures"))), key=_rank))),
        )
        for item in _tables(table.get("findings"))
    )
    lines = tuple(str(line) for line in _list(table.get("lines")))
    skipped = tuple(f"{item.get('name')}: {item.get('why')}" for item in _tables(table.get("skipped")))
    return Audit(lines, findings, skipped, bool(table.get("contradicted")))


def _rank(item: Mapping[str, Any]) -> int:
    """Return the rank of a quantity on the page, which shows only the first."""
    return FIRST.index(item["quantity"]) if item.get("quantity") in FIRST else len(FIRST)


def _figure(item: Mapping[str, Any]) -> Figure:
    known = ("attack", "name", "quantity", "value", "low", "high", "borne-out")
    notes = []
    for key, value in item.items():
        if key in known or not isinstance(value, str | int | float) or value == "":
            continue
        if isinstance(value, str):
            notes.append(value if key == "assumption" else f"{key} {value}")
        elif isinstance(value, float) and key in NOTES:
            notes.append(NOTES[key](value))
        else:
            notes.append(f"{key} {_number(value)}")
    quantity = str(item.get("quantity", ""))
    form = ".3f" if quantity in NAMES else ".4g"
    low, value, high = (_number(item.get(key, ""), form) for key in ("low", "value", "high"))
    if quantity == "epsilon" and isinstance(item.get("value"), float):
        value = at_least(item["value"], 3)
    return Figure(
        str(item.get("attack", item.get("name", ""))),
        NAMES.get(quantity, quantity),
        f"{value} ({low} to {high})" if low and high else value,
        ", ".join(notes),
        item.get("borne-out", True) is not False,
    )


def _tables(content: Any) -> list[Mapping[str, Any]]:
    return [item for item in _list(content) if isinstance(item, Mapping)]


def _list(content: Any) -> list[Any]:
    return list(content) if isinstance(content, list | tuple) else []


def _number(value: Any, form: str = ".4g") -> str:
    return f"{value:{form}}" if isinstance(value, float) else str(value)
