"""Canonical encoding of values as bytes, for signing, hashing, key derivation and sending."""

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
