"""Keys that two members agree on, and authenticated encryption under them."""

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


def agreed(private: X25519PrivateKey, public: bytes, purpose: bytes) -> bytes:
    """Return the key of 16 bytes that only the owners of two key pairs can compute.

    Args:
        private: the own private key.
        public: the other member's key, 32 bytes.
        purpose: context of the key: its use, the two members and the round.

    Raises:
        ProtocolError: the other member's key is of low order, and every party could compute the result.
    """
    try:
        return derived(private.exchange(X25519PublicKey.from_public_bytes(public)), purpose)
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
