"""Draw the units that take part in a step of DP-SGD, find their examples, and draw their places in a call."""

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import DTypeLike, NDArray

from cloister.core import check
from cloister.core.errors import ConfigError
from cloister.privacy.accounting.vocabulary import OVERFLOW

Batch = NDArray[np.intp]
"""Indices of examples, or of units, without repetition; possibly none."""


def poisson(examples: int, rate: float, steps: int, seed: int | None = None) -> Iterator[Batch]:
    """Batches in which each example takes part with probability `rate`, independently of all others.

    This is what accountants mean by Poisson sampling. A batch may be empty, and must be stepped on all the same.

    Args:
        examples: n ≥ 0.
        rate: q, above 0 and at most 1.
        steps: number of batches.
        seed: None draws from the operating system. A number gives the same batches every time, for tests; whoever knows
            it knows who took part, and no amplification may be claimed.

    Raises:
        ConfigError: `rate` is not a probability above 0, or a number is negative.

    Source: Abadi et al. (2016), §3.1 (lots); on what goes wrong otherwise: Chua et al. (2024), arXiv:2403.17673.
    """
    check.non_negative(examples=examples, steps=steps)
    if not 0 < rate <= 1:
        raise ConfigError(f"sampling_rate must be above 0 and at most 1, got {rate}")
    draw, threshold = _uniform(seed), round(rate * 2.0**64)
    # A whole 2^64 does not fit into 64 bits: comparing with the last number that takes part does.
    return (np.flatnonzero(draw(examples) <= np.uint64(max(threshold, 1) - 1)) for _ in range(steps))


def places_of(batch_size: int) -> int:
    """Return M, the places that units of a batch are given.

    The size n of a Poisson batch is a sum of independent draws, of mean μ ≤ B. So P[n ≥ M] ≤ exp(M - μ - M·ln(M/μ))
    (Chernoff), which grows with μ: M is the smallest number for which it is at most `OVERFLOW` at μ = B.

    Args:
        batch_size: B > 0, the expected number of units of a batch, or more.
    """
    limit = math.log(OVERFLOW)
    return next(m for m in itertools.count(batch_size + 1) if m - batch_size - m * math.log(m / batch_size) <= limit)


def shuffle(examples: int, batch_size: int, steps: int, seed: int | None = None) -> Iterator[Batch]:
    """Equal parts of a random order, a new order when one is used up: for comparison only.

    An accountant of Poisson sampling understates what these batches cost; they are accounted without amplification.

    Args:
        examples: n ≥ `batch_size`; the last n mod `batch_size` of an order sit out.
        batch_size: examples in each batch.
        steps: number of batches.
        seed: None draws from the operating system.

    Raises:
        ConfigError: there are fewer examples than one batch takes.
    """
    check.non_negative(examples=examples, steps=steps)
    if not 1 <= batch_size <= examples:
        raise ConfigError(f"batch_size must be from 1 to the {examples} examples, got {batch_size}")
    return _parts(examples, batch_size, steps, np.random.default_rng(seed))


def pieces(count: int, size: int) -> list[slice]:
    """Parts of at most `size` that hold `count` things in turn.

    Args:
        count: ≥ 0.
        size: > 0.
    """
    return [slice(start, start + size) for start in range(0, count, size)]


def units_of(groups: NDArray, cap: int, seed: int | None = None) -> list[NDArray[np.intp]]:
    """The examples of each group: what a step that protects groups draws from.

    Args:
        groups: of each example, shape (n,), numbers or strings; examples with the same one are one unit.
        cap: the most examples of a group that are kept, > 0; which ones is drawn at random.
        seed: None draws from the operating system.

    Returns:
        Indices of at most `cap` examples for each group, in the order of the groups' names.

    Raises:
        ConfigError: `cap` is not above 0.
    """
    check.positive(group_cap=cap)
    rng = np.random.default_rng(seed)
    _, group = np.unique(groups, return_inverse=True)
    order = np.lexsort((rng.random(len(group)), group.ravel()))
    starts = np.flatnonzero(np.diff(group.ravel()[order])) + 1
    return [np.sort(members[:cap]) for members in np.split(order, starts) if len(members)]


def rows_of(units: Sequence[NDArray[np.intp]], batch: Batch) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The examples of a batch of units, and for each the number of its unit: what `DpSgd.step` takes.

    Args:
        units: as `units_of` gives them.
        batch: indices of units.

    Returns:
        Indices of examples, and `groups` of the same length.
    """
    chosen = [units[number] for number in batch]
    groups = np.repeat(np.arange(len(chosen)), [len(rows) for rows in chosen])
    return (np.concatenate(chosen) if chosen else np.zeros(0, np.intp)), groups


class Draws:
    """Draw places and seeds, from the operating system or from a number for tests.

    Both are as secret as the noise. Random numbers belong to a unit's place in a call, not to the unit: they depend on
    no unit's data.

    Args:
        seed: None: the operating system's entropy.
    """

    def __init__(self, seed: int | Sequence[int] | None = None) -> None:
        self._rng = random.SystemRandom() if seed is None else random.Random(repr(seed))

    def seeds(self, *shape: int) -> NDArray[np.int64]:
        """Return fresh seeds, shape (*shape, 2).

        Args:
            shape: of what needs a seed each.
        """
        words = np.frombuffer(self._rng.randbytes(8 * math.prod(shape)), np.uint32)
        return (words >> 1).astype(np.int64).reshape(*shape, 2)

    def places(self, units: int, room: int) -> list[int]:
        """Return a place for each unit: every choice of different places is as likely as any other.

        Args:
            units: at most `room`.
            room: places.
        """
        return self._rng.sample(range(room), units)


class Members:
    """Which examples belong to which group.

    Args:
        groups: of each example, shape (n,).
    """

    def __init__(self, groups: NDArray) -> None:
        _, group = np.unique(groups, return_inverse=True)
        self._order = np.argsort(group.ravel(), kind="stable")
        self._sizes = np.bincount(group.ravel())
        self._starts = np.cumsum(self._sizes) - self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def table(self, numbers: NDArray[np.intp], cap: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """The examples of some of the groups, a row each. It takes groups × cap of memory, so not all at once.

        Args:
            numbers: of groups.
            cap: columns; of a larger group the first so many examples are kept.

        Returns:
            Indices of examples, shape (groups, cap), and which of them are meant: a row is filled up with its first.
        """
        column = np.arange(cap)
        mask = column < self._sizes[numbers, None]
        return self._order[self._starts[numbers, None] + np.where(mask, column, 0)], mask


def cast(rows: NDArray, dtype: DTypeLike) -> NDArray:
    """Return the rows in a type, with floats cut to the limits of unsigned or narrow integers, and NaN as 0.

    NumPy's own cast of such numbers depends on where they stand, and so on who else is there. To refuse them would tell
    about a row that decided about the type of a file.

    Args:
        rows: of examples.
        dtype: of the result.
    """
    rows, target = np.asarray(rows), np.dtype(dtype)
    if rows.dtype.kind == "f" and target.kind in "iu" and (target.itemsize < 4 or target == np.uint32):
        limits = np.iinfo(target)
        rows = np.clip(np.nan_to_num(rows.astype(np.float64)), limits.min, limits.max)
    return rows.astype(target, copy=False)


def _uniform(seed: int | None) -> Callable[[int], NDArray[np.uint64]]:
    """A source of independent uniform 64-bit numbers: AES in counter mode under a key of the operating system's."""
    if seed is not None:
        rng = np.random.default_rng(seed)
        return lambda count: rng.integers(0, 2**64, count, np.uint64)
    stream = Cipher(algorithms.AES(os.urandom(16)), modes.CTR(os.urandom(16))).encryptor()
    return lambda count: np.frombuffer(stream.update(bytes(8 * count)), np.uint64)


def _parts(examples: int, batch_size: int, steps: int, rng: np.random.Generator) -> Iterator[Batch]:
    per_order = examples // batch_size
    for step in range(steps):
        if step % per_order == 0:
            order = rng.permutation(examples)
        start = step % per_order * batch_size
        yield order[start : start + batch_size]
