"""Signing keys in files, their fingerprints, and the statement of their provisioner."""

import base64
import hashlib
from collections.abc import Sequence

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from cloister.core.errors import ConfigError
from cloister.core.text import clean

NAMED = 5
"""Most names of members in a sentence."""
LONGEST = 48
"""Most characters of a name."""
REMEDY = (
    "the remedy: `cloister signing-key FOLDER` at each of these sites, then `cloister site rotate CONNECTION NAME "
    "--signing-key FOLDER/signing.pub`"
)


def fingerprint(key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey) -> str:
    """Return the fingerprint of a public key, as `ssh-keygen -l` prints it."""
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def signing_key(content: bytes, place: str) -> ed25519.Ed25519PrivateKey:
    """Read the private key in a file.

    Args:
        content: of the file.
        place: names the file in errors.

    Raises:
        ConfigError: it contains no Ed25519 key in OpenSSH format without a passphrase.
    """
    key = _private_key(content, place)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"{place} must be an Ed25519 key: ssh-keygen -t ed25519")
    return key


def node_key(content: bytes, place: str) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file by which a SuperNode authenticates.

    Args:
        content: of the file.
        place: names it in errors.

    Raises:
        ConfigError: it holds no EC key in OpenSSH format without a passphrase.
    """
    key = _private_key(content, place)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{place} must be an EC key: ssh-keygen -t ecdsa -b 384")
    return key


def _private_key(content: bytes, place: str) -> object:
    """Return the private key in OpenSSH format, of any type."""
    try:
        return load_ssh_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Not chained: the frames of the cause hold the key.
        raise ConfigError(f"{place} is no private key in OpenSSH format without a passphrase") from None


def new_signing_key() -> bytes:
    """Return a new private Ed25519 key in file format."""
    return ed25519.Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def public_half(key: ed25519.Ed25519PrivateKey) -> bytes:
    """Return the public half of a signing key in file format."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def verifying_key(content: bytes, place: str) -> ed25519.Ed25519PublicKey:
    """Read the public key in a file.

    Args:
        content: of the file.
        place: names the file in errors.

    Raises:
        ConfigError: it contains no public Ed25519 key in OpenSSH format.
    """
    try:
        key = load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{place} is no public key in OpenSSH format") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ConfigError(f"{place} must be an Ed25519 key: ssh-keygen -t ed25519")
    return key


def provisioner_of(names: Sequence[str]) -> str:
    """Name the provisioner by the members whose keys it made.

    Args:
        names: of these members, at least one.

    Examples:
        >>> provisioner_of(["north", "south"])
        'the provisioner, who made the signing keys of north, south'
    """
    shown = [clean(name[:LONGEST]) for name in names[:NAMED]]
    others = len(names) - len(shown)
    return f"the provisioner, who made the signing keys of {', '.join(shown)}" + f" and {others} others" * (others > 0)
