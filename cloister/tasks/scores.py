"""Metrics that several tasks report."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RATES = np.linspace(0, 1, 101)
"""Shares of false alarms at which a ROC curve is kept."""
SMALLER = ("loss", "rmse", "mse", "mae", "error")
"""Scores for which a smaller value is better; for every other score, a larger value is better."""


def is_smaller_better(name: str) -> bool:
    """Return whether a smaller value of a score is better.

    Args:
        name: of the score, such as `loss`; an output's score has the output's name before it, such as `age.rmse`.
    """
    return name.rpartition(".")[2] in SMALLER


def class_figures(y: NDArray, scores: NDArray) -> dict[str, float]:
    """Return the macro F1 and AUC of a classifier, which show what accuracy hides if classes are imbalanced.

    Args:
        y: labels, shape (n,).
        scores: class probabilities, shape (n, classes).

    Returns:
        `f1` and `auc`, as in `Classification`; no `auc` if it is undefined.
    """
    found = Classification.of(y, scores)
    return {"f1": found.macro_f1} | ({} if found.auc is None else {"auc": found.auc})


def macro_figures(y: NDArray, scores: NDArray) -> dict[str, float]:
    """Return the macro F1 score and precision, and the micro-averaged AUC.

    Macro means are over the classes that occur. The AUC is the area under the ROC curve.

    Args:
        y: labels, shape (n,).
        scores: class probabilities, shape (n, classes).

    Returns:
        `f1`, `precision` and `auc`; no `auc` of a model that has diverged to NaN.
    """
    from sklearn.metrics import precision_recall_fscore_support, roc_auc_score

    chosen = scores.argmax(axis=1)
    precision, _, f1, _ = precision_recall_fscore_support(y, chosen, average="macro", zero_division=0)
    figures = {"f1": float(f1), "precision": float(precision)}
    if np.isfinite(scores).all():
        figures["auc"] = float(roc_auc_score(np.eye(scores.shape[1])[y].ravel(), scores.ravel()))
    return figures


@dataclass(frozen=True)
class ClassScores:
    """Scores of a classifier on one class.

    Attributes:
        name: of the class.
        precision: share of true members among the examples predicted as this class; 0 without such predictions.
        recall: share of this class's examples that are predicted as such; 0 without examples.
        f1: harmonic mean of the two.
        support: number of examples of this class.
    """

    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Classification:
    """Scores of a classifier, class by class.

    Attributes:
        confusion: rows are true classes, columns predicted ones, in the order of the classes.
        classes: one entry per class.
        macro_f1: mean F1 of the classes that have examples.
        auc: mean one-vs-rest area under the ROC curve over the classes. None if a class has no examples, or the model
            has diverged to NaN.
    """

    confusion: tuple[tuple[int, ...], ...]
    classes: tuple[ClassScores, ...]
    macro_f1: float
    auc: float | None

    @property
    def majority(self) -> float:
        """Return the accuracy of always answering the most frequent class; 0 without examples."""
        supports = [scored.support for scored in self.classes]
        return max(supports) / max(1, sum(supports))

    @classmethod
    def of(cls, y: NDArray, scores: NDArray, names: Sequence[str] = ()) -> "Classification":
        """Score predictions; the predicted class is the one with the largest score.

        Args:
            y: labels from 0 on, shape (n,).
            scores: class probabilities, shape (n, classes).
            names: of the classes; empty: their numbers.
        """
        count = scores.shape[1]
        named = names or [str(number) for number in range(count)]
        cells = np.bincount(y.astype(np.int64) * count + scores.argmax(axis=1), minlength=count * count).reshape(
            count, count
        )
        classes = []
        for number, name in enumerate(named):
            hits, support, given = cells[number, number], cells[number].sum(), cells[:, number].sum()
            f1 = 2 * hits / (support + given) if support + given else 0.0
            precision, recall = (float(hits / whole) if whole else 0.0 for whole in (given, support))
            classes.append(ClassScores(name, precision, recall, float(f1), int(support)))
        present = [scored.f1 for scored in classes if scored.support]
        confusion = tuple(tuple(int(cell) for cell in row) for row in cells)
        return cls(confusion, tuple(classes), float(np.mean(present)) if present else 0.0, _macro_auc(y, scores))


@dataclass(frozen=True)
class RocCurve:
    """Receiver operating characteristic of one class against the others.

    Attributes:
        name: of the class.
        auc: area under the curve.
        found: share of the class's examples that are found, at each share of false alarms in `RATES`.
    """

    name: str
    auc: float
    found: tuple[float, ...]


def roc_curves(members: NDArray, scores: NDArray, names: Sequence[str]) -> list[RocCurve]:
    """Return the ROC curve of each class that some of the examples have, and others lack.

    Args:
        members: 1 where an example is of a class, else 0, shape (n, classes).
        scores: shape (n, classes); a larger one speaks for the class.
        names: of the classes.

    Returns:
        One entry per such class; none of a model that has diverged to NaN.
    """
    from sklearn.metrics import roc_curve

    curves = []
    for name, inside, score in zip(names, members.T.astype(bool), scores.T, strict=True):
        if inside.any() and not inside.all() and np.isfinite(score).all():
            alarms, found, _ = roc_curve(inside, score)
            kept = tuple(np.interp(RATES, alarms, found).round(4).tolist())
            curves.append(RocCurve(name, _auc(score[inside], score[~inside]), kept))
    return curves


def _macro_auc(y: NDArray, scores: NDArray) -> float | None:
    count = scores.shape[1]
    if np.unique(y).size < count or not np.isfinite(scores).all():
        return None
    # Two classes have complementary scores, so that class 1 alone decides.
    numbers = [1] if count == 2 else range(count)
    return float(np.mean([_auc(scores[y == number, number], scores[y != number, number]) for number in numbers]))


def _auc(inside: NDArray, outside: NDArray) -> float:
    """Return the share of pairs in which the member of a class has the larger score; ties count as half.

    This is the area under the ROC curve. scikit-learn takes a hundred times as long on a client's few examples.
    """
    ordered = np.sort(outside)
    below = np.searchsorted(ordered, inside, "left") + np.searchsorted(ordered, inside, "right")
    return float(below.mean() / (2 * len(outside)))


def mean_auc(y: NDArray, scores: NDArray) -> dict[str, float]:
    """Return the mean area under the ROC curve over several findings, as `{"auc": area}`.

    Args:
        y: 0 or 1, shape (n, findings).
        scores: probabilities of 1, shape (n, findings).

    Returns:
        The mean over the findings of which there are examples with and without; an empty mapping if there are none.
    """
    pairs = np.stack([1 - scores, scores], axis=-1)
    areas = [_macro_auc(y[:, place], pairs[:, place]) for place in range(y.shape[1])]
    defined = [area for area in areas if area is not None]
    return {"auc": float(np.mean(defined))} if defined else {}
