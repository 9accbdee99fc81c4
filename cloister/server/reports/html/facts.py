"""Facts of a run, read once from its run directory into frozen values."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloister.aggregation.screening import Rejection
from cloister.config.run import digest_of, shown
from cloister.config.section import Scalar
from cloister.core.errors import ConfigError
from cloister.core.files import read_json, read_text
from cloister.privacy.claims.claim import Statement
from cloister.privacy.claims.record import schema_refused, statement_of
from cloister.server.ending import Ending
from cloister.server.reports.html.audit import Audit, audit_of
from cloister.server.reports.rundir import EVALUATION, PARAMETERS
from cloister.tasks.frozen import Parameters
from cloister.tasks.scores import Classification, ClassScores

MODELS = ("model.*", "hypothesis-*")
SHOWN = ("noise_std", "noise_multiplier", "clipping_norm", "released_distance", "epsilon")
"""Measurements that a page may show.

Measurements of un-noised updates (the clipped fraction, an exact distance) stay on the server."""
Scores = Mapping[str, float]


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
    def of(cls, line: Mapping[str, Any]) -> "RoundFacts":
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
    """

    examples: int
    metrics: Scores
    classification: Classification | None

    @classmethod
    def of(cls, content: Mapping[str, Any] | None) -> "Evaluation | None":
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
        return cls(content["examples"], _finite(content["metrics"]), classification)


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
            written = directory / "rounds.jsonl"
            rounds = rounds_in(read_text(written) if written.is_file() else "")
        with _named(directory / EVALUATION):
            evaluation = Evaluation.of(_json(directory / EVALUATION))
        with _named(directory / "config.json"):
            config = shown(settings["config"])
            return cls(
                name=directory.resolve().name,
                config=config,
                digest=digest_of(config),
                seed=settings["seed"],
                bundle=settings.get("bundle-sha256", ""),
                versions=dict(settings["versions"]),
                statement=statement,
                ending=ending,
                rounds=rounds,
                evaluation=evaluation,
                audit=audit_of(_json(directory / "audit.json")),
                models=_hashes(directory),
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ConfigError(f"{path} is not what a run writes: something in it is missing, or of another kind") from None


def _json(path: Path, otherwise: dict[str, Any] | None = None) -> Any:
    """Return the JSON content of a file; `otherwise` if it is absent."""
    return read_json(path) if path.is_file() else otherwise


def rounds_in(text: str) -> tuple[RoundFacts, ...]:
    """Return the complete lines of a `rounds.jsonl`.

    A killed run may leave a partial last line.
    """
    return tuple(RoundFacts.of(json.loads(line)) for line in text.rpartition("\n")[0].splitlines())


def cohorts_are_secret(rounds: Sequence[RoundFacts]) -> bool:
    """Return whether the rounds have measurements without numbers of replies."""
    return any(done.number and done.measured for done in rounds) and not any(done.replies for done in rounds)


def _finite(scores: Mapping[str, float]) -> Scores:
    """Return the finite scores; a diverged model has others."""
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def _hashes(directory: Path) -> dict[str, str]:
    paths = sorted(path for pattern in MODELS for path in directory.glob(pattern) if path.is_file())
    found = {}
    for path in paths:
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
