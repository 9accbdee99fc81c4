"""Updates as integers: a public grid, truncation toward zero, and exact sums.

An update that is bounded by C is written as whole multiples of a public step, C/D. Integers below 2^53 are added
exactly in doubles, in any order, so that one client moves the sum by exactly its contribution. The sensitivity is D
steps because Σk² ≤ D² is verified for the same numbers that are added.

A bound verifies this: Σk² ≤ Σx² over the numbers x with |x| ≥ 1 before truncation. A sum of squares in single precision
is below Σx² by less than the error that `row_squares` documents, and the clip leaves a margin for it. A contribution
for which the bound fails is shortened.

| edge case | result |
|---|---|
| a number smaller than a step, a subnormal one, -0 | it counts as 0 |
| an update whose integers have, or could have, a norm above D | it is shortened |
| an update with NaN, infinity, or squares that overflow | it counts as 0 |
| no noise | the finest grid on which the sum is exact |
| noise below 2^8 steps of the finest grid, z < 2^-18 | it is increased to 2^8 steps |
| noise of more than 2^24·C | the step is longer than C, and all updates count as 0 |
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cloister.privacy.mechanisms.discrete.sampler import MAX_EXACT, REACH, SMOOTHING, DiscreteGaussian
from cloister.privacy.mechanisms.noise import Keystream
from cloister.utils.cohort import SQUARES_ERROR, Cohort, blocks, row_squares
from cloister.utils.errors import PrivacyError
from cloister.utils.threads import BLOCK, Span

FINEST = 26
"""Log₂ of the most steps in the bound of a release with noise: a double holds the sum of 2^26 such contributions."""
CARRY = 1 << FINEST
"""Unit of the carry of sums."""
DISTINCT = 1 << 16
"""Least number of steps in a standard deviation for which truncation is negligible beside the noise."""
COMPILED = 1 << 14
"""Least number of elements in a span for the compiled kernel: a small model does not wait for its import."""
SHORTER = 1 - 2.0**-12
"""Norm of a shortened contribution, as a share of the bound: verifiably below it after any rounding."""


@dataclass(frozen=True)
class Grid:
    """Grid of a release: whole multiples of a public step.

    Attributes:
        bound: C > 0, in units of the weights.
        steps: D, number of steps in C, an upper bound on the sensitivity of the sum.
        scale: s, the standard deviation of the noise in steps; 0: no noise.

    Guarantee: s² ≥ (z·D)² + 25, so that the release costs at most as much as that of a continuous Gaussian of
        multiplier z, by any accountant and for sampled contributions too (`docs/privacy.md`, "Exact noise").
    """

    bound: float
    steps: float
    scale: int

    @classmethod
    def of(cls, bound: float, multiplier: float, count: int, widest: float = 0.0) -> "Grid":
        """Return the grid of a release.

        Args:
            bound: C > 0, in units of the weights.
            multiplier: z ≥ 0.
            count: n, largest number of contributions in the sum.
            widest: the largest z that the release could have, if z depends on private data. The grid then follows
                this public value, if that leaves 2^16 steps in a standard deviation. 0: z is public.

        Raises:
            PrivacyError: a sum of this many contributions could exceed 2^53.
        """
        if not multiplier:
            return cls(bound, math.ldexp(1.0, 52 - count.bit_length()), 0)
        steps, scale = _following(multiplier)
        if multiplier < widest < math.inf:
            wide, _ = _following(widest)
            enough = _scale(multiplier, wide)
            steps, scale = (wide, enough) if enough >= DISTINCT else (steps, scale)
        if count * steps + REACH >= MAX_EXACT:
            raise PrivacyError(f"{count} contributions are more than a sum of whole numbers has room for")
        return cls(bound, steps, scale)

    @property
    def step(self) -> float:
        """Return the distance between releasable sums, in units of the weights."""
        return self.bound / self.steps

    def covers(self, multiplier: float) -> bool:
        """Return whether its noise is at least that of a multiplier.

        Args:
            multiplier: z ≥ 0.
        """
        return not multiplier or self.scale >= _scale(multiplier, self.steps)

    def whole(self, share: float) -> int:
        """Return a share of the bound in whole steps, at most D after any rounding.

        Args:
            share: from -1 to 1.
        """
        # Rounding is monotone, and D is a double: the product never exceeds it.
        return math.trunc(share * self.steps)

    def noised(self, whole: int, noise: Keystream) -> float:
        """Return a single integer with noise, in units of the weights.

        Args:
            whole: number of steps.
            noise: source of the key of the noise.
        """
        total = np.array([whole], np.int64)
        DiscreteGaussian(self.scale, noise).add(total)
        return float(total[0]) * self.step

    @property
    def dtype(self) -> type[np.signedinteger]:
        """Return the integer type of one contribution; the narrow one is faster."""
        return np.int32 if self.steps <= 1 << FINEST else np.int64

    def settle(self, weights: NDArray, write: Callable[[NDArray], NDArray]) -> None:
        """Write a release, and rewrite it until every contribution is within the bound.

        Overwritten values have not left the process; the rewritten release has the same noise.

        Args:
            weights: factors of the updates before truncation, shape (n,).
            write: writes the release with the given weights, and returns the sum of squares of each contribution
                before truncation, shape (n,), as from `row_squares`.
        """
        squares = write(weights)
        for share in (SHORTER, 0.0):
            if not self.holds(squares).all():
                weights = self.shortened(weights, squares, share)
                squares = write(weights)

    def shortened(self, weights: NDArray, squares: NDArray, share: float) -> NDArray[np.float64]:
        """Return the weights, reduced for contributions not verified as bounded.

        Args:
            weights: factors of the updates before truncation, shape (n,).
            squares: sum of squares of each contribution before truncation, as from `row_squares`.
            share: norm of a shortened contribution, as a share of the bound.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            smaller = np.nan_to_num(weights * (share * self.steps) / np.sqrt(squares))
        return np.where(self.holds(squares), weights, smaller)

    def holds(self, squares: NDArray) -> NDArray[np.bool_]:
        """Return a mask of the contributions that have Σk² ≤ D².

        Args:
            squares: sum of squares of each contribution before truncation, as from `row_squares`.
        """
        return squares * (1 + SQUARES_ERROR) <= self.steps**2

    def contains(self, squares: float) -> bool:
        """Return whether integers are within the bound, exactly.

        Rounding never makes a sum of positive numbers smaller than a part of it. So if a sum of integers is below 2^53,
        all of its partial sums were integers below 2^53, and nothing was rounded.

        Args:
            squares: Σk², added in any order.
        """
        return squares <= math.floor(Fraction(self.steps) ** 2)


class IntegerSums:
    """Sums of integers in narrow types, of which processors add twice as many at a time as of doubles.

    A sum is low + 2^26·high. Before another contribution could overflow `low`, its upper bits are carried to `high`.

    Args:
        grid: of the numbers.
        size: largest number of sums.

    Guarantee: sums are exact if n·D < 2^53 for the n contributions in them. They are the same in any order, and
        contributions can be subtracted again.
    """

    def __init__(self, grid: Grid, size: int) -> None:
        self._low = np.zeros(size, grid.dtype)
        self._high: NDArray[np.signedinteger] | None = None
        # A carry leaves less than 2^26 behind.
        self._room = (np.iinfo(grid.dtype).max - CARRY) // max(1, math.floor(grid.steps))
        self._changes = 0

    def clear(self) -> None:
        """Reset all sums to 0."""
        self._low[:] = self._changes = 0
        self._high = None

    def change(self, whole: NDArray[np.signedinteger], sign: int) -> None:
        """Add or subtract a contribution.

        Args:
            whole: its integers, at most D each.
            sign: 1 or -1.
        """
        low = self.room(len(whole))
        (np.add if sign > 0 else np.subtract)(low, whole, out=low)

    def room(self, count: int) -> NDArray[np.signedinteger]:
        """Return integers in which one contribution can be added or subtracted, in place.

        Args:
            count: length of the contribution, whose integers are at most D each.
        """
        if self._changes == self._room:
            carried = self._low >> FINEST
            self._high = carried if self._high is None else self._high + carried
            self._low &= CARRY - 1
            self._changes = 0
        self._changes += 1
        return self._low[:count]

    def write(self, out: NDArray[np.float64]) -> None:
        """Write the first `len(out)` sums.

        Args:
            out: receives the sums.
        """
        np.copyto(out, self._low[: len(out)])
        if self._high is not None:
            out += self._high[: len(out)] * float(CARRY)


class Adder:
    """Truncation and summation of updates as integers, on one thread, in memory of its own.

    Args:
        grid: of the integers.
        dtype: of the updates.

    Attributes:
        whole, sums: memory for the sums of a span.
    """

    def __init__(self, grid: Grid, dtype: DTypeLike) -> None:
        self._grid = grid
        self._updates = np.empty(BLOCK, dtype)
        self._integers: NDArray[np.signedinteger] = np.empty(BLOCK, grid.dtype)
        self.whole = IntegerSums(grid, BLOCK)
        self.sums = np.empty(BLOCK)

    def add_up(
        self, cohort: Cohort, span: Span, weights: NDArray, squares: NDArray, sums: IntegerSums, sign: int = 1
    ) -> None:
        """Add Σ trunc(weights[i]·U[i]) over the columns in `span` to sums.

        A row with a norm above D in these columns alone counts as 0 in them, so that no integer is above D.

        Args:
            cohort: of n updates.
            span: the columns.
            weights: factor of each update, factors[i]/step, shape (n,); 0: the update is ignored.
            squares: receives Σ(weights[i]·U[i])² of each row over these columns, shape (n,), as from `row_squares`.
            sums: of these columns.
            sign: 1, or -1 to subtract a contribution with the same weights.
        """
        weights, compiled = weights.astype(self._updates.dtype), None
        if len(span) >= COMPILED and all(span.of(row).dtype == weights.dtype for row in (cohort.sent, *cohort.rows)):
            compiled = kernel(weights.dtype, self._integers.dtype)
        if compiled is None:
            for row in self._rows(cohort, span, weights, squares):
                sums.change(row, sign)
            return
        base, block = span.of(cohort.sent), self._updates[: len(span)]
        for at, trained in enumerate(cohort.rows):
            compiled.update(span.of(trained), base, weights[at], block)
            with np.errstate(over="ignore", invalid="ignore"):
                squares[at] = row_squares(block[None])[0]
            if self._grid.holds(squares[at]):
                compiled.change(block, sums.room(len(span)), sign)

    def _rows(
        self, cohort: Cohort, span: Span, weights: NDArray, squares: NDArray
    ) -> Iterator[NDArray[np.signedinteger]]:
        """Yield the integers of each contribution."""
        with np.errstate(over="ignore", invalid="ignore"):
            for which, block in blocks(cohort, span, self._updates):
                block *= weights[which, None]
                block[weights[which] == 0] = 0
                squares[which] = row_squares(block)
                block[~self._grid.holds(squares[which])] = 0
                whole = self._integers[: block.size].reshape(block.shape)
                np.copyto(whole, block, casting="unsafe")  # toward zero
                yield from whole


@cache
def kernel(dtype: np.dtype, integers: np.dtype) -> ModuleType | None:
    """Return the compiled kernel, if numba is installed and supports the dtype.

    It is imported on first use.

    Args:
        dtype: of updates.
        integers: of sums.

    Raises:
        PrivacyError: its sums differ from NumPy's, for instance with one from an older cache.
    """
    if dtype not in (np.float32, np.float64):
        return None
    try:
        from cloister.privacy.mechanisms.discrete import numba_kernel
    except ImportError:
        return None
    if not adds_as_numpy(numba_kernel, dtype, integers):
        raise PrivacyError("numba's kernel of sums is not NumPy's; empty numba's cache, or uninstall numba")
    return numba_kernel


def adds_as_numpy(compiled: ModuleType, dtype: np.dtype, integers: np.dtype) -> bool:
    """Return whether a kernel truncates, adds and subtracts like NumPy.

    Args:
        compiled: a module with the function `change`.
        dtype: of updates.
        integers: of sums.
    """
    wide = np.linspace(-float(CARRY), float(CARRY), 1001)
    numbers = np.concatenate([wide, wide / CARRY * 3.0, [-0.0, 5e-324, -1e-40]]).astype(dtype)
    sums = np.arange(len(numbers), dtype=integers)
    more, less = sums.copy(), sums.copy()
    compiled.change(numbers, more, 1)
    compiled.change(numbers, less, -1)
    whole = numbers.astype(integers)
    return np.array_equal(more, sums + whole) and np.array_equal(less, sums - whole)


def _following(multiplier: float) -> tuple[float, int]:
    """Return D and s for a public z; s is a power of two, for few tables."""
    _, exponent = math.frexp(multiplier)
    scale = 1 << min(24, max(8, FINEST - 1 + exponent))
    # Reduced by the rounding error of these three operations.
    return min(float(1 << FINEST), math.sqrt(scale**2 - SMOOTHING**2) / multiplier * (1 - 2.0**-50)), scale


def _scale(multiplier: float, steps: float) -> int:
    """Return the smallest s with s² ≥ (z·D)² + 25."""
    least = math.ceil((Fraction(multiplier) * Fraction(steps)) ** 2) + SMOOTHING**2
    return math.isqrt(least - 1) + 1
