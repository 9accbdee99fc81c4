"""Compared runs: their settings, scores and costs, and the composition of all of them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloister.config.io import Scalar
from cloister.config.privacy import idle
from cloister.config.run import RunConfig
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Relation
from cloister.privacy.claims.claim import DpSgdClaim, LocalClaim
from cloister.privacy.claims.premises import BUDGET_FIXED
from cloister.privacy.claims.render import weakest
from cloister.privacy.claims.server import ALL_RUNS, RUN
from cloister.server.reports.html.compliance import claims_of
from cloister.server.reports.html.data import Facts, RoundFacts
from cloister.server.reports.rundir import LEDGER
from cloister.server.reports.status import run_state
from cloister.tasks.scores import Classification, is_smaller_better
from cloister.utils.errors import ConfigError
from cloister.utils.files import complete_lines
from cloister.utils.text import at_most

PLACES = ("run-name", "output-dir")
"""Keys of a run's name and place, without effect on its results."""
AMOUNTS = (
    "privacy.laplace-noise-multiplier",
    *(f"privacy.{who}{name}" for who in ("", "dp-sgd-", "gaussian-") for name in ("noise-multiplier", "clipping-norm")),
)
"""Keys that distinguish mechanisms even at their defaults."""
BUDGETS = ("privacy.max-epsilon", "privacy.client-max-epsilon", "privacy.max-leakage")
"""Keys for which 0 means that there is no budget."""
Settings = Mapping[str, Scalar]
AS_ASKED = "as-asked"
NOT_ENDED = "not ended"
OVER_CLASSES: Mapping[str, Callable[[Classification], float | None]] = {
    "macro F1": lambda found: found.macro_f1,
    "macro AUC": lambda found: found.auc,
}
"""Figures of the kept model on the server's test data, by column name."""
DATA = ("task.name", "task.data-path", "privacy.data-identity")
"""Keys that identify the data of a run."""
EACH = "A choice among the runs by what they released releases all of them: their costs add up."


def in_force(facts: Facts) -> dict[str, Scalar]:
    """Return the settings of a run that had an effect.

    The value from the claim replaces `auto`, where the claim has it.

    Args:
        facts: of the run.
    """
    found = {key: value for claim in claims_of(facts) for key, value in claim.parameters.items()}
    without = idle(facts.config)
    without |= {key for key in BUDGETS if not facts.config.get(key)}
    settings = {key: value for key, value in facts.config.items() if key not in without}
    for key, value in settings.items():
        if value == "auto" and key in found:
            claimed = found[key]
            settings[key] = float(f"{claimed:.4g}") if isinstance(claimed, float) else claimed
    return settings


def differing(configs: Sequence[Settings]) -> list[str]:
    """Return the keys whose values differ, in alphabetical order.

    Args:
        configs: dotted keys of each.
    """
    keys = sorted({key for config in configs for key in config} - set(PLACES))
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def telling(configs: Sequence[Settings]) -> list[str]:
    """Return the differing keys that merit a column.

    Excluded are defaults that only some of the runs have.

    Args:
        configs: the result of `in_force` for each run.
    """
    defaults = RunConfig().flat()

    def tells(key: str) -> bool:
        values = {repr(config[key]) for config in configs if key in config}
        return key in AMOUNTS or values != {repr(defaults.get(key))}

    return [key for key in differing(configs) if tells(key)]


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

    @property
    def majority(self) -> float | None:
        """Return the accuracy of always answering the most frequent class; None as `over_classes`."""
        evaluation = self.facts.evaluation
        found = None if evaluation is None else evaluation.classification
        return None if found is None else found.majority

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
    return min(values) if is_smaller_better(score) else max(values)


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
    task, costs = str(facts.config.get("task.name")), []
    for claim in claims_of(facts):
        of_clients = isinstance(claim, DpSgdClaim | LocalClaim)
        of_run = (figure for figure in claim.figures if figure.scope == RUN)
        figure = weakest(claim) if isinstance(claim, DpSgdClaim | LocalClaim) else next(of_run, None)
        if figure is None or figure.epsilon is None or not math.isfinite(figure.epsilon):
            costs.append(Cost("heuristic" if claim.is_guaranteed else claim.status))
            continue
        side, relation = ("clients" if of_clients else "server"), figure.relation or claim.relation
        kind = Kind(task, side, claim.word_for(figure.unit), relation, figure.delta or 0.0)
        costs.append(Cost(claim.status, figure.epsilon, kind))
    return tuple(costs) or (Cost("none"),)


def _seconds(directory: Path) -> float | None:
    """Return the seconds of all rounds; None for a run that hides durations."""
    path = directory / "rounds.jsonl"
    try:
        found = [seconds["total"] for line in complete_lines(path) if (seconds := json.loads(line).get("seconds"))]
        return sum(found) if found else None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{path} is not what a run writes: the seconds of a round are no numbers") from None


def composition_note(runs: Sequence[RunSummary], kinds: Sequence[Kind]) -> str:
    """Return a sentence on the composition of runs that have an ε.

    Args:
        runs: two or more.
        kinds: of their ε.
    """
    epsilon = composed_epsilon(runs, kinds)
    if epsilon is None:
        return EACH
    if math.isinf(epsilon):
        return "No ε bounds all runs together, nor a choice among them: some of them released without a guarantee."
    budget = _budget(runs)
    kept = f"; the budget of ε = {at_most(budget, 6)} holds for any way to set them up" if budget else ""
    return (
        f"All of them together, with what else is in their ledgers, come to ε = {at_most(epsilon)} if none was set up, "
        "or resumed, because of what had been released, and no other run in those ledgers was ended because of "
        f"it{kept}. This holds for a run that is chosen among them; its own ε does not."
    )


def composed_epsilon(runs: Sequence[RunSummary], kinds: Sequence[Kind]) -> float | None:
    """Return ε of all ledger entries; ∞ without a bound, None if unknown.

    Args:
        runs: on the same data. A run that its own releases ended counts with all planned rounds, as in its own claim.
        kinds: of their ε; they compose if they are one kind, and the server's.
    """
    paths = [run.directory / LEDGER for run in runs]
    said = [run.facts.statement for run in runs if run.facts.statement is not None]
    same = len({tuple(run.facts.config.get(key) for key in DATA) for run in runs}) == 1
    if len(kinds) != 1 or kinds[0].side != "server" or not same or not all(path.is_file() for path in paths):
        return None
    if len(said) < len(runs):
        return None  # the end of an unfinished run decides what it counts
    # Each run directory contains a copy of a shared ledger, taken at the end of that run.
    entries = {entry.release: entry for path in paths for entry in Ledger(path).entries if entry.unit == "client"}
    relation: Relation = "replace-one" if kinds[0].relation == "replace-one" else "add-or-remove"
    account = Account((entry.event for entry in entries.values()), relation, insiders=True)
    for event, count in (item for statement in said for item in statement.planned):
        account = account.plus(event, count)
    return best_epsilon(account, kinds[0].delta)[0]


def _budget(runs: Sequence[RunSummary]) -> float:
    """Return the budget that bounds all runs, even adaptive ones; 0: none.

    It was fixed before all releases, and all runs' ledgers are copies of one, at the end of each run. Then the longest
    contains the heads of all others. Separate ledgers have separate budgets, and both may be spent.
    """
    kept = []
    for run in runs:
        claimed = run.facts.statement.claim.figures if run.facts.statement is not None else ()
        fixed = (figure for figure in claimed if figure.budget and BUDGET_FIXED not in figure.premises)
        kept.append(next((figure.epsilon or 0.0 for figure in fixed if figure.scope == ALL_RUNS), 0.0))
    if not all(kept):
        return 0.0
    ledgers = [Ledger(run.directory / LEDGER) for run in runs]
    known = max((ledger.heads() for ledger in ledgers), key=len)
    return max(kept) if all(ledger.head in known for ledger in ledgers) else 0.0
