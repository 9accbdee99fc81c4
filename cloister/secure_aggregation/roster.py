"""Roster: the permitted members, and the long-term key of each."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self, cast

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cloister.secure_aggregation.primitives import PUBLIC_KEY
from cloister.secure_aggregation.serialization import read, text
from cloister.utils.errors import ProtocolError
from cloister.utils.keys import fingerprint

SIGNATURE = 64
"""Bytes of a signature."""
LABEL = "roster"
SIGNED = "signed roster"
AT_SITE = "site"
"""Mark in an entry: the site made its key itself. Without it, the provisioner made the key."""

Entry = tuple[str, bytes] | tuple[str, bytes, str]
"""A name and its public key, with `AT_SITE` if the site made the key."""


@dataclass(frozen=True)
class Roster:
    """Names and their Ed25519 keys. A party other than the server must vouch for them.

    Args:
        keys: name -> public key, 32 bytes.
        at_site: names of the sites that made their keys themselves. The provisioner made the keys of all other sites,
            and can sign in their names.
    """

    keys: Mapping[str, bytes]
    at_site: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := self.at_site - set(self.keys):
            raise ProtocolError(f"the roster states who made the keys of {', '.join(sorted(unknown))}, and has none")
        if wrong := [name for name, key in self.keys.items() if len(key) != PUBLIC_KEY]:
            raise ProtocolError(f"a key on the roster must have {PUBLIC_KEY} bytes; not so: {', '.join(wrong)}")
        if len(set(self.keys.values())) < len(self.keys):
            raise ProtocolError("two names on the roster have the same key: one site would count as two members")

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return each name with its key and the key's maker, in the canonical order and form."""
        made = {name: (AT_SITE,) if name in self.at_site else () for name in self.keys}
        return tuple((name, key, *made[name]) for name, key in sorted(self.keys.items()))

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Self:
        """Return the roster with these entries.

        Args:
            entries: as in `entries`.

        Raises:
            ValueError: they are malformed, or not in the canonical order and form.
        """
        found = tuple(entries)
        typed = all(isinstance(name, str) and isinstance(key, bytes) for name, key, *_ in found)
        at_site = frozenset(name for name, _, *made in found if made)
        if not typed or (roster := cls({name: key for name, key, *_ in found}, at_site)).entries != found:
            raise ValueError("these are no entries of a roster")
        return roster

    @cached_property
    def by_provisioner(self) -> tuple[str, ...]:
        """Return the names of members whose keys the provisioner made.

        The provisioner can impersonate these members.
        """
        return tuple(sorted(set(self.keys) - self.at_site))

    @cached_property
    def digest(self) -> bytes:
        """Return the hash, 32 bytes, of all entries.

        Members sign it with the terms of every attempt.
        """
        return hashlib.sha256(text(LABEL, self.entries)).digest()

    def has_signed(self, name: str, signature: bytes, signed: bytes) -> bool:
        """Return True if a name is on the roster and its key has signed a text.

        Args:
            name: claimed signer.
            signature: 64 bytes.
            signed: the text.
        """
        return name in self.keys and _fits(self.keys[name], signature, signed)

    def pinned(self, fingerprints: Mapping[str, str]) -> Self:
        """Return this roster if the fingerprints of all its keys are pinned.

        The roster itself may be from an untrusted source.

        Args:
            fingerprints: name -> fingerprint of the key, from the site's own file.

        Raises:
            ProtocolError: a name has no pinned fingerprint, or a key has another one.
        """
        for name, key in self.keys.items():
            if fingerprints.get(name) != fingerprint(Ed25519PublicKey.from_public_bytes(key)):
                raise ProtocolError(f"the key of {name!r} on the roster is not the one whose fingerprint is pinned")
        return self


def sign_roster(roster: Roster, serial: int, authority: Ed25519PrivateKey) -> bytes:
    """Sign a roster.

    Args:
        roster: names, keys, and the keys' makers.
        serial: number of the roster, larger than those of all earlier rosters.
        authority: key of the party that vouches. Its owner can invent sites: the server's operator must not have it.

    Returns:
        The signed roster, for distribution to the sites.
    """
    content = text(LABEL, serial, roster.entries)
    return text(SIGNED, content, authority.sign(content))


@dataclass(frozen=True)
class SignedRoster:
    """A roster as distributed. Any party can make one: it counts if `require` accepts it, or by pinned fingerprints.

    Args:
        roster: names, keys, and the keys' makers.
        serial: its number.
        content: the signed bytes.
        signature: of the authority, 64 bytes.
    """

    roster: Roster
    serial: int
    content: bytes
    signature: bytes

    def require(self, authority: Ed25519PublicKey, oldest: int = 0) -> Roster:
        """Return the roster if the authority vouches for it.

        Args:
            authority: the authority's key, from a source other than the server.
            oldest: smallest serial number accepted. A site stores the largest it has seen, so that an old roster cannot
                bring a removed member back.

        Raises:
            ProtocolError: it was changed, another key signed it, or it is too old.
        """
        if not _fits(authority, self.signature, self.content):
            raise ProtocolError("the roster does not have the signature of the authority")
        if self.serial < oldest:
            raise ProtocolError(f"the roster has the serial number {self.serial}; the oldest that is taken is {oldest}")
        return self.roster


def opened(signed: bytes) -> SignedRoster:
    """Decode the output of `sign_roster` without verifying its signer.

    Raises:
        ProtocolError: the bytes are not an output of `sign_roster`.
    """
    try:
        content, signature = cast(tuple[bytes, bytes], read(SIGNED, signed))
        serial, entries = cast(tuple[int, tuple[Entry, ...]], read(LABEL, content))
        roster = Roster.of(entries)
        again = text(SIGNED, text(LABEL, serial, roster.entries), signature)
    except (ValueError, TypeError, AttributeError) as error:
        raise ProtocolError("the bytes are no signed roster") from error
    if not (again == signed and isinstance(serial, int) and isinstance(signature, bytes)):
        raise ProtocolError("the bytes are no signed roster")
    return SignedRoster(roster, serial, content, signature)


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """Return the public key of a long-term key, 32 bytes, as in a roster."""
    return key.public_key().public_bytes_raw()


def _fits(key: bytes | Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    public = Ed25519PublicKey.from_public_bytes(key) if isinstance(key, bytes) else key
    try:
        public.verify(signature, signed)
    except InvalidSignature:
        return False
    return True


SENT_LABEL = "roster told"
MAX_ENCODED_ROSTER = 4 * 2**20
"""Largest encoded roster in bytes: enough for 10,000 members."""


def encode_roster(roster: Roster) -> bytes:
    """Encode names, keys and their makers in the canonical form."""
    return text(SENT_LABEL, roster.entries)


def decode_roster(content: bytes) -> Roster:
    """Decode the roster that `encode_roster` encoded.

    It is unauthenticated: members use their own roster.

    Raises:
        ProtocolError: the bytes are no roster.
    """
    if len(content) > MAX_ENCODED_ROSTER:
        raise ProtocolError("the bytes are no roster")
    try:
        (entries,) = read(SENT_LABEL, content)
        return Roster.of(cast(tuple[Entry, ...], entries))
    except (ValueError, TypeError) as error:
        raise ProtocolError("the bytes are no roster") from error
