"""What an audit found, as values: the same for every attack, so that one place prints and one place writes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Quantity = Literal["auc", "epsilon", "tpr", "similarity", "score"]
"""Area under the ROC curve; a lower bound on ε; a rate of hits at a given rate of false alarms; SSIM of two images; or
a number in units of its own."""
Unit = Literal["", "example", "client"]
CHANCE = 0.5
"""The AUC of an attacker who guesses."""
NOTHING = "This audit shows nothing: none of its attacks did on its controls what it has to."


@dataclass(frozen=True)
class Measured:
    """One number that an attack came to. None: it does not apply.

    Attributes:
        attack: which attack, in a few words.
        quantity: what the number is.
        value: the number.
        unit: about whom the attacker learns something.
        low, high: 95 % interval.
        delta: at which ε is bounded.
        confidence: of a lower bound.
        alarms: rate of false alarms at which a rate of hits was measured.
        assumption: what a bound rests on; empty: nothing about the distribution of the scores.
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
        """Whether an AUC lies above that of a guess by more than its interval is wide; another number: is above 0."""
        if self.quantity != "auc":
            return self.value > 0
        return (self.value if self.low is None else self.low) > CHANCE

    def facts(self) -> dict[str, object]:
        """The fields that apply, for `audit.json`."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in found.items() if value is not None and value != ""}


@dataclass(frozen=True)
class Control:
    """The same attack where the answer is known: a weak attack, or one that sees what is not there, shows here.

    Attributes:
        name: what is attacked, in a few words.
        expected: whether the attack has to succeed or to fail there.
        measured: what it came to; the attack's name in it says whose control this is.
        met: whether it did as expected.
    """

    name: str
    expected: Literal["succeeds", "fails"]
    measured: Measured
    met: bool

    def facts(self) -> dict[str, object]:
        """For `audit.json`."""
        return {"name": self.name, "expected": self.expected, "met": self.met, "measured": self.measured.facts()}


@dataclass(frozen=True)
class Finding:
    """What one audit found out about one run.

    Attributes:
        name: of the audit.
        meaning: a sentence or two for a person: what the attacker can do, and what that does not prove.
        measured: the figures.
        controls: one that has to succeed and one that has to fail, at the least.
        pictures: names of files in the run directory.
        details: whatever else belongs into `audit.json`, such as points of a ROC curve: plain JSON values.
        seconds: that the audit took; None: nobody looked at the clock.
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
        """Whether no attack of it did on its controls what it has to."""
        controlled = {control.measured.attack for control in self.controls}
        return bool(controlled) and controlled == {item.measured.attack for item in self.controls if not item.met}

    @property
    def in_sum(self) -> str:
        """What is said of it first: its meaning, or that it has none."""
        return NOTHING if self.shows_nothing else self.meaning

    def bears_out(self, item: Measured) -> bool:
        """Whether all controls of this figure's attack did as expected; if not, the figure shows nothing.

        Args:
            item: one of the figures.
        """
        return all(control.met for control in self.controls if control.measured.attack == item.attack)

    def borne_out(self, quantity: Quantity) -> list[Measured]:
        """The figures of a kind that the controls bear out.

        Args:
            quantity: the kind.
        """
        return [item for item in self.measured if item.quantity == quantity and self.bears_out(item)]

    def facts(self) -> dict[str, object]:
        """For `audit.json`."""
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
        """The finding that `facts` wrote down.

        Raises:
            KeyError, TypeError, AttributeError: it is none.
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
    """An audit that was not made: it does not fit the run, or nobody asked for it.

    Attributes:
        name: of the audit.
        why: in a few words.
    """

    name: str
    why: str


def strongest(findings: tuple[Finding, ...], quantity: Quantity) -> Measured | None:
    """The largest figure of a kind over several audits, of those that controls bear out; None without one.

    Args:
        findings: of the audits.
        quantity: the kind.
    """
    found = [item for finding in findings for item in finding.borne_out(quantity)]
    return max(found, key=lambda item: item.value, default=None)
