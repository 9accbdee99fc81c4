"""The roster: who may take part, and the long-term key by which each is known."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cloister.core.errors import ProtocolError
from cloister.core.keys import fingerprint
from cloister.secure_aggregation.canonical import read, text

SIGNATURE = 64
"""Bytes of a signature."""
PUBLIC_KEY = 32
"""Bytes of a key on the roster."""
LABEL = "roster"


@dataclass(frozen=True)
class Roster:
    """Names and the Ed25519 keys that belong to them, once somebody other than the server has vouched for them.

    Args:
        keys: name -> public key, 32 bytes.
    """

    keys: Mapping[str, bytes]

    def __post_init__(self) -> None:
        if wrong := [name for name, key in self.keys.items() if len(key) != PUBLIC_KEY]:
            raise ProtocolError(f"a key on the roster must have {PUBLIC_KEY} bytes; not so: {', '.join(wrong)}")

    def has_signed(self, name: str, signature: bytes, signed: bytes) -> bool:
        """Whether somebody on the roster has signed a text.

        Args:
            name: who is said to have signed.
            signature: 64 bytes.
            signed: the text.
        """
        return name in self.keys and _fits(self.keys[name], signature, signed)

    @classmethod
    def pinned(cls, keys: Mapping[str, bytes], fingerprints: Mapping[str, str]) -> "Roster":
        """A roster that a site has put together itself, by fingerprints that people have compared.

        Args:
            keys: name -> public key, from anybody.
            fingerprints: name -> fingerprint of the key, from the site's own file.

        Raises:
            ProtocolError: a name has no pinned fingerprint, or a key has another one.
        """
        for name, key in keys.items():
            if fingerprints.get(name) != fingerprint(Ed25519PublicKey.from_public_bytes(key)):
                raise ProtocolError(f"the key of {name!r} on the roster is not the one whose fingerprint is pinned")
        return cls(dict(keys))


def sign_roster(roster: Roster, serial: int, authority: Ed25519PrivateKey) -> bytes:
    """Vouch for a roster.

    Args:
        roster: names and keys.
        serial: number of the roster, larger than those of all rosters before it.
        authority: the key of whoever vouches. Whoever holds it can invent sites: the server's operator must not.

    Returns:
        The signed roster, to be handed to the sites.
    """
    content = text(LABEL, serial, tuple(sorted(roster.keys.items())))
    return text("signed roster", content, authority.sign(content))


def read_roster(signed: bytes, authority: Ed25519PublicKey, oldest: int = 0) -> Roster:
    """Read a roster that the authority vouches for.

    Args:
        signed: what `sign_roster` returned.
        authority: the authority's key, which has not come from the server.
        oldest: smallest serial number that is taken; a site keeps the largest that it has seen, so that nobody who has
            been taken off the roster comes back with an old one.

    Raises:
        ProtocolError: the roster was changed or cut, is signed by somebody else, or is too old.
    """
    try:
        content, signature = cast(tuple[bytes, bytes], read("signed roster", signed))
        genuine = _fits(authority, signature, content)
        serial, entries = cast(tuple[int, tuple[tuple[str, bytes], ...]], read(LABEL, content))
    except (ValueError, TypeError) as error:
        raise ProtocolError("the bytes are no signed roster") from error
    if not genuine:
        raise ProtocolError("the roster does not have the signature of the authority")
    if serial < oldest:
        raise ProtocolError(f"the roster has the serial number {serial}; the oldest that is taken is {oldest}")
    return Roster(dict(entries))


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The public key of a long-term key, 32 bytes, as a roster has it."""
    return key.public_key().public_bytes_raw()


def _fits(key: bytes | Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    public = Ed25519PublicKey.from_public_bytes(key) if isinstance(key, bytes) else key
    try:
        public.verify(signature, signed)
    except InvalidSignature:
        return False
    return True
