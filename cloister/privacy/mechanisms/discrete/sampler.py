"""The exact source of noise: integers of the discrete Gaussian law, on a keystream from the operating system's entropy.

A block's bits are read from its place in the keystream in one order, whatever computes with them: candidates, then what
the few that need a second look read, then, for one in some hundred thousand, further bits one after another.
Refused candidates are replaced by spare ones. NumPy and numba make the same numbers of the same key.

| edge case | what happens |
|---|---|
| a scale below 2^8 or from 2^25 on, floating-point sums that are not whole | refused |
| numbers further than 63 deviations from zero | never drawn: all are below 2^31; 2^-2900 of the law lies there |
| a bit string that leaves a comparison open | further bits are drawn until it is decided |
| a block that has used up its place in the stream | refused; that takes ten times the bits that a block reads |
| a forked process, a copy, a pickle | refused: both would add the same noise |
"""

import math
from fractions import Fraction
from functools import cache
from types import ModuleType

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from cloister.core.errors import PrivacyError
from cloister.core.threads import BLOCK, Span, for_each_span, spans
from cloister.privacy.mechanisms.discrete import numpy_kernel
from cloister.privacy.mechanisms.discrete.decision import number_of
from cloister.privacy.mechanisms.discrete.numpy_kernel import OPEN, REFUSED, TAKEN
from cloister.privacy.mechanisms.discrete.tables import LOW_BITS, Tables, tables_of
from cloister.privacy.mechanisms.keystream import Keystream, Places, counter

BYTES = 6
"""Of keystream, for a candidate: 16 bits of index and a word of 32."""
PLACE = 1 << 22
"""Bytes of keystream that a block may read: it needs about 2^19."""
COUNTERS = PLACE // 16
MAX_EXACT = 1 << 53
"""Sums must stay below it with their noise: above, a double holds no longer every integer."""
REACH = 1 << 31
"""Above every number that is drawn."""
SMOOTHING = 5
"""Deviation, in steps, of the random rounding that makes this noise of a continuous Gaussian."""


def spares(count: int) -> int:
    """Candidates that are made on top of `count`: at most one in 400 is refused, and seldom are more asked for."""
    return 16 + count // 128


ZEROS = bytes(1 << 16)
"""What is encrypted, again and again: zeros come out as the keystream. More would drive the tables from the cache."""


@cache
def kernel() -> ModuleType:
    """The fastest kernel that is installed, imported when the first number is made: numba takes a second.

    Raises:
        PrivacyError: the compiled kernel does not make NumPy's numbers, as one from an older cache might not.
    """
    try:
        from cloister.privacy.mechanisms.discrete import numba_kernel
    except ImportError:
        return numpy_kernel
    if not agree(numpy_kernel, numba_kernel):
        raise PrivacyError("numba's kernel of exact noise is not NumPy's; empty numba's cache, or uninstall numba")
    return numba_kernel


def agree(one: ModuleType, other: ModuleType) -> bool:
    """Whether two kernels make the same of some thousand candidates, most of which need a second look.

    Args:
        one, other: modules with the functions `look_up`, `decide` and `onto_grid`.
    """
    tables = tables_of(Fraction(3 << 15))
    bits = np.frombuffer(Cipher(algorithms.AES(bytes(16)), modes.CTR(bytes(16))).encryptor().update(ZEROS), np.uint64)
    # High indices, many of which the tables leave over, and words of which most are compared with exp(-t).
    slots, indices = bits[:6000].reshape(-1, 3) | np.uint64(0xF000), bits[6000:6500].view(np.uint16) | np.uint16(0xF000)
    words = bits[6500:7500].view(np.uint32) >> np.uint32(7)
    copies = words.copy(), words.copy()
    positions = [each.look_up(indices, copy, tables) for each, copy in zip((one, other), copies)]
    decided = [each.decide(indices, words, slots, tables) for each in (one, other)]
    known = decided[0][1] != OPEN
    written = [_on_a_grid(each, bits[:6000].view(np.int32)) for each in (one, other)]
    return (
        np.array_equal(*positions)
        and np.array_equal(*copies)
        and np.array_equal(decided[0][1], decided[1][1])
        and np.array_equal(decided[0][0][known], decided[1][0][known])
        and all(map(np.array_equal, *written))
    )


def _on_a_grid(kernel: ModuleType, numbers: NDArray) -> list[NDArray]:
    """What a kernel writes for sums that lie between two whole numbers, and on one."""
    sums, written = np.arange(len(numbers)) / 4 - 1000, []
    for dtype in (np.float32, np.float64):
        written.append(np.empty(len(numbers), dtype))
        kernel.onto_grid(sums.astype(dtype), numbers, 3.0, 1 / 7, written[-1])
    return written


class DiscreteGaussian(Keystream):
    """An endless stream of independent integers k of probability ∝ exp(-k²/2s²), for noise on whole numbers.

    Args:
        scale: s, the rational number of grid steps that the noise's standard deviation is, from 2^8 up to 2^25. Noise
            of another deviation σ is the same noise on another grid: its step is σ/s. Where σ is secret, so would that
            step be: keep a public step, and give each σ a source of its own, of scale σ/step.
        seed: None draws the key from the operating system. A number gives the same stream every time, for tests and
            for papers; whatever is released with it is not private, and says `seeded`. Another source of noise gives a
            key from its next place: a new one for each release. Bytes are a secret from which somebody else, to whom it
            is shown, can make the same numbers.

    Guarantee: a sum of integers whose L2 sensitivity is Δ steps is released with ½(Δ/s)²-concentrated differential
        privacy, RDP(α) = αΔ²/2s² (Canonne, Kamath, Steinke, 2020, Theorem 14), up to a total variation of 2^-2900 a
        number, and computationally: as long as AES-128 cannot be told from random bits. What is released must be a
        function of the noised integers alone, such as their multiple by the step. The time that a block takes tells
        how many candidates were refused, a little about the noise.

    Raises:
        ConfigError: the scale lies outside.

    Examples:
        >>> source = DiscreteGaussian(scale=2**20, seed=7)
        >>> numbers = source.integers(10_000)
        >>> numbers.dtype, abs(float(numbers.std()) / 2**20 - 1) < 0.05
        (dtype('int32'), True)
        >>> round(source.noise_multiplier(distance=2**20), 6)
        1.0
        >>> total = np.array([3.0, -5.0, 0.0])
        >>> source.add(total)
        >>> bool((total == np.rint(total)).all())
        True
    """

    def __init__(self, scale: Fraction | int = 1 << 24, seed: int | bytes | Keystream | None = None) -> None:
        super().__init__(seed, "cloister discrete noise", BLOCK, COUNTERS)
        self._tables = tables_of(Fraction(scale))

    @property
    def scale(self) -> Fraction:
        """The scale s; the standard deviation of the numbers is below it by less than 2^-1000."""
        return self._tables.scale

    def noise_multiplier(self, distance: int) -> float:
        """z of the continuous Gaussian release that a release with this noise costs, for a `Gaussian` event.

        It is √(s² - 25)/Δ, rounded down, which holds for every accountant and for sampled contributions too
        (`docs/privacy.md`, "Exact noise"): a release of p numbers is that of a Gaussian of deviation √(s² - 25), each
        number rounded at random, up to a total variation of p·2^-700.

        Args:
            distance: Δ, by how many steps of L2 distance one unit's joining or leaving moves the sum, at least 1.
        """
        if distance < 1:
            raise PrivacyError(f"a distance must be at least one step of the grid, got {distance}")
        squared = (self.scale**2 - SMOOTHING**2) / distance**2
        return math.nextafter(math.isqrt(math.floor(squared * 4**60)) / 2**60, 0)

    def integers(self, count: int) -> NDArray[np.int32]:
        """`count` independent numbers, as int32."""
        out = np.zeros(count, np.int32)
        self._add(out)
        return out

    def add(self, sums: NDArray) -> None:
        """Add a number to every sum of a flat array, in place.

        Args:
            sums: int64, or float64 whose numbers are whole; below 2^53 - 2^31, so that every addition is exact.

        Raises:
            PrivacyError: the array cannot carry this noise exactly, or this is a copy in a forked process. Nothing
                was added.
        """
        if sums.dtype not in (np.int64, np.float64) or sums.ndim != 1 or not sums.flags.writeable:
            raise PrivacyError(
                "exact noise is added in place to flat, writable int64 or float64 arrays; "
                f"found {sums.dtype} of shape {sums.shape}"
            )
        if len(sums) and not (sums.min() > -MAX_EXACT + REACH and sums.max() < MAX_EXACT - REACH and _are_whole(sums)):
            raise PrivacyError("exact noise is added to whole numbers below 2^53 - 2^31; round and bound them first")
        self._add(sums)

    def maker(self) -> "Maker":
        """What makes this stream's blocks on one thread, with memory of its own."""
        return Maker(self._key, self._nonce, self._tables)

    def _add(self, target: NDArray) -> None:
        places = self.places(spans([len(target)], BLOCK))

        def work(span: Span, maker: Maker) -> None:
            maker.add(span.of([target]), places[span])

        for_each_span(list(places), work, self.maker)


class Maker:
    """Makes blocks of one stream, on one thread.

    Args:
        key, nonce: of the stream.
        tables: of the scale.
        numbers: that a block has at most; the maker's memory is for as many.
    """

    def __init__(self, key: bytes, nonce: int, tables: Tables, numbers: int = BLOCK) -> None:
        self._nonce, self._tables, self._kernel = nonce, tables, kernel()
        self._keystream = Cipher(algorithms.AES(key), modes.CTR(nonce.to_bytes(16))).encryptor()
        self._numbers = min(numbers, BLOCK)
        self._memory = np.empty(BYTES * (self._numbers + spares(self._numbers)), np.uint8)
        self._left = 0

    def add(self, target: NDArray, places: Places) -> None:
        """Add a number to every number of a flat array, in place.

        Args:
            target: of n numbers.
            places: of their noise.
        """
        for start, number in zip(range(0, len(target), BLOCK), places, strict=True):
            part = target[start : start + BLOCK]
            part += self.integers(number, len(part))

    def onto_grid(self, sums: NDArray, places: Places, scale: float, unit: float, out: NDArray) -> None:
        """Write (rint(sums·scale) + noise)·unit.

        Args:
            sums: flat, of n float32 or float64 numbers.
            places: of their noise.
            scale, unit: as in `numpy_kernel.onto_grid`.
            out: of n numbers; it may be `sums`.

        Raises:
            PrivacyError: lengths differ. A compiled kernel would release what lies behind them in memory.
        """
        if len(out) != len(sums):
            raise PrivacyError(f"noise on {len(sums)} sums goes into as many numbers, not into {len(out)}")
        for start, number in zip(range(0, len(sums), BLOCK), places, strict=True):
            block = slice(start, start + BLOCK)
            self._kernel.onto_grid(sums[block], self.integers(number, len(sums[block])), scale, unit, out[block])

    def integers(self, number: int, count: int) -> NDArray[np.int32]:
        """The numbers of a block, as many as are needed, where the next ones will be too.

        Args:
            number: of the block, its place in the stream.
            count: how many are needed.

        Raises:
            PrivacyError: the block is larger than its place in the stream, or than the memory.
        """
        if count > self._numbers:
            raise PrivacyError(f"a block of {count} numbers was asked of a maker of {self._numbers}")
        self._keystream.reset_nonce(counter(self._nonce, number, COUNTERS))
        self._left = PLACE
        made, refused = self._candidates(self._memory, count + spares(count))
        holes = refused[refused < count]
        spare = _without(made[count:], refused[len(holes) :] - count)
        while len(spare) < len(holes):
            spare = np.concatenate([spare, _without(*self._candidates(np.empty_like(self._memory), spares(count)))])
        made[holes] = spare[: len(holes)]
        # An arithmetic shift: b·2^16 + low becomes b·2^L and the upper L bits of low.
        shift = LOW_BITS - self._tables.low_bits
        return np.right_shift(made[:count], shift, out=made[:count]) if shift else made[:count]

    def _candidates(self, memory: NDArray, count: int) -> tuple[NDArray, NDArray]:
        """Candidates, each b·2^16 + low, and the positions of those that are refused."""
        raw = memory[: BYTES * count]
        self._draw(raw)
        words, indices = raw[: 4 * count].view(np.uint32), raw[4 * count :].view(np.uint16)
        positions = self._kernel.look_up(indices, words, self._tables)
        slots = np.empty((len(positions), 3), np.uint64)
        self._draw(slots.reshape(-1).view(np.uint8))
        numbers, outcome = self._kernel.decide(indices[positions], words[positions], slots, self._tables)
        for at in np.flatnonzero(outcome == OPEN):
            place = positions[at]
            exact = number_of(int(indices[place]), int(words[place]), slots[at], self._tables, self._further)
            outcome[at] = REFUSED if exact is None else TAKEN
            numbers[at] = 0 if exact is None else exact
        words[positions] = numbers.view(np.uint32)
        return words.view(np.int32), positions[outcome == REFUSED]

    def _further(self) -> int:
        """64 more bits of the block."""
        drawn = np.empty(1, np.uint64)
        self._draw(drawn.view(np.uint8))
        return int(drawn[0])

    def _draw(self, out: NDArray) -> None:
        """The next bytes of the block's own place in the keystream."""
        self._left -= len(out)
        if self._left < 0:
            raise PrivacyError("a block of noise has used up its place in the keystream")
        for start in range(0, len(out), len(ZEROS)):
            part = out[start : start + len(ZEROS)]
            self._keystream.update_into(memoryview(ZEROS)[: len(part)], part.data)


def _without(numbers: NDArray, positions: NDArray) -> NDArray:
    """The numbers at all other positions, in order."""
    kept = np.ones(len(numbers), bool)
    kept[positions] = False
    return numbers[kept]


def _are_whole(sums: NDArray) -> bool:
    return sums.dtype == np.int64 or bool((np.rint(sums) == sums).all())
