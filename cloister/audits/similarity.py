"""Similarity of two images: the structural similarity index.

Source: Wang et al. (2004), IEEE Transactions on Image Processing 13(4), with a flat window instead of a Gaussian one
and unbiased covariances, as scikit-image has it.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

WINDOW = 7
"""Pixels per side of a window."""
K1, K2 = 0.01, 0.03


def ssim(one: NDArray, other: NDArray) -> float:
    """Return the mean structural similarity of two grey images.

    It is 1 for equal images, and about 0 for unrelated ones.

    Args:
        one: shape (height, width), each at least 7, values from 0 to 1.
        other: of the same shape.
    """
    x, y = (  # every window as a row
        sliding_window_view(image.astype(np.float64), (WINDOW, WINDOW)).reshape(-1, WINDOW**2) for image in (one, other)
    )
    mean_x, mean_y = x.mean(axis=1), y.mean(axis=1)
    unbiased = WINDOW**2 / (WINDOW**2 - 1)
    variance_x, variance_y = x.var(axis=1) * unbiased, y.var(axis=1) * unbiased
    covariance = ((x * y).mean(axis=1) - mean_x * mean_y) * unbiased
    light = (2 * mean_x * mean_y + K1**2) / (mean_x**2 + mean_y**2 + K1**2)
    structure = (2 * covariance + K2**2) / (variance_x + variance_y + K2**2)
    return float((light * structure).mean())
