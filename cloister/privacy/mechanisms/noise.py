"""Sources of noise: a secret keystream, and continuous Gaussian noise on a public grid.

**Keystream.** AES-128 in counter mode, with a key from the operating system's entropy. Each block of noise has a
numbered place in it. Places are assigned before the noise is drawn, so that the bytes of a block do not depend on the
thread that draws it.

**Gaussian noise.** Box-Muller on the keystream, which is faster than NumPy's generator with the processor's AES
instructions. Numbers are drawn block by block in the cache, for large arrays on a few threads. `discrete` has exact
noise.

Radii come from 64 bits, so that the tail reaches 9.4 standard deviations: 32 bits would cut it at 6.7, which over
millions of coordinates is not negligible beside the δ of a guarantee. `docs/privacy.md` describes the remaining
floating-point attacks (Mironov, 2012).

| edge case | result |
|---|---|
| standard deviation 0 | no noise and no rounding |
| negative, NaN or infinite deviation | refused (`add`, `add_on_grid`) |
| an array without numbers | unchanged; no place of the stream is used |
| NaN or infinite numbers in the target | they stay NaN or infinite: the caller has to exclude them |
| a forked process, a copy, a pickle | refused: both would add the same noise |
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import DTypeLike, NDArray

from cloister.utils import check, threads
from cloister.utils.arrays import Row
from cloister.utils.errors import PrivacyError
from cloister.utils.threads import Span, for_each_span, spans

SECRET = 16
"""Least number of bytes of a secret: the length of the key."""
Places = tuple[int, ...]
"""Places of a span's noise in the stream: the numbers of its blocks."""


class Keystream:
    """Keystream of AES-128 in counter mode: a key, the start of the counter, and the next free place.

    Args:
        seed: None draws the key from the operating system. A number gives the same key every time. With another
            stream, the key is the keystream at that stream's next place, and both are seeded or neither is. Bytes are
            a secret that the caller has drawn: a party that receives it can draw the same noise.
        purpose: name of the noise; sources of two purposes share no key under the same seed.
        block: numbers of noise per place.
        counters: values of the counter that a place has, 16 bytes of keystream each.
    """

    def __init__(self, seed: "int | bytes | Keystream | None", purpose: str, block: int, counters: int) -> None:
        self.seeded: bool = seed.seeded if isinstance(seed, Keystream) else not isinstance(seed, bytes | None)
        if isinstance(seed, Keystream):
            secret = seed.secret()
        elif isinstance(seed, bytes):
            if len(seed) < SECRET:
                raise PrivacyError(
                    f"a secret that noise is made from must have at least {SECRET} bytes, found {len(seed)}"
                )
            secret = hashlib.sha256(f"{purpose} from a secret ".encode() + seed).digest()
        else:
            secret = os.urandom(32) if seed is None else hashlib.sha256(f"{purpose} {seed}".encode()).digest()
        self._key, self._nonce, self._counters = secret[:16], int.from_bytes(secret[16:]), counters
        # Each number is assigned once, over all threads: noise of a repeated block could be subtracted.
        self._numbers = count()
        self._process = os.getpid()
        self._block = block

    def places(self, stretches: Sequence[Span]) -> dict[Span, Places]:
        """Reserve places in the stream for the noise of some spans, in their order.

        Places are reserved before the noise is drawn, so that they do not depend on the assignment of spans to threads.

        Raises:
            PrivacyError: this is a copy in a forked process, whose noise would repeat the parent's.
        """
        if os.getpid() != self._process:
            raise PrivacyError("noise cannot be shared with a forked process: both would add the same; make another")
        return {span: tuple(next(self._numbers) for _ in range(0, len(span), self._block)) for span in stretches}

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: each copy would add the same noise.

        Raises:
            PrivacyError: always.
        """
        raise PrivacyError("noise cannot be copied or pickled: both copies would add the same; make another")

    def secret(self) -> bytes:
        """Return 32 bytes of the next place, reserved as the key of another stream."""
        ((number,),) = self.places([Span(0, 0, 1)]).values()
        start = counter(self._nonce, number, self._counters)
        return Cipher(algorithms.AES(self._key), modes.CTR(start)).encryptor().update(bytes(32))


def counter(nonce: int, number: int, counters: int) -> bytes:
    """Return the start of a place in a keystream.

    Args:
        nonce: start of the stream.
        number: of the place.
        counters: counter values per place.
    """
    return ((nonce + number * counters) % 2**128).to_bytes(16)


BLOCK = threads.BLOCK // 2
"""Normal numbers per block."""
HALF = BLOCK // 2
WORKSPACE = 2 * BLOCK
"""Length of the memory for a whole block; it stays in a core's cache, and the scratch of a span has this length."""
BYTES_PER_PAIR = {np.dtype(np.float32): 12, np.dtype(np.float64): 16}
ZEROS = bytes(max(BYTES_PER_PAIR.values()) * HALF)
"""Plaintext that encrypts to the keystream itself."""

GRID_BITS = 20
"""Bits between the standard deviation of the noise and the grid of the release, whose step is a power of two."""
DISTINCT = 1 << 12
"""Least number of steps in a standard deviation for which rounding to a grid is negligible beside the noise."""
HEADROOM = 64
"""Deviations of the noise that the dtype of a number must hold."""


class GaussianNoise(Keystream):
    """Endless stream of independent N(0, 1) numbers.

    Args:
        seed: None draws the key from the operating system. A number gives the same stream every time, for tests and
            for papers; a release with it is not private, and `seeded` is True.

    Examples:
        >>> numbers = GaussianNoise(seed=7).standard_normal(10_000)
        >>> bool((numbers == GaussianNoise(seed=7).standard_normal(10_000)).all())
        True
        >>> abs(float(numbers.mean())) < 0.05, abs(float(numbers.std()) - 1) < 0.05
        (True, True)
        >>> GaussianNoise().seeded
        False
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed, "cloister noise", BLOCK, HALF)

    def add(self, target: NDArray, std: float) -> None:
        """Add `std` · N(0, 1) to every number of a flat array, in place, on no grid.

        Args:
            target: n numbers of float32 or float64; the noise is drawn in its precision.
            std: ≥ 0; 0: no noise.

        Raises:
            ConfigError: `std` is not a finite number of at least 0.
        """
        check.non_negative(std=std)
        places = self.places(spans([len(target)], BLOCK))

        def work(span: Span, maker: Maker) -> None:
            maker.add(span.of([target]), std, places[span])

        for_each_span(list(places), work, lambda: self.maker(target.dtype))

    def add_on_grid(self, row: Row, std: float, step: float | None = None, out: Row | None = None) -> None:
        """Add `std` · N(0, 1) to every number of a row, rounded to a public grid.

        See `Maker.add_on_grid`.

        Args:
            row: flat float32 or float64 arrays.
            std: ≥ 0; 0: no noise.
            step: of the grid, a power of two; None: `grid_step(std)`.
            out: receives the sums, arrays of the same sizes; None: in place.

        Raises:
            ConfigError: `std` is not a finite number of at least 0.
        """
        check.non_negative(std=std)
        places = self.places(spans([piece.size for piece in row], BLOCK))

        def work(span: Span, maker: Maker) -> None:
            maker.add_on_grid(span.of(row), std, places[span], step, None if out is None else span.of(out))

        for_each_span(list(places), work, self.maker)

    def standard_normal(self, count: int, dtype: type = np.float32) -> NDArray:
        """Return `count` independent N(0, 1) numbers.

        Args:
            count: ≥ 0.
            dtype: float32 or float64.
        """
        out: NDArray = np.zeros(count, dtype)
        self.add(out, 1.0)
        return out

    def maker(self, dtype: DTypeLike = np.float64) -> "Maker":
        """Return a maker of blocks for one thread, for noise of this dtype."""
        return Maker(self._key, self._nonce, np.empty(WORKSPACE, dtype))


class Maker:
    """Maker of one stream's blocks, on one thread.

    Args:
        key, nonce: of the stream.
        workspace: memory for twice the numbers of a block, of their dtype. Each block of noise overwrites it; between
            blocks it may serve other purposes.
    """

    def __init__(self, key: bytes, nonce: int, workspace: NDArray) -> None:
        self.workspace = workspace
        self._nonce = nonce
        self._keystream = Cipher(algorithms.AES(key), modes.CTR(nonce.to_bytes(16))).encryptor()
        self._bytes_per_pair = BYTES_PER_PAIR[workspace.dtype]
        pairs = len(workspace) // 4
        self._bytes, self._radii = workspace[: 3 * pairs].view(np.uint8), workspace[3 * pairs : 4 * pairs]
        self._point = _point32 if workspace.dtype == np.float32 else _point64

    def add(self, target: NDArray, std: float, places: Places) -> None:
        """Add N(0, std²) to every number of a flat array, in place; unchanged at 0.

        Args:
            target: of n numbers.
            std: ≥ 0.
            places: of its noise.
        """
        for block, number in _blocks(target, places) if std else ():
            target[block] += self.normals(number, len(target[block]), std)

    def add_on_grid(
        self, target: NDArray, std: float, places: Places, step: float | None = None, out: NDArray | None = None
    ) -> None:
        """Add N(0, std²) and round to a public grid, before the cast to the dtype.

        Both are in the maker's precision. The low bits of floating-point noise reveal the number under it (Mironov,
        2012; Haney et al., 2022). So each released number has at most `GRID_BITS` bits below `std`; 33 bits of a
        double are below that.

        Args:
            target: flat, of n float32 or float64 numbers.
            std: ≥ 0; 0: no noise and no rounding.
            places: of its noise.
            step: of the grid, a power of two; None: `grid_step(std)`. If `std` is secret, the grid must not depend on
                it. A maker of float32 noise needs a coarser one.
            out: receives the sums; None: in place.
        """
        if not std:
            return None if out is None else np.copyto(out, target)
        out = target if out is None else out
        step = grid_step(std) if step is None else step
        for block, number in _blocks(target, places):
            wide = self.normals(number, len(target[block]), std)
            wide += target[block]
            wide *= 1 / step  # exact, like the product below: a power of two
            np.rint(wide, out=wide)
            np.multiply(wide, step, out=out[block], casting="same_kind")

    def normals(self, number: int, count: int, std: float) -> NDArray:
        """Return the first numbers of a block, in memory that is reused.

        A radius √(-2 ln u) and a uniform point on the circle give a pair of independent normals (Box, Muller, 1958).

        Args:
            number: place of the block in the stream.
            count: number of normals; the next call overwrites them.
            std: their standard deviation.

        Raises:
            PrivacyError: the block is larger than its place in the stream, or than the memory: some of its numbers
                would use bytes of other blocks, or none.
        """
        pairs = (count + 1) // 2
        if pairs > min(HALF, len(self._radii)):
            raise PrivacyError(f"a block of {count} numbers was asked of a maker of {2 * min(HALF, len(self._radii))}")
        drawn, radius = self._bytes[: self._bytes_per_pair * pairs], self._radii[:pairs]
        self._draw(number, drawn)
        # std · √(-2 ln u), u uniform above 0 from 64 bits each. Processors convert signed integers to floats several
        # times faster than unsigned ones.
        one = radius.dtype.type
        np.copyto(radius, drawn[: 8 * pairs].view(np.int64), casting="unsafe")
        np.abs(radius, out=radius)
        radius += one(0.5)
        radius *= one(2.0**-63)
        np.log(radius, out=radius)
        radius *= one(-2)
        np.sqrt(radius, out=radius)
        radius *= one(std)
        # The numbers overwrite the bytes from which they are computed.
        normals = drawn[: 2 * radius.nbytes].view(radius.dtype)
        self._point(drawn[8 * pairs :], radius, normals[:pairs], normals[pairs:])
        return normals[:count]

    def _draw(self, number: int, out: NDArray) -> None:
        """Read bytes from the block's own place in the keystream: 16 for each possible pair."""
        self._keystream.reset_nonce(counter(self._nonce, number, HALF))
        self._keystream.update_into(memoryview(ZEROS)[: len(out)], out.data)


def noised(model: Row, std: float, noise: GaussianNoise, widest: float = 0.0) -> Row:
    """Return a copy of a model with N(0, std²) on every parameter, on the grid.

    The noise is in double precision.

    Args:
        model: p parameters, in flat arrays.
        std: ≥ 0.
        noise: source of the normal numbers.
        widest: the largest possible deviation, if `std` depends on private data. The grid then follows this public
            value, if that leaves 2^12 steps in a deviation. 0: `std` is public.

    Returns:
        Arrays of float32, or of float64 if the model has that.
    """
    copies = tuple(piece.astype(np.result_type(piece, np.float32)) for piece in model)
    step = grid_step(widest) if std < widest < math.inf else 0.0
    noise.add_on_grid(copies, std, step if 0 < step <= std / DISTINCT else None)
    return copies


def grid_step(std: float) -> float:
    """Return the grid's step under noise of this deviation: a power of two."""
    return float(2.0 ** (math.floor(math.log2(std)) - GRID_BITS)) if std else 0.0


def refuse_beyond(log_std: float) -> None:
    """Refuse noise beyond single precision: infinities and zeros are no noise.

    Args:
        log_std: ln of the standard deviation of one coordinate.

    Raises:
        PrivacyError: the noise is beyond this range. The message omits the value, which may depend on private numbers.
    """
    limits = np.finfo(np.float32)
    if not math.log(limits.tiny) + GRID_BITS < log_std < math.log(limits.max) - math.log(HEADROOM):
        raise PrivacyError("this asks for noise beyond the range of single precision; scale the model")


def _blocks(target: NDArray, places: Places) -> Iterator[tuple[slice, int]]:
    """Return the blocks of an array, each with its place in the stream."""
    starts = range(0, len(target), BLOCK)
    return ((slice(start, start + BLOCK), number) for start, number in zip(starts, places, strict=True))


def _point32(raw: NDArray, radius: NDArray, x: NDArray, y: NDArray) -> None:
    """Compute points at these radii and uniform angles from 32 bits, overwritten."""
    angle = np.multiply(
        raw.view(np.int32), np.float32(math.pi * 2.0**-31), out=raw.view(np.float32), dtype=np.float32, casting="unsafe"
    )
    np.cos(angle, out=x)
    np.sin(angle, out=y)
    x *= radius
    y *= radius


def _point64(raw: NDArray, radius: NDArray, x: NDArray, y: NDArray) -> None:
    """Compute points at these radii and uniform angles from 64 bits each.

    They are in double precision; `y` is the memory of the bits.

    With t = tan(θ/2), cos θ = (1 - t²)/(1 + t²) and sin θ = 2t/(1 + t²). NumPy's tangent of a double is vectorised,
    and faster than its sine and cosine.
    """
    t = np.multiply(raw.view(np.int64), math.pi * 2.0**-64, out=y)
    np.tan(t, out=t)
    np.square(t, out=x)
    x += 1
    radius /= x
    np.subtract(2, x, out=x)
    x *= radius
    radius *= 2
    t *= radius
