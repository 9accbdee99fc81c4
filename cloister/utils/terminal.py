"""Helpers for terminal output."""

from collections.abc import Iterable, Sequence

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

UNBOUNDED = 10_000
"""Width of a console in which no line wraps."""


def can_redraw(console: "Console") -> bool:
    """Return True if a console is a terminal that can redraw lines."""
    return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter and not console.quiet


def format_duration(seconds: float) -> str:
    """Format a duration as minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    *,
    whole: Iterable[int] = (),
    right: Iterable[int] = (),
    box: Box | None = HEAVY_HEAD,
    min_width: int | None = None,
) -> Table:
    """Return a table for a console, whose text is never truncated.

    Args:
        columns: headings; if all are empty, there is no heading.
        rows: one text for each column.
        title: above the table, at its left.
        whole: numbers of the columns whose cells do not wrap.
        right: numbers of the columns that are aligned at the right.
        box: the frame; None: no frame, and one blank between columns.
        min_width: of the table.
    """
    whole, right = set(whole), set(right)
    found = Table(
        title=title,
        title_justify="left",
        show_header=any(columns),
        box=box,
        min_width=min_width,
        padding=(0, 1) if box else (0, 1, 0, 0),
    )
    for number, name in enumerate(columns):
        found.add_column(name, justify="right" if number in right else "left", overflow="fold", no_wrap=number in whole)
    for row in rows:
        found.add_row(*row)
    return found


def plain(found: Table, width: int) -> list[str]:
    """Return a table as lines of plain text of at most `width` characters."""
    console = Console(width=width, markup=False, emoji=False, highlight=False, no_color=True, color_system=None)
    with console.capture() as capture:
        console.print(found)
    return [line.rstrip() for line in capture.get().splitlines()]


def fits(found: Table, width: int, wrapped: bool = True) -> bool:
    """Return whether a table needs at most `width` characters.

    Args:
        found: the table.
        width: in characters.
        wrapped: whether texts may wrap between words.
    """
    console = Console(width=UNBOUNDED, markup=False, emoji=False)
    needed = Measurement.get(console, console.options, found)
    return (needed.minimum if wrapped else needed.maximum) <= width
