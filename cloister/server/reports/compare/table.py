"""Comparison of runs as a table of texts, for the terminal, Markdown and the HTML page."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import wrap

from rich.box import ROUNDED
from rich.table import Table as RichTable

from cloister.core.digits import at_most
from cloister.core.terminal import fits, plain
from cloister.core.terminal import table as rich_table
from cloister.core.text import clean
from cloister.server.reports.compare.comparison import Comparison, Group, Spread, short_keys
from cloister.server.reports.compare.runs import AS_ASKED
from cloister.server.reports.html.tables import short

UNKNOWN = "–"
VALUE = 40
"""Maximum characters of a setting."""
NUMBER = 20
"""Maximum characters of a number with its deviation."""
WIDTH = 100
"""Columns of a terminal."""


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
    cells = [_cells(comparison, group, settings) for group in comparison.groups]
    columns = tuple(dict.fromkeys(name for row in cells for name in row))
    numeric = tuple(name not in (comparison.heading, "ended", *settings.values()) for name in columns)
    rows = tuple(tuple(clean(row.get(name, UNKNOWN)) for name in columns) for row in cells)
    return Table(tuple(map(clean, columns)), rows, numeric)


def _cells(comparison: Comparison, group: Group, settings: Mapping[str, str]) -> dict[str, str]:
    score, on_clients = comparison.score, comparison.on_clients
    cells = {comparison.heading: group.name}
    cells |= {heading: _value(group.settings.get(key)) for key, heading in settings.items()}
    done = sorted({run.rounds for run in group.runs})
    wanted = group.runs[0].facts.config.get("num-rounds")
    span = f"{done[0]} to {done[-1]}" if done[1:] else str(done[0])
    cells["rounds"] = span if done == [wanted] else f"{span} of {wanted}"
    if score:
        cells[f"final {score}"] = _spread(group.final(score, on_clients))
        cells[f"best {score}"] = _spread(group.best(score, on_clients))
    cells |= {name: _spread(group.over_classes(name)) for name in comparison.over_classes}
    # With several kinds of ε, add the number of the note about its kind.
    kinds = comparison.kinds
    cells["ε"] = "; ".join(
        cost.status
        if cost.epsilon is None or cost.kind is None
        else at_most(cost.epsilon) + (f" [{kinds.index(cost.kind) + 1}]" if len(kinds) > 1 else "")
        for cost in group.costs
    )
    cells["seconds"] = _spread(group.seconds, ".1f")
    if any(run.ended != AS_ASKED for run in comparison.runs):
        cells["ended"] = ", ".join(dict.fromkeys(run.ended for run in group.runs))
    return cells


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
