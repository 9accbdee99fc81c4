"""Findings of audits as values, in one form for every attack."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Quantity = Literal["auc", "epsilon", "tpr", "similarity", "score"]
"""Area under the ROC curve, lower bound on ε, rate of hits at a given rate of false alarms, SSIM of two images, or a
number in units of its own."""
Unit = Literal["", "example", "client"]
CHANCE = 0.5
"""AUC of guessing."""
NOTHING = "This audit shows nothing: none of its attacks did on its controls what it has to."


@dataclass(frozen=True)
class Measured:
    """One figure of an attack. A field of None does not apply.

    Attributes:
        attack: name of the attack, in a few words.
        quantity: kind of the figure.
        value: the figure.
        unit: unit about which the attacker learns.
        low, high: 95 % interval.
        delta: δ at which ε is bounded.
        confidence: of a lower bound.
        alarms: rate of false alarms at which a rate of hits was measured.
        assumption: assumption of a bound; empty: no assumption on the distribution of the scores.
    """

    attack: str
    quantity: Quantity
    value: float
    unit: Unit = ""
    low: float | None = None
    high: float | None = None
    delta: float | None = None
    confidence: float | None = None
    alarms: float | None = None
    assumption: str = ""

    @property
    def beats_chance(self) -> bool:
        """Return True if the figure is above chance.

        For an AUC its whole interval must be above that of a guess. Other figures must be above 0.
        """
        if self.quantity != "auc":
            return self.value > 0
        return (self.value if self.low is None else self.low) > CHANCE

    def facts(self) -> dict[str, object]:
        """Return the fields that apply, for `audit.json`."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in found.items() if value is not None and value != ""}


@dataclass(frozen=True)
class Control:
    """The same attack on a case with a known answer. It reveals an attack that is too weak or that has false results.

    Attributes:
        name: attacked case, in a few words.
        expected: required outcome of the attack.
        measured: its figure, with the name of the controlled attack.
        met: True if the outcome is as expected.
    """

    name: str
    expected: Literal["succeeds", "fails"]
    measured: Measured
    met: bool

    def facts(self) -> dict[str, object]:
        """Return the fields for `audit.json`."""
        return {"name": self.name, "expected": self.expected, "met": self.met, "measured": self.measured.facts()}


@dataclass(frozen=True)
class Finding:
    """Result of one audit of one run.

    Attributes:
        name: of the audit.
        meaning: one or two sentences for people: the attacker's success, and the limits of this evidence.
        measured: the figures.
        controls: at least one that must succeed and one that must fail.
        pictures: names of files in the run directory.
        details: further content of `audit.json`, such as points of a ROC curve: plain JSON values.
        seconds: duration of the audit; None: not measured.
    """

    name: str
    meaning: str
    measured: tuple[Measured, ...]
    controls: tuple[Control, ...] = ()
    pictures: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def shows_nothing(self) -> bool:
        """Return True if every controlled attack missed at least one of its controls."""
        controlled = {control.measured.attack for control in self.controls}
        return bool(controlled) and controlled == {item.measured.attack for item in self.controls if not item.met}

    @property
    def in_sum(self) -> str:
        """Summary of the finding: its meaning, or that it shows nothing."""
        return NOTHING if self.shows_nothing else self.meaning

    def bears_out(self, item: Measured) -> bool:
        """Return True if this figure's attack met all its controls.

        Otherwise the figure shows nothing.

        Args:
            item: one of the figures.
        """
        return all(control.met for control in self.controls if control.measured.attack == item.attack)

    def borne_out(self, quantity: Quantity) -> list[Measured]:
        """Return the figures of a kind whose attacks met all their controls.

        Args:
            quantity: the kind.
        """
        return [item for item in self.measured if item.quantity == quantity and self.bears_out(item)]

    def facts(self) -> dict[str, object]:
        """Return the content for `audit.json`."""
        return {
            "name": self.name,
            "meaning": self.in_sum,
            "measured": [item.facts() | {"borne-out": self.bears_out(item)} for item in self.measured],
            "controls": [item.facts() for item in self.controls],
            "pictures": list(self.pictures),
            "details": dict(self.details),
            "seconds": None if self.seconds is None else round(self.seconds, 1),
        }

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Finding":
        """Return the finding from the output of `facts`.

        Raises:
            KeyError, TypeError, AttributeError: the content is not that of a finding.
        """
        known = {item.name for item in fields(Measured)}

        def measured(item: Mapping[str, Any]) -> Measured:
            return Measured(**{name: value for name, value in item.items() if name in known})

        return cls(
            name=facts["name"],
            meaning=facts["meaning"],
            measured=tuple(map(measured, facts["measured"])),
            controls=tuple(Control(**item | {"measured": measured(item["measured"])}) for item in facts["controls"]),
            pictures=tuple(facts["pictures"]),
            details=facts["details"],
            seconds=facts["seconds"],
        )


@dataclass(frozen=True)
class Skipped:
    """An audit that did not run: it does not fit the run, or was not requested.

    Attributes:
        name: of the audit.
        why: reason, in a few words.
    """

    name: str
    why: str


def strongest(findings: tuple[Finding, ...], quantity: Quantity) -> Measured | None:
    """Return the largest figure of a kind over several audits; None without one.

    Only figures whose controls were met count.

    Args:
        findings: of the audits.
        quantity: the kind.
    """
    found = [item for finding in findings for item in finding.borne_out(quantity)]
    return max(found, key=lambda item: item.value, default=None)
