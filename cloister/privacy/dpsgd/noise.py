"""Bounds on the effect of roundings on a clipped sum, and exact noise on the sum, which is rounded to integers.

**Roundings of the sum.** The release is the result of float32 kernels for Σ fᵢ·gᵢ, not the exact sum. Contributions
are therefore clipped to S/(1 + η), where η·S/(1 + η) is proved to be at least the distance that roundings add between
two sums of which one has an additional example. Let u = 2⁻²⁴, with at most m examples in a call of a kernel and at
most M examples in a batch, the number of places (`batches.places_of`):

1. Norms are overstated (`forms.squares`, `forms.gram_squares`), so that in exact arithmetic fᵢ·‖gᵢ‖ ≤ S/(1 + η), and
   if positions can cancel also fᵢ·Σ_t‖a_t‖‖d_t‖ ≤ `MASS_PER_NORM`·S/(1 + η).
2. A sum over m examples has at most m + 2 roundings for each term, in any order of additions, so it is within
   γ·Σᵢ fᵢ‖gᵢ‖ of the exact one, γ = (m + `EXTRA`)u/(1 - (m + `EXTRA`)u) (Higham, 2002, §3.1 and §4.2).
   If positions can cancel, sums are in double precision, where the factor `MASS_PER_NORM` costs less than that.
3. Both neighbours' sums have this error: 2·γ·M·S/(1 + η) together.
4. Results of calls are summed in double precision. That, and underflow, is within `SLACK` for batches up to 2¹⁷.

An example's own gradient is computed with roundings too. They may have any size, since the bound applies to the
result, if this depends on no other example: `clipped_sums` ensures that.

**Rounding to integers.** With w steps for a unit of the sum, one unit of a batch moves the computed sum v by S at
most. The integers q = rint(v·w) move further, since the sums of both neighbours are rounded:

1. Rounding moves each of p numbers by half a step at most, on both sides: √p steps in L2.
2. v·w is rounded itself, by 2⁻⁵³ of it. For n ≤ 2²⁵ units ‖v‖ ≤ (n + 1)·S, and w·S ≤ 2²⁶. So this is at most
   2·2⁻⁵³·(2²⁵ + 1)·2²⁶ < ½ + 2⁻²⁴ steps on both sides together, that of w less than 2⁻²⁴, underflow far less.
   `SCALING` covers all three.
3. So q moves by w·S + √p + 1 steps at most. The choice of w makes this equal to the D of a `Grid`. The grid's noise
   covers a move by D for the claimed multiplier (`docs/privacy.md`, "A step of DP-SGD").

The noise is larger than σS by the factor D/(D - √p - 1): by 5·10⁻⁵ of it for 0.8 million parameters and σ = 1.

| edge case | result |
|---|---|
| no noise | no rounding |
| noise below 2^-18·S | it is increased: see `Grid` |
| so much noise that rounding takes up half of D | refused: σ above 2^23/(√p + 1) |
| a sum that is not finite | it stays unchanged: the caller has to exclude it |
| numbers of the result beyond its precision | they become infinite, which is post-processing |

Source: Higham (2002), Accuracy and Stability of Numerical Algorithms, 2nd ed.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.dpsgd.batches import places_of
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian, Maker
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils import check
from cloister.utils.arrays import Row
from cloister.utils.crash import note_failure
from cloister.utils.errors import ConfigError
from cloister.utils.threads import Span, for_each_span, spans

UNIT = 2.0**-24
"""Unit roundoff of float32."""
UNDERFLOW = 2.0**-125
"""Largest underflow error of a float32 square below the smallest normal number, and of its addition."""
EXTRA = 4
"""Further roundings of a term besides the additions: of its factor, of the products, and one in reserve."""
MASS_PER_NORM = 2.0**10
"""Ratio of the norms of an example's positions to the norm of their sum above which the former set the clip factor."""
MAX_POSITIONS = 2**14
"""Most positions for which 2 and the bound on a Gram norm hold."""
SLACK = 2.0**-16
BLOCK = 128
"""Units whose inputs are held in double precision at a time."""
MAX_FEATURES = 1 << 16
"""Most features of `clipped_products`, whose norms are sums of as many squares."""
ONE_THREAD = 1 << 18
"""Multiplications of a product that OpenBLAS does on one thread: others would spin on after each of many calls."""
AT_ONCE = 1024
"""Most units of a call: sums in double precision are within 2⁻²⁰·S of the exact one for 2¹⁷ units in total."""
ROUNDED = 2.0**-51
"""Relative overstatement of a sum of squares per summand: at least twice the rounding error of any order in double."""
DOUBLE_UNDERFLOW = 2.0**-1021
"""Bound on the underflow error of a square of a double. The other factor of a product may be large."""
MINIMUM_CLIPPING_NORM = 1e-12
"""Least S: far above the underflow error of a float32, and far below the norm of any useful gradient."""
MAXIMUM_CLIPPING_NORM = 1e30
"""Largest S: a float32 can hold the sum of 10⁸ contributions of this norm, which noise covers only if it is finite."""
SMALLEST_FACTOR = 2.0**-126
"""Least clip factor: a smaller one would lose bits as a float32, and counts as 0."""
ROOT = 1 + 2.0**-40
"""Factor that covers the roundings of a root, and of the sum of a few squares under it, in double precision."""
MAXIMUM_OVERSTATEMENT = 1 / 10
"""Largest part of S for roundings: larger batches take several calls."""
SCALING = 1.0
"""Steps in the sensitivity for roundings of v·w and of w: see 2 of the second list above."""


def check_clipping_norm(clipping_norm: float) -> None:
    """Refuse a bound S that underflow or overflow would affect.

    Raises:
        ConfigError: S is not a number from `MINIMUM_CLIPPING_NORM` to `MAXIMUM_CLIPPING_NORM`.
    """
    check.positive(clipping_norm=clipping_norm)
    if clipping_norm > MAXIMUM_CLIPPING_NORM:
        raise ConfigError(f"clipping_norm must be <= {MAXIMUM_CLIPPING_NORM:g}, got {clipping_norm:g}")
    if clipping_norm < MINIMUM_CLIPPING_NORM:
        raise ConfigError(f"clipping_norm must be >= {MINIMUM_CLIPPING_NORM:g}, got {clipping_norm:g}")


def overstatement(batch_size: int, at_once: int) -> float:
    """Return η, the relative margin of the bound for roundings, by B and the number m of units in a call."""
    roundings = (at_once + EXTRA) * UNIT
    return 2 * places_of(batch_size) * roundings / (1 - roundings) + SLACK


def most_at_once(batch_size: int) -> int:
    """Return the most units in a call with η up to `MAXIMUM_OVERSTATEMENT`.

    Args:
        batch_size: B, at most 2¹⁶, for which such a number exists.
    """
    share = (MAXIMUM_OVERSTATEMENT - SLACK) / (2 * places_of(batch_size))
    return math.floor(share / (1 + share) / UNIT) - EXTRA


def rounding_steps(parameters: int) -> float:
    """Return the number of steps that rounding can add to the L2 distance of two sums of p numbers."""
    return math.sqrt(parameters) + SCALING


def grid_of(clipping_norm: float, noise_multiplier: float, parameters: int) -> Grid:
    """Return the public grid to which a clipped sum is rounded.

    Args:
        clipping_norm: S > 0, L2 sensitivity of the computed sum to one unit.
        noise_multiplier: σ ≥ 0.
        parameters: p, the numbers of the sum.

    Returns:
        A grid on which one unit moves the integers by D steps at most. Its scale is 0 without noise.

    Raises:
        ConfigError: σ is negative or not finite, or so large that rounding would take up half of D.
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
        noise: source of the key of the noise: a new key for each sum.
        out: flat arrays of the same sizes, float32 or float64; they may be `sums`.
        size: public divisor of the noised sum, > 0.

    Guarantee: the result is a function of integers alone, to each of which an integer of the discrete Gaussian law is
        added. Without noise it is sums/size.
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
    shares: Iterable[float] = repeat(1.0),
) -> Row:
    """Return the sum of `clipped_sum` + exact noise of deviation σS, in float64.

    Args:
        gradients, like, clipping_norm, shares: as in `clipped_sum`.
        noise_multiplier: σ ≥ 0.
        noise: source of the key of the noise.

    Guarantee: the cost is that of a Gaussian mechanism of noise multiplier σ, as noise is exact.

    Raises:
        ConfigError: a number is out of range.

    Source: Abadi et al. (2016), arXiv:1607.00133, Algorithm 1.
    """
    grid = grid_of(clipping_norm, noise_multiplier, sum(piece.size for piece in like))
    sums = clipped_sum(gradients, like, clipping_norm, shares)
    noised_sum(sums, grid, noise, out=sums)
    return sums


def clipped_sum(
    gradients: Iterable[Callable[[], Row]], like: Row, clipping_norm: float, shares: Iterable[float] = repeat(1.0)
) -> Row:
    """Return Σ gradient·min(1, c·S/‖gradient‖) without noise, in float64: not for release.

    Args:
        gradients: functions, one for each unit of the batch, possibly none; each is called once and returns its unit's
            gradient. A unit is an example, or a group of them with the mean of its examples' gradients.
        like: flat arrays of the shapes of a gradient.
        clipping_norm: S, from `MINIMUM_CLIPPING_NORM` to `MAXIMUM_CLIPPING_NORM`.
        shares: c of each unit, a function of this unit alone. Numbers outside of [0, 1] count as its nearest end, NaN
            as 1.

    Guarantee: among at most 2^17 units one unit's joining or leaving moves the sum by at most S in L2. Contributions
        are clipped to S/(1 + `SLACK`): enough for roundings of 2^17 units of 2^30 numbers each. A gradient that is not
        finite, or whose computation raises an exception, contributes zero and does not affect other units.

    Raises:
        ConfigError: S is out of range.
    """
    check_clipping_norm(clipping_norm)
    sums = tuple(np.zeros(piece.size) for piece in like)
    for gradient, share in zip(gradients, shares, strict=False):
        try:
            found = tuple(
                np.asarray(part, np.float64).reshape(piece.shape) for part, piece in zip(gradient(), like, strict=True)
            )
        except Exception as error:  # of any kind: the sum of the other units must not depend on it
            note_failure(error)
            continue
        # `min` returns its first argument for NaN.
        if factor := _factor(found, max(0.0, min(1.0, share)) * clipping_norm / (1 + SLACK)):
            for total, part in zip(sums, found, strict=True):
                total += factor * part
    return sums


def clipped_products(
    inputs: NDArray, errors: NDArray, clipping_norm: float, shares: NDArray
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return `clipped_sum` of gradients (aᵢ·eᵢᵀ, eᵢ), those of a linear layer with a bias, without noise.

    The norm of such a gradient is √(‖aᵢ‖² + 1)·‖eᵢ‖. So no gradient is computed, but products of blocks of units. Both
    are first rounded to single precision, so that no square in double precision underflows or overflows.

    Args:
        inputs: a, shape (n, features), a row for each unit; features at most `MAX_FEATURES`.
        errors: e, shape (n, outputs): row i must be a function of unit i alone, to the last bit.
        clipping_norm: S, as in `clipped_sum`.
        shares: c of each unit, as there; shape (n,).

    Returns:
        The sums of aᵢ·eᵢᵀ, shape (features, outputs), and of eᵢ, shape (outputs,).

    Guarantee: that of `clipped_sum` for arrays that are there: a row with a number that is not finite in single
        precision contributes zero. Factors and products are in double precision. Factors are within 2⁻³⁷ of the
        exact ones: of n ≤ 2¹⁷ units, they move the sum by less than 2⁻¹⁹·S. Sums of n terms, in any order, are within
        (n + 8)·2⁻⁵³·n·S < 2⁻¹⁸·S. For both neighbours that is below `SLACK`, even if kernels compute a row differently
        beside other rows.

    Raises:
        ConfigError: S is out of range.
    """
    check_clipping_norm(clipping_norm)
    sums, biases = np.zeros((errors.shape[1], inputs.shape[1])), np.zeros(errors.shape[1])
    at_once = max(1, ONE_THREAD // sums.size)
    bounds = np.nan_to_num(np.clip(shares, 0, 1), nan=1.0) * (clipping_norm / (1 + SLACK))
    for start in range(0, len(inputs), BLOCK):
        units = slice(start, start + BLOCK)
        with np.errstate(all="ignore"):
            a, e = (part[units].astype(np.float32, copy=False).astype(np.float64) for part in (inputs, errors))
            norms = np.sqrt((np.einsum("ij,ij->i", a, a) + 1) * np.einsum("ij,ij->i", e, e))
            factors = np.where((norms > 0) & (norms < np.inf), np.minimum(1, bounds[units] / norms), 0)
        out = factors == 0  # NaN times 0 would stay
        a[out], e[out] = 0, 0
        e *= factors[:, None]
        for first in range(0, len(a), at_once):
            sums += e[first : first + at_once].T @ a[first : first + at_once]
        biases += e.sum(axis=0)
    return sums.T, biases


def _factor(gradient: Row, bound: float) -> float:
    """Return the factor that clips a gradient; 0 if it is not finite."""
    # Squares of doubles underflow below 1e-162: the error is far below any accepted bound.
    with np.errstate(over="ignore"):
        norm = math.sqrt(sum(float(np.square(part).sum()) for part in gradient))
    return min(1.0, bound / norm) if 0 < norm < math.inf else 0.0
