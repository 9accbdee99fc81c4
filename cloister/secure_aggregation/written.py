"""Values that can be written down as bytes, and read again: in one way, and checked whenever one is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, cast

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.canonical import Item, read, text

MAX_MEMBERS = 10_000
MAX_NAME = 200
"""Characters of a name."""

Names = tuple[str, ...]
"""Names in their order, each once."""
ByName = Mapping[str, bytes]
Check = Callable[[object, str], None]
"""Refuses a value for its field of this name."""
About = Mapping[str, Check]
"""What a field says about itself: the metadata of a dataclass."""


@dataclass(frozen=True)
class Written:
    """A frozen value, each field of which says by its metadata what it may hold; no other value can be made."""

    def __post_init__(self) -> None:
        for one in fields(self):
            one.metadata["check"](self, one.name)

    def encode(self) -> bytes:
        """Write the value down: one way, whoever writes it."""
        # The fields, in the order in which they are declared.
        return text(type(self).__name__, *map(_item, vars(self).values()))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a value from the bytes that `encode` gives, and from no others.

        Raises:
            ProtocolError: the bytes are no such value.
        """
        try:
            value = cls(*map(_value, read(cls.__name__, data)))
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"the bytes are no {cls.__name__}") from error
        if value.encode() != data:
            raise ProtocolError(f"the bytes are not the one way to write this {cls.__name__}")
        return value


def checked(check: Check) -> About:
    """A field that is looked at when a value is made.

    Args:
        check: gets the value and the name of the field, and raises ProtocolError.
    """
    return {"check": check}


def sized(size: int, or_none: bool = False, called: str = "") -> About:
    """A field with bytes.

    Args:
        size: how many.
        or_none: whether there may be none at all.
        called: what the field is called in errors; empty: by its name.
    """

    def check(owner: object, name: str) -> None:
        value = getattr(owner, name)
        _check_bytes(called or name, value, size if value or not or_none else 0)

    return checked(check)


def sized_by_name(size: int) -> About:
    """A field that has so many bytes for each of some names. A copy is kept, in the order of names."""

    def check(owner: object, name: str) -> None:
        found = _ordered(owner, name)
        for value in found.values():
            _check_bytes(name, value, size)
        object.__setattr__(owner, name, found)

    return checked(check)


def nested(kind: type[Written], or_none: bool = False) -> About:
    """A field with another value that can be written down.

    Args:
        kind: of the value.
        or_none: whether there may be None instead.
    """

    def check(owner: object, name: str) -> None:
        found = getattr(owner, name)
        empty = or_none and found in (None, b"")
        object.__setattr__(owner, name, None if empty else _of_kind(kind, name, found))

    return checked(check)


def nested_by_name(kind: type[Written]) -> About:
    """A field that has such a value for each of some names. A copy is kept, in the order of names."""

    def check(owner: object, name: str) -> None:
        found = _ordered(owner, name)
        object.__setattr__(owner, name, {key: _of_kind(kind, name, one) for key, one in found.items()})

    return checked(check)


def _check_number(owner: object, name: str) -> None:
    found = getattr(owner, name)
    if type(found) is not int or found < 0:
        raise ProtocolError(f"{name} must be a whole number of at least 0, found {type(found).__name__}")


def _check_text(owner: object, name: str) -> None:
    found = getattr(owner, name)
    if not isinstance(found, bytes):
        raise ProtocolError(f"{name} must be bytes, found {type(found).__name__}")


ONE_NAME = checked(lambda owner, name: check_names((getattr(owner, name),)))
SEVERAL_NAMES = checked(lambda owner, name: check_names(getattr(owner, name)))
NUMBER = checked(_check_number)
TEXT = checked(_check_text)
"""Bytes, as many as there are."""


def check_names(names: object) -> None:
    """Raises ProtocolError if these are not names in their order, each once, in a tuple."""
    if not isinstance(names, tuple) or len(names) > MAX_MEMBERS:
        raise ProtocolError(f"names must be in a tuple of at most {MAX_MEMBERS}")
    if not all(isinstance(name, str) and 0 < len(name) <= MAX_NAME for name in names):
        raise ProtocolError(f"a name must have 1 to {MAX_NAME} characters")
    if list(names) != sorted(set(names)):
        raise ProtocolError("names must be in order, and each must be there once")


def _ordered(owner: object, name: str) -> dict[str, Any]:
    found = getattr(owner, name)
    if not isinstance(found, Mapping):
        raise ProtocolError(f"{name} must be a mapping by name, found {type(found).__name__}")
    ordered = {key: found[key] for key in sorted(found)}
    check_names(tuple(ordered))
    return ordered


def _of_kind(kind: type[Written], name: str, found: object) -> Written:
    """The value, also from the bytes that say it."""
    if isinstance(found, bytes):
        return kind.decode(found)
    if not isinstance(found, kind):
        raise ProtocolError(f"{name} must be a {kind.__name__}, found {type(found).__name__}")
    return found


def _check_bytes(field: str, found: object, size: int) -> None:
    if not isinstance(found, bytes):
        raise ProtocolError(f"{field} must be bytes, found {type(found).__name__}")
    if len(found) != size:
        raise ProtocolError(f"{field} must have {size} bytes, found {len(found)}")


def _item(found: object) -> Item:
    """A field's value as it is written down."""
    if found is None:
        return b""
    if isinstance(found, Written):
        return found.encode()
    if isinstance(found, Mapping):
        return ("", *((key, _item(found[key])) for key in sorted(found)))
    return tuple(map(_item, found)) if isinstance(found, tuple) else cast(Item, found)


def _value(item: Item) -> object:
    """What was written down, as a field's value: a mapping begins with an empty name."""
    if isinstance(item, tuple) and item[:1] == ("",):
        return dict(cast(tuple[tuple[str, bytes], ...], item[1:]))
    return item
