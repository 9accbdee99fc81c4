"""Signing keys in files, and signatures of nodes on their replies.

A node signs with its SuperNode's authentication key. The SuperLink lists the public half.

    signed = DOMAIN ‖ run id ‖ node id ‖ SHA-256 of the id of the message ‖ SHA-256 of the packed value

Each field has a fixed length, so that no two statements have the same bytes. Flower signs the text of a time with the
same key. Flower's text begins with a digit, `DOMAIN` with a letter. So neither signature is valid for the other text.

A signature proves that the owner of the listed key made this reply to this message. It holds against other nodes,
against strangers, and against replays. It proves nothing against the SuperLink, which lists the keys, and nothing
against another process of the site that can read the key.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from cloister.utils.errors import ConfigError
from cloister.utils.text import clean

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
    """Read a SuperNode's private authentication key from a file.

    Args:
        content: of the file.
        place: names it in errors.

    Raises:
        ConfigError: the file has no EC key in OpenSSH format, or the key has a passphrase.
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
    """Describe the provisioner by the members whose keys it made.

    Args:
        names: of these members, at least one.

    Examples:
        >>> provisioner_of(["north", "south"])
        'the provisioner, who made the signing keys of north, south'
    """
    shown = [clean(name[:LONGEST]) for name in names[:NAMED]]
    others = len(names) - len(shown)
    return f"the provisioner, who made the signing keys of {', '.join(shown)}" + f" and {others} others" * (others > 0)


DOMAIN = b"cloister: reply of a node, version 1\n"
HALF = 66
"""Bytes of each of a signature's two numbers. P-521, Flower's largest curve, needs this many."""
SIGNATURE = 2 * HALF
"""Bytes of a signature."""
MAX_PUBLIC_KEY = 300
"""Most bytes of a public key in PEM; P-521 takes 268. The parser tests longer keys of other kinds for primes."""

Sign = Callable[[bytes], bytes]
"""Returns the signature of a packed value."""


@dataclass(frozen=True)
class Answered:
    """Identify the message that a node answers. The node's signature covers these three ids.

    Attributes:
        run: id of the run.
        node: id of the node that was asked.
        message: id of the message that it was sent.
    """

    run: int
    node: int
    message: str

    def signer(self, key: ec.EllipticCurvePrivateKey) -> Sign:
        """Return what signs the packed value of a reply.

        Args:
            key: of the node.
        """

        def sign(value: bytes) -> bytes:
            one, other = decode_dss_signature(key.sign(self._with(value), ec.ECDSA(SHA256())))
            return one.to_bytes(HALF, "big") + other.to_bytes(HALF, "big")

        return sign

    def is_signed(self, value: bytes | memoryview, signature: bytes, public_key: bytes) -> bool:
        """Return whether the owner of a key signed a value as the reply to this message.

        Args:
            value: of the reply.
            signature: to be checked; any party may have made it.
            public_key: of the node, in PEM, as the SuperLink lists it. A node chooses it.
        """
        if len(public_key) > MAX_PUBLIC_KEY or len(signature) != SIGNATURE:
            return False
        one, other = int.from_bytes(signature[:HALF], "big"), int.from_bytes(signature[HALF:], "big")
        try:
            key = load_pem_public_key(public_key)
            if not isinstance(key, ec.EllipticCurvePublicKey):
                return False
            key.verify(encode_dss_signature(one, other), self._with(value), ec.ECDSA(SHA256()))
        except (InvalidSignature, UnsupportedAlgorithm, ValueError):
            return False
        return True

    def _with(self, value: bytes | memoryview) -> bytes:
        """Return the bytes that are signed."""
        ids = self.run.to_bytes(8, "big") + self.node.to_bytes(8, "big")
        return DOMAIN + ids + hashlib.sha256(self.message.encode()).digest() + hashlib.sha256(value).digest()
