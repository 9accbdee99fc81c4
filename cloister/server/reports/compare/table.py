"""Comparison of runs as a table of texts, for the terminal, Markdown and the HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table as RichTable

from cloister.core.digits import at_most
from cloister.core.text import clean
from cloister.server.reports.compare.comparison import Comparison, Group, Spread, short_keys
from cloister.server.reports.compare.runs import AS_ASKED, Cost, Kind
from cloister.server.reports.html.tables import short

UNKNOWN = "–"
VALUE = 40
"""Maximum characters of a setting."""
NUMBER, FEWEST = 20, 8
"""Maximum characters of a number with its deviation, and minimum characters of a text column."""
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
    cells["rounds"] = _rounds(group)
    if score:
        cells[f"final {score}"] = _spread(group.final(score, on_clients))
        cells[f"best {score}"] = _spread(group.best(score, on_clients))
    cells |= {name: _spread(group.over_classes(name)) for name in comparison.over_classes}
    cells["ε"] = "; ".join(_epsilon(cost, comparison.kinds) for cost in group.costs)
    cells["seconds"] = _spread(group.seconds, ".1f")
    if any(run.ended != AS_ASKED for run in comparison.runs):
        cells["ended"] = ", ".join(dict.fromkeys(run.ended for run in group.runs))
    return cells


def _value(value: object) -> str:
    return UNKNOWN if value is None else short(value if isinstance(value, str) else str(value), VALUE) or "''"


def _spread(spread: Spread | None, form: str = ".4f") -> str:
    return UNKNOWN if spread is None else spread.text(form)


def _rounds(group: Group) -> str:
    done = sorted({run.rounds for run in group.runs})
    wanted = group.runs[0].facts.config.get("num-rounds")
    span = f"{done[0]} to {done[-1]}" if done[1:] else str(done[0])
    return span if done == [wanted] else f"{span} of {wanted}"


def _epsilon(cost: Cost, kinds: Sequence[Kind]) -> str:
    """Return ε; with several kinds, add the number of the note about its kind."""
    if cost.epsilon is None or cost.kind is None:
        return cost.status
    return at_most(cost.epsilon) + (f" [{kinds.index(cost.kind) + 1}]" if len(kinds) > 1 else "")


def lines(comparison: Comparison) -> list[str]:
    """Return the table and its notes as lines of at most `WIDTH` characters."""
    table, settings = fitting(comparison)
    told = (*settings, *comparison.notes)
    return [*_drawn(table), *(line for text in told for line in wrap(text, WIDTH, break_on_hyphens=False))]


def fitting(comparison: Comparison) -> tuple[Table, list[str]]:
    """Return the table, with settings moved to sentences if it is too wide."""
    table = table_of(comparison)
    if _width(_narrowest(table)) <= WIDTH:
        return table, []
    return table_of(replace(comparison, groups=tuple(map(_bare, comparison.groups)))), _below(comparison)


def _width(columns: Sequence[int]) -> int:
    """Return the width of a table with columns of these widths and borders."""
    return sum(columns) + 3 * len(columns) + 1


def _narrowest(table: Table) -> list[int]:
    """Return the minimum characters of each column.

    Headings and texts wrap between words, numbers do not.
    """
    return [
        max(len(part) for text in (*heading.split(), *cells) for part in ([text] if numeric else text.split() or [""]))
        for heading, numeric, *cells in zip(table.columns, _firm(table), *table.rows, strict=True)
    ]


def _firm(table: Table) -> list[bool]:
    """Return whether each column contains only numbers.

    An ε may have words beside it.
    """
    columns = zip(table.numeric, *table.rows, strict=True)
    return [numeric and max(map(len, cells), default=0) <= NUMBER for numeric, *cells in columns]


def _bare(group: Group) -> Group:
    return replace(group, settings={})


def _below(comparison: Comparison) -> list[str]:
    """Return one sentence with the settings of each group."""
    headings = dict(zip(comparison.keys, short_keys(comparison.keys), strict=True))
    return [
        clean(f"{group.name}: {', '.join(f'{headings[key]} {_value(value)}' for key, value in group.settings.items())}")
        for group in comparison.groups
        if group.settings
    ]


def _drawn(table: Table) -> list[str]:
    """Return the table as lines for a terminal."""
    drawn = RichTable(box=ROUNDED)
    for name, numeric, width in zip(table.columns, table.numeric, _widths(table), strict=True):
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold", width=width)
    for row in table.rows:
        drawn.add_row(*row)
    console = Console(width=WIDTH, markup=False, emoji=False, highlight=False, no_color=True, color_system=None)
    with console.capture() as capture:
        console.print(drawn)
    return [line.rstrip() for line in capture.get().splitlines()]


def _widths(table: Table) -> list[int]:
    """Return the characters of each column.

    Headings wrap first, then texts, and numbers last.
    """
    whole = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    if _width(whole) <= WIDTH:
        return whole
    widths, texts = _narrowest(table), [number for number, each in enumerate(_firm(table)) if not each]
    while _width(widths) > WIDTH and max(widths) > 1:
        wide = [number for number in texts if widths[number] > FEWEST] or range(len(widths))
        widths[max(wide, key=widths.__getitem__)] -= 1
    while _width(widths) < WIDTH and (lacking := [number for number in texts if widths[number] < whole[number]]):
        widths[min(lacking, key=widths.__getitem__)] += 1
    return widths


def markdown(comparison: Comparison) -> str:
    """Return the table and its notes as Markdown."""
    table = table_of(comparison)
    rule = ["---:" if numeric else "---" for numeric in table.numeric]
    rows = [table.columns, rule, *([cell.replace("|", "\\|") for cell in row] for row in table.rows)]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([text, "", *(f"- {note}" for note in comparison.notes)]) + "\n"
