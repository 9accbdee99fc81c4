"""Breast cancer in Wisconsin: 569 tumours measured under the microscope, shipped with scikit-learn."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task
from cloister.tasks.partition import holdout
from cloister.tasks.scores import binary_auc
from cloister.tasks.tables import Table

TUMOUR_SPLIT_SEED = 0
"""A constant, so that every run of every strategy is scored on the same tumours."""

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
        train, test = holdout(examples.y, 0.2, np.random.default_rng(TUMOUR_SPLIT_SEED))
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

    def unlabelled(self, path: Path) -> NDArray | None:
        """Return the inputs of a `.csv` file without `target`, or None for another file.

        Raises:
            DataError: the file is not in the task's format.
        """
        return TABLE.unlabelled(path) if path.suffix.lower() == ".csv" else None

    def build(self) -> Model:
        """Return softmax regression."""
        from cloister.tasks.softmax import SoftmaxRegression

        return SoftmaxRegression(features=len(RANGES), classes=2)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Return loss and accuracy, and the AUC if both classes occur.

        Args:
            y: shape (n,).
            scores: class probabilities that the model predicts, shape (n, 2).
        """
        return super().metrics(y, scores) | binary_auc(y, scores)
