"""One way, and only one, to write values down as bytes: what is signed, hashed, used as context, or sent."""

VERSION = "cloister secure aggregation 1"
"""The first item of every text, so that no signature or key of another protocol or version fits."""
MAX_DEPTH = 4
"""How deep tuples may lie in tuples: more than any message has."""
MAX_ITEMS = 2**18
"""Items of a text: more than any message of 10,000 members has. Whoever reads it waits two microseconds for each."""
HEAD = 9
"""Bytes before an item: one for its kind, eight for its length."""

Item = bytes | str | int | tuple["Item", ...]


def text(label: str, *items: Item) -> bytes:
    """Write items down under a label; two different lists of items never give the same bytes.

    Args:
        label: what the text is for.
        items: bytes, strings, whole numbers of 0 to 2⁶⁴ − 1, and tuples of these.
    """
    return _write((VERSION, label, *items))


def read(label: str, data: bytes) -> tuple[Item, ...]:
    """Read what `text` has written, and nothing else.

    Args:
        label: what the text must be for.
        data: the bytes.

    Returns:
        The items. Writing them again gives the same bytes.

    Raises:
        ValueError: the bytes are not what `text` writes under this label.
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
    """Reads items, and counts them.

    Args:
        data: the bytes.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._items = data, 0

    def item(self, start: int, depth: int) -> tuple[Item, int]:
        """The item that starts at a place, and where the next one does.

        Args:
            start: the place.
            depth: how deep tuples may still lie in it.

        Raises:
            ValueError: the bytes are no item, or hold too many.
        """
        kind, body = self._data[start : start + 1], start + HEAD
        end = body + int.from_bytes(self._data[start + 1 : body])
        self._items += 1
        if body > len(self._data) or end > len(self._data) or not depth or self._items > MAX_ITEMS:
            raise ValueError("the bytes end before their items do, lie too deep, or hold too many")
        if kind == b"t":
            return self._tuple(body, end, depth), end
        content = self._data[body:end]
        if kind == b"i" and len(content) == 8:
            return int.from_bytes(content), end
        if kind in (b"b", b"s"):
            return content if kind == b"b" else content.decode(), end
        raise ValueError("the bytes hold an item of no known kind")

    def _tuple(self, place: int, end: int, depth: int) -> tuple[Item, ...]:
        items = []
        while place < end:
            item, place = self.item(place, depth - 1)
            items.append(item)
        if place != end:
            raise ValueError("an item ends after the tuple that it is in")
        return tuple(items)
