"""Breast cancer in Wisconsin (569 tumours, shipped with scikit-learn) and heart disease in four hospitals (UCI).

No constant of heart disease is computed from its data. Ranges and substitutes are public clinical knowledge. So a
feature has the same meaning in every hospital, and preprocessing reveals nothing about a hospital's patients.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from cloister.tasks.base import Dataset, Examples, Judged, Model, Recipe, Task
from cloister.tasks.columns import MISSING, Category, Features, Number
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


class Patients(Task):
    """Binary classification of the rows of CSV files, and of `.npz` files in the units of x.

    Attributes:
        table: meaning of the columns.
        suffixes: of the CSV files.
    """

    classes = 2
    models = ("softmax",)
    table: ClassVar[Table]
    suffixes: ClassVar[tuple[str, ...]] = (".csv",)

    def rows(self, path: Path) -> Examples:
        """Return the data of a file of a node.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        if path.suffix.lower() not in self.suffixes:
            return super().rows(path)
        self.refuse_groups(path)
        return self.table.rows(path)

    def read(self, path: Path) -> Examples:
        """Return the data of a file as `rows` does, and refuse a file with a faulty row.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        if path.suffix.lower() not in self.suffixes:
            return super().read(path)
        self.refuse_groups(path)
        return self.checked(self.table.read(path), path)

    def judged(self, path: Path) -> Judged | None:
        """Return all rows of a CSV file, with or without the label; None for another file.

        Raises:
            DataError: the file is no table with the columns of inputs.
        """
        return self.table.judged(path) if path.suffix.lower() in self.suffixes else None

    def build(self) -> Model:
        """Return softmax regression."""
        from cloister.tasks.numpy_models import SoftmaxRegression

        return SoftmaxRegression(features=self.table.width, classes=2)


class BreastCancer(Patients):
    """Malignant (0) or benign (1). x is float32 of shape (n, 30), each feature from about 0 to about 1.

    A `.csv` file is in the units of `RANGES`, and has its 30 columns and `target` (0 or 1), in any order; other columns
    are ignored.
    """

    recipe = Recipe(local_epochs=5, batch_size=16, learning_rate=0.5)
    public = True
    class_names = ("malignant", "benign")
    input_shape = (len(RANGES),)
    bundled = True
    table = Table(RANGES, "target", 2, class_names, tolerance=0.02)

    def load(self) -> Dataset:
        """Return four fifths of each class as training data and one fifth as test data."""
        from sklearn.datasets import load_breast_cancer

        features, labels = load_breast_cancer(return_X_y=True)
        examples = Examples(self.table.scaled(features), labels.astype(np.int64))
        train, test = holdout(examples.y, 0.2, np.random.default_rng(SPLIT_SEED))
        return Dataset(examples.take(train), examples.take(test))


HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
"""Owners of the examples, in the order of their numbers."""


@dataclass(frozen=True)
class Codes:
    """Codes of a public list. Each has an input, and so has a missing value. Another text makes its row useless."""

    texts: tuple[str, ...]

    @property
    def width(self) -> int:
        """Return the length of the list, and one."""
        return len(self.texts) + 1

    def features(self, cells: Sequence[str], missing: Collection[str]) -> Features:
        """Return one 1 for each cell: at its place in the list, or for a missing value."""
        hot, _ = Category(self.texts).features(cells, missing)
        other, must = len(self.texts), f"must hold one of {', '.join(self.texts)}, or ?"
        return np.delete(hot, other, axis=1), [must if row[other] else "" for row in hot]


COLUMNS: dict[str, Number | Codes] = {
    "age": Number(18, 100, usual=55),
    "sex": Codes(("0", "1")),
    "cp": Codes(("1", "2", "3", "4")),
    # No living patient has a zero here, but some hospitals wrote it for "not measured": of cholesterol, all of
    # Switzerland and a quarter of the VA.
    "trestbps": Number(60, 260, usual=120, missing=("0",)),
    "chol": Number(50, 800, usual=200, missing=("0",)),
    "fbs": Codes(("0", "1")),
    "restecg": Codes(("0", "1", "2")),
    "thalach": Number(40, 240, usual=150, missing=("0",)),
    "exang": Codes(("0", "1")),
    "oldpeak": Number(-5, 10, usual=0),
    "slope": Codes(("1", "2", "3")),
    "ca": Number(0, 3, usual=0),
    "thal": Codes(("3", "6", "7")),
}
"""Columns of the files, in order; `num`, the diagnosis from 0 to 4, comes last."""
DIAGNOSES = {"not narrowed": ("0",), "narrowed": ("1", "2", "3", "4")}


class HeartDisease(Patients):
    """Artery narrowed by more than half (1) or not (0). x is float32 of shape (n, 38), from 0 to 1.

    A `.data` or `.csv` file has 14 columns in UCI's order and no header; `?` is missing.
    """

    recipe = Recipe(local_epochs=5, batch_size=16, learning_rate=0.1)
    public = True
    partition = "natural"
    class_names = tuple(DIAGNOSES)
    # Files with all 76 attributes have -9 for a missing value.
    table = Table(COLUMNS, "num", 2, DIAGNOSES, missing=(*MISSING, "-9"), order=(*COLUMNS, "num"))
    input_shape = (table.width,)
    suffixes = (".data", ".csv")

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
            examples = self.table.read(folder / name)
            split = holdout(examples.y, 0.2, np.random.default_rng(SPLIT_SEED))
            splits.append(tuple(map(examples.take, split)))
        train, test = (Examples.joined(parts) for parts in zip(*splits, strict=True))
        sizes = [len(part) for part, _ in splits]
        return Dataset(train, test, owners=np.repeat(np.arange(len(HOSPITALS)), sizes))
