"""Findings of audits as values, and their output: `audit.json`, tables and pictures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from textwrap import fill
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from cloister.privacy.claims.server import RUN
from cloister.utils.errors import ConfigError
from cloister.utils.files import Json, atomic_path, read_json
from cloister.utils.terminal import table
from cloister.utils.text import at_least, at_most, clean, percent_at_least

Quantity = Literal["auc", "epsilon", "tpr", "similarity", "score"]
"""Area under the ROC curve, lower bound on ε, rate of hits at a given rate of false alarms, SSIM of two images, or a
number in units of its own."""
Unit = Literal["", "example", "client"]
CHANCE = 0.5
"""AUC of guessing."""
NOTHING = "This audit shows nothing: each of its attacks missed a control."


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
    def of(cls, facts: Json) -> "Finding":
        """Return the finding from the output of `facts`.

        Raises:
            KeyError, TypeError, AttributeError: the content is not that of a finding.
        """
        known = {item.name for item in fields(Measured)}

        def measured(item: Json) -> Measured:
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


FILE = "audit.json"
ADD_OR_REMOVE = "add-or-remove"
"""Relation in `privacy.json` that attacks test."""
NAMES = {"auc": "AUC", "epsilon": "ε at least", "tpr": "members found", "similarity": "SSIM", "score": "score"}


@dataclass(frozen=True)
class Audited:
    """All findings about one run.

    Attributes:
        path: of the run directory.
        privacy: the content of its `privacy.json`.
        findings: of the audits that ran.
        skipped: the audits that did not run.
    """

    path: Path
    privacy: Json
    findings: tuple[Finding, ...]
    skipped: tuple[Skipped, ...]

    @property
    def lines(self) -> tuple[str, str]:
        """Return the two lines for a report: the claim, and the measured figures."""
        return f"claimed: {claimed(self.privacy)}", f"measured: {measured(self.findings)}"

    @property
    def contradicted(self) -> tuple[Measured, ...]:
        """Return the lower bounds on ε above the claim for the same unit.

        Each contradicts the claim, with its confidence.
        """
        mechanisms = (self.privacy, self.privacy.get("clients") or {})
        priced = [_figures(each) for each in mechanisms if each.get("status") in ("sound", "conditional")]
        sound = [item for figures in priced for item in figures if item.get("relation") == ADD_OR_REMOVE]
        found = []
        for bound in (item for finding in self.findings for item in finding.borne_out("epsilon")):
            of_unit = [item["epsilon"] for item in sound if item["unit"] == bound.unit and item["delta"] == bound.delta]
            if of_unit and bound.value > max(of_unit):
                found.append(bound)
        return tuple(found)

    def write(self) -> Path:
        """Write `audit.json` into the run directory, atomically."""
        place = self.path / FILE
        facts = {
            "rounds": self.privacy.get("rounds"),
            "lines": list(self.lines),
            "contradicted": [item.facts() for item in self.contradicted],
            "findings": [finding.facts() for finding in self.findings],
            "skipped": [asdict(item) for item in self.skipped],
        }
        with atomic_path(place) as partial:
            partial.write_text(json.dumps(facts, indent=2) + "\n")
        return place

    def show(self, console: Console) -> None:
        """Print a table and a sentence for each audit, and the two lines of the report."""
        for finding in self.findings:
            rows = [_cells(", ".join(filter(None, (item.attack, item.assumption))), item) for item in finding.measured]
            for control in finding.controls:
                about = f"{control.measured.attack}: {control.name}"
                if control.met:
                    name = f"  control: {about}"
                else:
                    name = f"  control NOT met, a working attack {control.expected}: {about}"
                rows.append(_cells(name, control.measured))
            console.print(table(("attack", "unit", "figure", "95 %"), rows, finding.name, min_width=60))
            console.print(finding.in_sum)
            for attack in dict.fromkeys(control.measured.attack for control in finding.controls if not control.met):
                console.print(f"  {attack}: shows nothing here, since it missed a control")
            for picture in finding.pictures:
                console.print(f"picture  {self.path / picture}")
        for each in self.skipped:
            console.print(f"not run: {each.name}: {each.why}")
        for bound in self.contradicted:
            console.print(f"the claim is contradicted, {_sure(bound)}: {in_words(bound)}")
        for line in self.lines:
            console.print(clean(line))  # the claim is text from the run directory


def earlier(path: Path, privacy: Mapping[str, object]) -> list[Finding]:
    """Read the findings in `audit.json`.

    The result is empty if the run was resumed since, because its models differ then.

    Args:
        path: of the run directory.
        privacy: the content of its `privacy.json`.

    Raises:
        ConfigError: the file is not in the format of an audit.
    """
    place = path / FILE
    if not place.is_file():
        return []
    facts = read_json(place)
    try:
        return [Finding.of(item) for item in facts["findings"]] if facts["rounds"] == privacy.get("rounds") else []
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{place} is not what an audit writes: remove it, and audit the run again") from None


def claimed(privacy: Json) -> str:
    """Format the claim of a run in a line.

    Of several figures about the run itself, the largest is shown.

    Args:
        privacy: the content of its `privacy.json`.
    """
    told = []
    for mechanism in (privacy, privacy.get("clients") or {}):
        if figures := _figures(mechanism):
            item = max(figures, key=lambda figure: figure["epsilon"])
            claim = f"ε = {at_most(item['epsilon'])} at δ = {at_most(item['delta'])} for one {item['unit']}"
            told.append(f"{claim}, {item['relation']} ({mechanism['mechanism']}, {mechanism['status']})")
    if told:
        return "; ".join(told)
    return f"no ε ({privacy.get('mechanism', 'none')}, {privacy.get('status', 'none')})"


def measured(findings: tuple[Finding, ...]) -> str:
    """Format the strongest figures of attacks whose controls were met, in a line.

    Args:
        findings: of all audits.
    """
    found = [strongest(findings, quantity) for quantity in ("epsilon", "auc", "similarity")]
    return "; ".join(in_words(item) for item in found if item is not None) or "nothing that its controls bear out"


def in_words(item: Measured) -> str:
    """Format a figure with its interval, the attack, and its assumption.

    Args:
        item: the figure.
    """
    if item.quantity == "epsilon":
        # δ and the confidence are rounded down: larger ones would strengthen the lower bound.
        told = f"ε ≥ {at_least(item.value, 3)} at δ = {at_least(item.delta or 0)}, {_sure(item)}"
    else:
        at = "" if item.alarms is None else f" at {100 * item.alarms:g} % false alarms"
        told = f"{NAMES[item.quantity]} {item.value:.3f}{at}"
    interval = "" if item.low is None or item.high is None else f" ({item.low:.3f} to {item.high:.3f})"
    resting = f", {item.assumption}" if item.assumption else ""
    about = f", unit {item.unit}" if item.unit else ""
    return f"{told}{interval} by {item.attack}{about}{resting}"


def _sure(item: Measured) -> str:
    """Format the confidence of a bound, rounded down."""
    return f"{percent_at_least(item.confidence or 0)} sure"


def _figures(mechanism: Json) -> list[Json]:
    """Return the figures with an ε about the run itself.

    Figures over further runs cover more than was audited.
    """
    # DP-SGD claims one unit, which names the size of a client; its figures for other units are by-products.
    by_size = ((size, item) for size in mechanism.get("by-examples", ()) for item in size.get("claims", ()))
    sizes = [item for size, item in by_size if f"{item['unit']}s" in size]
    found = [item for item in (*mechanism.get("claims", ()), *sizes) if item.get("epsilon") is not None]
    of_run = [item for item in found if item.get("scope") == RUN] or found
    # An attack measures this relation: the data of one unit are added or removed.
    return [item for item in of_run if item.get("relation") == ADD_OR_REMOVE] or of_run


def _cells(name: str, item: Measured) -> tuple[str, str, str, str]:
    at = "" if item.alarms is None else f" at {100 * item.alarms:g} % false alarms"
    interval = "" if item.low is None or item.high is None else f"{item.low:.3f} to {item.high:.3f}"
    value = at_least(item.value, 3) if item.quantity == "epsilon" else f"{item.value:.3f}"
    return name, item.unit, f"{NAMES[item.quantity]} {value}{at}", interval


INCHES, LETTERS = 1.1, 17
"""Size of an image in a table of images, and letters in a line of its caption."""


def roc_picture(place: Path, curves: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[str, ...]:
    """Draw ROC curves on logarithmic scales.

    Args:
        place: of the file.
        curves: points (false alarms, hits) of each attack.

    Returns:
        The name of the file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    lowest = min(points[0][0] for points in curves.values())
    axes.plot([lowest, 1], [lowest, 1], color="grey", linestyle=":", label="a guess")
    for attack, points in curves.items():
        axes.plot(*np.transpose(points), label=attack)
    axes.set(xscale="log", yscale="log", xlabel="rate of false alarms", ylabel="members found", ylim=(lowest, 1.1))
    axes.legend()
    with atomic_path(place) as partial:
        figure.savefig(partial, dpi=150)
    return (place.name,)


def image_table(place: Path, rows: Mapping[str, Sequence[tuple[str, NDArray]]]) -> tuple[str, ...]:
    """Draw rows of grey images, each with a caption.

    Args:
        place: of the file.
        rows: by their names; images of shape (height, width), from 0 to 1.

    Returns:
        The name of the file.
    """
    from matplotlib.figure import Figure

    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(INCHES * columns + 1.2, (INCHES + 0.6) * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, images) in zip(grid, rows.items(), strict=True):
        for axes in line:
            axes.axis("off")
        for axes, (caption, image) in zip(line, images, strict=False):
            axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            axes.set_title(fill(caption, LETTERS), fontsize=7)
        line[0].text(-0.1, 0.5, fill(name, LETTERS), fontsize=7, ha="right", va="center", transform=line[0].transAxes)
    with atomic_path(place) as partial:
        figure.savefig(partial, dpi=150)
    return (place.name,)
