"""Output of an audit: `audit.json`, the lines for people, and the two lines for a report of the run."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cloister.audits.finding import Finding, Measured, Skipped, strongest
from cloister.core.digits import at_least, at_most, percent_at_least
from cloister.core.errors import ConfigError
from cloister.core.files import atomic_path, read_json
from cloister.core.terminal import table
from cloister.core.text import clean
from cloister.privacy.claims.server import RUN

FILE = "audit.json"
ADD_OR_REMOVE = "add-or-remove"
"""Relation in `privacy.json` that attacks test."""
NAMES = {
    "auc": "AUC",
    "epsilon": "ε at least",
    "tpr": "members found",
    "similarity": "SSIM",
    "score": "score",
}


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
    privacy: Mapping[str, Any]
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
                    name = f"  control NOT met, it {control.expected} if it works: {about}"
                rows.append(_cells(name, control.measured))
            console.print(table(("attack", "unit", "figure", "95 %"), rows, finding.name, min_width=60))
            console.print(finding.in_sum)
            for attack in dict.fromkeys(control.measured.attack for control in finding.controls if not control.met):
                console.print(f"  {attack}: shows nothing here, since it does not do on its controls what it has to")
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


def claimed(privacy: Mapping[str, Any]) -> str:
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


def _figures(mechanism: Mapping[str, Any]) -> list[Mapping[str, Any]]:
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
