"""Masks: keystreams of AES-128 in counter mode, added to a vector in the ring."""

from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

BLOCK = 1 << 16
"""Bytes of a vector per block: the block, its keystream and the keystream's input of zeros fit a core's cache."""


def add_masks(values: NDArray, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """Add and subtract masks, in place and in one pass over the vector.

    Args:
        values: (p,) unsigned and contiguous.
        plus: keys of 16 bytes, whose masks are added; each key masks one vector only.
        minus: keys whose masks are subtracted.

    Guarantee:
        The mask depends on the key alone: the same key in `plus` and in `minus` cancels exactly.
    """
    raw = values.view(np.uint8)
    zeros, keystream = bytes(BLOCK), bytearray(BLOCK)
    # A key makes one mask only. So every keystream may start at zero.
    streams = [(_stream(key), np.add) for key in plus] + [(_stream(key), np.subtract) for key in minus]
    for start in range(0, raw.size, BLOCK):
        block = raw[start : start + BLOCK].view(values.dtype)
        for stream, combine in streams:
            stream.update_into(memoryview(zeros)[: block.nbytes], keystream)
            combine(block, np.frombuffer(keystream, values.dtype, block.size), out=block)


def _stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
