"""DP-SGD for small models that give their own gradient: one example at a time, in NumPy."""

from collections.abc import Iterable, Sequence

import numpy as np

from cloister.core import check
from cloister.core.arrays import Row
from cloister.privacy.noise import GaussianNoise
from cloister.privacy.release import noised


def noisy_sum(
    gradients: Iterable[Row], like: Row, *, clipping_norm: float, noise_multiplier: float, noise: GaussianNoise
) -> Row:
    """Σ gradient·min(1, S/‖gradient‖) + N(0, σ²S²), in float64.

    Args:
        gradients: one of each example in the batch; possibly none.
        like: flat arrays of the shapes of a gradient.
        clipping_norm: S > 0.
        noise_multiplier: σ ≥ 0.
        noise: where normal numbers come from.

    Guarantee: one example's joining or leaving moves the un-noised sum by at most S in L2, up to rounding in double
        precision: a Gaussian mechanism of noise multiplier σ. A gradient that is not finite contributes zero.

    Source: Abadi et al. (2016), arXiv:1607.00133, Algorithm 1.
    """
    check.positive(clipping_norm=clipping_norm)
    check.non_negative(noise_multiplier=noise_multiplier)
    total = [np.zeros(piece.size) for piece in like]
    for gradient in gradients:
        factor = _factor(gradient, clipping_norm)
        for piece, part in zip(total, gradient, strict=True) if factor else ():
            piece += factor * part.astype(np.float64)
    return noised(tuple(total), noise_multiplier * clipping_norm, noise)


def _factor(gradient: Sequence[np.ndarray], clipping_norm: float) -> float:
    norm = float(np.sqrt(sum(np.square(part, dtype=np.float64).sum() for part in gradient)))
    return min(1.0, clipping_norm / norm) if 0 < norm < np.inf else 0.0
