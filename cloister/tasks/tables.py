"""CSV files with named columns, and tasks whose data they are. All that preprocessing needs is stated in the task."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples, Judged, Regression, Task
from cloister.tasks.columns import LONGEST, MISSING, NO_NUMBER, NOT_FINITE, Column, Number, is_absent, plain
from cloister.tasks.csv_files import Cells, number_of, read_cells, tables_in
from cloister.tasks.labels import NO_CLASS, classes_of, described
from cloister.tasks.partition import SPLIT_SEED, numbered
from cloister.tasks.splits import dataset_at, dataset_of_owners
from cloister.utils.errors import DataError
from cloister.utils.files import expanded

QUOTED = 40
"""Largest number of characters of a cell that a message to its owner quotes."""
UNEVEN = "has another number of cells than there are columns"
EMPTY = "is empty"


@dataclass(frozen=True)
class Table:
    """Meaning of the columns of a task's CSV files. Other columns are ignored.

    Attributes:
        columns: name -> kind of the column. A pair (smallest, largest) is a `Number` that every row needs.
        target: name of the column of labels, or of the numbers of a regression.
        classes: number of classes; 0 for a regression.
        names: of the classes (see `classes_of`); or name -> the texts that cells of this class hold.
        tolerance: that of the pairs in `columns`.
        span: range of the targets of a regression, which is scaled to 0 to 1; None: targets are used as they are.
        missing: texts of missing values in all columns, in any case.
        order: names of all columns of files without a header; empty: files have one.
        site: name of the column of sites, which counts in simulations only; empty: there is none.
    """

    columns: Mapping[str, Column | tuple[float, float]]
    target: str
    classes: int
    names: Sequence[str] | Mapping[str, Sequence[str]] = ()
    tolerance: float = 0.0
    span: tuple[float, float] | None = None
    missing: Sequence[str] = MISSING
    order: Sequence[str] = ()
    site: str = ""

    @property
    def width(self) -> int:
        """Return the number of inputs of a row."""
        return sum(column.width for column in self._kinds.values())

    @property
    def _kinds(self) -> dict[str, Column]:
        return {
            name: Number(*column, needed=True, tolerance=self.tolerance) if isinstance(column, tuple) else column
            for name, column in self.columns.items()
        }

    def rows(self, path: Path, group: str = "") -> Examples:
        """Read every line by itself.

        An unusable row gets NaN as inputs, and an invalid target. Under DP-SGD it must not change any other row.

        Args:
            path: of the file.
            group: name of the column of groups, the run's `task.group`; empty: each row is a group.

        Returns:
            The examples, with their `faults` by column and reason.

        Raises:
            DataError: the file is absent, is no table, or lacks a column.
        """
        cells = read_cells(path, self._labelled(group), self.order)
        x, reasons = self._inputs(cells)
        y, reasons[self.target] = self._targets(cells)
        first = _first_reasons(cells, reasons)
        bad = np.array([bool(reason) for reason in first], bool)
        x[bad] = np.nan
        counts = Counter(filter(None, first)).most_common()
        groups = None
        if group:
            # NumPy stores text at the length of the longest cell, for every row.
            groups = np.array([cell if len(cell) <= LONGEST else "" for cell in cells.columns[group]], np.str_)
        return Examples(x, y, groups, faults=tuple(f"{count} where {reason}" for reason, count in counts))

    def read(self, path: Path, group: str = "") -> Examples:
        """Read a file as `rows` does, and refuse it if a row is unusable.

        Args: as `rows`.

        Raises:
            DataError: as `rows`; or there is no row, or a cell is none that its column may hold. The message names the
                column and quotes no cell.
        """
        cells = read_cells(path, self._labelled(group), self.order)
        _, reasons = self._inputs(cells)
        if not cells.whole:
            raise DataError(f"data-path: {path} has no rows of data")
        if not all(cells.whole):
            row = cells.whole.index(False) + 1
            raise DataError(f"data-path: {path}: data row {row} {UNEVEN}")
        for name, found in (reasons | {self.target: self._targets(cells)[1]}).items():
            if reason := next(filter(None, found), ""):
                more = {NOT_FINITE: "; every cell needs a number", EMPTY: "; every row needs one", NO_NUMBER: ""}.get(
                    reason, ", as the task states; correct the file, or change the task at every site alike"
                )
                row, others = found.index(reason), found.count(reason) - 1
                held = cells.columns[name][row]
                held = held if len(held) <= QUOTED else f"{held[:QUOTED]}..."
                others_too = f", and {others} more rows are faulty" if others else ""
                first = f"data row {row + 1} holds {held!r}{others_too}"
                raise DataError(f"data-path: {path}: column {name} {reason}{more}", first)
        return self.rows(path, group)

    def judged(self, path: Path) -> Judged:
        """Return all rows of a file for predictions. The file, or some of its rows, may lack a target.

        Raises:
            DataError: the file is absent, is no table, or lacks a column of inputs.
        """
        try:
            has_target = any(read_cells(path, (self.target,), self.order).whole)
        except DataError:
            has_target = False  # without this column, or `read_cells` below reports the fault
        needs = (*self.columns, *([self.target] if has_target else []))
        order = [name for name in self.order if has_target or name != self.target]
        cells = read_cells(path, tuple(dict.fromkeys(needs)), order)
        x, reasons = self._inputs(cells)
        return Judged(x, self._targets(cells)[0] if has_target else None, _first_reasons(cells, reasons))

    def scaled(self, features: NDArray) -> NDArray[np.float32]:
        """Scale numbers to shares of their columns' ranges.

        The numbers are in the units of the columns, of shape (n, columns). Every column is a pair.
        """
        low, high = np.array(list(self.columns.values()), np.float64).T
        scaled: NDArray[np.float32] = ((features - low) / (high - low)).astype(np.float32)
        return scaled

    @property
    def _absent(self) -> tuple[str, ...]:
        return tuple(map(plain, self.missing))

    def _labelled(self, group: str) -> tuple[str, ...]:
        """Return the columns that a training file needs."""
        return tuple(dict.fromkeys((*self.columns, self.target, *([group] if group else []))))

    def _inputs(self, cells: Cells) -> tuple[NDArray[np.float32], dict[str, list[str]]]:
        """Return the inputs, and for each column the reasons why rows are unusable."""
        parts, reasons = [], {}
        for name, kind in self._kinds.items():
            part, reasons[name] = kind.features(cells.columns[name], self._absent)
            with np.errstate(over="ignore"):
                parts.append(part.astype(np.float32))
        return np.concatenate(parts, axis=1), reasons

    def _targets(self, cells: Cells) -> tuple[NDArray, list[str]]:
        """Return the targets, shape (n,), and the reasons why rows are unusable."""
        texts, absent = cells.columns[self.target], self._absent
        if not self.classes:
            low, high = self.span or (0.0, 1.0)
            numbers = np.array([number_of(text) for text in texts], np.float64)
            reasons = [
                "" if np.isfinite(number) else EMPTY if is_absent(text, absent) else NO_NUMBER
                for number, text in zip(numbers.tolist(), texts, strict=True)
            ]
            if self.span:
                outside = f"must hold numbers from {low:g} to {high:g}"
                beyond = (numbers < low) | (numbers > high)
                reasons = [reason or (outside if far else "") for reason, far in zip(reasons, beyond, strict=True)]
            with np.errstate(over="ignore"):
                y = ((numbers - low) / (high - low)).astype(np.float32)
            return np.where([bool(reason) for reason in reasons], np.float32(np.nan), y), reasons
        if isinstance(self.names, Mapping):
            names = tuple(self.names)
            places = {plain(text): place for place, name in enumerate(names) for text in self.names[name]}
            labels = np.array([places.get(plain(text), NO_CLASS) for text in texts], np.int64)
            must = f"must hold {', '.join(text for name in names for text in self.names[name])} only"
        else:
            names = tuple(self.names)
            labels = classes_of([text[: LONGEST + 1] for text in texts], self.classes, names)
            must = f"must hold {'' if names else 'labels '}{described(self.classes, names)} only"
        unknown = ((labels < 0) | (labels >= self.classes)).tolist()
        empty = [isinstance(self.names, Mapping) and len(text) <= LONGEST and plain(text) in absent for text in texts]
        told = [EMPTY if is_empty else must for is_empty in empty]
        return labels, [reason if bad else "" for reason, bad in zip(told, unknown, strict=True)]


def _first_reasons(cells: Cells, reasons: Mapping[str, list[str]]) -> list[str]:
    """Return the first reason why each row is unusable; empty: it is usable.

    Args:
        cells: of n rows.
        reasons: n of each column.
    """
    first = ["" if whole else UNEVEN for whole in cells.whole]
    for name, found in reasons.items():
        first = [was or (f"column {name} {now}" if now else "") for was, now in zip(first, found, strict=True)]
    return first


class TableTask(Task):
    """Classification of the rows of CSV files. `cloister new task NAME --from csv` writes subclasses.

    Unusable rows are left out, and counted by column and reason for their owner.

    Attributes:
        table: meaning of the columns.
        data: the benchmark data where `task.data-path` is empty; None: there is none.
    """

    table: ClassVar[Table]
    data: ClassVar[Path | None] = None

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        place = config.data_path or self.data
        self._place = expanded(place) if place else None
        # A folder has a file for each site, unless it has one for training and one for tests.
        is_split = self._place and all((self._place / f"{part}.csv").is_file() for part in ("train", "test"))
        if self.table.site or (self._place and self._place.is_dir() and not is_split):
            self.partition = "natural"

    def load(self) -> Dataset:
        """Return the benchmark data at `task.data-path`.

        It is a folder with `train.csv` and `test.csv`, a folder with a file for each site, or one file. If the table
        has a column of sites, rows belong to these sites. A fifth of each class (and of each site) is test data.

        Raises:
            DataError: there is none, or it is not in the format of the table.
        """
        if self._place is None:
            raise DataError("task.data-path is empty; name a table, or a folder with one for each site")
        paths = tables_in(self._place)
        if self.partition != "natural" or not paths:
            return dataset_at(self, self._place, ".csv")
        try:
            parts = [self._at_sites(path) for path in paths]
        except DataError as error:
            raise error.of("task.data-path") from None
        owners = numbered(np.concatenate([sites for _, sites in parts]), np.random.default_rng(SPLIT_SEED))
        return dataset_of_owners(self, [examples for examples, _ in parts], owners)

    def _at_sites(self, path: Path) -> tuple[Examples, NDArray[np.str_]]:
        """Return the examples of a file, and the site of each."""
        examples = self.rows(path)
        keep, faults = self.usable(examples), examples.faults
        sites = np.full(len(examples), path.name)
        if name := self.table.site:
            sites = np.array(
                [plain(cell) for cell in read_cells(path, (name,), self.table.order).columns[name]], np.str_
            )
            if nowhere := int((keep & (sites == "")).sum()):
                keep, faults = keep & (sites != ""), (*faults, f"{nowhere} where column {name} {EMPTY}")
        return self._used(examples, keep, faults, path), sites[keep]

    def _used(self, examples: Examples, keep: NDArray[np.bool_], faults: tuple[str, ...], path: Path) -> Examples:
        """Return the examples to keep, with the faults of the others.

        Raises:
            DataError: there are none.
        """
        if not keep.any():
            found = "has no row that can be used" if len(keep) else "has no rows of data"
            raise DataError(f"data-path: {path} {found}", "; ".join(faults))
        return replace(self.checked(examples.take(np.flatnonzero(keep)), path), faults=faults)

    def read(self, path: Path) -> Examples:
        """Return the rows of a site's own file that can be used, with the faults of the others.

        Raises:
            DataError: there are none, or the file is no table with the columns of the task.
        """
        examples = self.rows(path)
        return self._used(examples, self.usable(examples), examples.faults, path)

    def rows(self, path: Path) -> Examples:
        """Return all rows, of which some may be unusable. Under DP-SGD such a row changes no other.

        Raises:
            DataError: the file is no table with the columns of the task.
        """
        return self.table.rows(path, self.config.group)

    def judged(self, path: Path) -> Judged:
        """Return all rows of a file for predictions. The file, or some of its rows, may lack a target.

        Raises:
            DataError: the file is no table with the columns of the task's inputs.
        """
        return self.table.judged(path)


class TableRegression(TableTask, Regression):
    """Regression of the rows of CSV files. Targets and predictions are shares of the table's `span`."""

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Return the mean squared error of the shares as `loss`, and `rmse` in the units of the column.

        Args:
            y: shape (n,).
            scores: predictions of the model, shape (n,).
        """
        low, high = self.table.span or (0.0, 1.0)
        found = super().metrics(y, scores)
        return found | {"rmse": found["rmse"] * (high - low)}
