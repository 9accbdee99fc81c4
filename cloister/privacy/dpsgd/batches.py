"""Batches of DP-SGD: draws of the units of a step, their examples, and their places in a call."""

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from cloister.privacy.accounting.vocabulary import OVERFLOW
from cloister.utils import check
from cloister.utils.errors import ConfigError

Batch = NDArray[np.intp]
"""Indices of examples, or of units, without repetition; possibly empty."""
MEMORY = 1 << 30
"""Most bytes of units that a call keeps until its end. A larger batch takes several calls."""
CACHE = 1 << 23
"""Bytes of a round in its largest tensor, approximately: more would leave the cache, less would keep cores waiting."""


def poisson(examples: int, rate: float, steps: int, seed: int | None = None) -> Iterator[Batch]:
    """Draw batches that contain each example independently with probability `rate`.

    This is the Poisson sampling of accountants. A batch may be empty, and must be stepped on too.

    Args:
        examples: n ≥ 0.
        rate: q, above 0 and at most 1.
        steps: number of batches.
        seed: None draws from the operating system. A number gives the same batches every time, for tests. A party with
            the seed can compute all batches, so that no amplification may be claimed.

    Raises:
        ConfigError: `rate` is not a probability above 0, or a number is negative.

    Source: Abadi et al. (2016), §3.1 (lots); on the gap to shuffled batches: Chua et al. (2024), arXiv:2403.17673.
    """
    check.non_negative(examples=examples, steps=steps)
    if not 0 < rate <= 1:
        raise ConfigError(f"sampling_rate must be above 0 and at most 1, got {rate}")
    draw, threshold = _uniform(seed), round(rate * 2.0**64)
    # 2^64 does not fit into 64 bits, so the comparison uses the last number that takes part.
    return (np.flatnonzero(draw(examples) <= np.uint64(max(threshold, 1) - 1)) for _ in range(steps))


def places_of(batch_size: int) -> int:
    """Return M, the number of places for the units of a batch.

    The size n of a Poisson batch is a sum of independent draws, of mean μ ≤ B. So P[n ≥ M] ≤ exp(M - μ - M·ln(M/μ))
    (Chernoff), which grows with μ: M is the smallest number for which it is at most `OVERFLOW` at μ = B.

    Args:
        batch_size: B > 0, the expected number of units of a batch, or more.
    """
    limit = math.log(OVERFLOW)
    return next(m for m in itertools.count(batch_size + 1) if m - batch_size - m * math.log(m / batch_size) <= limit)


def shuffle(examples: int, batch_size: int, steps: int, seed: int | None = None) -> Iterator[Batch]:
    """Draw equal parts of a random order, repeatedly: for comparison only.

    An accountant of Poisson sampling understates the cost of these batches; they are charged without amplification.

    Args:
        examples: n ≥ `batch_size`; the last n mod `batch_size` of an order are unused.
        batch_size: examples in each batch.
        steps: number of batches.
        seed: None draws from the operating system.

    Raises:
        ConfigError: there are fewer examples than in one batch.
    """
    check.non_negative(examples=examples, steps=steps)
    if not 1 <= batch_size <= examples:
        raise ConfigError(f"batch_size must be from 1 to the {examples} examples, got {batch_size}")
    rng, cuts = np.random.default_rng(seed), pieces(examples // batch_size * batch_size, batch_size)
    orders = (rng.permutation(examples) for _ in itertools.count())
    return itertools.islice((order[cut] for order in orders for cut in cuts), steps)


def pieces(count: int, size: int) -> list[slice]:
    """Return slices of at most `size` > 0 that cover `count` elements in order."""
    return [slice(start, start + size) for start in range(0, count, size)]


def units_of(groups: NDArray, cap: int, seed: int | None = None) -> list[NDArray[np.intp]]:
    """Return the examples of each group, the units of a step that protects groups.

    Args:
        groups: of each example, shape (n,), numbers or strings; examples with the same value are one unit.
        cap: largest number of examples kept of a group, > 0; they are drawn at random.
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
    """Return indices of the examples of a batch of units, and their units' numbers: `groups` of `DpSgd.step`.

    Args:
        units: from `units_of`.
        batch: indices of units.
    """
    chosen = [units[number] for number in batch]
    groups = np.repeat(np.arange(len(chosen)), [len(rows) for rows in chosen])
    return (np.concatenate(chosen) if chosen else np.zeros(0, np.intp)), groups


class Draws:
    """Source of places and seeds, from the operating system or from a number for tests.

    Both are as secret as the noise. Random numbers belong to a unit's place in a call, not to the unit: they are
    independent of all units' data.

    Args:
        seed: None draws from the operating system.
    """

    def __init__(self, seed: int | Sequence[int] | None = None) -> None:
        self._rng = random.SystemRandom() if seed is None else random.Random(repr(seed))

    def seeds(self, *shape: int) -> NDArray[np.int64]:
        """Return fresh seeds, shape (*shape, 2)."""
        words = np.frombuffer(self._rng.randbytes(8 * math.prod(shape)), np.uint32)
        return (words >> 1).astype(np.int64).reshape(*shape, 2)

    def places(self, units: int, room: int) -> list[int]:
        """Return a place below `room` for each unit: every choice of different places is equally likely."""
        return self._rng.sample(range(room), units)


class Members:
    """Examples of each group, from the group of each example."""

    def __init__(self, groups: NDArray) -> None:
        _, group = np.unique(groups, return_inverse=True)
        self._group = group.ravel()
        self._order = np.argsort(self._group, kind="stable")
        self._sizes = np.bincount(self._group)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def means(self, values: NDArray) -> NDArray[np.float64]:
        """Return the mean of each group's values, added in their order, to the last bit independent of other groups.

        Args:
            values: of each example, shape (n,).
        """
        return np.bincount(self._group, values, len(self)) / self._sizes

    def table(self, numbers: NDArray[np.intp], cap: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return a table of the examples of some groups, a row each, in groups × cap of memory.

        Args:
            numbers: of groups.
            cap: number of columns; of a larger group the first `cap` examples are kept.

        Returns:
            Indices of examples, shape (groups, cap), and a mask of the valid ones: a row is padded with its first.
        """
        column = np.arange(cap)
        mask = column < self._sizes[numbers, None]
        return self._order[self._starts[numbers, None] + np.where(mask, column, 0)], mask


def rounds(occupied: NDArray[np.intp], at_once: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the place whose unit is in each row of each round, and which rows count.

    Args:
        occupied: places of units, in order; at least one.
        at_once: P > 0. Place s is computed in row s mod P.

    Returns:
        Two tables of shape (rounds, P), of as few rounds as the fullest row needs. Free rows repeat a unit.
    """
    row = occupied % at_once
    order = np.argsort(row, kind="stable")
    sizes = np.bincount(row, minlength=at_once)
    number = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    table = np.full((sizes.max(), at_once), occupied[0])
    real = np.zeros(table.shape, bool)
    table[number, row[order]], real[number, row[order]] = occupied[order], True
    return table, real


def evenly(room: int, most: int) -> int:
    """Return places per call that fit `room` units in the fewest calls."""
    calls = -(-room // most)
    return -(-room // calls)


def places_in_memory(places: int, room: int, kept: int) -> int:
    """Return the places of a call, at most as many as given.

    Args:
        places: of a call; at least 2.
        room: places of a batch.
        kept: bytes that a call keeps of one unit.
    """
    return places if kept * places <= MEMORY else max(2, evenly(room, max(1, MEMORY // kept)))


def fitting(largest: int, at_once: int) -> int:
    """Return how many units of a round fit the cache.

    Args:
        largest: bytes of the largest tensor of a round.
        at_once: units of this round.
    """
    return CACHE * at_once // largest


def resized(at_once: int, fit: int, places: int) -> int:
    """Return the units of a round: as before, unless half or twice as many fit the cache better.

    Args:
        at_once: units of a round before.
        fit: units that fit.
        places: of a call, the most; at least 2, as there is a proof of two rows.
    """
    fit = min(places, max(2, fit))
    return at_once if at_once / 2 < fit < at_once * 2 and at_once <= places else fit


def _uniform(seed: int | None) -> Callable[[int], NDArray[np.uint64]]:
    """Return a source of independent uniform 64-bit numbers, from AES if unseeded."""
    if seed is not None:
        rng = np.random.default_rng(seed)
        return lambda count: rng.integers(0, 2**64, count, np.uint64)
    stream = Cipher(algorithms.AES(os.urandom(16)), modes.CTR(os.urandom(16))).encryptor()
    return lambda count: np.frombuffer(stream.update(bytes(8 * count)), np.uint64)
