"""Likelihood ratios under Gaussians fitted to shadow runs."""

import numpy as np
from scipy import stats

from cloister.audits.scores import Scores

SMALLEST = 1e-12
"""Smallest standard deviation, in units of the values' own size: exactly repeated runs would have 0."""


def cross_fitted(present: Scores, absent: Scores) -> tuple[Scores, Scores]:
    """Compute the log likelihood ratio of each value.

    The Gaussians are fitted to the other half of the values.

    Args:
        present: values of one kind, shape (m,), m > 1.
        absent: values of the other kind, shape (n,), n > 1.

    Returns:
        Ratios of shapes (m,) and (n,): positive where a value supports `present`.
    """
    found = np.empty(len(present)), np.empty(len(absent))
    for half in (0, 1):
        fitted = present[1 - half :: 2], absent[1 - half :: 2]
        for values, into in zip((present, absent), found, strict=True):
            into[half::2] = ratios(values[half::2], *fitted)
    return found


def ratios(values: Scores, present: Scores, absent: Scores) -> Scores:
    """Compute ln N(value; fit of `present`) - ln N(value; fit of `absent`).

    Args:
        values: scored values.
        present, absent: values to which the Gaussians are fitted.
    """
    return log_density(values, present) - log_density(values, absent)


def log_density(values: Scores, fitted: Scores) -> Scores:
    """Compute the logarithm of a Gaussian's density.

    Args:
        values: points of evaluation.
        fitted: values to which the Gaussian is fitted.
    """
    size = float(np.abs(fitted).max()) or 1.0
    found: Scores = stats.norm.logpdf(values, fitted.mean(), max(float(fitted.std()), SMALLEST * size))
    return found
