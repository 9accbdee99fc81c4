"""What the parties send each other: frozen values, and the one way to write them down.

Every message is checked when it is made, so that none that is malformed or too large reaches the protocol.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Self, cast

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.canonical import Item, read, text
from cloister.secure_aggregation.chain import LINK
from cloister.secure_aggregation.keys import PUBLIC_KEY, SEAL
from cloister.secure_aggregation.roster import SIGNATURE
from cloister.secure_aggregation.sharing import SECRET

MAX_MEMBERS = 10_000
MAX_NAME = 200
"""Characters of a name."""
SEALED_SHARES = SEAL + 2 * SECRET
"""Bytes of a sealed pair of shares: of the seed of a key, and of the seed of a mask."""

Names = tuple[str, ...]
"""Names in their order, each once."""
ByName = Mapping[str, bytes]
Check = Callable[[object, str], None]
"""Refuses a message for the field of this name."""


def _checked(check: Check) -> Mapping[str, Check]:
    """What a field says about itself, for the message to look at when it is made."""
    return {"check": check}


def _bytes(size: int, or_none: bool = False, called: str = "") -> Mapping[str, Check]:
    """A field with so many bytes; `or_none`: with so many or with none at all."""

    def check(message: object, name: str) -> None:
        value = getattr(message, name)
        _check_bytes(called or name, value, size if value or not or_none else 0)

    return _checked(check)


def _by_name(size: int) -> Mapping[str, Check]:
    """A field that has so many bytes for each of some names. A copy is kept, in the order of names."""

    def check(message: object, name: str) -> None:
        found = getattr(message, name)
        if not isinstance(found, Mapping):
            raise ProtocolError(f"{name} must be a mapping by name, found {type(found).__name__}")
        ordered = {key: found[key] for key in sorted(found)}
        _check_names(tuple(ordered))
        for value in ordered.values():
            _check_bytes(name, value, size)
        object.__setattr__(message, name, ordered)

    return _checked(check)


def _check_advertisements(message: object, name: str) -> None:
    """Check a tuple of advertisements, and keep those that are bytes as what they say."""
    found = getattr(message, name)
    if not isinstance(found, tuple):
        raise ProtocolError(f"a cohort must be a tuple of advertisements, found {type(found).__name__}")
    ones = tuple(one if isinstance(one, Advertisement) else _advertisement(one) for one in found)
    _check_names(tuple(one.name for one in ones))
    object.__setattr__(message, name, ones)


def _check_payload(message: object, name: str) -> None:
    payload = getattr(message, name)
    if not isinstance(payload, bytes):
        raise ProtocolError(f"a masked input must be bytes, found {type(payload).__name__}")


ONE_NAME = _checked(lambda message, name: _check_names((getattr(message, name),)))
SEVERAL_NAMES = _checked(lambda message, name: _check_names(getattr(message, name)))


@dataclass(frozen=True)
class Message:
    """Something that is sent: it can be written as bytes, and read from them."""

    def __post_init__(self) -> None:
        for one in fields(self):
            one.metadata["check"](self, one.name)

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

    name: str = field(metadata=ONE_NAME)
    mask_key: bytes = field(metadata=_bytes(PUBLIC_KEY))
    seal_key: bytes = field(metadata=_bytes(PUBLIC_KEY))
    signature: bytes = field(metadata=_bytes(SIGNATURE))


@dataclass(frozen=True)
class Cohort(Message):
    """Everybody who takes part, as the server tells all members: encoded advertisements, in the order of names."""

    advertisements: tuple[Advertisement, ...] = field(metadata=_checked(_check_advertisements))

    @property
    def names(self) -> Names:
        """The names of all."""
        return tuple(one.name for one in self.advertisements)


@dataclass(frozen=True)
class SealedShares(Message):
    """A member's shares for each of its peers: name of the peer -> 60 bytes that only this peer can open."""

    sender: str = field(metadata=ONE_NAME)
    sealed: ByName = field(metadata=_by_name(SEALED_SHARES))


@dataclass(frozen=True)
class Delivery(Message):
    """What the server passes on to one member: who has sent shares to anybody, and the shares for this member."""

    sharers: Names = field(metadata=SEVERAL_NAMES)
    sealed: ByName = field(metadata=_by_name(SEALED_SHARES))


@dataclass(frozen=True)
class MaskedInput(Message):
    """A member's masked vector.

    Args:
        sender: whose it is.
        payload: numbers in the ring, the lowest byte of each first.
        signature: on the terms of its noise and the list of who has sent shares, 64 bytes.
    """

    sender: str = field(metadata=ONE_NAME)
    payload: bytes = field(metadata=_checked(_check_payload))
    signature: bytes = field(default=b"", metadata=_bytes(SIGNATURE, True, "the signature of a masked input"))


@dataclass(frozen=True)
class Survivors(Message):
    """Whose masked inputs have arrived, as the server tells them, and the signatures that came with these."""

    names: Names = field(metadata=SEVERAL_NAMES)
    signatures: ByName = field(default_factory=dict, metadata=_by_name(SIGNATURE))


@dataclass(frozen=True)
class SurvivorSignature(Message):
    """A member's signature on the terms and the list of survivors."""

    sender: str = field(metadata=ONE_NAME)
    signature: bytes = field(metadata=_bytes(SIGNATURE))


@dataclass(frozen=True)
class Signatures(Message):
    """The signatures on the list of survivors, as the server passes them on: name -> 64 bytes."""

    signatures: ByName = field(metadata=_by_name(SIGNATURE))


@dataclass(frozen=True)
class Unmasking(Message):
    """One share a peer: of a survivor's own mask, or of a key of somebody who is no survivor.

    Args:
        sender: who answers.
        shares: peer -> share, 16 bytes.
        revealed: a link of the sender's chain of seeds, 32 bytes, or nothing.
    """

    sender: str = field(metadata=ONE_NAME)
    shares: ByName = field(metadata=_by_name(SECRET))
    revealed: bytes = field(default=b"", metadata=_bytes(LINK, True))


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
