"""Heart disease in four hospitals: a federation with real institutions as clients (UCI, 920 patients).

No number here is computed from the data. Ranges and substitutes are public clinical knowledge, so that a feature means
the same in every hospital and nothing about a hospital's patients enters its preprocessing.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.core.files import expanded
from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task
from cloister.tasks.partition import holdout
from cloister.tasks.scores import binary_auc

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
"""The owners of the examples: owner i is the i-th."""
SPLIT_SEED = 0
"""Fixed here, not configured: every run of every strategy is scored on the same patients."""
MISSING = {"", "?", "-9", "-9.0"}
"""How the files write an unknown value; -9 in the files with all 76 attributes."""


@dataclass(frozen=True)
class Measure:
    """A column of numbers, which becomes two features: its place in `low` to `high`, and whether it is missing.

    Attributes:
        low, high: what is clinically possible, in the column's unit.
        usual: stands in for a missing value.
        zero_is_missing: no living patient has a zero here; some hospitals wrote it for "not measured".
    """

    name: str
    low: float
    high: float
    usual: float
    zero_is_missing: bool = False

    def features(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Shape (n, 2), from values of shape (n,) with NaN for missing."""
        missing = np.isnan(values)
        if self.zero_is_missing:
            missing |= values == 0
        filled = np.where(missing, self.usual, values)
        if ((filled < self.low) | (filled > self.high)).any():
            raise DataError(f"column {self.name} must hold numbers from {self.low:g} to {self.high:g}, or ?")
        return np.stack([(filled - self.low) / (self.high - self.low), missing], axis=1)


@dataclass(frozen=True)
class Category:
    """A column of k codes, which becomes k + 1 features: one per code and one for missing; one of them is 1."""

    name: str
    codes: tuple[float, ...]

    def features(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Shape (n, k + 1), from values of shape (n,) with NaN for missing."""
        hot = np.column_stack([values[:, None] == np.array(self.codes), np.isnan(values)])
        if not hot.any(axis=1).all():
            raise DataError(f"column {self.name} must hold one of {', '.join(f'{c:g}' for c in self.codes)}, or ?")
        return hot.astype(np.float64)


COLUMNS: tuple[Measure | Category, ...] = (
    Measure("age", 18, 100, usual=55),
    Category("sex", (0, 1)),
    Category("cp", (1, 2, 3, 4)),
    Measure("trestbps", 60, 260, usual=120, zero_is_missing=True),
    # Zero for all of Switzerland and a quarter of the VA: nobody lives without cholesterol.
    Measure("chol", 50, 800, usual=200, zero_is_missing=True),
    Category("fbs", (0, 1)),
    Category("restecg", (0, 1, 2)),
    Measure("thalach", 40, 240, usual=150, zero_is_missing=True),
    Category("exang", (0, 1)),
    Measure("oldpeak", -5, 10, usual=0),
    Category("slope", (1, 2, 3)),
    Measure("ca", 0, 3, usual=0),
    Category("thal", (3, 6, 7)),
)
"""What the files hold, in order; `num`, the diagnosis from 0 to 4, comes last."""
DIAGNOSIS = Category("num", (0, 1, 2, 3, 4))
FEATURES = sum(2 if isinstance(column, Measure) else len(column.codes) + 1 for column in COLUMNS)


class HeartDisease(Task):
    """Whether an artery is narrowed by more than half (1) or not (0); x is float32 of shape (n, `FEATURES`), 0 to 1."""

    recipe = Recipe(local_epochs=5, batch_size=16, learning_rate=0.1)
    partition = "natural"
    classes = 2
    class_names = ("not narrowed", "narrowed")
    input_shape = (FEATURES,)
    models = ("softmax",)
    public = True

    def load(self) -> Dataset:
        """Four fifths of each class of each hospital to train on, owned by it, and one fifth to test on."""
        folder = _folder(self.config.data_path)
        splits = [_split(_read_hospital(folder / _file(name))) for name in HOSPITALS]
        train, test = (_joined(parts) for parts in zip(*splits, strict=True))
        sizes = [len(part) for part, _ in splits]
        return Dataset(train, test, owners=np.repeat(np.arange(len(HOSPITALS)), sizes))

    def rows(self, path: Path) -> Examples:
        """A node's own data: an `.npz` file in the units above, or one hospital's `.data` or `.csv` file.

        The latter has 14 columns in UCI's order and no header; `?` is missing.

        Raises:
            DataError: the file is absent or is not what the task reads.
        """
        if path.suffix.lower() not in (".data", ".csv"):
            return super().rows(path)
        self.refuse_groups(path)
        return _usable_rows(path)

    def read(self, path: Path) -> Examples:
        """The same, of a file without a fault.

        Raises:
            DataError: the file is absent or is not what the task reads.
        """
        if path.suffix.lower() not in (".data", ".csv"):
            return super().read(path)
        self.refuse_groups(path)
        return _read_hospital(path)

    def unlabelled(self, path: Path) -> NDArray | None:
        """Patients in a file of 13 columns, without the diagnosis.

        Raises:
            DataError: a column holds what it cannot.
        """
        if path.suffix.lower() not in (".data", ".csv"):
            return None
        try:
            rows = _rows(path, len(COLUMNS))
        except DataError:
            return None  # it has the diagnosis, or `read` says what is wrong
        return _features(rows.T)

    def build(self) -> Model:
        """Softmax regression."""
        from cloister.tasks.softmax import SoftmaxRegression

        return SoftmaxRegression(features=FEATURES, classes=2)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Loss, accuracy, and AUC where both classes are there.

        Args:
            y: shape (n,).
            scores: what the model predicts, class probabilities, shape (n, 2).
        """
        return super().metrics(y, scores) | binary_auc(y, scores)


def _file(hospital: str) -> str:
    return f"processed.{hospital}.data"


def _folder(data_path: str) -> Path:
    folder = expanded(data_path)
    missing = [_file(name) for name in HOSPITALS if not data_path or not (folder / _file(name)).is_file()]
    if missing:
        raise DataError(
            f"task.data-path = {data_path!r} must be a folder with {', '.join(missing)}; get them from the UCI "
            "Machine Learning Repository, data set 45, Heart Disease"
        )
    return folder


def _split(examples: Examples) -> tuple[Examples, Examples]:
    train, test = holdout(examples.y, 0.2, np.random.default_rng(SPLIT_SEED))
    return examples.take(train), examples.take(test)


def _joined(parts: tuple[Examples, ...]) -> Examples:
    return Examples(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))


def _read_hospital(path: Path) -> Examples:
    if not path.is_file():
        raise DataError(f"data-path: no file at {path}; expected one hospital's file of 14 columns")
    try:
        return _encode(_rows(path))
    except DataError as error:
        raise DataError(f"data-path: {path}: {error}") from None


def _usable_rows(path: Path) -> Examples:
    """What the lines of a file hold, each by itself: under DP-SGD a faulty one must change no other."""
    if not path.is_file():
        raise DataError(f"data-path: no file at {path}; expected one hospital's file of 14 columns")
    with path.open(encoding="utf-8", errors="replace") as file:
        found = [row for number, line in enumerate(file, 1) if (row := _usable_row(number, line))]
    return _joined(tuple(found)) if found else Examples(np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64))


def _usable_row(number: int, line: str) -> Examples | None:
    try:
        return _encode(np.array([_numbers(number, next(csv.reader([line]), []))]))
    except (DataError, ValueError, csv.Error):
        return None


def _rows(path: Path, width: int = len(COLUMNS) + 1) -> NDArray[np.float64]:
    """The file's numbers, shape (n, width), with NaN for missing."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [_numbers(number, cells, width) for number, cells in enumerate(csv.reader(file), 1) if cells]
    except (ValueError, OSError, csv.Error):
        # Not chained: the cause would quote a patient's cell.
        raise DataError("not a text file of numbers and ?, set apart by commas, without a header") from None
    if not rows:
        raise DataError("the file has no rows")
    return np.array(rows)


def _numbers(number: int, cells: list[str], width: int = len(COLUMNS) + 1) -> list[float]:
    if len(cells) != width:
        raise DataError(f"row {number} has {len(cells)} columns; expected {width}")
    return [np.nan if cell.strip() in MISSING else float(cell) for cell in cells]


def _encode(rows: NDArray[np.float64]) -> Examples:
    *values, diagnosis = rows.T
    if np.isnan(diagnosis).any():
        raise DataError("column num, the diagnosis, must not be missing")
    DIAGNOSIS.features(diagnosis)
    return Examples(_features(values), (diagnosis > 0).astype(np.int64))


def _features(values: Iterable[NDArray[np.float64]]) -> NDArray[np.float32]:
    """Shape (n, `FEATURES`), from the values of each column, shape (n,)."""
    pairs = zip(COLUMNS, values, strict=True)
    features = np.concatenate([column.features(column_values) for column, column_values in pairs], axis=1)
    return features.astype(np.float32)
