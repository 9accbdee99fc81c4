"""What the parties send each other: frozen values, and the one way to write them down.

Every message is checked when it is made, so that none that is malformed or too large reaches the protocol.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, cast

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.canonical import Item, read, text
from cloister.secure_aggregation.chain import LINK
from cloister.secure_aggregation.keys import SEAL
from cloister.secure_aggregation.roster import SIGNATURE
from cloister.secure_aggregation.sharing import SECRET

MAX_MEMBERS = 10_000
MAX_NAME = 200
"""Characters of a name."""
PUBLIC_KEY = 32
SEALED_SHARES = SEAL + 2 * SECRET
"""Bytes of a sealed pair of shares: of the seed of a key, and of the seed of a mask."""

Names = tuple[str, ...]
"""Names in their order, each once."""
ByName = Mapping[str, bytes]


class Message:
    """Something that is sent: it can be written as bytes, and read from them."""

    def encode(self) -> bytes:
        """Write the message down: one way, whoever writes it."""
        # The fields, in the order in which they are declared.
        return text(type(self).__name__, *map(_item, vars(self).values()))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a message from the bytes that `encode` gives, and from no others.

        Raises:
            ProtocolError: the bytes are no such message.
        """
        try:
            message = cls(*map(_value, read(cls.__name__, data)))
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"the bytes are no {cls.__name__}") from error
        if message.encode() != data:
            raise ProtocolError(f"the bytes are not the one way to write this {cls.__name__}")
        return message


@dataclass(frozen=True)
class Advertisement(Message):
    """A member's keys for one attempt, signed with its long-term key.

    Args:
        name: of the member.
        mask_key: public key that masks are agreed with, 32 bytes.
        seal_key: public key that shares are sealed with, 32 bytes.
        signature: 64 bytes.
    """

    name: str
    mask_key: bytes
    seal_key: bytes
    signature: bytes

    def __post_init__(self) -> None:
        _check_names((self.name,))
        _check_bytes("mask_key", self.mask_key, PUBLIC_KEY)
        _check_bytes("seal_key", self.seal_key, PUBLIC_KEY)
        _check_bytes("signature", self.signature, SIGNATURE)


@dataclass(frozen=True)
class Cohort(Message):
    """Everybody who takes part, as the server tells all members: encoded advertisements, in the order of names."""

    advertisements: tuple[Advertisement, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.advertisements, tuple):
            raise ProtocolError(
                f"a cohort must be a tuple of advertisements, found {type(self.advertisements).__name__}"
            )
        read_ones = tuple(one if isinstance(one, Advertisement) else _advertisement(one) for one in self.advertisements)
        object.__setattr__(self, "advertisements", read_ones)
        _check_names(self.names)

    @property
    def names(self) -> Names:
        """The names of all."""
        return tuple(one.name for one in self.advertisements)


@dataclass(frozen=True)
class SealedShares(Message):
    """A member's shares for each of its peers: name of the peer -> 60 bytes that only this peer can open."""

    sender: str
    sealed: ByName

    def __post_init__(self) -> None:
        _check_names((self.sender,))
        _check_by_name(self, "sealed", SEALED_SHARES)


@dataclass(frozen=True)
class Delivery(Message):
    """What the server passes on to one member: who has sent shares to anybody, and the shares for this member."""

    sharers: Names
    sealed: ByName

    def __post_init__(self) -> None:
        _check_names(self.sharers)
        _check_by_name(self, "sealed", SEALED_SHARES)


@dataclass(frozen=True)
class MaskedInput(Message):
    """A member's masked vector.

    Args:
        sender: whose it is.
        payload: numbers in the ring, the lowest byte of each first.
        signature: on the terms of its noise and the list of who has sent shares, 64 bytes.
    """

    sender: str
    payload: bytes
    signature: bytes = b""

    def __post_init__(self) -> None:
        _check_names((self.sender,))
        if not isinstance(self.payload, bytes):
            raise ProtocolError(f"a masked input must be bytes, found {type(self.payload).__name__}")
        _check_bytes("the signature of a masked input", self.signature, SIGNATURE if self.signature else 0)


@dataclass(frozen=True)
class Survivors(Message):
    """Whose masked inputs have arrived, as the server tells them, and the signatures that came with these."""

    names: Names
    signatures: ByName = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_names(self.names)
        _check_by_name(self, "signatures", SIGNATURE)


@dataclass(frozen=True)
class SurvivorSignature(Message):
    """A member's signature on the terms and the list of survivors."""

    sender: str
    signature: bytes

    def __post_init__(self) -> None:
        _check_names((self.sender,))
        _check_bytes("signature", self.signature, SIGNATURE)


@dataclass(frozen=True)
class Signatures(Message):
    """The signatures on the list of survivors, as the server passes them on: name -> 64 bytes."""

    signatures: ByName

    def __post_init__(self) -> None:
        _check_by_name(self, "signatures", SIGNATURE)


@dataclass(frozen=True)
class Unmasking(Message):
    """One share a peer: of a survivor's own mask, or of a key of somebody who is no survivor.

    Args:
        sender: who answers.
        shares: peer -> share, 16 bytes.
        revealed: a link of the sender's chain of seeds, 32 bytes, or nothing.
    """

    sender: str
    shares: ByName
    revealed: bytes = b""

    def __post_init__(self) -> None:
        _check_names((self.sender,))
        _check_by_name(self, "shares", SECRET)
        _check_bytes("revealed", self.revealed, LINK if self.revealed else 0)


def _item(value: object) -> Item:
    """A field's value as it is written down."""
    if isinstance(value, Message):
        return value.encode()
    if isinstance(value, Mapping):
        return ("", *sorted(value.items()))
    return tuple(map(_item, value)) if isinstance(value, tuple) else cast(Item, value)


def _value(item: Item) -> object:
    """What was written down, as a field's value: a mapping begins with an empty name."""
    if isinstance(item, tuple) and item[:1] == ("",):
        return dict(cast(tuple[tuple[str, bytes], ...], item[1:]))
    return item


def _advertisement(item: object) -> Advertisement:
    if not isinstance(item, bytes):
        raise ProtocolError(f"a cohort must hold advertisements, found {type(item).__name__}")
    return Advertisement.decode(item)


def _check_names(names: object) -> None:
    if not isinstance(names, tuple) or len(names) > MAX_MEMBERS:
        raise ProtocolError(f"names must be in a tuple of at most {MAX_MEMBERS}")
    if not all(isinstance(name, str) and 0 < len(name) <= MAX_NAME for name in names):
        raise ProtocolError(f"a name must have 1 to {MAX_NAME} characters")
    if list(names) != sorted(set(names)):
        raise ProtocolError("names must be in order, and each must be there once")


def _check_bytes(field: str, value: object, size: int) -> None:
    if not isinstance(value, bytes):
        raise ProtocolError(f"{field} must be bytes, found {type(value).__name__}")
    if len(value) != size:
        raise ProtocolError(f"{field} must have {size} bytes, found {len(value)}")


def _check_by_name(message: object, field: str, size: int) -> None:
    """Check a mapping, and keep a copy in the order of names."""
    found = getattr(message, field)
    if not isinstance(found, Mapping):
        raise ProtocolError(f"{field} must be a mapping by name, found {type(found).__name__}")
    ordered = {name: found[name] for name in sorted(found)}
    _check_names(tuple(ordered))
    for value in ordered.values():
        _check_bytes(field, value, size)
    object.__setattr__(message, field, ordered)
