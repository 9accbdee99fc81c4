"""Data of a report, read from a run directory: facts of the run, results of attacks, statements of the operator."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from cloister.config.io import Scalar, Section, checked
from cloister.config.renamed import translated
from cloister.config.run import digest_of, shown
from cloister.privacy.claims.claim import Statement
from cloister.privacy.claims.to_json import schema_refused, statement_of
from cloister.server.reports.rundir import EVALUATION, PARAMETERS
from cloister.server.screening import Rejection
from cloister.server.stopping import Ending
from cloister.tasks.making import Parameters
from cloister.tasks.scores import RATES, Classification, ClassScores, RocCurve
from cloister.utils.errors import ConfigError
from cloister.utils.files import Json, JsonTable, atomic_path, complete_lines, read_json
from cloister.utils.text import at_least, percent_at_least

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
STATED = "statements.json"
"""File in the run directory with the latest statements, for later reports."""
LONGEST = 240
"""Maximum characters of one statement; nine of them share one page with the facts."""
Stated = Annotated[str, Field(max_length=LONGEST)]
MODELS = ("model.*", "hypothesis-*")
SHOWN = ("noise_std", "noise_multiplier", "clipping_norm", "released_distance", "epsilon")
"""Measurements that a page may show.

Measurements of un-noised updates (the clipped fraction, an exact distance) stay on the server."""
Scores = Mapping[str, float]


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


def audit_of(content: Json | None) -> Audit | None:
    """Read the content of `audit.json`; return None for None."""
    if content is None:
        return None
    findings = tuple(
        Finding(item["name"], item["meaning"], tuple(map(_figure, sorted(item["measured"], key=_rank))))
        for item in content["findings"]
    )
    skipped = tuple(f"{item['name']}: {item['why']}" for item in content.get("skipped", ()))
    return Audit(tuple(content.get("lines", ())), findings, skipped, bool(content.get("contradicted")))


def _rank(item: Json) -> int:
    """Return the rank of a quantity on the page, which shows only the first."""
    return FIRST.index(item["quantity"]) if item["quantity"] in FIRST else len(FIRST)


def _figure(item: Json) -> Figure:
    quantity: str = item["quantity"]
    notes = []
    for key in [key for key in item if key not in ("attack", "quantity", "value", "low", "high", "borne-out")]:
        notes.append(NOTES[key](item[key]) if key in NOTES else f"{key} {item[key]}".removeprefix("assumption "))
    value, *interval = (f"{item[key]:.3f}" for key in ("value", "low", "high") if key in item)
    if quantity == "epsilon":
        value = at_least(item["value"], 3)
    return Figure(
        item["attack"],
        NAMES.get(quantity, quantity),
        f"{value} ({' to '.join(interval)})" if interval else value,
        ", ".join(notes),
        item.get("borne-out", True),
    )


class Statements(Section):
    """Statements of the operator, one for each question; an empty one is marked as open.

    Args:
        parameters: the reason for this ε and δ, and who decided on them.
        unit: the real-world meaning of a unit (a client, an example, a group), and the number of units of a person.
        mechanism: other processing of the data before or after the mechanism.
        utility: the purpose of the model, the accuracy it requires, and the groups of people that were evaluated.
        trust: the operator of the server, and why the sites trust it.
        composition: other past or future releases about the same data, outside of this ledger.
        implementation: maintenance of the machines, access for measurements, and reviewers of the code.
        access: who may see the model, this page, the run directory and the ledger.
        collection: how the data was collected, on what grounds, and for how long it is kept.
    """

    parameters: Stated = ""
    unit: Stated = ""
    mechanism: Stated = ""
    utility: Stated = ""
    trust: Stated = ""
    composition: Stated = ""
    implementation: Stated = ""
    access: Stated = ""
    collection: Stated = ""


def keep(directory: Path, statements: Statements) -> None:
    """Write statements into a run directory, for later reports.

    Args:
        directory: of the run.
        statements: of the operator.
    """
    content = {name: stated for name, stated in statements.model_dump().items() if stated}
    with atomic_path(directory / STATED) as partial:
        partial.write_text(json.dumps(content, indent=2), encoding="utf-8")


def kept(directory: Path) -> Statements:
    """Return the stored statements about a run; empty without any.

    Raises:
        ConfigError: the file contains anything else.
    """
    path = directory / STATED
    return checked(Statements, read_json(path), f"{path}: ") if path.is_file() else Statements()


@dataclass(frozen=True)
class RoundFacts:
    """One line of `rounds.jsonl`.

    Attributes:
        number: 0 is the initial model.
        central: scores on the server's examples.
        federated: scores on the clients' own examples.
        measured: numbers by their names in `SHOWN`.
        replies: numbers of counted and of requested replies; None if they are secret.
        rejected: replies that did not count.
        unscored: evaluation replies that did not count.
        diverged: names of scores on the server's examples that are not finite.
    """

    number: int
    central: Scores
    federated: Scores
    measured: Scores
    replies: tuple[int, int] | None
    rejected: tuple[Rejection, ...]
    unscored: tuple[Rejection, ...]
    diverged: tuple[str, ...]

    @classmethod
    def of(cls, line: Json) -> "RoundFacts":
        """Read one line, in which any field but the number may be absent."""
        measured, central = line.get("measured") or {}, line.get("central") or {}
        return cls(
            int(line["round"]),
            _finite(central),
            _finite(line.get("federated") or {}),
            _finite({name: measured[name] for name in SHOWN if measured.get(name) is not None}),
            (int(measured["accepted"]), int(measured["asked"])) if "accepted" in measured else None,
            tuple(Rejection(**item) for item in measured.get("rejected", ())),
            tuple(Rejection(**item) for item in line.get("unscored", ())),
            tuple(name for name, value in central.items() if not math.isfinite(value)),
        )


@dataclass(frozen=True)
class Evaluation:
    """Content of `evaluation.json`: the kept model on the server's own test data.

    Attributes:
        examples: number of test examples.
        metrics: of the task.
        classification: class by class; None for a regression.
        roc: curves of the classes; none of a run before they were kept.
    """

    examples: int
    metrics: Scores
    classification: Classification | None
    roc: tuple[RocCurve, ...] = ()

    @classmethod
    def of(cls, content: Json | None) -> "Evaluation | None":
        """Read the content of the file; return None for None."""
        if content is None:
            return None
        classification = None
        if "confusion" in content:
            classification = Classification(
                tuple(tuple(row) for row in content["confusion"]),
                tuple(ClassScores(**scored) for scored in content["classes"]),
                content["macro_f1"],
                content["auc"],
            )
        roc = [RocCurve(str(each["name"]), float(each["auc"]), tuple(each["found"])) for each in content.get("roc", ())]
        if any(len(curve.found) != len(RATES) or not np.isfinite(curve.found).all() for curve in roc):
            raise ValueError("a ROC curve has other points")
        return cls(content["examples"], _finite(content["metrics"]), classification, tuple(roc))


@dataclass(frozen=True)
class Facts:
    """Facts from which a report is rendered.

    Attributes:
        name: of the run directory.
        config: its dotted keys, in the form of `shown`.
        digest: SHA-256 of them.
        seed: drawn or configured.
        bundle: SHA-256 of the app bundle that Flower ran; empty: the run had none.
        versions: of packages.
        statement: about privacy; None before the run has ended.
        ending: how it ended.
        rounds: in their order.
        evaluation: None if the server had no examples.
        audit: None if there was none.
        models: SHA-256 of each model file, by name.
        parameters: numbers of model parameters; None if they were not recorded.
    """

    name: str
    config: Mapping[str, Scalar]
    digest: str
    seed: int
    bundle: str
    versions: Mapping[str, str]
    statement: Statement | None
    ending: Ending
    rounds: tuple[RoundFacts, ...]
    evaluation: Evaluation | None = None
    audit: Audit | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    parameters: Parameters | None = None

    @classmethod
    def read(cls, directory: Path) -> "Facts":
        """Read a run directory.

        Raises:
            ConfigError: the directory contains no run, or a file is damaged.
        """
        settings = read_json(directory / "config.json")
        privacy = _json(directory / "privacy.json", {"status": "running"})
        has_ended = isinstance(privacy, dict) and privacy.get("status") != "running"
        if refused := schema_refused(privacy) if has_ended else "":
            raise ConfigError(f"{directory / 'privacy.json'}: {refused}")
        with _named(directory / "privacy.json"):
            statement = None if privacy["status"] == "running" else statement_of(privacy)
            ending = Ending(**privacy.get("ended", {"how": "error", "why": "privacy.json has no ending"}))
        with _named(directory / "rounds.jsonl"):
            rounds = tuple(RoundFacts.of(json.loads(line)) for line in complete_lines(directory / "rounds.jsonl"))
        with _named(directory / EVALUATION):
            evaluation = Evaluation.of(_json(directory / EVALUATION))
        with _named(directory / "audit.json"):
            audit = audit_of(_json(directory / "audit.json"))
        with _named(directory / "config.json"):
            config = shown(translated(settings["config"]))
            models = {}
            for path in sorted(path for pattern in MODELS for path in directory.glob(pattern) if path.is_file()):
                with path.open("rb") as file:
                    models[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(
                name=directory.resolve().name,
                config=config,
                digest=digest_of(settings["config"]),
                seed=settings["seed"],
                bundle=settings.get("bundle-sha256", ""),
                versions=dict(settings["versions"]),
                statement=statement,
                ending=ending,
                rounds=rounds,
                evaluation=evaluation,
                audit=audit,
                models=models,
                parameters=Parameters(**counted) if (counted := _json(directory / PARAMETERS)) else None,
            )

    @property
    def secret_cohorts(self) -> bool:
        """Return whether numbers of replies are absent because cohorts are secret."""
        return cohorts_are_secret(self.rounds)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Convert parsing errors in the block to a `ConfigError` naming the file."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ConfigError(f"{path} is not what a run writes: something in it is missing, or of another kind") from None


def _json(path: Path, otherwise: JsonTable | None = None) -> Any:
    """Return the JSON content of a file; `otherwise` if it is absent."""
    return read_json(path) if path.is_file() else otherwise


def cohorts_are_secret(rounds: Sequence[RoundFacts]) -> bool:
    """Return whether the rounds have measurements without numbers of replies."""
    return any(done.number and done.measured for done in rounds) and not any(done.replies for done in rounds)


def _finite(scores: Mapping[str, float]) -> Scores:
    """Return the finite scores; a diverged model has others."""
    return {name: value for name, value in scores.items() if math.isfinite(value)}
