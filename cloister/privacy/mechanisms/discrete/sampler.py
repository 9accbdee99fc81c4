"""Source of exact noise: integers of the discrete Gaussian law, on a keystream from the operating system's entropy.

Every kernel reads a block's bits from its place in the keystream in the same order: candidates, then the slots of the
few that the first table leaves undecided, then, for one in some hundred thousand, further bits one after another.
Refused candidates are replaced by spare ones. The NumPy and numba kernels return the same numbers for the same key.

**Cost of one release.** Let q be a vector of integers that differs between neighbours by an L2 distance of at most Δ,
and k the noise. The release q + k is ½(Δ/s)²-concentrated DP (Canonne, Kamath, Steinke, 2020, Theorem 14). So RDP(α) =
αΔ²/2s², that of the Gaussian at z = s/Δ.

**Cost of sampled releases, and by other accountants.** These need the law itself. With r = `SMOOTHING`, draw y from
N(0, s² - r²), and then an integer k with probability exp(-(k - y)²/2r²)/ρ(y), where ρ(y) is the sum of
exp(-(j - y)²/2r²) over all integers j. By Poisson summation, with a sum over n ≥ 1,

    ρ(y) = r√(2π) · (1 + 2·Σ exp(-2π²r²n²)·cos(2πny)),

so that ρ(y)/(r√(2π)) is between 1 - ν and 1 + ν, where ν = 2.1·exp(-2π²r²). With r√(2π) in place of ρ(y), the integral
over y is a convolution of two Gaussians, and gives k a weight proportional to exp(-k²/2s²). The same sum over j shows
that these weights add up to a total within 1 ± ν. So the law of k is within a total variation η ≤ 3ν of the discrete
Gaussian. For r = 5, η < 2^-700.

Rounding at random depends on the real vector alone, and rounding q + y gives q + k for integers q. So q + k is, up to
p·η, a post-processed N(q, s² - r²) of p numbers, with the same rounding for every q, a drawn one included. For T
releases, each chosen after the ones before, it is so up to T·p·η. A guarantee (ε, δ) of the continuous mechanism at
z = √(s² - 25)/Δ is therefore one of (ε, δ + (1 + e^ε)·T·p·η) of the exact one. The addition to δ is below 2^-580 up to
T·p = 10^13 and ε = 50. It is not printed.

| edge case | result |
|---|---|
| a scale below 2^8 or from 2^25 on, floating-point sums that are not whole | refused |
| numbers further than 63 deviations from zero | never drawn: all are below 2^31; 2^-2900 of the law is beyond |
| a bit string that leaves a comparison open | further bits are drawn until it is decided |
| a block that exhausts its place in the stream | refused; that takes ten times the bits that a block reads |
| a forked process, a copy, a pickle | refused: both would add the same noise |
"""

import math
from fractions import Fraction
from functools import cache
from types import ModuleType

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from cloister.privacy.mechanisms.discrete import numpy_kernel
from cloister.privacy.mechanisms.discrete.numpy_kernel import OPEN, REFUSED, TAKEN, number_of
from cloister.privacy.mechanisms.discrete.tables import LOW_BITS, Tables, tables_of
from cloister.privacy.mechanisms.noise import Keystream, Places, counter
from cloister.utils.errors import PrivacyError
from cloister.utils.threads import BLOCK, Span, for_each_span, spans

BYTES = 6
"""Bytes of keystream for a candidate: 16 bits of index and a word of 32."""
PLACE = 1 << 22
"""Bytes of keystream that a block may read: it needs about 2^19."""
COUNTERS = PLACE // 16
MAX_EXACT = 1 << 53
"""Limit of sums with their noise: above it, a double cannot hold every integer."""
REACH = 1 << 31
"""Upper bound of every drawn number."""
SMOOTHING = 5
"""Deviation, in steps, of the random rounding that turns a continuous Gaussian into this noise."""


def spares(count: int) -> int:
    """Return the number of spare candidates; at most one in 400 is refused."""
    return 16 + count // 128


ZEROS = bytes(1 << 16)
"""Plaintext that encrypts to the keystream. A longer one would evict the tables from the processor's cache."""


@cache
def kernel() -> ModuleType:
    """Return the fastest installed kernel.

    It is imported when the first number is drawn, since numba takes a second to import.

    Raises:
        PrivacyError: the compiled kernel does not return NumPy's numbers, for instance one from an older cache.
    """
    try:
        from cloister.privacy.mechanisms.discrete import numba_kernel
    except ImportError:
        return numpy_kernel
    if not agree(numpy_kernel, numba_kernel):
        raise PrivacyError("numba's kernel of exact noise is not NumPy's; empty numba's cache, or uninstall numba")
    return numba_kernel


def agree(one: ModuleType, other: ModuleType) -> bool:
    """Return whether two kernels agree on some thousand candidates.

    Most of these candidates need their slots.

    Args:
        one, other: modules with the functions `look_up`, `decide` and `onto_grid`.
    """
    tables = tables_of(Fraction(3 << 15))
    bits = np.frombuffer(Cipher(algorithms.AES(bytes(16)), modes.CTR(bytes(16))).encryptor().update(ZEROS), np.uint64)
    # High indices, many without a block in the tables, and words most of which are compared with exp(-t).
    slots, indices = bits[:6000].reshape(-1, 3) | np.uint64(0xF000), bits[6000:6500].view(np.uint16) | np.uint16(0xF000)
    words = bits[6500:7500].view(np.uint32) >> np.uint32(7)
    copies = words.copy(), words.copy()
    positions = [each.look_up(indices, copy, tables) for each, copy in zip((one, other), copies)]
    decided = [each.decide(indices, words, slots, tables) for each in (one, other)]
    known = decided[0][1] != OPEN
    numbers, written = bits[:6000].view(np.int32), []
    # Sums on and between whole numbers.
    sums = np.arange(len(numbers)) / 4 - 1000
    for each in (one, other):
        for dtype in (np.float32, np.float64):
            written.append(np.empty(len(numbers), dtype))
            each.onto_grid(sums.astype(dtype), numbers, 3.0, 1 / 7, written[-1])
    return (
        np.array_equal(*positions)
        and np.array_equal(*copies)
        and np.array_equal(decided[0][1], decided[1][1])
        and np.array_equal(decided[0][0][known], decided[1][0][known])
        and all(map(np.array_equal, written[:2], written[2:]))
    )


class DiscreteGaussian(Keystream):
    """Endless stream of independent integers k of probability ∝ exp(-k²/2s²), for noise on integer sums.

    Args:
        scale: s, standard deviation of the noise in grid steps, a rational number from 2^8 up to 2^25. For another
            deviation σ, use a grid of step σ/s. If σ is secret, that step would be secret too: keep a public step,
            and use a source of scale σ/step for each σ.
        seed: None draws the key from the operating system. A number gives the same stream every time, for tests and
            for papers; a release with it is not private, and `seeded` is True. With another source of noise, the key
            comes from that source's next place, so that each release has its own. Bytes are a secret: a party that
            receives it can draw the same numbers.

    Guarantee: a sum of integers whose L2 sensitivity is Δ steps is released with ½(Δ/s)²-concentrated differential
        privacy, RDP(α) = αΔ²/2s² (Canonne, Kamath, Steinke, 2020, Theorem 14), up to a total variation of 2^-2900 a
        number, and computationally: as long as AES-128 is indistinguishable from random bits. The release must be a
        function of the noised integers alone, such as their multiple by the step. The time that a block takes reveals
        the number of refused candidates, a little about the noise.

    Raises:
        ConfigError: the scale is outside this range.

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
        """Return the scale s, above the standard deviation by less than 2^-1000."""
        return self._tables.scale

    def noise_multiplier(self, distance: int) -> float:
        """Return z of the continuous Gaussian that such a release costs.

        It is √(s² - 25)/Δ, rounded down: the multiplier of a `Gaussian` event. It holds for every accountant, and for
        sampled contributions. The module proves that a release of p numbers is that of a Gaussian of deviation
        √(s² - 25), each number rounded at random, up to a total variation of p·2^-700.

        Args:
            distance: Δ ≥ 1, the L2 distance in steps by which one unit's joining or leaving moves the sum.
        """
        if distance < 1:
            raise PrivacyError(f"a distance must be at least one step of the grid, got {distance}")
        squared = (self.scale**2 - SMOOTHING**2) / distance**2
        return math.nextafter(math.isqrt(math.floor(squared * 4**60)) / 2**60, 0)

    def integers(self, count: int) -> NDArray[np.int32]:
        """Return `count` independent numbers, as int32."""
        out = np.zeros(count, np.int32)
        self._add(out)
        return out

    def add(self, sums: NDArray) -> None:
        """Add a number to every element of a flat array of sums, in place.

        Args:
            sums: int64, or float64 with whole numbers; below 2^53 - 2^31, so that every addition is exact.

        Raises:
            PrivacyError: the array cannot hold this noise exactly, or this is a copy in a forked process. Nothing is
                added.
        """
        if sums.dtype not in (np.int64, np.float64) or sums.ndim != 1 or not sums.flags.writeable:
            raise PrivacyError(
                "exact noise is added in place to flat, writable int64 or float64 arrays; "
                f"found {sums.dtype} of shape {sums.shape}"
            )
        is_whole = sums.dtype == np.int64 or bool((np.rint(sums) == sums).all())
        if len(sums) and not (is_whole and sums.min() > -MAX_EXACT + REACH and sums.max() < MAX_EXACT - REACH):
            raise PrivacyError("exact noise is added to whole numbers below 2^53 - 2^31; round and bound them first")
        self._add(sums)

    def maker(self) -> "Maker":
        """Return a maker of this stream's blocks for one thread, with memory of its own."""
        return Maker(self._key, self._nonce, self._tables)

    def _add(self, target: NDArray) -> None:
        places = self.places(spans([len(target)], BLOCK))

        def work(span: Span, maker: Maker) -> None:
            maker.add(span.of([target]), places[span])

        for_each_span(list(places), work, self.maker)


class Maker:
    """Maker of one stream's blocks, on one thread.

    Args:
        key, nonce: of the stream.
        tables: of the scale.
        numbers: the most numbers of a block; the maker's memory has this size.
    """

    def __init__(self, key: bytes, nonce: int, tables: Tables, numbers: int = BLOCK) -> None:
        self._nonce, self._tables, self._kernel = nonce, tables, kernel()
        self._keystream = Cipher(algorithms.AES(key), modes.CTR(nonce.to_bytes(16))).encryptor()
        self._numbers = min(numbers, BLOCK)
        self._memory = np.empty(BYTES * (self._numbers + spares(self._numbers)), np.uint8)
        self._left = 0

    def add(self, target: NDArray, places: Places) -> None:
        """Add a number to every element of a flat array, in place.

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
            PrivacyError: lengths differ. A compiled kernel would read the memory behind the shorter array.
        """
        if len(out) != len(sums):
            raise PrivacyError(f"noise on {len(sums)} sums goes into as many numbers, not into {len(out)}")
        for start, number in zip(range(0, len(sums), BLOCK), places, strict=True):
            block = slice(start, start + BLOCK)
            self._kernel.onto_grid(sums[block], self.integers(number, len(sums[block])), scale, unit, out[block])

    def integers(self, number: int, count: int) -> NDArray[np.int32]:
        """Return the first numbers of a block, in memory that is reused.

        Args:
            number: place of the block in the stream.
            count: number of integers; the next call overwrites them.

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
        """Return candidates, each b·2^16 + low, and the positions of refused ones."""
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
        """Draw 64 more bits of the block."""
        drawn = np.empty(1, np.uint64)
        self._draw(drawn.view(np.uint8))
        return int(drawn[0])

    def _draw(self, out: NDArray) -> None:
        """Read the next bytes of the block's own place in the keystream."""
        self._left -= len(out)
        if self._left < 0:
            raise PrivacyError("a block of noise has used up its place in the keystream")
        for start in range(0, len(out), len(ZEROS)):
            part = out[start : start + len(ZEROS)]
            self._keystream.update_into(memoryview(ZEROS)[: len(part)], part.data)


def _without(numbers: NDArray, positions: NDArray) -> NDArray:
    """Return the numbers at all other positions, in order."""
    kept = np.ones(len(numbers), bool)
    kept[positions] = False
    return numbers[kept]
