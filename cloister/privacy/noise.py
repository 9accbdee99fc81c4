"""The one source of noise: Gaussian numbers from the operating system's entropy.

Box-Muller on the keystream of AES-128 in counter mode, a cryptographic generator and, with the processor's AES
instructions, a faster one than NumPy's. Numbers are made block by block in the cache and added where they are needed.

Radii come from 64 bits, so that the tail reaches 9.4 standard deviations: 32 bits would cut it at 6.7, which over
millions of coordinates is not negligible beside the δ of a guarantee. What remains of floating-point attacks
(Mironov, 2012) is named in `docs/privacy.md`.
"""

import hashlib
import math
import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from cloister.core import check

BLOCK = 1 << 15
"""Normal numbers made at a time; a block and its scratch stay in a core's cache."""
HALF = BLOCK // 2
BYTES_PER_PAIR = {np.dtype(np.float32): 12, np.dtype(np.float64): 16}


class GaussianNoise:
    """An endless stream of independent N(0, 1) numbers.

    Args:
        seed: None draws the key from the operating system. A number gives the same stream every time, for tests and
            for papers; whatever is released with it is not private, and says `seeded`.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seeded = seed is not None
        key = os.urandom(32) if seed is None else hashlib.sha256(f"cloister noise {seed}".encode()).digest()
        self._keystream = Cipher(algorithms.AES(key[:16]), modes.CTR(key[16:])).encryptor()
        self._scratch: dict[np.dtype, _Scratch] = {}

    def add(self, target: NDArray, std: float) -> None:
        """Add `std` · N(0, 1) to every number of a flat float32 or float64 array, in place.

        Raises:
            ConfigError: `std` is not a finite number of at least 0. At 0 nothing is added.
        """
        check.non_negative(std=std)
        if std == 0:
            return
        for start in range(0, len(target), BLOCK):
            piece = target[start : start + BLOCK]
            np.add(piece, self._normals(target.dtype, std)[: len(piece)], out=piece)

    def standard_normal(self, count: int, dtype: type = np.float32) -> NDArray:
        """`count` independent N(0, 1) numbers."""
        out = np.zeros(count, dtype)
        self.add(out, 1.0)
        return out

    def _normals(self, dtype: np.dtype, std: float) -> NDArray:
        """`BLOCK` fresh numbers, in a buffer that the next call overwrites."""
        if dtype not in self._scratch:
            self._scratch[dtype] = _Scratch(dtype)
        scratch = self._scratch[dtype]
        self._keystream.update_into(scratch.zeros, scratch.raw)
        return scratch.box_muller(std)


class _Scratch:
    """Buffers of one dtype: raw keystream bytes in, `BLOCK` normal numbers out."""

    def __init__(self, dtype: np.dtype) -> None:
        size = BYTES_PER_PAIR[dtype] * HALF
        self.zeros = bytes(size)
        self.raw = bytearray(size)
        # Signed: processors turn signed integers into floats several times faster than unsigned ones.
        self._for_radius = np.frombuffer(self.raw, np.int64, HALF)
        self._radius, self._out = np.empty(HALF, dtype), np.empty(BLOCK, dtype)
        self._circle = _circle32 if dtype == np.float32 else _circle64

    def box_muller(self, std: float) -> NDArray:
        """Radius √(-2 ln u) and a uniform point on the circle: two independent normals a pair (Box, Muller, 1958)."""
        radius, one = self._radius, self._radius.dtype.type
        np.copyto(radius, self._for_radius, casting="unsafe")
        np.abs(radius, out=radius)
        radius += one(0.5)
        radius *= one(2.0**-63)
        np.log(radius, out=radius)
        radius *= one(-2)
        np.sqrt(radius, out=radius)
        radius *= one(std)
        cosine, sine = self._out[:HALF], self._out[HALF:]
        self._circle(memoryview(self.raw)[8 * HALF :], cosine, sine)
        cosine *= radius
        sine *= radius
        return self._out


def _circle32(raw: memoryview, cosine: NDArray, sine: NDArray) -> None:
    """Uniform points on the circle, from 32 bits each."""
    angle = np.multiply(
        np.frombuffer(raw, np.int32), np.float32(math.pi * 2.0**-31), dtype=np.float32, casting="unsafe"
    )
    np.cos(angle, out=cosine)
    np.sin(angle, out=sine)


SECTORS = 256
_SECTOR_ANGLES = 2 * math.pi * np.arange(SECTORS) / SECTORS
_COSINES, _SINES = np.cos(_SECTOR_ANGLES), np.sin(_SECTOR_ANGLES)


def _circle64(raw: memoryview, cosine: NDArray, sine: NDArray) -> None:
    """Uniform points on the circle, from 64 bits each, to double precision.

    NumPy's sine of a double is not vectorised and would take most of the time. Eight bits choose one of 256 sectors
    from a table; the rest, an angle below 0.0246, needs five terms of its series; the addition theorem joins them.
    """
    bits = np.frombuffer(raw, np.uint64)
    sector = (bits >> np.uint64(56)).astype(np.intp)
    x = (bits & np.uint64(2**56 - 1)).view(np.int64) * (2 * math.pi * 2.0**-64)
    square = x * x
    small_sine = x * (1 + square * (-1 / 6 + square * (1 / 120 - square / 5040)))
    small_cosine = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square / 40320)))
    base_cosine, base_sine = _COSINES[sector], _SINES[sector]
    np.subtract(base_cosine * small_cosine, base_sine * small_sine, out=cosine)
    np.add(base_sine * small_cosine, base_cosine * small_sine, out=sine)
