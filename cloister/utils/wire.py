"""Messages: the names of their fields, and packed messages.

A packed message holds all of its content as one value after fresh random bytes.

Flower cuts a message into objects, names each by the SHA-256 of its content, and tells any node whether an object of a
given name is there. So a node could ask for the names of values that it guesses. A packed value begins with a salt of
32 random bytes. Its name, and the name of every object above it, cannot be computed without the salt.

    value = salt ‖ length of the header ‖ header ‖ parts        up to 1 MiB: bytes in one ConfigRecord
    value = salt ‖ AES-256-CTR, keyed by the salt, of the rest  above: one Array

A node that has a key appends its signature of the value (`cloister.utils.keys`); the field is then named `signed`.

Flower cuts an array into pieces of 5 MiB and names each by its content. So above 1 MiB the salt is the key of a
keystream: each piece is as random as the salt. The keystream hides nothing from a node that has the salt.

The header is JSON: an error, or the records with the lengths of their parts. A part is an array's bytes, or a record
of metrics or settings as Flower deflates it.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict

from cloister.flower.messages import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as PIECE
from cloister.utils.errors import FederationError
from cloister.utils.keys import SIGNATURE, Sign

ARRAYS = "arrays"
"""The record of a model's arrays, in both directions."""
CONFIG = "config"
"""The record of settings from the server."""
METRICS = "metrics"
"""The record of numbers in a client's reply."""
ATTESTATION = "attestation"
"""The record, and the field in it, with a node's attestation of its client's mechanism; absent: no attestation."""

ROUND = "server-round"
SEED = "seed"
PROXIMAL_MU = "proximal-mu"
HYPOTHESES = "hypotheses"
"""Number of models in the record of arrays; absent: one, under its own array names."""
PROMISE = "privacy-events"
"""The releases that will contain a client's update, as events; absent: nothing is claimed."""
LEDGER_HEAD = "ledger-head"
"""The hash of the last line of the server's ledger; absent: the server keeps none of this run."""

FROZEN = "frozen-sha256"
"""The digest of the frozen weights in the server's model, which are not sent; absent: it has none."""

SECURE = "query.secure"
"""The type of a secure aggregation message for a step without training."""
SECURE_STEP = "secure-step"
"""The requested step of it; a training message requests the vector itself."""
ADVERTISE, SHARE, SIGN, UNMASK = "advertise", "share", "sign", "unmask"
SECURE_MESSAGE = "secure-message"
"""Protocol message of a secure aggregation: bytes in the settings to a node, an array of bytes in its reply."""
CLIPPING_NORM = "clipping-norm"
"""C of a round, if clients clip for a secure aggregation and C adapts; absent: C of the configuration."""
DISTANCE = "distance"
"""Distance between the updates of the last round, if clients scale noise for a secure aggregation by it."""
ROSTER = "roster"
"""The roster of a node, sent with its keys for an attempt."""

EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
LEAKAGE = "leakage"
"""The record in which a simulated client counts its leakage; it stays with the client."""
NOISED_LEAKAGE = "noised"
"""The part of the leakage from noised models, without choices among hypotheses."""


GATE = hashlib.sha256(b"cloister superlink").hexdigest()
"""Object id that identifies `cloister superlink`: a server's app requests it, and no object has this name."""

ASSUMED = "assumed"
"""The record of a simulated client without memory of earlier rounds of its run; it stays with the client."""
ASSUMED_ROUNDS, HELD_OUT = "rounds", "held-out"
"""Number of rounds in which the client is assumed to have trained; True if it only evaluates models instead."""


def number(record: Mapping[str, object], name: str) -> float:
    """Return a number in one of Flower's records, whose values may also be lists and text.

    Raises:
        FederationError: the value is not a number.
    """
    value = record[name]
    if not isinstance(value, int | float):
        raise FederationError(f"{name!r} in a message must be a number, found {type(value).__name__}")
    return float(value)


def config_of(records: RecordDict, name: str) -> ConfigRecord:
    """Return the config record of a name; if there is none, an empty one that is not added.

    Flower's `config_records` checks and copies all records on each access.
    """
    found = records.get(name)
    return found if isinstance(found, ConfigRecord) else ConfigRecord()


Value = ConfigRecord | ArrayRecord
PACKED, SHARED = "cloister.packed", "cloister.shared"
"""The records of a packed message: what is its own, and what messages of one round share."""
VALUE, SIGNED, STYPE = "value", "signed", "cloister.packed"
"""The one field of such a record, without and with a signature behind the value; and the type of an array."""
SALT = 32
"""Bytes of a salt, and of the shortest piece of an array."""
MAX_IN_RECORD = 2**20
"""Bytes of a value that travels as one ConfigRecord: Flower takes 41 ms to write and read a megabyte of it."""
MAX_HEADER = 2**20
"""Bytes of a header. Read, it takes up to thirty times as much memory."""
KINDS: Mapping[str, type[MetricRecord] | type[ConfigRecord]] = {"metrics": MetricRecord, "config": ConfigRecord}


def packed(content: RecordDict | Error, sign: Sign | None = None) -> Value:
    """Return the content as one salted value.

    Guarantee: of two values of one content, no object of the one has the name of an object of the other.

    Args:
        content: of a message, or its error.
        sign: makes the signature that follows the value; None: there is none.
    """
    header: dict[str, object] = {}
    parts: list[bytes] = []
    if isinstance(content, Error):
        header["error"] = [content.code, content.reason or ""]
    else:
        records: list[list[object]] = []
        for name, record in content.items():
            if isinstance(record, ArrayRecord):
                arrays = [
                    [key, each.dtype, list(each.shape), each.stype, len(each.data)] for key, each in record.items()
                ]
                records.append([name, "arrays", arrays])
                parts += [array.data for array in record.values()]
            else:
                part = record.deflate()
                records.append([name, "metrics" if isinstance(record, MetricRecord) else "config", len(part)])
                parts.append(part)
        header["records"] = records
    encoded = json.dumps(header, separators=(",", ":")).encode()
    rest = [len(encoded).to_bytes(4, "big"), encoded, *parts]
    salt, size = secrets.token_bytes(SALT), SALT + sum(map(len, rest)) + (SIGNATURE if sign else 0)
    if size <= MAX_IN_RECORD:
        name, data = _with_signature(b"".join([salt, *rest]), sign)
        return ConfigRecord({name: data})
    if 0 < size % PIECE < SALT:
        rest.append(bytes(SALT - size % PIECE))
    name, data = _with_signature(b"".join([salt, *map(_keystream(salt), rest)]), sign)
    return ArrayRecord({name: Array("uint8", (len(data),), STYPE, data)})


def _with_signature(value: bytes, sign: Sign | None) -> tuple[str, bytes]:
    """Return the name of the field of a value, and what is in it."""
    return (VALUE, value) if sign is None else (SIGNED, value + sign(value))


def signed_part(value: object) -> tuple[memoryview, bytes] | None:
    """Return what a node has signed of a packed value, and its signature; None if it is not signed.

    Args:
        value: a record of a message, by any party.

    Raises:
        FederationError: it is no value that `packed` makes.
    """
    stored = _stored(value)
    return (stored.value, stored.signature) if stored.signature else None


def unpacked(value: object, max_records: int) -> RecordDict | Error:
    """Return the content, or the error, that `packed` made the value of.

    Args:
        value: a record of a message, by any party.
        max_records: bytes that metrics and settings may have together.

    Raises:
        FederationError: the value is none that `packed` makes, or is too large. Its text holds nothing of the value.
    """
    try:
        stored = _stored(value)
        return _read(_Reader(stored.value, stored.is_encrypted), max_records)
    except FederationError:
        raise
    except Exception as error:  # a hostile sender can make a parser raise any exception; its text is dropped
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


def _keystream(salt: bytes) -> Callable[[bytes | memoryview], bytes]:
    """Return what encrypts, and decrypts, the bytes after a salt, a stretch at a time."""
    update: Callable[[bytes | memoryview], bytes] = (
        Cipher(algorithms.AES256(salt), modes.CTR(bytes(16))).encryptor().update
    )
    return update


@dataclass(frozen=True)
class _Stored:
    """The field of a record with a packed value.

    Attributes:
        value: without the signature.
        is_encrypted: whether the bytes after the salt are.
        signature: empty: there is none.
    """

    value: memoryview
    is_encrypted: bool
    signature: bytes


def _stored(value: object) -> _Stored:
    """Return the field of a record that holds a packed value.

    Raises:
        FederationError: it is no value of ours.
    """
    if isinstance(value, ConfigRecord | ArrayRecord) and [*value] in ([VALUE], [SIGNED]):
        ((name, field),) = value.items()
        is_encrypted = isinstance(field, Array) and field.stype == STYPE
        data = field.data if isinstance(field, Array) and is_encrypted else field
        size = SIGNATURE if name == SIGNED else 0
        if isinstance(data, bytes) and len(data) >= SALT + size and is_encrypted == (len(data) > MAX_IN_RECORD):
            end = len(data) - size
            return _Stored(memoryview(data)[:end], is_encrypted, data[end:])
    raise FederationError("a packed message holds another value than one")


class _Reader:
    """Reads the bytes after the salt once, from the first to the last.

    Args:
        data: of a value.
        is_encrypted: whether they are.
    """

    def __init__(self, data: memoryview, is_encrypted: bool) -> None:
        self._rest = data[SALT:]
        self._decrypt: Callable[[bytes | memoryview], bytes] = _keystream(bytes(data[:SALT])) if is_encrypted else bytes

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
    """Return the content that the bytes of a value describe; any exception: they describe none."""
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
        if kind != "arrays":
            content[name] = KINDS[kind].inflate(reader.take(described))
            continue
        arrays: dict[str, Array] = {}
        for key, dtype, shape, stype, size in described:
            if key in arrays:
                raise FederationError("a packed message names an array twice")
            if not isinstance(shape, list):
                raise ValueError("a shape is a list")
            data = reader.take(_whole(size))
            arrays[_text(key)] = Array(_text(dtype), tuple(map(_whole, shape)), _text(stype), data)
        content[name] = ArrayRecord(arrays)
    reader.end()
    return content


def _whole(value: object) -> int:
    """Return a number that is whole and not below 0.

    Raises:
        ValueError: it is another value.
    """
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _text(value: object) -> str:
    """Return a text.

    Raises:
        ValueError: it is another value.
    """
    if not isinstance(value, str):
        raise ValueError
    return value
