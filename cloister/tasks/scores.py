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
