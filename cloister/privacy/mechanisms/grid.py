"""Updates as whole numbers: a public grid, truncation toward zero, and sums in which nothing is rounded.

An update that is bounded by C is written as whole multiples of a public step, C/D. Whole numbers below 2^53 are added
exactly in doubles, in any order, so that one client moves the sum by what it contributes and by nothing else. The
sensitivity is D steps because Σk² ≤ D² is verified for the very numbers that are added.

That is verified by a bound: Σk² ≤ Σx² over the numbers x that are truncated, those with |x| ≥ 1, and a sum of squares
in single precision is below Σx² by less than `row_squares` says. The clip leaves room for that. A contribution for
which the bound does not show it is shortened.

| edge case | what happens |
|---|---|
| a number smaller than a step, a subnormal one, -0 | it counts as 0 |
| an update whose whole numbers are, or could be, longer than D | it is shortened |
| an update with NaN, infinity, or squares that overflow | it counts as 0 |
| no noise | a finer grid, by as much as the sum has room for |
| noise below 2^8 steps of the finest grid, z < 2^-18 | there is more of it, 2^8 steps |
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

from cloister.core.cohort import SQUARES_ERROR, Cohort, blocks, row_squares
from cloister.core.errors import PrivacyError
from cloister.core.threads import BLOCK, Span
from cloister.privacy.mechanisms.discrete.sampler import MAX_EXACT, REACH, SMOOTHING, DiscreteGaussian
from cloister.privacy.mechanisms.keystream import Keystream

FINEST = 26
"""The bound of a release with noise is at most 2 to this power of steps: a double has room for 2^26 of them."""
CARRY = 1 << FINEST
"""What sums carry over in."""
DISTINCT = 1 << 16
"""Steps in a standard deviation from which on truncation does not show beside the noise."""
COMPILED = 1 << 14
"""Numbers in a span from which on a compiled kernel adds them: a small model does not wait for it."""
SHORTER = 1 - 2.0**-12
"""What a contribution is shortened to, as a share of the bound: far enough below it to show, whatever is rounded."""


@dataclass(frozen=True)
class Grid:
    """What a release counts in: whole multiples of a public step.

    Attributes:
        bound: C > 0, in units of the weights.
        steps: D, how many steps C is; the sensitivity of the sum is at most that.
        scale: s, the standard deviation of the noise in steps; 0: there is none.

    Guarantee: s² ≥ (z·D)² + 25, so that the release costs no more than that of a continuous Gaussian of multiplier z,
        by any accountant and for sampled contributions too (`docs/privacy.md`, "Exact noise").
    """

    bound: float
    steps: float
    scale: int

    @classmethod
    def of(cls, bound: float, multiplier: float, count: int, widest: float = 0.0) -> "Grid":
        """The grid of a release.

        Args:
            bound: C > 0, in units of the weights.
            multiplier: z ≥ 0.
            count: n, the most contributions that are added up.
            widest: the largest z that the release could have had, if z depends on private data. The grid then follows
                this public value, if that leaves 2^16 steps in a standard deviation. 0: z is public.

        Raises:
            PrivacyError: a sum of so many could pass 2^53.
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
        """The distance between the sums that may be released, in units of the weights."""
        return self.bound / self.steps

    def covers(self, multiplier: float) -> bool:
        """Whether its noise is that of a multiplier, or more.

        Args:
            multiplier: z ≥ 0.
        """
        return not multiplier or self.scale >= _scale(multiplier, self.steps)

    def whole(self, share: float) -> int:
        """The whole number of steps that a share of the bound has, toward zero: at most D, whatever is rounded.

        Args:
            share: from -1 to 1.
        """
        # Rounding is monotone, and D steps are a double: the product never passes it.
        return math.trunc(share * self.steps)

    def noised(self, whole: int, noise: Keystream) -> float:
        """A single whole number with noise, in units of the weights.

        Args:
            whole: of steps.
            noise: where the key of the noise comes from.
        """
        total = np.array([whole], np.int64)
        DiscreteGaussian(self.scale, noise).add(total)
        return float(total[0]) * self.step

    @property
    def dtype(self) -> type[np.signedinteger]:
        """Of integers that hold any contribution; the processor does more of the narrow ones at a time."""
        return np.int32 if self.steps <= 1 << FINEST else np.int64

    def settle(self, weights: NDArray, write: Callable[[NDArray], NDArray]) -> None:
        """Write a release, and write it anew while a contribution is not shown to be within the bound.

        Nothing of what is written over has left; its noise is the same.

        Args:
            weights: what updates are multiplied with before they are truncated, shape (n,).
            write: given weights, writes what is released, and returns the squares of each contribution before it was
                truncated, shape (n,), as `row_squares` has them.
        """
        squares = write(weights)
        for share in (SHORTER, 0.0):
            if not self.holds(squares).all():
                weights = self.shortened(weights, squares, share)
                squares = write(weights)

    def shortened(self, weights: NDArray, squares: NDArray, share: float) -> NDArray[np.float64]:
        """The weights, smaller for contributions that are not shown to be within the bound.

        Args:
            weights: that updates were multiplied with before they were truncated, shape (n,).
            squares: of each contribution before it was truncated, as `row_squares` has them.
            share: of the bound, that contributions are shortened to.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            smaller = np.nan_to_num(weights * (share * self.steps) / np.sqrt(squares))
        return np.where(self.holds(squares), weights, smaller)

    def holds(self, squares: NDArray) -> NDArray[np.bool_]:
        """Which contributions have Σk² ≤ D².

        Args:
            squares: of each contribution before it was truncated, as `row_squares` has them.
        """
        return squares * (1 + SQUARES_ERROR) <= self.steps**2

    def contains(self, squares: float) -> bool:
        """Whether whole numbers are within the bound, by the sum of their squares in double precision: exactly.

        Rounding never makes a sum of positive numbers smaller than a part of it. So a sum of whole numbers that comes
        to less than 2^53 was a whole number below 2^53 all along, and nothing was rounded.

        Args:
            squares: Σk², added up in any order.
        """
        return squares <= math.floor(Fraction(self.steps) ** 2)


class WholeSums:
    """Sums of whole numbers, in narrow integers: processors add twice as many of them at a time as of doubles.

    A sum is low + 2^26·high. What does not fit in `low` is carried over after as many contributions as it has room for.

    Args:
        grid: of the numbers.
        size: how many sums there are at most.

    Guarantee: sums are exact if n·D < 2^53 for the n contributions in them. They are the same in any order, and what
        was added can be taken off again.
    """

    def __init__(self, grid: Grid, size: int) -> None:
        self._low = np.zeros(size, grid.dtype)
        self._high: NDArray[np.signedinteger] | None = None
        # A carry leaves less than 2^26 behind.
        self._room = (np.iinfo(grid.dtype).max - CARRY) // max(1, math.floor(grid.steps))
        self._changes = 0

    def clear(self) -> None:
        """Begin anew."""
        self._low[:] = self._changes = 0
        self._high = None

    def change(self, whole: NDArray[np.signedinteger], sign: int) -> None:
        """Add a contribution, or take it off.

        Args:
            whole: its numbers, at most D each.
            sign: 1 or -1.
        """
        low = self.room(len(whole))
        (np.add if sign > 0 else np.subtract)(low, whole, out=low)

    def room(self, count: int) -> NDArray[np.signedinteger]:
        """Integers in which one contribution can be added or taken off, in place.

        Args:
            count: how many numbers it has, at most D each.
        """
        if self._changes == self._room:
            self._carry()
        self._changes += 1
        return self._low[:count]

    def write(self, out: NDArray[np.float64]) -> None:
        """Write the sums, the first as many as there is room for.

        Args:
            out: takes them.
        """
        np.copyto(out, self._low[: len(out)])
        if self._high is not None:
            out += self._high[: len(out)] * float(CARRY)

    def _carry(self) -> None:
        carried = self._low >> FINEST
        self._high = carried if self._high is None else self._high + carried
        self._low &= CARRY - 1
        self._changes = 0


class Adder:
    """Truncates updates to whole numbers and adds them up, on one thread, in memory of its own.

    Args:
        grid: that updates are counted on.
        dtype: that updates are computed in.

    Attributes:
        whole, sums: memory for the sums of a span.
    """

    def __init__(self, grid: Grid, dtype: DTypeLike) -> None:
        self._grid = grid
        self._updates = np.empty(BLOCK, dtype)
        self._integers: NDArray[np.signedinteger] = np.empty(BLOCK, grid.dtype)
        self.whole = WholeSums(grid, BLOCK)
        self.sums = np.empty(BLOCK)

    def add_up(
        self, cohort: Cohort, span: Span, weights: NDArray, squares: NDArray, sums: WholeSums, sign: int = 1
    ) -> None:
        """Add Σ trunc(weights[i]·U[i]) over the columns in `span` to sums.

        What is longer than D in these columns alone counts as 0 in them: no whole number is above D.

        Args:
            cohort: of n updates.
            span: the columns.
            weights: what each update is multiplied with, factors[i]/step, shape (n,); 0: it is left out.
            squares: takes Σ(weights[i]·U[i])² of each row over these columns, shape (n,), as `row_squares` has it.
            sums: of these columns.
            sign: 1, or -1 to take off what was added with the same weights.
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
        """The whole numbers of each contribution."""
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
    """The compiled kernel, if numba is installed and knows the dtype; imported when the first large sum is made.

    Args:
        dtype: of updates.
        integers: of sums.

    Raises:
        PrivacyError: it does not add what NumPy adds, as one from an older cache might not.
    """
    if dtype not in (np.float32, np.float64):
        return None
    try:
        from cloister.privacy.mechanisms import compiled_grid
    except ImportError:
        return None
    if not adds_as_numpy(compiled_grid, dtype, integers):
        raise PrivacyError("numba's kernel of sums is not NumPy's; empty numba's cache, or uninstall numba")
    return compiled_grid


def adds_as_numpy(compiled: ModuleType, dtype: np.dtype, integers: np.dtype) -> bool:
    """Whether a kernel truncates, adds and takes off as NumPy does.

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
    """D and s for a public z: s is a power of two, so that few tables serve all releases."""
    _, exponent = math.frexp(multiplier)
    scale = 1 << min(24, max(8, FINEST - 1 + exponent))
    # A little less than it may be: what these three operations round.
    return min(float(1 << FINEST), math.sqrt(scale**2 - SMOOTHING**2) / multiplier * (1 - 2.0**-50)), scale


def _scale(multiplier: float, steps: float) -> int:
    """The smallest s with s² ≥ (z·D)² + 25."""
    least = math.ceil((Fraction(multiplier) * Fraction(steps)) ** 2) + SMOOTHING**2
    return math.isqrt(least - 1) + 1
