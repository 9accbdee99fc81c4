"""Two-sided tests of noise, with their false-alarm rates."""

import math

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-9


def std_is(sample: np.ndarray, std: float, tolerance: float = 0.02) -> bool:
    """Return whether a sample can come from N(0, std²), to `tolerance` in its standard deviation.

    With n numbers the sample's deviation is off by about 1/√(2n); n must be large enough that a right sample leaves
    the tolerance with probability below `FALSE_ALARM` (six deviations).
    """
    assert 6 / math.sqrt(2 * sample.size) < tolerance, "the sample is too small for this tolerance"
    centred = abs(sample.mean()) < 6 * std / math.sqrt(sample.size)
    return centred and abs(sample.std() / std - 1) < tolerance


def is_normal(sample: np.ndarray, std: float) -> bool:
    """Kolmogorov-Smirnov against N(0, std²)."""
    return stats.kstest(sample / std, "norm").pvalue > FALSE_ALARM
