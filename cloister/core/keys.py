"""How people compare keys."""

import base64
import hashlib

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat


def fingerprint(key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey) -> str:
    """The fingerprint of a public key, as `ssh-keygen -l` prints it."""
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"
