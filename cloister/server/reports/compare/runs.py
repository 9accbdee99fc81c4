"""Facts of several runs, read from their directories; limited to the content of each run's report."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloister.core.digits import at_most
from cloister.core.errors import ConfigError
from cloister.core.files import read_text
from cloister.privacy.claims.claim import Claim, DpSgdClaim, LocalClaim
from cloister.privacy.claims.meaning import weakest
from cloister.privacy.claims.server import RUN
from cloister.server.reports.html.facts import Facts, RoundFacts
from cloister.server.reports.html.officer import claims_of
from cloister.server.reports.status import run_state
from cloister.tasks.scores import Classification

AS_ASKED = "as-asked"
NOT_ENDED = "not ended"
SMALLER = ("loss", "rmse", "mse", "mae", "error")
"""Scores for which a smaller value is better; for every other score, a larger value is better."""

OVER_CLASSES: Mapping[str, Callable[[Classification], float | None]] = {
    "macro F1": lambda found: found.macro_f1,
    "macro AUC": lambda found: found.auc,
}
"""Figures of the kept model on the server's test data, by column name."""


@dataclass(frozen=True)
class Kind:
    """Kind of guarantee of an ε. Two values of ε are comparable if their kinds are equal.

    Attributes:
        task: of the run.
        side: side of the mechanism: `server` or `clients`.
        unit: the protected unit.
        relation: neighbouring relation of datasets.
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
    """Claim about one mechanism of a run.

    Attributes:
        status: `sound`, `heuristic` or `none`; `not ended` before the run has a claim.
        epsilon: the ε of the run by itself; None without a claimed ε.
        kind: of this ε; None without one.
    """

    status: str
    epsilon: float | None = None
    kind: Kind | None = None


@dataclass(frozen=True)
class RunSummary:
    """One run, finished or not.

    Attributes:
        name: unique among the runs.
        directory: of the run.
        facts: the data of its own report.
        ended: how it ended; `running` or `dead` if it has not.
        costs: of its mechanisms, the server's first.
        seconds: total duration of its rounds; None if the run hides durations, which would reveal random draws.
    """

    name: str
    directory: Path
    facts: Facts
    ended: str
    costs: tuple[Cost, ...]
    seconds: float | None

    @property
    def rounds(self) -> int:
        """Return the number of the last finished round."""
        return self.facts.rounds[-1].number if self.facts.rounds else 0

    def curve(self, score: str, on_clients: bool) -> dict[int, float]:
        """Return a score by round, from round 1 on.

        Args:
            score: its name.
            on_clients: whether to use the score on the clients' data.
        """
        found = {done.number: scores_of(done, on_clients) for done in self.facts.rounds if done.number}
        return {number: scores[score] for number, scores in found.items() if score in scores}

    def final(self, score: str, on_clients: bool) -> float | None:
        """Return a score after its last round; None without one or if diverged.

        Args: as `curve`.
        """
        curve = self.curve(score, on_clients)
        return curve[max(curve)] if curve and not self.has_diverged(score, on_clients) else None

    def over_classes(self, name: str) -> float | None:
        """Return a figure of the kept model.

        It is None without classes, or without test data on the server.

        Args:
            name: in `OVER_CLASSES`.
        """
        evaluation = self.facts.evaluation
        found = None if evaluation is None else evaluation.classification
        return None if found is None else OVER_CLASSES[name](found)

    def has_diverged(self, score: str, on_clients: bool) -> bool:
        """Return whether the last score on the server's data is not finite.

        The scores of clients are always finite.

        Args: as `curve`.
        """
        taken = [score in done.diverged for done in self.facts.rounds if score in (*done.central, *done.diverged)]
        return not on_clients and taken[-1:] == [True]


def scores_of(done: RoundFacts, on_clients: bool) -> Mapping[str, float]:
    """Return the scores of a round.

    Args:
        done: the round.
        on_clients: whether to return the scores on the clients' data instead of the server's.
    """
    return done.federated if on_clients else done.central


def better(score: str, values: Sequence[float]) -> float:
    """Return the best of several values of a score.

    Args:
        score: its name, which determines whether a smaller value is better.
        values: at least one.
    """
    return min(values) if score in SMALLER else max(values)


def read_runs(directories: Sequence[Path]) -> tuple[RunSummary, ...]:
    """Read run directories, in their order.

    Args:
        directories: of runs that have ended, are under way or have broken off.

    Raises:
        ConfigError: with every directory that contains no run or occurs twice.
    """
    runs, wrong = [], []
    names = [directory.resolve().name for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory.resolve()) for directory in directories]
    for directory, name in zip(directories, names, strict=True):
        try:
            state, facts = run_state(directory), Facts.read(directory)
            ended = (state.how or AS_ASKED) if state.state == "ended" else state.state
            runs.append(RunSummary(name, directory, facts, ended, costs_of(facts), _seconds(directory)))
        except ConfigError as error:
            wrong.append(str(error))
    wrong += [f"{name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return tuple(runs)


def costs_of(facts: Facts) -> tuple[Cost, ...]:
    """Return the costs of a run, one for each mechanism."""
    if facts.statement is None:
        return (Cost(NOT_ENDED),)
    task = str(facts.config.get("task.name"))
    return tuple(_cost(claim, task) for claim in claims_of(facts)) or (Cost("none"),)


def _cost(claim: Claim, task: str) -> Cost:
    of_clients = isinstance(claim, DpSgdClaim | LocalClaim)
    of_run = (figure for figure in claim.figures if figure.scope == RUN)
    figure = weakest(claim) if isinstance(claim, DpSgdClaim | LocalClaim) else next(of_run, None)
    if figure is None or figure.epsilon is None or not math.isfinite(figure.epsilon):
        return Cost("heuristic" if claim.is_guaranteed else claim.status)
    side, relation = ("clients" if of_clients else "server"), figure.relation or claim.relation
    return Cost(claim.status, figure.epsilon, Kind(task, side, figure.unit, relation, figure.delta or 0.0))


def _seconds(directory: Path) -> float | None:
    """Return the seconds of all rounds; None for a run that hides durations."""
    path = directory / "rounds.jsonl"
    lines = read_text(path).rpartition("\n")[0].splitlines() if path.is_file() else []
    try:
        found = [seconds["total"] for line in lines if (seconds := json.loads(line).get("seconds"))]
        return sum(found) if found else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"{path} is not what a run writes: the seconds of a round are no numbers") from None
