"""Exact noise on a sum of floats: it is rounded to whole numbers, its sensitivity counts that, integers are added.

With w steps for a unit of the sum, `rounding` bounds how far one unit of a batch moves the sum v as it is computed: by
S. The whole numbers q = rint(v·w) move further, since those of both neighbours are rounded:

1. Rounding moves each of p numbers by half a step at most, on both sides: √p steps in L2.
2. v·w is rounded itself, by 2⁻⁵³ of it. A sum over n ≤ 2²⁵ units is no longer than (n + 1)·S, w·S ≤ 2²⁶, so that is
   just over half a step on both sides together. `SCALING` counts for it, and for what the double w itself is off by.
3. So q moves by w·S + √p + 1 steps at most. That is made equal to the D of a `Grid`, by the choice of w. The grid's
   noise covers a move by D for the multiplier that is claimed (`docs/privacy.md`, "A step of DP-SGD").

The noise is larger than σS by D/(D - √p - 1): by 5·10⁻⁵ of it for 0.8 million parameters and σ = 1.

| edge case | what happens |
|---|---|
| no noise | nothing is rounded |
| noise below 2^-18·S | there is more of it: see `Grid` |
| so much noise that rounding takes up half of D | refused: σ above 2^23/(√p + 1) |
| a sum that is not finite | it is not changed: the caller has to keep it out |
| numbers of the result beyond its precision | they become infinite, which is post-processing |
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from cloister.core import check
from cloister.core.arrays import Row
from cloister.core.errors import ConfigError
from cloister.core.threads import Span, for_each_span, spans
from cloister.privacy.dpsgd.rounding import SLACK, check_clipping_norm
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian, Maker
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise

SCALING = 1.0
"""Steps that the sensitivity counts for roundings of v·w and of w: 2 above."""


def rounding_steps(parameters: int) -> float:
    """By how many steps rounding can add to the L2 distance of two sums.

    Args:
        parameters: p, the numbers of a sum.
    """
    return math.sqrt(parameters) + SCALING


def grid_of(clipping_norm: float, noise_multiplier: float, parameters: int) -> Grid:
    """The public grid that a clipped sum is rounded to.

    Args:
        clipping_norm: S > 0, by which one unit moves the sum as it is computed, in L2.
        noise_multiplier: σ ≥ 0.
        parameters: p, the numbers of the sum.

    Returns:
        A grid on which one unit moves the whole numbers by D steps at most. Its scale is 0 without noise.

    Raises:
        ConfigError: σ is negative or not finite, or so large that rounding would be half of what one unit moves.
    """
    check.non_negative(noise_multiplier=noise_multiplier)
    grid = Grid.of(clipping_norm, noise_multiplier, 1)
    if not grid.scale:
        return grid
    left = grid.steps - rounding_steps(parameters)
    if left < grid.steps / 2:
        largest = noise_multiplier * grid.steps / (2 * rounding_steps(parameters))
        raise ConfigError(
            f"noise_multiplier must be <= {math.floor(largest)} for {parameters} parameters, got {noise_multiplier:g}"
        )
    return replace(grid, bound=clipping_norm * (grid.steps / left))


def noised_sum(sums: Row, grid: Grid, noise: GaussianNoise, out: Row, size: float = 1.0) -> None:
    """Write (rint(sums/step) + exact noise)·step/size, in one pass.

    Args:
        sums: flat arrays of float32 or float64.
        grid: from `grid_of`.
        noise: where the key of the noise comes from: a new one for each sum.
        out: flat arrays of the same sizes, float32 or float64; they may be `sums`.
        size: a public number > 0 that the noised sum is divided by.

    Guarantee: a function of whole numbers, to each of which an integer of the discrete Gaussian law is added; nothing
        of the sum is left in the result but them. Without noise it is sums/size.
    """
    if not grid.scale:
        for piece, part in zip(out, sums, strict=True):
            np.divide(part, size, out=piece, casting="same_kind")
        return
    source = DiscreteGaussian(grid.scale, noise)
    places = source.places(spans([piece.size for piece in sums]))
    scale, unit = 1 / grid.step, grid.step / size

    def work(span: Span, maker: Maker) -> None:
        maker.onto_grid(span.of(sums), places[span], scale, unit, span.of(out))

    for_each_span(list(places), work, source.maker)


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
        noise is exact. It costs what a Gaussian mechanism of noise multiplier σ does. Contributions are clipped to
        S/(1 + `rounding.SLACK`): enough for roundings of 2^17 units of 2^30 numbers each. A gradient that is not
        finite, or whose computation raises an exception, contributes zero and changes nothing for the others.

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
    except Exception:  # of any kind: the others' sum must not show that it happened
        return nothing
    factor = _factor(found, bound)
    return tuple(factor * part for part in found) if factor else nothing


def _factor(gradient: Row, bound: float) -> float:
    # Squares of doubles underflow below 1e-162: what is lost there is far below any bound that is accepted.
    with np.errstate(over="ignore"):
        norm = math.sqrt(sum(float(np.square(part).sum()) for part in gradient))
    return min(1.0, bound / norm) if 0 < norm < math.inf else 0.0
