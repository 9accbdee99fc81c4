"""Which of a node's own examples are for training, decided for each by itself.

A shuffle reassigns everybody when one row joins or leaves, and a stratified one shows how many classes there are. Here
a hash of the row itself decides, keyed with a secret of the node: one row more or less moves no other, and a server
that chooses the share of test examples cannot tell which rows it moves.
"""

import hashlib
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ConfigError
from cloister.tasks.base import Examples

KEY_BYTES = 32
NAME = "split.key"


def split(examples: Examples, fraction: float, key: bytes) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Divide examples into those to train on and those to score with.

    Args:
        examples: n of them. All rows of a group go to the same side.
        fraction: probability of a row, or a group, to be scored with; in [0, 1).
        key: secret of the node.

    Returns:
        Indices (train, test), together all n. A row's side does not depend on the other rows.
    """
    draws = uniform_hashes(_identities(examples), key) if fraction else np.ones(len(examples))
    return np.flatnonzero(draws >= fraction), np.flatnonzero(draws < fraction)


def uniform_hashes(identities: Sequence[bytes], key: bytes) -> NDArray[np.float64]:
    """A number in [0, 1) for each identity: uniform to whoever does not know the key, always the same to who does."""
    digests = b"".join(hashlib.blake2b(identity, key=key, digest_size=8).digest() for identity in identities)
    return np.frombuffer(digests, ">u8") / 2.0**64


def _identities(examples: Examples) -> list[bytes]:
    """What a row is known by: its group where it has one, else all of its numbers."""
    if examples.groups is not None:
        # Whatever text a file holds has bytes: one name without them would fail for all.
        return [str(group).encode("utf-8", "surrogatepass") for group in examples.groups.tolist()]
    x, y = np.ascontiguousarray(examples.x), np.ascontiguousarray(examples.y)
    return [x[i].tobytes() + y[i].tobytes() for i in range(len(examples))]


def secret_key(folder: Path) -> bytes:
    """The node's secret, made when it is asked for first; only the node's user may read it.

    Raises:
        ConfigError: the file is not one that was written here.
    """
    path = folder / NAME
    if not path.exists():
        _make_key(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{NAME} in the folder of the node's ledgers must hold {KEY_BYTES} bytes, found {len(key)}")
    return key


def _make_key(path: Path) -> None:
    """A new key in a file, whole or absent; of several nodes that share a folder, the first one's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{NAME}.{secrets.token_hex(8)}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        # A link, and no renaming: that would take the place of a key that another node has split its data by.
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()
