"""Signatures of nodes on their replies.

A node signs with the key by which its SuperNode authenticates: one key, whose public half the SuperLink lists.

    signed = DOMAIN ‖ run id ‖ node id ‖ SHA-256 of the id of the message ‖ SHA-256 of the packed value

Each field has a fixed length, so that no two statements have the same bytes. Flower signs the text of a time with the
same key. That text begins with a digit, and `DOMAIN` with a letter: neither signature is one of the other.

A signature proves that the owner of the listed key made this reply to this message. It holds against other nodes,
against strangers, and against replays. It proves nothing against the SuperLink, which lists the keys, and nothing
against another process of the site that can read the key.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

DOMAIN = b"cloister: reply of a node, version 1\n"
HALF = 66
"""Bytes of each of the two numbers of a signature: as many as the largest curve of Flower's, P-521, needs."""
SIGNATURE = 2 * HALF
"""Bytes of a signature."""
MAX_PUBLIC_KEY = 300
"""Bytes of a public key in PEM: one of P-521 has 268. Of long keys of other kinds the parser tests prime numbers."""

Sign = Callable[[bytes], bytes]
"""Returns the signature of a packed value."""


@dataclass(frozen=True)
class Answered:
    """Message that a node answers, as its signature names it.

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
            signature: of it, by any party.
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
