"""Canonical encoding of values as bytes, and the base class of values that have one.

A text is for signing, hashing, key derivation and sending. Each value checks its fields on construction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Self, cast

from cloister.utils.errors import ProtocolError

VERSION = "cloister secure aggregation 1"
"""First item of every text. It separates signatures and keys from other protocols and versions."""
MAX_DEPTH = 4
"""Largest nesting of tuples: deeper than in any message."""
MAX_ITEMS = 2**18
"""Largest number of items of a text: more than in any message of 10,000 members. Reading takes 2 µs per item."""
HEAD = 9
"""Bytes before an item: one for its kind, eight for its length."""

Item = bytes | str | int | tuple["Item", ...]


def text(label: str, *items: Item) -> bytes:
    """Encode items under a label; different lists of items give different bytes.

    Args:
        label: purpose of the text.
        items: bytes, strings, integers from 0 to 2⁶⁴ − 1, and tuples of these.
    """
    return _write((VERSION, label, *items))


def read(label: str, data: bytes) -> tuple[Item, ...]:
    """Decode a text that `text` encoded.

    Args:
        label: required purpose of the text.
        data: the bytes.

    Returns:
        The items. Encoding them again gives the same bytes.

    Raises:
        ValueError: the bytes are not an encoding by `text` under this label.
    """
    item, end = _Reader(data).item(0, MAX_DEPTH)
    if end != len(data) or not isinstance(item, tuple) or item[:2] != (VERSION, label):
        raise ValueError(f"the bytes are no {label}")
    return item[2:]


def _write(item: Item) -> bytes:
    if isinstance(item, tuple):
        return _headed(b"t", b"".join(map(_write, item)))
    if isinstance(item, str):
        return _headed(b"s", item.encode())
    return _headed(b"i", item.to_bytes(8)) if isinstance(item, int) else _headed(b"b", item)


def _headed(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(8) + content


class _Reader:
    """A decoder that counts items.

    Args:
        data: the bytes.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._items = data, 0

    def item(self, start: int, depth: int) -> tuple[Item, int]:
        """Return the item that starts at a position, and the position after it.

        Args:
            start: position in the bytes.
            depth: remaining levels of nested tuples.

        Raises:
            ValueError: the bytes are no item, or contain too many.
        """
        kind, body = self._data[start : start + 1], start + HEAD
        end = body + int.from_bytes(self._data[start + 1 : body])
        self._items += 1
        if body > len(self._data) or end > len(self._data) or not depth or self._items > MAX_ITEMS:
            raise ValueError("the bytes end before their items do, lie too deep, or hold too many")
        if kind == b"t":
            items = []
            while body < end:
                item, body = self.item(body, depth - 1)
                items.append(item)
            if body != end:
                raise ValueError("an item ends after the tuple that it is in")
            return tuple(items), end
        content = self._data[body:end]
        if kind == b"i" and len(content) == 8:
            return int.from_bytes(content), end
        if kind in (b"b", b"s"):
            return content if kind == b"b" else content.decode(), end
        raise ValueError("the bytes hold an item of no known kind")


MAX_MEMBERS = 10_000
MAX_NAME = 200
"""Characters of a name."""

Names = tuple[str, ...]
"""Sorted names, each once."""
ByName = Mapping[str, bytes]
Check = Callable[[object, str], None]
"""A check of the named field of a value; it raises ProtocolError."""
About = Mapping[str, Check]
"""Metadata of a dataclass field."""


@dataclass(frozen=True)
class Serializable:
    """A frozen value whose fields declare their permitted contents. Construction refuses other contents."""

    def __post_init__(self) -> None:
        for one in fields(self):
            one.metadata["check"](self, one.name)

    def encode(self) -> bytes:
        """Encode the value in its canonical form."""
        # vars() has the fields in their declared order.
        return text(type(self).__name__, *map(_item, vars(self).values()))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a value from its canonical encoding.

        Raises:
            ProtocolError: the bytes are not the canonical encoding of such a value.
        """
        try:
            value = cls(*map(_value, read(cls.__name__, data)))
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"the bytes are no {cls.__name__}") from error
        if value.encode() != data:
            raise ProtocolError(f"the bytes are not the one way to write this {cls.__name__}")
        return value


def checked(check: Check) -> About:
    """Return metadata for a field with a check on construction.

    Args:
        check: receives the value and the name of the field, and raises ProtocolError.
    """
    return {"check": check}


def sized(size: int, or_none: bool = False, called: str = "") -> About:
    """Return metadata for a field with bytes.

    Args:
        size: number of bytes.
        or_none: True if the field may be empty.
        called: name of the field in errors; empty: its own name.
    """

    def check(owner: object, name: str) -> None:
        value = getattr(owner, name)
        _check_bytes(called or name, value, size if value or not or_none else 0)

    return checked(check)


def sized_by_name(size: int) -> About:
    """Return metadata for a mapping of names to bytes of one size.

    The value stores a copy, ordered by name.
    """

    def check(owner: object, name: str) -> None:
        found = _ordered(owner, name)
        for value in found.values():
            _check_bytes(name, value, size)
        object.__setattr__(owner, name, found)

    return checked(check)


def nested(kind: type[Serializable], or_none: bool = False) -> About:
    """Return metadata for a field with another `Serializable` value.

    Args:
        kind: of the value.
        or_none: True if the field may be None.
    """

    def check(owner: object, name: str) -> None:
        found = getattr(owner, name)
        empty = or_none and found in (None, b"")
        object.__setattr__(owner, name, None if empty else _of_kind(kind, name, found))

    return checked(check)


def nested_by_name(kind: type[Serializable]) -> About:
    """Return metadata for a mapping of names to `Serializable` values.

    The value stores a copy, ordered by name.
    """

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
"""Bytes of any length."""


def check_names(names: object) -> None:
    """Raise ProtocolError unless these are sorted names, each once, in a tuple."""
    if not isinstance(names, tuple) or len(names) > MAX_MEMBERS:
        raise ProtocolError(f"names must be in a tuple of at most {MAX_MEMBERS}")
    if not all(isinstance(name, str) and 0 < len(name) <= MAX_NAME for name in names):
        raise ProtocolError(f"a name must have 1 to {MAX_NAME} characters")
    if list(names) != sorted(set(names)):
        raise ProtocolError("names must be in order, and each must be there once")


def _ordered(owner: object, name: str) -> dict[str, object]:
    found = getattr(owner, name)
    if not isinstance(found, Mapping):
        raise ProtocolError(f"{name} must be a mapping by name, found {type(found).__name__}")
    ordered = {key: found[key] for key in sorted(found)}
    check_names(tuple(ordered))
    return ordered


def _of_kind(kind: type[Serializable], name: str, found: object) -> Serializable:
    """Return the value, decoded if it is bytes."""
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
    """Return a field's value as an item of the encoding."""
    if found is None:
        return b""
    if isinstance(found, Serializable):
        return found.encode()
    if isinstance(found, Mapping):
        return ("", *((key, _item(found[key])) for key in sorted(found)))
    return tuple(map(_item, found)) if isinstance(found, tuple) else cast(Item, found)


def _value(item: Item) -> object:
    """Return an item as a field's value: a mapping begins with an empty name."""
    if isinstance(item, tuple) and item[:1] == ("",):
        return dict(cast(tuple[tuple[str, bytes], ...], item[1:]))
    return item
