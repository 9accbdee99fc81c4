"""Primitives of the protocol: keys, shares of secrets, chains of seeds, the ring of sums, and masks."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from cloister.secure_aggregation.serialization import NUMBER, Serializable, sized, text
from cloister.utils import check
from cloister.utils.errors import ProtocolError

KEY = 16
"""Bytes of a symmetric key, and of the seed of a private key."""
NONCE = 12
PUBLIC_KEY = 32
"""Bytes of a public key, for key agreement or for signatures."""
SEAL = NONCE + 16
"""Bytes by which a sealed text is longer than the text."""


def derived(secret: bytes, purpose: bytes, length: int = KEY) -> bytes:
    """Derive a key from a secret.

    Args:
        secret: unpredictable bytes.
        purpose: context of the key; other purposes give independent keys.
        length: bytes of the key.
    """
    return HKDF(SHA256(), length, salt=None, info=purpose).derive(secret)


def private_key(seed: bytes) -> X25519PrivateKey:
    """Derive the private key from a seed of 16 bytes, which is short enough to be shared."""
    return X25519PrivateKey.from_private_bytes(derived(seed, text("private key"), 32))


def public_key(seed: bytes) -> bytes:
    """Return the public key, 32 bytes, of the private key of a seed."""
    return private_key(seed).public_key().public_bytes_raw()


def agreed(private: X25519PrivateKey, public: bytes, purpose: bytes, length: int = KEY) -> bytes:
    """Return the key that only the owners of two key pairs can compute.

    Args:
        private: the own private key.
        public: the other member's key, 32 bytes.
        purpose: context of the key: its use, the two members and the round.
        length: bytes of the key.

    Raises:
        ProtocolError: the other member's key is of low order, and every party could compute the result.
    """
    try:
        return derived(private.exchange(X25519PublicKey.from_public_bytes(public)), purpose, length)
    except ValueError as error:
        raise ProtocolError("the key of a member is no key to agree with") from error


def can_agree(public: bytes) -> bool:
    """Return True if a key of 32 bytes is fit for key agreement.

    A key of low order gives no secret.
    """
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def pair_key(private: X25519PrivateKey, public: bytes, binding: bytes, one: str, other: str) -> bytes:
    """Return the key of the mask that two members have in common.

    One member adds the mask, the other subtracts it.

    Args:
        private: the first or second member's private key for masks.
        public: the other member's public key for masks.
        binding: hash of the attempt's terms and keys.
        one: name of one member.
        other: name of the other member; the order of the names is irrelevant.
    """
    return agreed(private, public, text("mask", binding, *sorted((one, other))))


def seal(key: bytes, context: bytes, plain: bytes) -> bytes:
    """Encrypt and authenticate a text by AES-GCM.

    Args:
        key: 16 bytes.
        context: authenticated data, needed to open it: sender, receiver and round.
        plain: the text.
    """
    nonce = os.urandom(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, plain, context)


def unseal(key: bytes, context: bytes, sealed: bytes) -> bytes:
    """Decrypt the output of `seal`.

    Args:
        key: the key of the sealing.
        context: the context of the sealing.
        sealed: output of `seal`.

    Raises:
        ProtocolError: sender, receiver or round differ, or the bytes were changed.
    """
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], context)
    except InvalidTag as error:
        raise ProtocolError("a sealed share is not of this sender, this receiver and this attempt") from error


SECRET = 16
"""Bytes of a secret, and of a share."""


def split(secret: bytes, holders: Collection[str], needed: int) -> dict[str, bytes]:
    """Split a secret into one share for each holder.

    Args:
        secret: 16 bytes.
        holders: names, each once.
        needed: number of shares that recover the secret, 2 to the number of holders.

    Guarantee:
        Fewer than `needed` shares are independent of the secret.

    Source:
        Shamir (1979), over GF(2¹²⁸), by pycryptodome.
    """
    shares = Shamir.split(needed, len(holders), secret, ssss=False)
    return {name: share for name, (_, share) in zip(sorted(holders), shares, strict=True)}


def combine(shares: Mapping[str, bytes], holders: Collection[str], needed: int) -> bytes:
    """Recover a secret from its shares.

    Args:
        shares: holder -> share, at least `needed` of them.
        holders: the names that the secret was split for.
        needed: number of shares that recover the secret.
    """
    places = {name: place for place, name in enumerate(sorted(holders), start=1)}
    # The interpolation must use exactly `needed` shares.
    return Shamir.combine([(places[name], shares[name]) for name in sorted(shares)[:needed]], ssss=False)


LINK = 32
"""Bytes of a link of the chain, and of a seed."""


@dataclass(frozen=True)
class SeedChain(Serializable):
    """The seeds of components `lowest` to `highest` of a member's noise.

    Each link is derived from the link above it by a one-way function. So the link of component j gives the seeds of all
    components up to j.

    Args:
        top: the link of the highest component, 32 bytes from the operating system.
        lowest: number of the lowest component that can be revealed.
        highest: number of the highest component: the number of members.
    """

    top: bytes = field(repr=False, metadata=sized(LINK))
    lowest: int = field(metadata=NUMBER)
    highest: int = field(metadata=NUMBER)

    def reveal(self, survivors: int) -> bytes:
        """Return the link for this number of survivors.

        It gives the seeds of all components up to this number, and of none above. It is empty below `lowest`.

        Raises:
            ProtocolError: there are more survivors than components.
        """
        if survivors > self.highest:
            raise ProtocolError(f"{survivors} survivors, of a chain of seeds for {self.highest} at most")
        if survivors < self.lowest:
            return b""
        link = self.top
        for _ in range(self.highest - survivors):
            link = _below(link)
        return link

    def seeds(self) -> dict[int, bytes]:
        """Return the seeds of all components, for the member that makes the noise."""
        return seeds(self.top, self.lowest, self.highest)


def seeds(link: bytes, lowest: int, highest: int) -> dict[int, bytes]:
    """Return the seeds of components that a revealed link gives.

    Args:
        link: of component `highest`, as a survivor revealed it.
        lowest: number of the lowest component.
        highest: number of survivors.

    Returns:
        Number of the component -> seed of 32 bytes; empty if the link is empty.
    """
    found = {}
    for number in range(highest if link else 0, lowest - 1, -1):
        found[number] = derived(link, text("seed of noise", number), LINK)
        link = _below(link)
    return found


def _below(link: bytes) -> bytes:
    return derived(link, text("link below"), LINK)


RINGS: dict[int, np.dtype] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}
"""Bits of a number -> dtype in memory and in messages: little-endian."""
SIGNED: dict[int, np.dtype] = {32: np.dtype("<i4"), 64: np.dtype("<i8")}


def into_ring(numbers: NDArray, bits: int) -> NDArray:
    """Convert integers, including negative ones, to the ring.

    Args:
        numbers: (p,) int64.
        bits: 32 or 64.

    Returns:
        (p,) unsigned, a new array.
    """
    check.one_of({"32", "64"}, bits=str(bits))
    return numbers.astype(RINGS[bits])


def out_of_ring(values: NDArray) -> NDArray:
    """Convert a sum in the ring to the integer of least absolute value.

    The caller ensures that every sum is below 2³¹ (2⁶³) in absolute value. A larger one is read as another number.

    Args:
        values: (p,) unsigned.

    Returns:
        (p,) int64.
    """
    return values.view(SIGNED[8 * values.itemsize]).astype(np.int64)


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
