"""Which keys strangers may show: those that nodes can have.

Flower reads the key of a request before it knows its sender, whatever kind of key it is. Of one for Diffie-Hellman it
is checked that the number in it is a prime, which takes seconds to minutes in which nothing else goes on.
"""

import re
from base64 import b64decode
from types import ModuleType
from typing import Any, ClassVar

from cloister.deploy.superlink.in_front import InFront
from cloister.flower.superlink import node_auth

PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----\n([A-Za-z0-9+/=\n]{1,400})-----END PUBLIC KEY-----\n")
CURVES = {
    "P-256": "3059301306072a8648ce3d020106082a8648ce3d030107034200",
    "P-384": "3076301006072a8648ce3d020106052b81040022036200",
    "P-521": "30819b301006072a8648ce3d020106052b8104002303818600",
}
"""How a key on each curve begins in DER: what is left is its point (RFC 5480)."""


class NodeKeys(InFront):
    """Has keys of other kinds refused before they are read."""

    handlers: ClassVar[ModuleType] = node_auth
    names = ("bytes_to_public_key",)

    def bytes_to_public_key(self, public_key_bytes: bytes) -> Any:
        """The key that a node shows.

        Raises:
            ValueError: it is on none of the `CURVES`.
        """
        found = PEM.fullmatch(public_key_bytes)
        if not found or not b64decode(found[1]).startswith(tuple(map(bytes.fromhex, CURVES.values()))):
            raise ValueError("no key of a node")
        return self.inner["bytes_to_public_key"](public_key_bytes)
