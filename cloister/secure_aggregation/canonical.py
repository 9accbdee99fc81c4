"""One way, and only one, to write values down as bytes: what is signed, hashed, used as context, or sent."""

VERSION = "cloister secure aggregation 1"
"""The first item of every text, so that no signature or key of another protocol or version fits."""
MAX_DEPTH = 4
"""How deep tuples may lie in tuples: more than any message has."""
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
    item, end = _read(data, 0, MAX_DEPTH)
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


def _read(data: bytes, start: int, depth: int) -> tuple[Item, int]:
    """The item that starts at a place, and where the next one does."""
    kind, body = data[start : start + 1], start + HEAD
    end = body + int.from_bytes(data[start + 1 : body])
    if body > len(data) or end > len(data) or not depth:
        raise ValueError("the bytes end before their items do, or lie too deep")
    if kind == b"t":
        return _tuple(data, body, end, depth), end
    content = data[body:end]
    if kind == b"i" and len(content) == 8:
        return int.from_bytes(content), end
    if kind in (b"b", b"s"):
        return content if kind == b"b" else content.decode(), end
    raise ValueError("the bytes hold an item of no known kind")


def _tuple(data: bytes, place: int, end: int, depth: int) -> tuple[Item, ...]:
    items = []
    while place < end:
        item, place = _read(data, place, depth - 1)
        items.append(item)
    if place != end:
        raise ValueError("an item ends after the tuple that it is in")
    return tuple(items)
