"""Examples in a CSV file: named columns, scaled by ranges that are public."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.tasks.base import Examples
from cloister.tasks.labels import classes_of, described

LONGEST = 200
"""Characters of a cell."""
NAMED = 5
"""Of the columns that are missing."""
Cells = Mapping[str, Sequence[str]]
"""The text of every column."""


@dataclass(frozen=True)
class Table:
    """What the columns of a task's CSV files mean. Columns that are not named are ignored.

    Attributes:
        columns: name -> (smallest, largest) value; it becomes a number from 0 to 1. Ranges are constants of the task:
            ranges of a site's own rows would leak them, and give the same number another meaning at each site.
        target: name of the column of labels, or of the numbers of a regression.
        classes: how many there are; 0 for a regression.
        names: of the classes (see `classes_of`).
        group: name of the column that says whose a row is; empty: each row is its own.
    """

    columns: Mapping[str, tuple[float, float]]
    target: str
    classes: int
    names: tuple[str, ...] = ()
    group: str = ""

    def rows(self, path: Path) -> Examples:
        """Every line by itself: one that cannot be read has NaN for numbers, and a label that is no class.

        Under DP-SGD a row that the task cannot take must not change what becomes of any other.

        Raises:
            DataError: the file is absent or lacks a column.
        """
        return self._examples(self._cells(path, tolerant=True))

    def read(self, path: Path) -> Examples:
        """The same, of a file without a fault.

        Raises:
            DataError: as `rows`; or a cell is no finite number or no class. The column is named, and no cell quoted.
        """
        cells = self._cells(path, tolerant=False)
        if not cells[self.target]:
            raise DataError(f"data-path: {path} has no rows below its header")
        for name in (*self.columns, *(() if self.classes else (self.target,))):
            _refuse_faults(cells[name], name, path)
        examples = self._examples(cells)
        if self.classes and not ((examples.y >= 0) & (examples.y < self.classes)).all():
            raise DataError(
                f"data-path: {path}: column {self.target} must hold {'' if self.names else 'labels '}"
                f"{described(self.classes, self.names)} only"
            )
        return examples

    def scaled(self, features: NDArray) -> NDArray[np.float32]:
        """Numbers in the units of the columns, shape (n, columns), as parts of their ranges."""
        low, high = np.array(list(self.columns.values()), np.float64).T
        with np.errstate(over="ignore"):
            scaled: NDArray[np.float32] = ((features - low) / (high - low)).astype(np.float32)
        return scaled

    def _cells(self, path: Path, tolerant: bool) -> Cells:
        if not path.is_file():
            expected = f"a .csv file with {len(self.columns)} features and {self.target}"
            raise DataError(f"data-path: no file at {path}; expected {expected}")
        try:
            cells = _tolerated(path) if tolerant else _strict(path)
        except (ValueError, csv.Error, StopIteration):
            # Not chained: the cause quotes what it cannot read, which may be a patient's.
            raise DataError(f"data-path: {path} must be a .csv file with a header") from None
        missing = [name for name in (*self.columns, self.target, self.group) if name and name not in cells]
        if missing:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            raise DataError(
                f"data-path: {path} lacks the columns {', '.join(missing[:NAMED])}{more}; its header must name them"
            )
        return cells

    def _examples(self, cells: Cells) -> Examples:
        x = self.scaled(np.stack([_numbers(cells[name]) for name in self.columns], axis=1))
        target = cells[self.target]
        y = classes_of(target, self.classes, self.names) if self.classes else _numbers(target)
        groups = np.array(cells[self.group], np.str_) if self.group else None
        return Examples(x, y if self.classes else y.astype(np.float32), groups)


def _strict(path: Path) -> Cells:
    """The cells of a whole file, all of whose rows are as long as its header."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = (row for row in csv.reader(file, strict=True) if row)
    uneven = [number for number, row in enumerate(rows, 1) if len(row) != len(header)]
    if uneven:
        raise DataError(f"data-path: {path}: row {uneven[0]} has another number of columns than the header")
    return _by_column(header, rows)


def _tolerated(path: Path) -> Cells:
    """The cells of every line that can be read by itself; empty ones for the others.

    A line is a row: a quotation mark that is never closed would else swallow the rows after it.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        header = next(csv.reader([file.readline()]))
        return _by_column(header, [_cells_of(line, len(header)) for line in file if line.strip()])


def _cells_of(line: str, width: int) -> list[str]:
    try:
        cells = next(csv.reader([line]), [])
    except csv.Error:
        cells = []
    # One endless cell would make an array of text that long for every row.
    readable = len(cells) == width and max(map(len, cells)) <= LONGEST
    return cells if readable else [""] * width


def _by_column(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Cells:
    columns = list(zip(*rows, strict=True)) or [()] * len(header)
    return {name.strip(): column for name, column in zip(header, columns, strict=True)}


def _number(cell: str) -> float:
    """What a cell holds; NaN if it is no number."""
    try:
        return math.nan if "_" in cell else float(cell)
    except ValueError:
        return math.nan


def _numbers(cells: Sequence[str]) -> NDArray[np.float64]:
    return np.array([_number(cell) for cell in cells], np.float64)


def _refuse_faults(cells: Sequence[str], name: str, path: Path) -> None:
    numbers = _numbers(cells)
    faulty = [cell.strip().lower() for cell, number in zip(cells, numbers, strict=True) if math.isnan(number)]
    if set(faulty) - {"", "nan"}:
        raise DataError(f"data-path: {path}: column {name} must hold numbers only")
    if not np.isfinite(numbers).all():
        raise DataError(f"data-path: {path}: column {name} has empty or infinite cells; every cell needs a number")
