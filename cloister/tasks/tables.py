"""CSV files with named columns, scaled by public ranges."""

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Examples
from cloister.tasks.labels import classes_of, described
from cloister.utils.errors import DataError

LONGEST = 200
"""Largest number of characters of a cell."""
QUOTED = 40
"""Largest number of characters of a cell that a message to its owner quotes."""
NAMED = 5
"""Largest number of missing columns that a message names."""
Cells = Mapping[str, Sequence[str]]
"""Text of every column, by its name."""


@dataclass(frozen=True)
class Table:
    """Meaning of the columns of a task's CSV files. Other columns are ignored.

    Attributes:
        columns: name -> (smallest, largest) value; the range is scaled to 0 to 1. Ranges are constants of the task.
            Ranges of a site's own rows would leak them, and give the same number another meaning at each site.
        target: name of the column of labels, or of the numbers of a regression.
        classes: number of classes; 0 for a regression.
        names: of the classes (see `classes_of`).
        tolerance: share of its range by which a value may exceed it, as published ranges are rounded.
    """

    columns: Mapping[str, tuple[float, float]]
    target: str
    classes: int
    names: tuple[str, ...] = ()
    tolerance: float = 0.0

    def rows(self, path: Path, group: str = "") -> Examples:
        """Read every line by itself.

        An unreadable line gets NaN as inputs, and a label that is no class. A value outside its range becomes NaN too.
        Under DP-SGD an unusable row must not change any other row.

        Args:
            path: of the file.
            group: name of the column of groups, the run's `task.group`; empty: each row is a group.

        Raises:
            DataError: the file is absent or lacks a column.
        """
        examples = self._examples(self._cells(path, self._labelled(group), tolerant=True), group)
        beyond = (examples.x < -self.tolerance) | (examples.x > 1 + self.tolerance)
        return Examples(np.where(beyond, np.float32(np.nan), examples.x), examples.y, examples.groups)

    def read(self, path: Path, group: str = "") -> Examples:
        """Read a file as `rows` does, and refuse it if a row is faulty.

        Args: as `rows`.

        Raises:
            DataError: as `rows`; or a cell is not finite, is outside its range, or is no class. The message names the
                column and quotes no cell.
        """
        cells = self._cells(path, self._labelled(group), tolerant=False)
        self._refuse_faulty_inputs(cells, path)
        if not self.classes:
            _refuse_faults(cells[self.target], self.target, path)
        examples = self._examples(cells, group)
        known = (examples.y >= 0) & (examples.y < self.classes)
        if self.classes and not known.all():
            raise DataError(
                f"data-path: {path}: column {self.target} must hold {'' if self.names else 'labels '}"
                f"{described(self.classes, self.names)} only",
                _first(cells[self.target], ~known),
            )
        return examples

    def unlabelled(self, path: Path) -> NDArray[np.float32] | None:
        """Return the inputs of a file without targets, shape (n, columns).

        A file without targets has no such column, or an empty one. None: a target is set.

        Raises:
            DataError: as `read`.
        """
        cells = self._cells(path, tuple(self.columns), tolerant=False)
        if any(cell.strip() for cell in cells.get(self.target, ())):
            return None
        self._refuse_faulty_inputs(cells, path)
        return self._inputs(cells)

    def _refuse_faulty_inputs(self, cells: Cells, path: Path) -> None:
        for name, (low, high) in self.columns.items():
            if not cells[name]:
                raise DataError(f"data-path: {path} has no rows below its header")
            _refuse_faults(cells[name], name, path)
            numbers, slack = _numbers(cells[name]), self.tolerance * (high - low)
            beyond = (numbers < low - slack) | (numbers > high + slack)
            if beyond.any():
                raise DataError(
                    f"data-path: {path}: column {name} must hold numbers from {low:g} to {high:g}, the range that the "
                    "task states for it; correct the file, or widen the range in the task, at every site alike",
                    _first(cells[name], beyond),
                )

    def scaled(self, features: NDArray) -> NDArray[np.float32]:
        """Scale numbers to shares of their columns' ranges.

        The numbers are in the units of the columns, of shape (n, columns).
        """
        low, high = np.array(list(self.columns.values()), np.float64).T
        with np.errstate(over="ignore"):
            scaled: NDArray[np.float32] = ((features - low) / (high - low)).astype(np.float32)
        return scaled

    def _labelled(self, group: str) -> tuple[str, ...]:
        """Return the columns that a training file needs."""
        return (*self.columns, self.target, *([group] if group else []))

    def _cells(self, path: Path, needs: Sequence[str], tolerant: bool) -> Cells:
        if not path.is_file():
            expected = f"a .csv file with {len(self.columns)} features and {self.target}"
            raise DataError(f"data-path: no file at {path}; expected {expected}")
        try:
            with path.open(newline="", encoding="utf-8-sig", errors="replace" if tolerant else "strict") as file:
                if tolerant:
                    # Each line is a row: otherwise an unclosed quotation mark would swallow the rows after it.
                    header = next(csv.reader([file.readline()]))
                    rows = [_cells_of(line, len(header)) for line in file if line.strip()]
                else:
                    header, *rows = (row for row in csv.reader(file, strict=True) if row)
                    if uneven := [number for number, row in enumerate(rows, 1) if len(row) != len(header)]:
                        raise DataError(
                            f"data-path: {path}: row {uneven[0]} has another number of columns than the header"
                        )
            columns = list(zip(*rows, strict=True)) or [()] * len(header)
            cells = {name.strip(): column for name, column in zip(header, columns, strict=True)}
        except (ValueError, csv.Error, StopIteration):
            # Not chained: the cause may quote a patient's cell.
            raise DataError(f"data-path: {path} must be a .csv file with a header") from None
        missing = [name for name in needs if name not in cells]
        if missing:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            raise DataError(
                f"data-path: {path} lacks the columns {', '.join(missing[:NAMED])}{more}; its header must name them"
            )
        return cells

    def _examples(self, cells: Cells, group: str) -> Examples:
        x, target = self._inputs(cells), cells[self.target]
        y = classes_of(target, self.classes, self.names) if self.classes else _numbers(target)
        groups = np.array(cells[group], np.str_) if group else None
        return Examples(x, y if self.classes else y.astype(np.float32), groups)

    def _inputs(self, cells: Cells) -> NDArray[np.float32]:
        return self.scaled(np.stack([_numbers(cells[name]) for name in self.columns], axis=1))


def _cells_of(line: str, width: int) -> list[str]:
    """Return the cells of a line, parsed by itself; empty cells if it is unreadable."""
    try:
        cells = next(csv.reader([line]), [])
    except csv.Error:
        cells = []
    # NumPy stores text at the length of the longest cell, for every row.
    readable = len(cells) == width and max(map(len, cells)) <= LONGEST
    return cells if readable else [""] * width


def _numbers(cells: Sequence[str]) -> NDArray[np.float64]:
    """Parse cells; NaN for a cell that is not a number."""
    numbers = np.full(len(cells), np.nan)
    for row, cell in enumerate(cells):
        with suppress(ValueError):
            # Python would read `1_000` as a number.
            numbers[row] = np.nan if "_" in cell else float(cell)
    return numbers


def _refuse_faults(cells: Sequence[str], name: str, path: Path) -> None:
    numbers = _numbers(cells)
    words = np.array([cell.strip().lower() not in ("", "nan") for cell in cells], bool) & np.isnan(numbers)
    if words.any():
        raise DataError(f"data-path: {path}: column {name} must hold numbers only", _first(cells, words))
    if not np.isfinite(numbers).all():
        raise DataError(
            f"data-path: {path}: column {name} has empty or infinite cells; every cell needs a number",
            _first(cells, ~np.isfinite(numbers)),
        )


def _first(cells: Sequence[str], faulty: NDArray[np.bool_]) -> str:
    """Describe the first faulty row below the header, and count the others."""
    row, more = int(faulty.argmax()), int(faulty.sum()) - 1
    held = cells[row] if len(cells[row]) <= QUOTED else f"{cells[row][:QUOTED]}..."
    return f"row {row + 1} below the header holds {held!r}" + (f", and {more} more rows are faulty" if more else "")
