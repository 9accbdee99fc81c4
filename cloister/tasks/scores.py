"""Figures of merit that more than one task reports."""

import numpy as np
from numpy.typing import NDArray


def binary_auc(y: NDArray, scores: NDArray) -> dict[str, float]:
    """Area under the ROC curve of class 1, as `{"auc": area}`.

    Args:
        y: labels 0 and 1, shape (n,).
        scores: class probabilities, shape (n, 2).

    Returns:
        An empty mapping where there is no such area: a class is absent, or the model has diverged to NaN.
    """
    if np.unique(y).size < 2 or not np.isfinite(scores).all():
        return {}
    from sklearn.metrics import roc_auc_score

    return {"auc": float(roc_auc_score(y, scores[:, 1]))}


def macro_figures(y: NDArray, scores: NDArray) -> dict[str, float]:
    """F1 score and precision, means over the classes that occur, and the area under the micro-averaged ROC curve.

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
