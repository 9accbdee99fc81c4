"""Split of a node's own examples for training and evaluation, independent for each example.

With a shuffle, one added or removed row reassigns all others, and a stratified split reveals the number of classes.
Here a hash of the row itself decides, keyed with a secret of the node. An added or removed row moves no other. A server
that chooses the share of test examples cannot determine which rows it moves.
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
    """Divide examples into those for training and those for evaluation.

    Args:
        examples: n of them. All rows of a group go to the same side.
        fraction: probability of a row, or a group, to be for evaluation; in [0, 1).
        key: secret of the node.

    Returns:
        Indices (train, test), together all n. A row's side does not depend on the other rows.
    """
    if not fraction:
        return np.arange(len(examples)), np.arange(0)
    # The identity of a row: its group, or else all its numbers.
    if examples.groups is not None:
        # Any text of a file must have bytes: otherwise one name would fail the whole node.
        identities = [str(group).encode("utf-8", "surrogatepass") for group in examples.groups.tolist()]
    else:
        x, y = np.ascontiguousarray(examples.x), np.ascontiguousarray(examples.y)
        identities = [x[i].tobytes() + y[i].tobytes() for i in range(len(examples))]
    draws = uniform_hashes(identities, key)
    return np.flatnonzero(draws >= fraction), np.flatnonzero(draws < fraction)


def uniform_hashes(identities: Sequence[bytes], key: bytes) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each identity.

    It is uniform without the key, and fixed given the key.
    """
    digests = b"".join(hashlib.blake2b(identity, key=key, digest_size=8).digest() for identity in identities)
    return np.frombuffer(digests, ">u8") / 2.0**64


def secret_key(folder: Path) -> bytes:
    """Return the node's secret key, made at its first use.

    Only the node's user may read it. The file is complete or absent. The first of several writers wins.

    Raises:
        ConfigError: the file has another format.
    """
    path = folder / NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{NAME}.{secrets.token_hex(8)}")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            # Use a link instead of renaming, which would replace a key that another node has split its data by.
            with suppress(FileExistsError):
                os.link(partial, path)
        finally:
            partial.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{NAME} in the folder of the node's ledgers must hold {KEY_BYTES} bytes, found {len(key)}")
    return key
