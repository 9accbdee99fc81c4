"""Keys that two members agree on, and what is sealed under them."""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.canonical import text

KEY = 16
"""Bytes of a symmetric key, and of the seed of a private key."""
NONCE = 12
PUBLIC_KEY = 32
"""Bytes of a public key, to agree with or to verify by."""
SEAL = NONCE + 16
"""Bytes that a sealed text is longer than the text."""


def derived(secret: bytes, purpose: bytes, length: int = KEY) -> bytes:
    """Derive a key from a secret.

    Args:
        secret: bytes that nobody can guess.
        purpose: what the key is for; other purposes give independent keys.
        length: bytes of the key.
    """
    return HKDF(SHA256(), length, salt=None, info=purpose).derive(secret)


def private_key(seed: bytes) -> X25519PrivateKey:
    """The private key that a seed of 16 bytes stands for: a seed is short enough to be shared."""
    return X25519PrivateKey.from_private_bytes(derived(seed, text("private key"), 32))


def public_key(seed: bytes) -> bytes:
    """The public key, 32 bytes, of the private key that a seed stands for."""
    return private_key(seed).public_key().public_bytes_raw()


def agreed(private: X25519PrivateKey, public: bytes, purpose: bytes) -> bytes:
    """The key of 16 bytes that the owners of two key pairs have in common, and nobody else.

    Args:
        private: one's own key.
        public: the other's key, 32 bytes.
        purpose: what the key is for, who the two are, and in which round.

    Raises:
        ProtocolError: the other's key is of low order: everybody would have the key in common.
    """
    try:
        return derived(private.exchange(X25519PublicKey.from_public_bytes(public)), purpose)
    except ValueError as error:
        raise ProtocolError("the key of a member is no key to agree with") from error


def can_agree(public: bytes) -> bool:
    """Whether a key of 32 bytes is one to agree with: of the few that are of low order nobody can make a secret."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def pair_key(private: X25519PrivateKey, public: bytes, binding: bytes, one: str, other: str) -> bytes:
    """The key of the mask that two members have in common: one adds the mask, the other subtracts it.

    Args:
        private: the key for masks of one of the two.
        public: the other's key for masks.
        binding: hash of the attempt's terms and keys.
        one: the first's name.
        other: the second's name; which is first does not matter.
    """
    return agreed(private, public, text("mask", binding, *sorted((one, other))))


def seal(key: bytes, context: bytes, plain: bytes) -> bytes:
    """Encrypt and authenticate a text by AES-GCM.

    Args:
        key: 16 bytes.
        context: what must be known, and the same, to open it: who sent it to whom, and in which round.
        plain: the text.
    """
    nonce = os.urandom(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, plain, context)


def unseal(key: bytes, context: bytes, sealed: bytes) -> bytes:
    """Decrypt what `seal` made.

    Args:
        key: the key that it was sealed with.
        context: the context that it was sealed with.
        sealed: what `seal` returned.

    Raises:
        ProtocolError: it was sealed by another, for another, in another round, or was changed.
    """
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], context)
    except InvalidTag as error:
        raise ProtocolError("a sealed share is not of this sender, this receiver and this attempt") from error
