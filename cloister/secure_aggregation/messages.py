"""Messages of the protocol: frozen values with one canonical encoding.

Every message is checked on construction, so that the protocol receives only well-formed messages of limited size.
"""

from dataclasses import dataclass, field

from cloister.secure_aggregation.primitives import LINK, PUBLIC_KEY, SEAL, SECRET
from cloister.secure_aggregation.roster import SIGNATURE
from cloister.secure_aggregation.serialization import (
    ONE_NAME,
    SEVERAL_NAMES,
    ByName,
    Names,
    Serializable,
    check_names,
    checked,
    sized,
    sized_by_name,
)
from cloister.utils.errors import ProtocolError

SEALED_SHARES = SEAL + 2 * SECRET
"""Bytes of a sealed pair of shares: one of a key's seed, and one of a mask's seed."""


def _check_advertisements(message: object, name: str) -> None:
    """Check a tuple of advertisements, and decode those that are bytes."""
    found = getattr(message, name)
    if not isinstance(found, tuple):
        raise ProtocolError(f"a cohort must be a tuple of advertisements, found {type(found).__name__}")
    ones = []
    for one in found:
        if not isinstance(one, bytes | Advertisement):
            raise ProtocolError(f"a cohort must hold advertisements, found {type(one).__name__}")
        ones.append(Advertisement.decode(one) if isinstance(one, bytes) else one)
    check_names(tuple(one.name for one in ones))
    object.__setattr__(message, name, tuple(ones))


def _check_payload(message: object, name: str) -> None:
    payload = getattr(message, name)
    if not isinstance(payload, bytes):
        raise ProtocolError(f"a masked input must be bytes, found {type(payload).__name__}")


@dataclass(frozen=True)
class Message(Serializable):
    """A message of the protocol."""


@dataclass(frozen=True)
class FromMember(Message):
    """A message of a member to the server.

    Args:
        name: of the member.
    """

    name: str = field(metadata=ONE_NAME)


@dataclass(frozen=True)
class Advertisement(FromMember):
    """A member's keys for one attempt, signed with its long-term key.

    Args:
        mask_key: public key for agreeing on masks, 32 bytes.
        seal_key: public key for sealing shares, 32 bytes.
        signature: 64 bytes.
    """

    mask_key: bytes = field(metadata=sized(PUBLIC_KEY))
    seal_key: bytes = field(metadata=sized(PUBLIC_KEY))
    signature: bytes = field(metadata=sized(SIGNATURE))


@dataclass(frozen=True)
class Cohort(Message):
    """The members of an attempt, as the server sends them to all: encoded advertisements, ordered by name."""

    advertisements: tuple[Advertisement, ...] = field(metadata=checked(_check_advertisements))

    @property
    def names(self) -> Names:
        """Return the names of all members."""
        return tuple(one.name for one in self.advertisements)


@dataclass(frozen=True)
class SealedShares(FromMember):
    """A member's shares for each of its peers: name of the peer -> 60 bytes that only this peer can open."""

    sealed: ByName = field(metadata=sized_by_name(SEALED_SHARES))


@dataclass(frozen=True)
class Delivery(Message):
    """The server's message to one member: all members that sent shares, and the shares for this member."""

    sharers: Names = field(metadata=SEVERAL_NAMES)
    sealed: ByName = field(metadata=sized_by_name(SEALED_SHARES))


@dataclass(frozen=True)
class MaskedInput(FromMember):
    """A member's masked vector.

    Args:
        payload: numbers in the ring, little-endian.
        signature: on the terms of its noise and the list of members that sent shares, 64 bytes.
    """

    payload: bytes = field(metadata=checked(_check_payload))
    signature: bytes = field(default=b"", metadata=sized(SIGNATURE, True, "the signature of a masked input"))


@dataclass(frozen=True)
class Survivors(Message):
    """Members whose masked inputs have arrived, as the server lists them, with their inputs' signatures."""

    names: Names = field(metadata=SEVERAL_NAMES)
    signatures: ByName = field(default_factory=dict, metadata=sized_by_name(SIGNATURE))


@dataclass(frozen=True)
class SurvivorSignature(FromMember):
    """A member's signature on the terms and the list of survivors."""

    signature: bytes = field(metadata=sized(SIGNATURE))


@dataclass(frozen=True)
class Signatures(Message):
    """The signatures on the list of survivors, as the server relays them: name -> 64 bytes."""

    signatures: ByName = field(metadata=sized_by_name(SIGNATURE))


@dataclass(frozen=True)
class Unmasking(FromMember):
    """One share per peer: of the mask of a survivor, or of the key of a member that dropped out.

    Args:
        shares: peer -> share, 16 bytes.
        revealed: a link of the member's chain of seeds, 32 bytes, or nothing.
    """

    shares: ByName = field(metadata=sized_by_name(SECRET))
    revealed: bytes = field(default=b"", metadata=sized(LINK, True))
