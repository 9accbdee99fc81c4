"""A secret key and numbered places in its keystream: what every source of noise is made on.

Noise is numbered first and made later, so that which thread makes a block never decides which bytes it is made of.
"""

import hashlib
import os
from collections.abc import Sequence
from itertools import count

from cloister.core.errors import PrivacyError
from cloister.core.threads import Span

Places = tuple[int, ...]
"""Where in the stream the noise of a span lies: the numbers of its blocks."""


class Keystream:
    """A key of AES-128 in counter mode, where the counter starts, and the next free place.

    Args:
        seed: None draws the key from the operating system. A number gives the same key every time.
        purpose: what the noise is; sources of two purposes share no key under the same seed.
        block: numbers of noise that a place is for.
    """

    def __init__(self, seed: int | None, purpose: str, block: int) -> None:
        self.seeded = seed is not None
        secret = os.urandom(32) if seed is None else hashlib.sha256(f"{purpose} {seed}".encode()).digest()
        self._key, self._nonce = secret[:16], int.from_bytes(secret[16:])
        # No number is ever given out twice, to no thread: a block that repeats is noise that can be subtracted.
        self._numbers = count()
        self._process = os.getpid()
        self._block = block

    def places(self, stretches: Sequence[Span]) -> dict[Span, Places]:
        """Set places in the stream aside for the noise of some spans, in their order.

        Noise is numbered here and made later: which thread takes which span must not decide who gets which number.

        Raises:
            PrivacyError: this is a copy in a forked process, whose noise would be the parent's once more.
        """
        if os.getpid() != self._process:
            raise PrivacyError("noise cannot be shared with a forked process: both would add the same; make another")
        return {span: tuple(next(self._numbers) for _ in range(0, len(span), self._block)) for span in stretches}
