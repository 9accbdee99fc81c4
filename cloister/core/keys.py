"""How people compare keys, and keys to sign with in files."""

import base64
import hashlib

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from cloister.core.errors import ConfigError


def fingerprint(key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey) -> str:
    """The fingerprint of a public key, as `ssh-keygen -l` prints it."""
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def signing_key(content: bytes, place: str) -> ed25519.Ed25519PrivateKey:
    """The private key in a file.

    Args:
        content: of the file.
        place: names it in errors.

    Raises:
        ConfigError: it holds no Ed25519 key in OpenSSH format without a passphrase.
    """
    try:
        key = load_ssh_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Not chained: the frames of the cause hold the key.
        raise ConfigError(f"{place} is no private key in OpenSSH format without a passphrase") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"{place} must be an Ed25519 key: ssh-keygen -t ed25519")
    return key


def verifying_key(content: bytes, place: str) -> ed25519.Ed25519PublicKey:
    """The public key in a file.

    Args:
        content: of the file.
        place: names it in errors.

    Raises:
        ConfigError: it holds no public Ed25519 key in OpenSSH format.
    """
    try:
        key = load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{place} is no public key in OpenSSH format") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ConfigError(f"{place} must be an Ed25519 key: ssh-keygen -t ed25519")
    return key
