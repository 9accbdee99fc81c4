"""What attacks on a run came to, as `audit.json` tells it; an audit may say more than is read here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One number that an attack came to.

    Attributes:
        attack: which attack, in a few words.
        quantity: what the number is.
        value: the number, with its interval where there is one, in words.
        notes: what else is said about it.
    """

    attack: str
    quantity: str
    value: str
    notes: str


@dataclass(frozen=True)
class Finding:
    """What one audit found out.

    Attributes:
        name: of the audit.
        meaning: a sentence or two.
        valid: whether its controls did as expected; if not, its figures show nothing.
        figures: in their order.
    """

    name: str
    meaning: str
    valid: bool
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Audit:
    """The content of `audit.json`.

    Attributes:
        lines: in sum.
        findings: of the audits that were made.
        contradicted: whether some lower bound on ε is above what is claimed.
    """

    lines: tuple[str, ...]
    findings: tuple[Finding, ...]
    contradicted: bool


def audit_of(content: Any) -> Audit | None:
    """Read the content of `audit.json`, a table or a list of findings; None where there is none.

    Args:
        content: as JSON; what is not understood is left out.
    """
    if content is None:
        return None
    table = content if isinstance(content, Mapping) else {"findings": content}
    findings = tuple(_finding(item) for item in _tables(table.get("findings")))
    lines = tuple(str(line) for line in _list(table.get("lines")))
    return Audit(lines, findings, bool(table.get("contradicted")))


def _finding(item: Mapping[str, Any]) -> Finding:
    figures = _tables(item.get("measured", item.get("figures")))
    valid = item.get("valid", True) is not False
    return Finding(
        str(item.get("name", "unnamed")), str(item.get("meaning", "")), valid, tuple(_figure(each) for each in figures)
    )


def _figure(item: Mapping[str, Any]) -> Figure:
    interval = f" ({_number(item['low'])} to {_number(item['high'])})" if "low" in item and "high" in item else ""
    known = ("attack", "name", "quantity", "value", "low", "high")
    notes = [f"{key} {_number(value)}" for key, value in item.items() if key not in known and _is_plain(value)]
    return Figure(
        str(item.get("attack", item.get("name", ""))),
        str(item.get("quantity", "")),
        _number(item.get("value", "")) + interval,
        ", ".join(notes),
    )


def _tables(content: Any) -> list[Mapping[str, Any]]:
    return [item for item in _list(content) if isinstance(item, Mapping)]


def _list(content: Any) -> list[Any]:
    return list(content) if isinstance(content, list | tuple) else []


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and value != ""


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
