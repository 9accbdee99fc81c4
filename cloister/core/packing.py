"""Packed messages: all that a message holds is one value after fresh random bytes.

Flower cuts a message into objects, names each by the SHA-256 of its content, and tells any node whether an object of a
given name is there. So a node could ask for the names of values that it guesses. A packed value begins with a salt of
32 random bytes. Its name, and the name of every object above it, cannot be computed without the salt.

    value = salt ‖ length of the header ‖ header ‖ parts        up to 1 MiB: bytes in one ConfigRecord
    value = salt ‖ AES-256-CTR, keyed by the salt, of the rest  above: one Array

Flower cuts an array into pieces of 5 MiB and names each by its content. So above 1 MiB the salt is the key of a
keystream: each piece is as random as the salt. The keystream hides nothing from a node that has the salt.

The header is JSON: an error, or the records with the lengths of their parts. A part is an array's bytes, or a record
of metrics or settings as Flower deflates it.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict

from cloister.core.errors import FederationError
from cloister.flower.messages import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as PIECE

Value = ConfigRecord | ArrayRecord
PACKED, SHARED = "cloister.packed", "cloister.shared"
"""The records of a packed message: what is its own, and what messages of one round share."""
VALUE, STYPE = "value", "cloister.packed"
SALT = 32
"""Bytes of a salt, and of the shortest piece of an array."""
MAX_IN_RECORD = 2**20
"""Bytes of a value that travels as one ConfigRecord: Flower takes 41 ms to write and read a megabyte of it."""
MAX_HEADER = 2**20
"""Bytes of a header. Read, it takes up to thirty times as much memory."""
KINDS: Mapping[str, type[MetricRecord] | type[ConfigRecord]] = {"metrics": MetricRecord, "config": ConfigRecord}


def packed(content: RecordDict | Error) -> Value:
    """Return the content as one salted value.

    Guarantee: of two values of one content, no object of the one has the name of an object of the other.

    Args:
        content: of a message, or its error.
    """
    header, parts = _described(content)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    rest = [len(encoded).to_bytes(4, "big"), encoded, *parts]
    salt, size = secrets.token_bytes(SALT), SALT + sum(map(len, rest))
    if size <= MAX_IN_RECORD:
        return ConfigRecord({VALUE: b"".join([salt, *rest])})
    if 0 < size % PIECE < SALT:
        rest.append(bytes(SALT - size % PIECE))
    data = b"".join([salt, *map(_keystream(salt), rest)])
    return ArrayRecord({VALUE: Array("uint8", (len(data),), STYPE, data)})


def unpacked(value: object, max_records: int) -> RecordDict | Error:
    """Return the content, or the error, that `packed` made the value of.

    Args:
        value: a record of a message, whoever made it.
        max_records: bytes that metrics and settings may have together.

    Raises:
        FederationError: the value is none that `packed` makes, or is too large. Its text holds nothing of the value.
    """
    try:
        return _read(_Reader(*_stored(value)), max_records)
    except FederationError:
        raise
    except Exception as error:  # whatever the sender makes a parser raise, without its text
        raise FederationError(f"a packed message cannot be read: {type(error).__name__}") from None


def is_packed(content: RecordDict) -> bool:
    """Return whether the content of a message is packed."""
    return PACKED in content


def opened(content: RecordDict, max_records: int) -> RecordDict | Error:
    """Return what a packed message holds: its own records, and those that it shares with others.

    Args:
        content: of a packed message.
        max_records: as of `unpacked`.

    Raises:
        FederationError: as of `unpacked`, or the message has other records beside the packed ones.
    """
    if content.keys() - {PACKED, SHARED}:
        raise FederationError("a packed message holds records that are not packed")
    own = unpacked(content[PACKED], max_records)
    if SHARED not in content:
        return own
    shared = unpacked(content[SHARED], max_records)
    if isinstance(own, Error) or isinstance(shared, Error) or own.keys() & shared.keys():
        raise FederationError("a packed message names a record twice, or shares an error")
    return RecordDict({**own, **shared})


def _described(content: RecordDict | Error) -> tuple[dict[str, object], list[bytes]]:
    """Return the header of a content, and its parts."""
    if isinstance(content, Error):
        return {"error": [content.code, content.reason or ""]}, []
    records: list[list[object]] = []
    parts: list[bytes] = []
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = [[key, each.dtype, list(each.shape), each.stype, len(each.data)] for key, each in record.items()]
            records.append([name, "arrays", arrays])
            parts += [array.data for array in record.values()]
        else:
            part = record.deflate()
            records.append([name, "metrics" if isinstance(record, MetricRecord) else "config", len(part)])
            parts.append(part)
    return {"records": records}, parts


def _keystream(salt: bytes) -> Callable[[bytes | memoryview], bytes]:
    """Return what encrypts, and decrypts, the bytes after a salt, a stretch at a time."""
    update: Callable[[bytes | memoryview], bytes] = (
        Cipher(algorithms.AES256(salt), modes.CTR(bytes(16))).encryptor().update
    )
    return update


def _stored(value: object) -> tuple[bytes, bool]:
    """Return the bytes of a value, and whether they are encrypted.

    Raises:
        FederationError: it is no value of ours.
    """
    if isinstance(value, ConfigRecord) and [*value] == [VALUE]:
        data: object = value[VALUE]
        if isinstance(data, bytes) and SALT <= len(data) <= MAX_IN_RECORD:
            return data, False
    elif isinstance(value, ArrayRecord) and [*value] == [VALUE]:
        array = value[VALUE]
        if array.stype == STYPE and len(array.data) > MAX_IN_RECORD:
            return array.data, True
    raise FederationError("a packed message holds another value than one")


class _Reader:
    """Reads the bytes after the salt once, from the first to the last.

    Args:
        data: of a value.
        is_encrypted: whether they are.
    """

    def __init__(self, data: bytes, is_encrypted: bool) -> None:
        self._rest = memoryview(data)[SALT:]
        self._decrypt: Callable[[bytes | memoryview], bytes] = _keystream(data[:SALT]) if is_encrypted else bytes

    def take(self, size: int) -> bytes:
        """Return the next bytes.

        Raises:
            FederationError: there are not so many.
        """
        if size > len(self._rest):
            raise FederationError("a packed message is shorter than it says")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return self._decrypt(taken)

    def end(self) -> None:
        """Refuse bytes that nothing describes: padding alone may be left.

        Raises:
            FederationError: there are some.
        """
        if len(self._rest) >= SALT or any(self.take(len(self._rest))):
            raise FederationError("a packed message is longer than it says")


def _read(reader: _Reader, max_records: int) -> RecordDict | Error:
    length = int.from_bytes(reader.take(4), "big")
    if length > MAX_HEADER:
        raise FederationError(f"the header of a packed message may have {MAX_HEADER} bytes")
    header = json.loads(reader.take(length))
    if header.keys() == {"error"}:
        reader.end()
        code, reason = header["error"]
        return Error(_whole(code), _text(reason))
    if header.keys() != {"records"}:
        raise FederationError("a packed message describes neither records nor an error")
    records = [(_text(name), kind, described) for name, kind, described in header["records"]]
    if len({name for name, *_ in records}) < len(records):
        raise FederationError("a packed message names a record twice")
    if sum(_whole(described) for _, kind, described in records if kind in KINDS) > max_records:
        raise FederationError(f"metrics and settings of a packed message may have {max_records} bytes")
    content = RecordDict()
    for name, kind, described in records:
        content[name] = (
            ArrayRecord(dict(_arrays(described, reader)))
            if kind == "arrays"
            else KINDS[kind].inflate(reader.take(described))
        )
    reader.end()
    return content


def _arrays(described: Iterable[Iterable[object]], reader: _Reader) -> Iterator[tuple[str, Array]]:
    """Return the arrays of a record by name.

    Raises:
        FederationError: a name comes twice.
    """
    names = set()
    for key, dtype, shape, stype, size in described:
        if key in names:
            raise FederationError("a packed message names an array twice")
        names.add(key)
        data = reader.take(_whole(size))
        yield _text(key), Array(_text(dtype), _shape(shape), _text(stype), data)


def _whole(value: object) -> int:
    """Return a number that is whole and not below 0.

    Raises:
        ValueError: it is another value.
    """
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _shape(value: object) -> tuple[int, ...]:
    """Return the shape of an array.

    Raises:
        ValueError: it is another value.
    """
    if not isinstance(value, list):
        raise ValueError
    return tuple(map(_whole, value))


def _text(value: object) -> str:
    """Return a text.

    Raises:
        ValueError: it is another value.
    """
    if not isinstance(value, str):
        raise ValueError
    return value
