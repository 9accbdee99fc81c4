"""What several runs are compared by: groups, a score, the settings that differ, and what must be said beside."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cloister.config.section import Scalar
from cloister.core.errors import ConfigError
from cloister.core.text import clean
from cloister.privacy.claims.server import ALL_PLANNED
from cloister.server.reports.compare.runs import AS_ASKED, OVER_CLASSES, Cost, Kind, RunSummary, better, scores_of
from cloister.server.reports.compare.settings import in_force, telling
from cloister.server.reports.compare.together import told_together

LOSS = "loss"
LABEL = 48
"""Characters of a name in a figure."""
OF_KEPT = (
    "Macro F1 is the mean F1 of the classes that have examples, macro AUC the mean area under the ROC curve of each "
    "class against the others: of the model that a run kept, on the server's own test data."
)
VAGUE = ("name", "server", "client", "options")
"""Last parts of keys that say nothing without the first."""
COLUMNS = ("run", "cell", "rounds", "ended", "seconds")


@dataclass(frozen=True)
class Spread:
    """A number over several runs.

    Attributes:
        mean: over them.
        std: the sample standard deviation; None of one run.
        count: how many runs have it.
    """

    mean: float
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Of those values that are there; None if none is."""
        found = [value for value in values if value is not None and math.isfinite(value)]
        if not found:
            return None
        return cls(statistics.fmean(found), statistics.stdev(found) if found[1:] else None, len(found))

    def text(self, form: str = ".4f") -> str:
        """The number, with its deviation where there is one.

        Args:
            form: of each number.
        """
        return f"{self.mean:{form}}" + (f" ± {self.std:{form}}" if self.std is not None else "")


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone, or one run.

    Attributes:
        name: no other of the groups has it.
        settings: in which groups differ, with the values of this one.
        runs: at least one.
    """

    name: str
    settings: Mapping[str, Scalar]
    runs: tuple[RunSummary, ...]

    @property
    def task(self) -> str:
        """That its runs are about."""
        return str(self.runs[0].facts.config.get("task.name"))

    def final(self, score: str, on_clients: bool) -> Spread | None:
        """A score after the last round that has it, over the runs that have not diverged.

        Args: as `RunSummary.curve`.
        """
        return Spread.of(run.final(score, on_clients) for run in self.runs)

    def best(self, score: str, on_clients: bool) -> Spread | None:
        """The best that a score was after any round.

        Args: as `RunSummary.curve`.
        """
        curves = [run.curve(score, on_clients) for run in self.runs]
        return Spread.of(better(score, list(curve.values())) for curve in curves if curve)

    def over_classes(self, name: str) -> Spread | None:
        """A figure of the kept models, over the runs that have it.

        Args: as `RunSummary.over_classes`.
        """
        return Spread.of(run.over_classes(name) for run in self.runs)

    def curve(self, score: str, on_clients: bool) -> dict[int, Spread]:
        """A score by round, over the runs that have it.

        Args: as `RunSummary.curve`.
        """
        curves = [run.curve(score, on_clients) for run in self.runs]
        found = {
            number: Spread.of(curve.get(number) for curve in curves)
            for number in sorted({number for curve in curves for number in curve})
        }
        return {number: spread for number, spread in found.items() if spread is not None}

    @property
    def seconds(self) -> Spread | None:
        """Of the rounds of a run; None where any of them hides it."""
        times = [run.seconds for run in self.runs]
        return None if None in times else Spread.of(times)

    @property
    def costs(self) -> tuple[Cost, ...]:
        """What is claimed of each mechanism, by the run of which the least is."""
        return max((run.costs for run in self.runs), key=_how_little_is_claimed)


def _how_little_is_claimed(costs: Sequence[Cost]) -> tuple[bool, float]:
    """Larger where less is claimed."""
    return any(cost.epsilon is None for cost in costs), sum(cost.epsilon or 0.0 for cost in costs)


@dataclass(frozen=True)
class Comparison:
    """Several groups of runs.

    Attributes:
        groups: in the order of the table.
        score: that they are compared by.
        on_clients: whether it is that of the clients' data, as no run has one of the server's.
        heading: what a group is called in the table.
        remarks: that are made beside its own notes.
    """

    groups: tuple[Group, ...]
    score: str
    on_clients: bool
    heading: str = "run"
    remarks: tuple[str, ...] = ()

    @cached_property
    def runs(self) -> tuple[RunSummary, ...]:
        """Of all groups."""
        return tuple(run for group in self.groups for run in group.runs)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """That the runs are about."""
        return tuple(sorted({group.task for group in self.groups}))

    def about(self, task: str) -> "Comparison":
        """The groups that are about one task.

        Args:
            task: its name.
        """
        return replace(self, groups=tuple(group for group in self.groups if group.task == task))

    @property
    def keys(self) -> tuple[str, ...]:
        """In which groups differ."""
        return tuple(dict.fromkeys(key for group in self.groups for key in group.settings))

    @cached_property
    def over_classes(self) -> tuple[str, ...]:
        """The figures over classes that any run has."""
        return tuple(name for name in OVER_CLASSES if any(group.over_classes(name) for group in self.groups))

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """What the ε of the runs are about; one, where all of them can be compared."""
        costs = (cost for run in self.runs for cost in run.costs)
        return tuple(dict.fromkeys(cost.kind for cost in costs if cost.kind is not None))

    @cached_property
    def labels(self) -> dict[str, str]:
        """What groups are called in a figure, by name: their settings, where these are short and tell them apart."""
        headings = dict(zip(self.keys, short_keys(self.keys), strict=True))
        told = {
            group.name: " ".join(f"{headings[key]}={value}" for key, value in group.settings.items())
            for group in self.groups
        }
        fit = all(0 < len(text) <= LABEL for text in told.values()) and len(set(told.values())) == len(told)
        return told if fit else {name: name for name in told}

    def points(self) -> dict[str, tuple[float, Spread]]:
        """ε and the final score of each group that has both, by name; nothing where ε are about different things."""
        if len(self.kinds) != 1 or not self.score:
            return {}
        found = {}
        for group in self.groups:
            epsilons = [cost.epsilon for cost in group.costs]
            final = group.final(self.score, self.on_clients)
            if final is not None and len(epsilons) == 1 and epsilons[0] is not None:
                found[group.name] = (epsilons[0], final)
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be known to read the table."""
        told = (*_about_scores(self), *_about_epsilon(self), *_about_ends(self), *self.remarks)
        return tuple(map(clean, told))


def compared(groups: Sequence[Group], score: str = "") -> Comparison:
    """Put groups of runs beside each other.

    Args:
        groups: at least one.
        score: that they are compared by; empty: the first that is no loss.

    Raises:
        ConfigError: no run has this score.
    """
    runs = [run for group in groups for run in group.runs]
    for on_clients in (False, True):
        rounds = [done for run in runs for done in run.facts.rounds]
        names = list(dict.fromkeys(name for done in rounds for name in scores_of(done, on_clients)))
        if names and (not score or score in names):
            first = next((name for name in names if name != LOSS), names[0])
            return Comparison(tuple(groups), score or first, on_clients)
    if score:
        known = sorted({name for run in runs for done in run.facts.rounds for name in (*done.central, *done.federated)})
        raise ConfigError(f"score = {score!r} is not valid: the runs have {', '.join(known) or 'no scores'}")
    return Comparison(tuple(groups), "", False)


def each_alone(runs: Sequence[RunSummary]) -> tuple[Group, ...]:
    """A group for each run, with the settings in which they differ.

    Args:
        runs: at least one.
    """
    configs = [in_force(run.facts) for run in runs]
    keys = telling(configs)
    return tuple(
        Group(run.name, {key: config[key] for key in keys if key in config}, (run,))
        for run, config in zip(runs, configs, strict=True)
    )


def short_keys(keys: Sequence[str]) -> list[str]:
    """The last part of each key; the whole key where that is vague, the end of another one, or a column of its own."""
    taken = [*(key.rpartition(".")[2] for key in keys), *VAGUE, *COLUMNS]
    return [last if taken.count(last) == 1 else key for key in keys if (last := key.rpartition(".")[2])]


def _about_scores(comparison: Comparison) -> Iterable[str]:
    if comparison.tasks[1:]:
        told = ", ".join(comparison.tasks)
        yield f"The runs are about different tasks ({told}): their scores do not measure the same thing."
    if not comparison.score:
        yield "No run has a score."
    elif comparison.on_clients:
        yield f"The {comparison.score} is that on the clients' own examples: no run has one on the server's."
    if comparison.over_classes:
        yield OF_KEPT
    for run in comparison.runs:
        if comparison.score and run.has_diverged(comparison.score, comparison.on_clients):
            yield f"{run.name} has diverged: its last {comparison.score} is no finite number, and it has no final one."
    if any(group.runs[1:] for group in comparison.groups):
        yield "Mean ± sample standard deviation over seeds; ε is the largest of any seed."


def _about_epsilon(comparison: Comparison) -> Iterable[str]:
    if not comparison.kinds:
        return
    if len(comparison.kinds) == 1:
        yield f"ε of a run by itself, the largest in its claim: for {comparison.kinds[0]}."
    else:
        several = len({kind.task for kind in comparison.kinds}) > 1
        kinds = [f"{kind.task}: {kind}" if several else str(kind) for kind in comparison.kinds]
        told = "; ".join(f"[{number}] {kind}" for number, kind in enumerate(kinds, start=1))
        yield f"The ε are about different things, cannot be compared, and are on no common axis: {told}."
    if len(comparison.runs) > 1:
        yield told_together(comparison.runs, comparison.kinds)


def _about_ends(comparison: Comparison) -> Iterable[str]:
    for run in comparison.runs:
        if run.ended == "running":
            yield f"{run.name} is under way: its figures are those of its rounds so far."
        elif run.ended == "dead":
            yield f"{run.name} broke off: no process on this machine runs it, and it did not end in order."
        elif run.ended != AS_ASKED:
            why = run.facts.ending.why or "no reason is known"
            counted = "; its ε counts all that were planned" if _counts_planned(run) else ""
            yield f"{run.name} did not run all its rounds ({run.ended}): {why}{counted}."


def _counts_planned(run: RunSummary) -> bool:
    statement = run.facts.statement
    return statement is not None and any(figure.counts == ALL_PLANNED for figure in statement.claim.figures)
