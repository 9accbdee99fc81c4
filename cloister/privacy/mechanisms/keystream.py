"""Secret key and numbered places in its keystream, the base of every source of noise.

Places are assigned before the noise is drawn, so that the bytes of a block do not depend on the thread that draws it.
"""

import hashlib
import os
from collections.abc import Sequence
from itertools import count
from typing import NoReturn

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cloister.core.errors import PrivacyError
from cloister.core.threads import Span

SECRET = 16
"""Least number of bytes of a secret: the length of the key."""
Places = tuple[int, ...]
"""Places of a span's noise in the stream: the numbers of its blocks."""


class Keystream:
    """Keystream of AES-128 in counter mode: a key, the start of the counter, and the next free place.

    Args:
        seed: None draws the key from the operating system. A number gives the same key every time. Another stream
            reserves its next place: the keystream there is the key, and this stream is seeded if that one is. Bytes
            are a secret that the caller has drawn: a party that receives it can draw the same noise.
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
