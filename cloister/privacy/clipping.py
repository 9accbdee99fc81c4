"""Bounding what one client can contribute."""

from dataclasses import replace

import numpy as np

from cloister.core import check
from cloister.core.cohort import NORM_ERROR, Cohort


def clip(cohort: Cohort, bound: float) -> Cohort:
    """Scale every update into the L2 ball of radius `bound`: factor min(1, bound/‖U[i]‖), over all arrays together.

    An update of norm 0 is legal and keeps factor 1. Norms are overstated by their own rounding error first, so that
    the bound holds for the true norm.

    Args:
        cohort: of n updates that nothing has bounded yet.
        bound: C > 0, in units of the weights.

    Returns:
        The same updates with ‖factors[i]·U[i]‖₂ ≤ `bound` for every i, and `l2_bound = bound`.

    Raises:
        ConfigError: `bound` is not a finite number above 0.

    Source: McMahan et al. (2018), arXiv:1710.06963, §3.
    """
    check.positive(clipping_norm=bound)
    return replace(cohort, factors=bound / np.maximum(cohort.norms * (1 + NORM_ERROR), bound), l2_bound=bound)


def clipped_fraction(cohort: Cohort) -> float:
    """Share of the updates that were scaled down. Computed from un-noised norms: not for release."""
    return float(np.mean(cohort.factors < 1)) if len(cohort) else 0.0
