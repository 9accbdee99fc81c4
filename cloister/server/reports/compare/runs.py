"""What is known of each of several runs, from their directories alone: no more than the report of each shows."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloister.core.digits import at_most
from cloister.core.errors import ConfigError
from cloister.core.files import read_text
from cloister.privacy.claims.claim import Claim, DpSgdClaim, Figure, LocalClaim
from cloister.privacy.claims.meaning import weakest
from cloister.privacy.claims.server import RUN
from cloister.server.reports.html.facts import Facts, RoundFacts
from cloister.server.reports.html.officer import claims_of
from cloister.server.reports.status import run_state
from cloister.tasks.scores import Classification

AS_ASKED = "as-asked"
NOT_ENDED = "not ended"
SMALLER = ("loss", "rmse", "mse", "mae", "error")
"""Scores that are better when they are less; every other is better when it is more."""

OVER_CLASSES: Mapping[str, Callable[[Classification], float | None]] = {
    "macro F1": lambda found: found.macro_f1,
    "macro AUC": lambda found: found.auc,
}
"""Figures of the kept model on the server's test data, by the names of their columns."""


@dataclass(frozen=True)
class Kind:
    """What an ε is about. Two of them can be compared where all of this is the same.

    Attributes:
        task: of the run.
        side: whose mechanism it is: `server` or `clients`.
        unit: whose data it is about.
        relation: which datasets are neighbours.
        delta: δ.
    """

    task: str
    side: str
    unit: str
    relation: str
    delta: float

    def __str__(self) -> str:
        owner = {"server": "the server's", "clients": "the clients'"}[self.side]
        return f"one {self.unit}, {self.relation}, δ = {at_most(self.delta)}, by {owner} mechanism"


@dataclass(frozen=True)
class Cost:
    """What is claimed of one mechanism of a run.

    Attributes:
        status: `sound`, `heuristic` or `none`; `not ended` where nothing is claimed yet.
        epsilon: the ε of the run by itself; None where none is claimed.
        kind: of this ε; None without one.
    """

    status: str
    epsilon: float | None = None
    kind: Kind | None = None


@dataclass(frozen=True)
class RunSummary:
    """One run, finished or not.

    Attributes:
        name: no other of the runs has it.
        directory: of the run.
        facts: what its own report is made of.
        ended: how it ended; `running` or `dead` where it has not.
        costs: of its mechanisms, the server's first.
        seconds: of its rounds together; None where they were not written down, as they would tell of a draw.
    """

    name: str
    directory: Path
    facts: Facts
    ended: str
    costs: tuple[Cost, ...]
    seconds: float | None

    @property
    def rounds(self) -> int:
        """The last finished one."""
        return self.facts.rounds[-1].number if self.facts.rounds else 0

    def curve(self, score: str, on_clients: bool) -> dict[int, float]:
        """A score by round, from round 1 on.

        Args:
            score: its name.
            on_clients: whether it is that of the clients' data.
        """
        found = {done.number: scores_of(done, on_clients) for done in self.facts.rounds if done.number}
        return {number: scores[score] for number, scores in found.items() if score in scores}

    def final(self, score: str, on_clients: bool) -> float | None:
        """A score after the last round that has it; None without one, and where the run has diverged.

        Args: as `curve`.
        """
        curve = self.curve(score, on_clients)
        return curve[max(curve)] if curve and not self.has_diverged(score, on_clients) else None

    def over_classes(self, name: str) -> float | None:
        """A figure of the kept model; None where there are no classes, or no test data on the server.

        Args:
            name: in `OVER_CLASSES`.
        """
        evaluation = self.facts.evaluation
        found = None if evaluation is None else evaluation.classification
        return None if found is None else OVER_CLASSES[name](found)

    def has_diverged(self, score: str, on_clients: bool) -> bool:
        """Whether a score is no finite number in the last round in which it was taken. That of clients always is one.

        Args: as `curve`.
        """
        taken = [score in done.diverged for done in self.facts.rounds if score in (*done.central, *done.diverged)]
        return not on_clients and taken[-1:] == [True]


def scores_of(done: RoundFacts, on_clients: bool) -> Mapping[str, float]:
    """The scores of a round.

    Args:
        done: the round.
        on_clients: whether those of the clients' data are meant, and not those of the server's.
    """
    return done.federated if on_clients else done.central


def better(score: str, values: Sequence[float]) -> float:
    """The best of several values of a score.

    Args:
        score: its name, which says whether less is better.
        values: at least one.
    """
    return min(values) if score in SMALLER else max(values)


def read_runs(directories: Sequence[Path]) -> tuple[RunSummary, ...]:
    """Read run directories, in their order.

    Args:
        directories: of runs that have ended, are under way or have broken off.

    Raises:
        ConfigError: names every directory that is none of a run, or that is there twice.
    """
    runs, wrong = [], []
    names = _names(directories)
    for directory, name in zip(directories, names, strict=True):
        try:
            runs.append(_read(directory, name))
        except ConfigError as error:
            wrong.append(str(error))
    wrong += [f"{name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return tuple(runs)


def _names(directories: Sequence[Path]) -> list[str]:
    """Names of directories, or their paths where two have one name."""
    names = [directory.resolve().name for directory in directories]
    return names if len(set(names)) == len(names) else [str(directory.resolve()) for directory in directories]


def _read(directory: Path, name: str) -> RunSummary:
    state, facts = run_state(directory), Facts.read(directory)
    ended = (state.how or AS_ASKED) if state.state == "ended" else state.state
    return RunSummary(name, directory, facts, ended, costs_of(facts), _seconds(directory))


def costs_of(facts: Facts) -> tuple[Cost, ...]:
    """What is claimed of a run, mechanism by mechanism."""
    if facts.statement is None:
        return (Cost(NOT_ENDED),)
    task = str(facts.config.get("task.name"))
    return tuple(_cost(claim, task) for claim in claims_of(facts)) or (Cost("none"),)


def _cost(claim: Claim, task: str) -> Cost:
    of_clients = isinstance(claim, DpSgdClaim | LocalClaim)
    figure = weakest(claim) if isinstance(claim, DpSgdClaim | LocalClaim) else _of_run(claim)
    if figure is None or figure.epsilon is None or not math.isfinite(figure.epsilon):
        return Cost("heuristic" if claim.is_guaranteed else claim.status)
    side, relation = ("clients" if of_clients else "server"), figure.relation or claim.relation
    return Cost(claim.status, figure.epsilon, Kind(task, side, figure.unit, relation, figure.delta or 0.0))


def _of_run(claim: Claim) -> Figure | None:
    return next((figure for figure in claim.figures if figure.scope == RUN), None)


def _seconds(directory: Path) -> float | None:
    """Of all rounds; a run that hides how long they took has not written it down."""
    path = directory / "rounds.jsonl"
    lines = read_text(path).rpartition("\n")[0].splitlines() if path.is_file() else []
    try:
        found = [seconds["total"] for line in lines if (seconds := json.loads(line).get("seconds"))]
        return sum(found) if found else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"{path} is not what a run writes: the seconds of a round are no numbers") from None
