"""DP-SGD for small models that give their own gradient: one unit at a time, in NumPy."""

import math
from collections.abc import Callable, Iterable

import numpy as np

from cloister.core.arrays import Row
from cloister.privacy.dpsgd.exact_noise import grid_of, noised_sum
from cloister.privacy.dpsgd.rounding import check_clipping_norm
from cloister.privacy.mechanisms.noise import GaussianNoise

SLACK = 2.0**-16
"""Share of S for roundings in double precision: enough for 2^17 units of 2^30 numbers each."""


def noisy_sum(
    gradients: Iterable[Callable[[], Row]],
    like: Row,
    *,
    clipping_norm: float,
    noise_multiplier: float,
    noise: GaussianNoise,
) -> Row:
    """Σ gradient·min(1, S/‖gradient‖) + exact noise of standard deviation σS, in float64.

    Args:
        gradients: one for each unit of the batch, possibly none; called once, it gives that unit's gradient. A unit is
            an example, or a group of them with the mean of its examples' gradients.
        like: flat arrays of the shapes of a gradient.
        clipping_norm: S, from `rounding.MINIMUM_CLIPPING_NORM` to `MAXIMUM_CLIPPING_NORM`.
        noise_multiplier: σ ≥ 0.
        noise: where the key of the noise comes from.

    Guarantee: among at most 2^17 units one unit's joining or leaving moves the un-noised sum by at most S in L2, and
        noise is exact: see `exact_noise`. It costs what a Gaussian mechanism of noise multiplier σ does. Contributions
        are clipped to S/(1 + `SLACK`), which makes up for roundings. A gradient that is not finite, or whose
        computation raises an exception, contributes zero and changes nothing for the others.

    Raises:
        ConfigError: a number is out of range.

    Source: Abadi et al. (2016), arXiv:1607.00133, Algorithm 1.
    """
    check_clipping_norm(clipping_norm)
    sums = tuple(np.zeros(piece.size) for piece in like)
    grid = grid_of(clipping_norm, noise_multiplier, sum(piece.size for piece in like))
    for gradient in gradients:
        for total, part in zip(sums, _contribution(gradient, like, clipping_norm / (1 + SLACK)), strict=True):
            total += part
    noised_sum(sums, grid, noise, out=sums)
    return sums


def _contribution(gradient: Callable[[], Row], like: Row, bound: float) -> Row:
    """In double precision, no longer than the bound; zero where there is no finite gradient."""
    nothing = tuple(np.zeros(piece.size) for piece in like)
    try:
        found = tuple(
            np.asarray(part, np.float64).reshape(piece.shape) for part, piece in zip(gradient(), like, strict=True)
        )
    except Exception:  # whatever it is, it must not tell the others' sum that it happened
        return nothing
    factor = _factor(found, bound)
    return tuple(factor * part for part in found) if factor else nothing


def _factor(gradient: Row, bound: float) -> float:
    # Squares of doubles underflow below 1e-162: what is lost there is far below any bound that is accepted.
    with np.errstate(over="ignore"):
        norm = math.sqrt(sum(float(np.square(part).sum()) for part in gradient))
    return min(1.0, bound / norm) if 0 < norm < math.inf else 0.0
