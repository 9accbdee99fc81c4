"""The one source of noise: Gaussian numbers from the operating system's entropy.

Box-Muller on the keystream of AES-128 in counter mode, a cryptographic generator and, with the processor's AES
instructions, a faster one than NumPy's. Numbers are made block by block in the cache, on a few threads where there are
many; a block's place in the keystream is its number, so the same seed gives the same noise whatever thread made it.

Radii come from 64 bits, so that the tail reaches 9.4 standard deviations: 32 bits would cut it at 6.7, which over
millions of coordinates is not negligible beside the δ of a guarantee. What remains of floating-point attacks
(Mironov, 2012) is named in `docs/privacy.md`.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from itertools import count

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from cloister.core import check, cohort
from cloister.core.errors import PrivacyError

BLOCK = cohort.BLOCK // 2
"""Normal numbers made at a time."""
HALF = BLOCK // 2
WORKSPACE = 2 * BLOCK
"""Numbers whose memory a whole block is made in; it stays in a core's cache, and the scratch of a span is as large."""
BYTES_PER_PAIR = {np.dtype(np.float32): 12, np.dtype(np.float64): 16}
ZEROS = bytes(max(BYTES_PER_PAIR.values()) * HALF)
"""What is encrypted: zeros come out as the keystream itself."""

NumberedBlock = tuple[int, NDArray]
"""A place in the stream, and where the numbers of that place go."""


class GaussianNoise:
    """An endless stream of independent N(0, 1) numbers.

    Args:
        seed: None draws the key from the operating system. A number gives the same stream every time, for tests and
            for papers; whatever is released with it is not private, and says `seeded`.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seeded = seed is not None
        secret = os.urandom(32) if seed is None else hashlib.sha256(f"cloister noise {seed}".encode()).digest()
        self._key, self._nonce = secret[:16], int.from_bytes(secret[16:])
        # No number is ever given out twice, to no thread: a block that repeats is noise that can be subtracted.
        self._numbers = count()
        self._process = os.getpid()

    def add(self, target: NDArray, std: float) -> None:
        """Add `std` · N(0, 1) to every number of a flat float32 or float64 array, in place.

        Raises:
            ConfigError: `std` is not a finite number of at least 0. At 0 nothing is added.
        """

        def work(blocks: Iterator[NumberedBlock]) -> None:
            self.maker(np.empty(WORKSPACE, target.dtype)).add(blocks, std)

        cohort.share(self.blocks(target), work, len(target))

    def standard_normal(self, count: int, dtype: type = np.float32) -> NDArray:
        """`count` independent N(0, 1) numbers."""
        out: NDArray = np.zeros(count, dtype)
        self.add(out, 1.0)
        return out

    def blocks(self, target: NDArray, width: int = BLOCK) -> list[NumberedBlock]:
        """A flat array in blocks, each with a number of its own: the place in the stream where its noise lies.

        Args:
            target: flat, of n numbers.
            width: numbers in a block, at most `BLOCK`; a smaller one needs less workspace.

        Raises:
            PrivacyError: this is a copy in a forked process, whose noise would be the parent's once more; or a block
                is wider than its place in the stream, and would share numbers with the next.
        """
        if not 0 < width <= BLOCK:
            raise PrivacyError(f"a block of noise holds from 1 to {BLOCK} numbers, asked for {width}")
        if os.getpid() != self._process:
            raise PrivacyError("noise cannot be shared with a forked process: both would add the same; make another")
        return [(next(self._numbers), target[start : start + width]) for start in range(0, len(target), width)]

    def maker(self, workspace: NDArray) -> "Maker":
        """What makes this stream's blocks on one thread, in memory of twice as many numbers of their dtype."""
        return Maker(self._key, self._nonce, workspace)


class Maker:
    """Makes blocks of one stream, on one thread, in `workspace`: memory for twice the numbers of a block."""

    def __init__(self, key: bytes, nonce: int, workspace: NDArray) -> None:
        self._nonce = nonce
        self._keystream = Cipher(algorithms.AES(key), modes.CTR(nonce.to_bytes(16))).encryptor()
        self._bytes_per_pair = BYTES_PER_PAIR[workspace.dtype]
        pairs = len(workspace) // 4
        self._bytes, self._radii = workspace[: 3 * pairs].view(np.uint8), workspace[3 * pairs : 4 * pairs]
        self._point = _point32 if workspace.dtype == np.float32 else _point64

    def add(self, blocks: Iterable[NumberedBlock], std: float) -> None:
        """Add `std` · N(0, 1) to every number of the blocks; nothing at 0.

        Raises:
            ConfigError: `std` is not a finite number of at least 0.
        """
        check.non_negative(std=std)
        for number, target in blocks if std else ():
            target += self.normals(number, len(target), std)

    def normals(self, number: int, count: int, std: float) -> NDArray:
        """The numbers of a block, as many as are needed, where the next ones will be too.

        Radius √(-2 ln u) and a uniform point on the circle: two independent normals a pair (Box, Muller, 1958).

        Raises:
            PrivacyError: the block is larger than its place in the stream, or than the memory: some of its numbers
                would be made of other blocks' bytes, or of none.
        """
        pairs = (count + 1) // 2
        if pairs > min(HALF, len(self._radii)):
            raise PrivacyError(f"a block of {count} numbers was asked of a maker of {2 * min(HALF, len(self._radii))}")
        drawn, radius = self._bytes[: self._bytes_per_pair * pairs], self._radii[:pairs]
        self._draw(number, drawn)
        _radius(drawn[: 8 * pairs].view(np.int64), std, radius)
        # The numbers take the place of the bytes that they are made from.
        normals = drawn[: 2 * radius.nbytes].view(radius.dtype)
        self._point(drawn[8 * pairs :], radius, normals[:pairs], normals[pairs:])
        return normals[:count]

    def _draw(self, number: int, out: NDArray) -> None:
        """Bytes from the block's own place in the keystream: 16 for each pair that it may have."""
        self._keystream.reset_nonce(((self._nonce + number * HALF) % 2**128).to_bytes(16))
        self._keystream.update_into(memoryview(ZEROS)[: len(out)], out.data)


def _radius(bits: NDArray, std: float, radius: NDArray) -> None:
    """std · √(-2 ln u), u uniform above 0 from 64 bits each."""
    one = radius.dtype.type
    # Signed: processors turn signed integers into floats several times faster than unsigned ones.
    np.copyto(radius, bits, casting="unsafe")
    np.abs(radius, out=radius)
    radius += one(0.5)
    radius *= one(2.0**-63)
    np.log(radius, out=radius)
    radius *= one(-2)
    np.sqrt(radius, out=radius)
    radius *= one(std)


def _point32(raw: NDArray, radius: NDArray, x: NDArray, y: NDArray) -> None:
    """Points at these radii, at uniform angles from 32 bits each, which the angles overwrite."""
    angle = np.multiply(
        raw.view(np.int32), np.float32(math.pi * 2.0**-31), out=raw.view(np.float32), dtype=np.float32, casting="unsafe"
    )
    np.cos(angle, out=x)
    np.sin(angle, out=y)
    x *= radius
    y *= radius


def _point64(raw: NDArray, radius: NDArray, x: NDArray, y: NDArray) -> None:
    """Points at these radii, at uniform angles from 64 bits each, to double precision; `y` lies where the bits are.

    With t = tan(θ/2), cos θ = (1 - t²)/(1 + t²) and sin θ = 2t/(1 + t²). NumPy's tangent of a double is vectorised; its
    sine and cosine are not, and would take most of the time.
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
