"""Breast cancer in Wisconsin (569 tumours, shipped with scikit-learn) and heart disease in four hospitals (UCI).

No constant of heart disease is computed from its data. Ranges and substitutes are public clinical knowledge. So a
feature has the same meaning in every hospital, and preprocessing reveals nothing about a hospital's patients.
"""

import csv
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Dataset, Examples, Judged, Model, Recipe, Task
from cloister.tasks.labels import NO_CLASS
from cloister.tasks.partition import SPLIT_SEED, holdout
from cloister.tasks.tables import Table
from cloister.utils.errors import DataError
from cloister.utils.files import expanded

# Published with the dataset. Ranges measured on a client's own examples would leak them. They would also give the same
# number a different meaning on each client.
RANGES = {
    "mean radius": (6.981, 28.11),
    "mean texture": (9.71, 39.28),
    "mean perimeter": (43.79, 188.5),
    "mean area": (143.5, 2501.0),
    "mean smoothness": (0.053, 0.163),
    "mean compactness": (0.019, 0.345),
    "mean concavity": (0.0, 0.427),
    "mean concave points": (0.0, 0.201),
    "mean symmetry": (0.106, 0.304),
    "mean fractal dimension": (0.05, 0.097),
    "radius error": (0.112, 2.873),
    "texture error": (0.36, 4.885),
    "perimeter error": (0.757, 21.98),
    "area error": (6.802, 542.2),
    "smoothness error": (0.002, 0.031),
    "compactness error": (0.002, 0.135),
    "concavity error": (0.0, 0.396),
    "concave points error": (0.0, 0.053),
    "symmetry error": (0.008, 0.079),
    "fractal dimension error": (0.001, 0.03),
    "worst radius": (7.93, 36.04),
    "worst texture": (12.02, 49.54),
    "worst perimeter": (50.41, 251.2),
    "worst area": (185.2, 4254.0),
    "worst smoothness": (0.071, 0.223),
    "worst compactness": (0.027, 1.058),
    "worst concavity": (0.0, 1.252),
    "worst concave points": (0.0, 0.291),
    "worst symmetry": (0.156, 0.664),
    "worst fractal dimension": (0.055, 0.208),
}
"""Smallest and largest value of each feature, in the order of x."""


NAMES = ("malignant", "benign")
TABLE = Table(RANGES, "target", len(NAMES), NAMES, tolerance=0.02)


class BreastCancer(Task):
    """Malignant (0) or benign (1). x is float32 of shape (n, 30), each feature from about 0 to about 1."""

    recipe = Recipe(local_epochs=5, batch_size=16, learning_rate=0.5)
    classes = len(NAMES)
    class_names = NAMES
    input_shape = (len(RANGES),)
    models = ("softmax",)
    public = True
    bundled = True

    def load(self) -> Dataset:
        """Return four fifths of each class as training data and one fifth as test data."""
        from sklearn.datasets import load_breast_cancer

        features, labels = load_breast_cancer(return_X_y=True)
        examples = Examples(TABLE.scaled(features), labels.astype(np.int64))
        train, test = holdout(examples.y, 0.2, np.random.default_rng(SPLIT_SEED))
        return Dataset(examples.take(train), examples.take(test))

    def rows(self, path: Path) -> Examples:
        """Return the data of an `.npz` or `.csv` file of a node.

        An `.npz` file is in the units of x. A `.csv` file is in the units of `RANGES`, and has its 30 columns and
        `target` (0 or 1), in any order; other columns are ignored.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        if path.suffix.lower() != ".csv":
            return super().rows(path)
        self.refuse_groups(path)
        return TABLE.rows(path)

    def read(self, path: Path) -> Examples:
        """Return the data of a file as `rows` does, and refuse a file with a faulty row.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        if path.suffix.lower() != ".csv":
            return super().read(path)
        self.refuse_groups(path)
        return self.checked(TABLE.read(path), path)

    def judged(self, path: Path) -> Judged | None:
        """Return all rows of a `.csv` file, with or without `target`; None for another file.

        Raises:
            DataError: the file is no table with the columns of inputs.
        """
        return TABLE.judged(path) if path.suffix.lower() == ".csv" else None

    def build(self) -> Model:
        """Return softmax regression."""
        from cloister.tasks.numpy_models import SoftmaxRegression

        return SoftmaxRegression(features=len(RANGES), classes=2)


HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
"""Owners of the examples, in the order of their numbers."""
MISSING = {"", "?", "-9", "-9.0"}
"""Codes of a missing value; -9 in the files with all 76 attributes."""


@dataclass(frozen=True)
class Measure:
    """Numeric column that becomes two features: its position from `low` to `high`, and an indicator of a missing value.

    Attributes:
        low, high: the clinically possible range, in the column's unit.
        usual: substitute for a missing value.
        zero_is_missing: whether 0 codes a missing value. No living patient has a zero here, but some hospitals wrote it
            for "not measured".
    """

    name: str
    low: float
    high: float
    usual: float
    zero_is_missing: bool = False

    def features(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return features of shape (n, 2) for values of shape (n,); NaN is missing."""
        missing = np.isnan(values)
        if self.zero_is_missing:
            missing |= values == 0
        filled = np.where(missing, self.usual, values)
        if ((filled < self.low) | (filled > self.high)).any():
            raise DataError(f"column {self.name} must hold numbers from {self.low:g} to {self.high:g}, or ?")
        return np.stack([(filled - self.low) / (self.high - self.low), missing], axis=1)


@dataclass(frozen=True)
class Category:
    """Column of k codes that becomes k + 1 indicator features: one per code and one for missing. Exactly one is 1."""

    name: str
    codes: tuple[float, ...]

    def features(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return features of shape (n, k + 1) for values of shape (n,); NaN is missing."""
        hot = np.column_stack([values[:, None] == np.array(self.codes), np.isnan(values)])
        if not hot.any(axis=1).all():
            raise DataError(f"column {self.name} must hold one of {', '.join(f'{c:g}' for c in self.codes)}, or ?")
        return hot.astype(np.float64)


COLUMNS: tuple[Measure | Category, ...] = (
    Measure("age", 18, 100, usual=55),
    Category("sex", (0, 1)),
    Category("cp", (1, 2, 3, 4)),
    Measure("trestbps", 60, 260, usual=120, zero_is_missing=True),
    # Zero for all of Switzerland and a quarter of the VA. A cholesterol of zero is impossible.
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
"""Columns of the files, in order; `num`, the diagnosis from 0 to 4, comes last."""
DIAGNOSIS = Category("num", (0, 1, 2, 3, 4))
FEATURES = sum(2 if isinstance(column, Measure) else len(column.codes) + 1 for column in COLUMNS)


class HeartDisease(Task):
    """Artery narrowed by more than half (1) or not (0). x is float32 of shape (n, `FEATURES`), from 0 to 1."""

    recipe = Recipe(local_epochs=5, batch_size=16, learning_rate=0.1)
    partition = "natural"
    classes = 2
    class_names = ("not narrowed", "narrowed")
    input_shape = (FEATURES,)
    models = ("softmax",)
    public = True

    def load(self) -> Dataset:
        """Return training and test data of the four hospitals.

        Four fifths of each class of each hospital train, and one fifth tests.
        """
        folder, files = expanded(self.config.data_path), [f"processed.{name}.data" for name in HOSPITALS]
        missing = [name for name in files if not self.config.data_path or not (folder / name).is_file()]
        if missing:
            raise DataError(
                f"task.data-path = {self.config.data_path!r} must be a folder with {', '.join(missing)}; get them from "
                "the UCI Machine Learning Repository, data set 45, Heart Disease"
            )
        splits = []
        for name in files:
            examples = _read_hospital(folder / name)
            split = holdout(examples.y, 0.2, np.random.default_rng(SPLIT_SEED))
            splits.append(tuple(map(examples.take, split)))
        train, test = (Examples.joined(parts) for parts in zip(*splits, strict=True))
        sizes = [len(part) for part, _ in splits]
        return Dataset(train, test, owners=np.repeat(np.arange(len(HOSPITALS)), sizes))

    def rows(self, path: Path) -> Examples:
        """Return the data of an `.npz`, `.data` or `.csv` file of a node.

        An `.npz` file is in the units of x. Another file has 14 columns in UCI's order and no header; `?` is missing.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        if path.suffix.lower() not in (".data", ".csv"):
            return super().rows(path)
        self.refuse_groups(path)
        if not path.is_file():
            raise DataError(f"data-path: no file at {path}; expected one hospital's file of 14 columns")
        # Each line is parsed by itself: under DP-SGD a faulty line must change no other line.
        found = []
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                with suppress(DataError, ValueError, csv.Error):
                    found.append(_encode(np.array([_numbers(number, next(csv.reader([line]), []))])))
        return Examples.joined(found) if found else Examples(np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64))

    def read(self, path: Path) -> Examples:
        """Return the data of a file as `rows` does, and refuse a file with a faulty row.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        if path.suffix.lower() not in (".data", ".csv"):
            return super().read(path)
        self.refuse_groups(path)
        return _read_hospital(path)

    def judged(self, path: Path) -> Judged | None:
        """Return all rows of a `.data` or `.csv` file, with or without the diagnosis; None for another file."""
        if path.suffix.lower() not in (".data", ".csv"):
            return None
        x, y, reasons = [np.zeros((0, FEATURES), np.float32)], list[int](), list[str]()
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(filter(str.strip, file), 1):
                inputs, label, reason = np.zeros((1, FEATURES), np.float32), NO_CLASS, ""
                try:
                    cells = next(csv.reader([line]), [])
                    values = np.array(_numbers(number, cells, len(COLUMNS) + (len(cells) != len(COLUMNS))))
                    inputs = _features(values[: len(COLUMNS), None])
                    if len(cells) > len(COLUMNS) and values[-1] in DIAGNOSIS.codes:
                        label = int(values[-1] > 0)
                except DataError as error:
                    reason = str(error)
                except (ValueError, csv.Error):
                    reason = "has a cell that is neither a number nor ?"
                x.append(inputs)
                y.append(label)
                reasons.append(reason)
        return Judged(np.concatenate(x), np.array(y, np.int64), reasons)

    def build(self) -> Model:
        """Return softmax regression."""
        from cloister.tasks.numpy_models import SoftmaxRegression

        return SoftmaxRegression(features=FEATURES, classes=2)


def _read_hospital(path: Path) -> Examples:
    if not path.is_file():
        raise DataError(f"data-path: no file at {path}; expected one hospital's file of 14 columns")
    try:
        return _encode(_rows(path))
    except DataError as error:
        raise DataError(f"data-path: {path}: {error}") from None


def _rows(path: Path) -> NDArray[np.float64]:
    """Return the numbers of a file, shape (n, columns), with NaN for missing."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [_numbers(number, cells) for number, cells in enumerate(csv.reader(file), 1) if cells]
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
    """Return features of shape (n, `FEATURES`) for the columns, each of shape (n,)."""
    pairs = zip(COLUMNS, values, strict=True)
    features = np.concatenate([column.features(column_values) for column, column_values in pairs], axis=1)
    return features.astype(np.float32)
