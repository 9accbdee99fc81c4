"""What the scripts of the tables share: cells are run one after another, and told beside what a paper prints."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

Cell = TypeVar("Cell")
NONE = "–"
"""What a table says where there is no figure."""


def in_turn(left: Sequence[Cell], seconds: float, units: Callable[[Cell], float] = lambda _: 1.0) -> Iterator[Cell]:
    """Give each cell, and say before it how many hours it and those behind it take, by how long the last one took.

    Args:
        left: cells whose results are not there.
        seconds: of a unit, for the first estimate.
        units: how long a cell takes beside others, such as its number of rounds.
    """
    for number, cell in enumerate(left):
        hours = seconds * sum(map(units, left[number:])) / 3600
        print(f"{len(left) - number} cells to go, about {hours:.1f} hours: {cell}", flush=True)
        start = time.perf_counter()
        yield cell
        seconds = (time.perf_counter() - start) / units(cell)
    print("all cells are there")


def write_table(place: Path, about: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a Markdown table down, and show it.

    Args:
        place: of the file; its folder is made.
        about: a paragraph above the table.
        head: the names of the columns.
        rows: of one cell for each column.
    """
    lines = [about, "", _row(head), _row(["---"] * len(head)), *map(_row, rows)]
    text = "\n".join(lines) + "\n"
    print(text)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def apart(ours: float | None, paper: float | None, deviation: float) -> str:
    """How far our figure lies from the paper's, in its standard deviations; "–" where one is missing.

    Args:
        ours, paper: the figures.
        deviation: the paper's, above 0.
    """
    return NONE if ours is None or paper is None else f"{(ours - paper) / deviation:+.1f}"
