"""The roster: who may take part, and the long-term key by which each is known."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cloister.core.errors import ProtocolError
from cloister.core.keys import fingerprint
from cloister.secure_aggregation.canonical import read, text
from cloister.secure_aggregation.keys import PUBLIC_KEY

SIGNATURE = 64
"""Bytes of a signature."""
LABEL = "roster"
SIGNED = "signed roster"


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
        if len(set(self.keys.values())) < len(self.keys):
            raise ProtocolError("two names on the roster have the same key: one site would count as two members")

    @cached_property
    def digest(self) -> bytes:
        """The hash, 32 bytes, of all names and keys: members sign it with the terms of every attempt."""
        return hashlib.sha256(text(LABEL, tuple(sorted(self.keys.items())))).digest()

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
    return text(SIGNED, content, authority.sign(content))


@dataclass(frozen=True)
class SignedRoster:
    """A roster as it is handed out. Anybody can make one: it counts if `require` takes it, or by pinned fingerprints.

    Args:
        roster: names and keys.
        serial: its number.
        content: the bytes that were signed.
        signature: of whoever vouches, 64 bytes.
    """

    roster: Roster
    serial: int
    content: bytes
    signature: bytes

    def require(self, authority: Ed25519PublicKey, oldest: int = 0) -> Roster:
        """The roster, if the authority vouches for it.

        Args:
            authority: the authority's key, which has not come from the server.
            oldest: smallest serial number that is taken; a site keeps the largest that it has seen, so that nobody who
                has been taken off the roster comes back with an old one.

        Raises:
            ProtocolError: it was changed, is signed by somebody else, or is too old.
        """
        if not _fits(authority, self.signature, self.content):
            raise ProtocolError("the roster does not have the signature of the authority")
        if self.serial < oldest:
            raise ProtocolError(f"the roster has the serial number {self.serial}; the oldest that is taken is {oldest}")
        return self.roster


def opened(signed: bytes) -> SignedRoster:
    """Read what `sign_roster` returned, without a look at who signed it.

    Raises:
        ProtocolError: the bytes are nothing that `sign_roster` returns.
    """
    try:
        content, signature = cast(tuple[bytes, bytes], read(SIGNED, signed))
        serial, entries = cast(tuple[int, tuple[tuple[str, bytes], ...]], read(LABEL, content))
        keys = dict(entries)
        again = text(SIGNED, text(LABEL, serial, tuple(sorted(keys.items()))), signature)
    except (ValueError, TypeError, AttributeError) as error:
        raise ProtocolError("the bytes are no signed roster") from error
    typed = all(isinstance(name, str) and isinstance(key, bytes) for name, key in keys.items())
    if not (again == signed and typed and isinstance(serial, int) and isinstance(signature, bytes)):
        raise ProtocolError("the bytes are no signed roster")
    return SignedRoster(Roster(keys), serial, content, signature)


def read_roster(signed: bytes, authority: Ed25519PublicKey, oldest: int = 0) -> Roster:
    """Read a roster that the authority vouches for.

    Args:
        signed: what `sign_roster` returned.
        authority: the authority's key, which has not come from the server.
        oldest: smallest serial number that is taken.

    Raises:
        ProtocolError: the roster was changed or cut, is signed by somebody else, or is too old.
    """
    return opened(signed).require(authority, oldest)


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
