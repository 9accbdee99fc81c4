"""Comparison of groups of runs by a score, as a table for the terminal and Markdown, and as JSON."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from textwrap import wrap

from rich.box import ROUNDED
from rich.table import Table as RichTable

from cloister.config.io import Scalar
from cloister.privacy.claims.server import ALL_PLANNED
from cloister.server.reports.compare.runs import (
    AS_ASKED,
    OVER_CLASSES,
    Cost,
    Kind,
    RunSummary,
    better,
    composition_note,
    in_force,
    scores_of,
    telling,
)
from cloister.server.reports.html.page import short
from cloister.utils.errors import ConfigError
from cloister.utils.terminal import fits, plain
from cloister.utils.terminal import table as rich_table
from cloister.utils.text import at_most, clean

LOSS = "loss"
LABEL = 48
"""Maximum characters of a name in a figure."""
OF_KEPT = (
    "Macro F1 is the mean F1 of the classes that have examples, macro AUC the mean area under the ROC curve of each "
    "class against the others: of the model that a run kept, on the server's own test data."
)
VAGUE = ("name", "server", "client", "options")
"""Last parts of keys that are ambiguous without the first."""
COLUMNS = ("run", "cell", "rounds", "ended", "seconds")
UNKNOWN = "–"
VALUE = 40
"""Maximum characters of a setting."""
NUMBER = 20
"""Maximum characters of a number with its deviation."""
WIDTH = 100
"""Columns of a terminal."""


@dataclass(frozen=True)
class Spread:
    """Mean and deviation of a number over several runs.

    Attributes:
        mean: over them.
        std: the sample standard deviation; None for one run.
        count: number of runs with the number.
    """

    mean: float
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Return the spread of the finite values; None without any."""
        found = [value for value in values if value is not None and math.isfinite(value)]
        if not found:
            return None
        return cls(statistics.fmean(found), statistics.stdev(found) if found[1:] else None, len(found))

    def text(self, form: str = ".4f") -> str:
        """Return the mean, followed by the deviation if there is one.

        Args:
            form: format of each number.
        """
        return f"{self.mean:{form}}" + (f" ± {self.std:{form}}" if self.std is not None else "")


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds, or one run.

    Attributes:
        name: unique among the groups.
        settings: the settings that differ between groups, with the values of this one.
        runs: at least one.
    """

    name: str
    settings: Mapping[str, Scalar]
    runs: tuple[RunSummary, ...]

    @property
    def task(self) -> str:
        """Return the name of the task of these runs."""
        return str(self.runs[0].facts.config.get("task.name"))

    def final(self, score: str, on_clients: bool) -> Spread | None:
        """Return the spread of a score after its last round.

        Runs that have diverged are excluded.

        Args: as `RunSummary.curve`.
        """
        return Spread.of(run.final(score, on_clients) for run in self.runs)

    def best(self, score: str, on_clients: bool) -> Spread | None:
        """Return the spread of each run's best value of a score.

        Args: as `RunSummary.curve`.
        """
        curves = [run.curve(score, on_clients) for run in self.runs]
        return Spread.of(better(score, list(curve.values())) for curve in curves if curve)

    def over_classes(self, name: str) -> Spread | None:
        """Return the spread of a figure of the kept models.

        Args: as `RunSummary.over_classes`.
        """
        return Spread.of(run.over_classes(name) for run in self.runs)

    def curve(self, score: str, on_clients: bool) -> dict[int, Spread]:
        """Return the spread of a score by round, over the runs that have it.

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
        """Return the spread of all rounds' seconds; None if any run hides them."""
        times = [run.seconds for run in self.runs]
        return None if None in times else Spread.of(times)

    @property
    def costs(self) -> tuple[Cost, ...]:
        """Return the costs of the run with the weakest claims."""

        def weakness(costs: Sequence[Cost]) -> tuple[bool, float]:
            return any(cost.epsilon is None for cost in costs), sum(cost.epsilon or 0.0 for cost in costs)

        return max((run.costs for run in self.runs), key=weakness)


@dataclass(frozen=True)
class Comparison:
    """Groups of runs with a common score.

    Attributes:
        groups: in the order of the table.
        score: used for the comparison.
        on_clients: whether the score is on the clients' data, because no run has a score on the server's.
        heading: column heading of the groups' names.
        remarks: additional notes.
    """

    groups: tuple[Group, ...]
    score: str
    on_clients: bool
    heading: str = "run"
    remarks: tuple[str, ...] = ()

    @cached_property
    def runs(self) -> tuple[RunSummary, ...]:
        """Return the runs of all groups."""
        return tuple(run for group in self.groups for run in group.runs)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Return the names of the runs' tasks, sorted."""
        return tuple(sorted({group.task for group in self.groups}))

    def about(self, task: str) -> "Comparison":
        """Return the comparison of the groups with this task.

        Args:
            task: its name.
        """
        return replace(self, groups=tuple(group for group in self.groups if group.task == task))

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the settings that differ between groups."""
        return tuple(dict.fromkeys(key for group in self.groups for key in group.settings))

    @cached_property
    def over_classes(self) -> tuple[str, ...]:
        """Return the names of the figures over classes that any run has."""
        return tuple(name for name in OVER_CLASSES if any(group.over_classes(name) for group in self.groups))

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of the runs' ε. A single kind makes all ε comparable."""
        costs = (cost for run in self.runs for cost in run.costs)
        return tuple(dict.fromkeys(cost.kind for cost in costs if cost.kind is not None))

    @cached_property
    def labels(self) -> dict[str, str]:
        """Return labels for figures by group name.

        A label is the settings if they are short and distinct, otherwise the name.
        """
        headings = dict(zip(self.keys, short_keys(self.keys), strict=True))
        told = {
            group.name: " ".join(f"{headings[key]}={value}" for key, value in group.settings.items())
            for group in self.groups
        }
        fit = all(0 < len(text) <= LABEL for text in told.values()) and len(set(told.values())) == len(told)
        return told if fit else {name: name for name in told}

    def points(self) -> dict[str, tuple[float, Spread]]:
        """Return ε and final score by group name; empty if the ε differ in kind."""
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
        """Return the notes that explain the table."""
        runs, kinds = self.runs, self.kinds
        told = []
        if self.tasks[1:]:
            tasks = ", ".join(self.tasks)
            told.append(f"The runs are about different tasks ({tasks}): their scores do not measure the same thing.")
        if not self.score:
            told.append("No run has a score.")
        elif self.on_clients:
            told.append(f"The {self.score} is that on the clients' own examples: no run has one on the server's.")
        if self.over_classes:
            told.append(OF_KEPT)
        if shares := sorted({run.majority for run in runs if run.majority is not None}):
            span = " to ".join(f"{share:.4f}" for share in dict.fromkeys((shares[0], shares[-1])))
            told.append(f"Always answering the most frequent class of that data has an accuracy of {span}.")
        told += [
            f"{run.name} has diverged: its last {self.score} is no finite number, and it has no final one."
            for run in runs
            if self.score and run.has_diverged(self.score, self.on_clients)
        ]
        if any(group.runs[1:] for group in self.groups):
            told.append("Mean ± sample standard deviation over seeds; ε is the largest of any seed.")
        if len(kinds) == 1:
            told.append(f"ε of a run by itself, the largest in its claim: for {kinds[0]}.")
        elif kinds:
            several = len({kind.task for kind in kinds}) > 1
            named = [f"{kind.task}: {kind}" if several else str(kind) for kind in kinds]
            listed = "; ".join(f"[{number}] {kind}" for number, kind in enumerate(named, start=1))
            told.append(f"The ε are about different things, cannot be compared, and are on no common axis: {listed}.")
        if kinds and len(runs) > 1:
            told.append(composition_note(runs, kinds))
        return tuple(map(clean, (*told, *_about_ends(runs), *self.remarks)))


def compared(groups: Sequence[Group], score: str = "") -> Comparison:
    """Return a comparison of groups of runs.

    Args:
        groups: at least one.
        score: used for the comparison; empty: the first that is not a loss.

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
    """Return one group for each run, with the settings that differ.

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
    """Return the last part of each key; the whole key if that is ambiguous."""
    taken = [*(key.rpartition(".")[2] for key in keys), *VAGUE, *COLUMNS]
    return [last if taken.count(last) == 1 else key for key in keys if (last := key.rpartition(".")[2])]


def _about_ends(runs: Iterable[RunSummary]) -> Iterator[str]:
    for run in runs:
        if run.ended == "running":
            yield f"{run.name} is under way: its figures are those of its rounds so far."
        elif run.ended == "dead":
            yield f"{run.name} broke off: no process on this machine runs it, and it did not end in order."
        elif run.ended != AS_ASKED:
            why, statement = run.facts.ending.why or "no reason is known", run.facts.statement
            planned = statement and any(figure.counts == ALL_PLANNED for figure in statement.claim.figures)
            counted = "; its ε counts all that were planned" if planned else ""
            yield f"{run.name} did not run all its rounds ({run.ended}): {why}{counted}."


def record(comparison: Comparison) -> dict[str, object]:
    """Return the comparison as a JSON object."""
    score, on_clients = comparison.score, comparison.on_clients
    groups = [
        {
            "name": group.name,
            "settings": dict(group.settings),
            "final": _spread_facts(group.final(score, on_clients)),
            "best": _spread_facts(group.best(score, on_clients)),
            "over-classes": {name: _spread_facts(group.over_classes(name)) for name in comparison.over_classes},
            "claims": [
                {"status": cost.status}
                if cost.kind is None
                else {
                    "status": cost.status,
                    "epsilon": cost.epsilon,
                    "unit": cost.kind.unit,
                    "relation": cost.kind.relation,
                    "delta": cost.kind.delta,
                    "side": cost.kind.side,
                }
                for cost in group.costs
            ],
            "seconds": _spread_facts(group.seconds),
            "runs": [
                {
                    "name": run.name,
                    "directory": str(run.directory.resolve()),
                    "seed": run.facts.seed,
                    "ended": run.ended,
                    "rounds": run.rounds,
                    "final": run.final(score, on_clients),
                    "majority": run.majority,
                }
                for run in group.runs
            ],
        }
        for group in comparison.groups
    ]
    return {"score": score, "on-clients": on_clients, "groups": groups, "notes": list(comparison.notes)}


def _spread_facts(spread: Spread | None) -> dict[str, object] | None:
    return None if spread is None else {"mean": spread.mean, "std": spread.std, "runs": spread.count}


@dataclass(frozen=True)
class Table:
    """Texts in columns.

    Attributes:
        columns: headings; the first column contains the names of the rows.
        rows: one text for each column.
        numeric: whether a column contains numbers.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]


def table_of(comparison: Comparison) -> Table:
    """Return the table, with one row for each group of runs."""
    settings = dict(zip(comparison.keys, short_keys(comparison.keys), strict=True))
    score, on_clients, kinds = comparison.score, comparison.on_clients, comparison.kinds
    cells = []
    for group in comparison.groups:
        row = {comparison.heading: group.name}
        row |= {heading: _value(group.settings.get(key)) for key, heading in settings.items()}
        done = sorted({run.rounds for run in group.runs})
        wanted = group.runs[0].facts.config.get("num-rounds")
        span = f"{done[0]} to {done[-1]}" if done[1:] else str(done[0])
        row["rounds"] = span if done == [wanted] else f"{span} of {wanted}"
        if score:
            row[f"final {score}"] = _spread(group.final(score, on_clients))
            row[f"best {score}"] = _spread(group.best(score, on_clients))
        row |= {name: _spread(group.over_classes(name)) for name in comparison.over_classes}
        # With several kinds of ε, add the number of the note about its kind.
        row["ε"] = "; ".join(
            cost.status
            if cost.epsilon is None or cost.kind is None
            else at_most(cost.epsilon) + (f" [{kinds.index(cost.kind) + 1}]" if len(kinds) > 1 else "")
            for cost in group.costs
        )
        row["seconds"] = _spread(group.seconds, ".1f")
        if any(run.ended != AS_ASKED for run in comparison.runs):
            row["ended"] = ", ".join(dict.fromkeys(run.ended for run in group.runs))
        cells.append(row)
    columns = tuple(dict.fromkeys(name for row in cells for name in row))
    numeric = tuple(name not in (comparison.heading, "ended", *settings.values()) for name in columns)
    rows = tuple(tuple(clean(row.get(name, UNKNOWN)) for name in columns) for row in cells)
    return Table(tuple(map(clean, columns)), rows, numeric)


def _value(value: object) -> str:
    return UNKNOWN if value is None else short(value if isinstance(value, str) else str(value), VALUE) or "''"


def _spread(spread: Spread | None, form: str = ".4f") -> str:
    return UNKNOWN if spread is None else spread.text(form)


def lines(comparison: Comparison) -> list[str]:
    """Return the table and its notes as lines of at most `WIDTH` characters."""
    table, settings = fitting(comparison)
    told = (*settings, *comparison.notes)
    return [*plain(drawn(table), WIDTH), *(line for text in told for line in wrap(text, WIDTH, break_on_hyphens=False))]


def fitting(comparison: Comparison) -> tuple[Table, list[str]]:
    """Return the table, with one sentence for the settings of each group if it is too wide with them."""
    table = table_of(comparison)
    if fits(drawn(table), WIDTH):
        return table, []
    headings = dict(zip(comparison.keys, short_keys(comparison.keys), strict=True))
    below = [
        clean(f"{group.name}: {', '.join(f'{headings[key]} {_value(value)}' for key, value in group.settings.items())}")
        for group in comparison.groups
        if group.settings
    ]
    bare = tuple(replace(group, settings={}) for group in comparison.groups)
    return table_of(replace(comparison, groups=bare)), below


def drawn(table: Table) -> RichTable:
    """Return the table for a console; headings wrap first, then texts, and numbers last."""
    right = [number for number, numeric in enumerate(table.numeric) if numeric]
    # An ε may have words beside it.
    whole = [number for number in right if all(len(row[number]) <= NUMBER for row in table.rows)]
    found = rich_table(table.columns, table.rows, whole=whole, right=right, box=ROUNDED)
    if fits(found, WIDTH, wrapped=False):
        return found
    headings = [name.replace(" ", "\n") if number in whole else name for number, name in enumerate(table.columns)]
    found = rich_table(headings, table.rows, whole=whole, right=right, box=ROUNDED)
    return found if fits(found, WIDTH) else rich_table(headings, table.rows, right=right, box=ROUNDED)


def markdown(comparison: Comparison) -> str:
    """Return the table and its notes as Markdown."""
    table = table_of(comparison)
    rule = ["---:" if numeric else "---" for numeric in table.numeric]
    rows = [table.columns, rule, *([cell.replace("|", "\\|") for cell in row] for row in table.rows)]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([text, "", *(f"- {note}" for note in comparison.notes)]) + "\n"
