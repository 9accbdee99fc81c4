"""Examples of a client: a file of its node in a deployment, a part of a benchmark in a simulation.

A node's own examples are split for training and evaluation, independently for each example. With a shuffle, one added
or removed row reassigns all others, and a stratified split reveals the number of classes. Here a hash of the row
itself decides, keyed with a secret of the node. An added or removed row moves no other. A server that chooses the
share of test examples cannot determine which rows it moves.
"""

import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from logging import WARNING
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.client.node import NodeConfig
from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples, Task
from cloister.tasks.columns import spelt
from cloister.tasks.making import dataset_of, named_task, read_by, rows_by
from cloister.tasks.partition import deal, holdout
from cloister.utils.errors import ConfigError, DataError, NodeConfigError
from cloister.utils.files import expanded
from cloister.utils.rows import shapes_of
from cloister.utils.text import only_text

KEY_BYTES = 32
NAME = "split.key"
logger = logging.getLogger("cloister.client")
_handed_out: ContextVar[Sequence[Examples] | None] = ContextVar(
    "examples of simulated clients, in place of their parts of a benchmark", default=None
)


@dataclass(frozen=True)
class LocalData:
    """Examples of a client for training, and held-out examples for evaluation."""

    train: Examples
    test: Examples


@contextmanager
def handing_out(parts: Sequence[Examples]) -> Iterator[None]:
    """Replace the benchmark parts of simulated clients within the block.

    Args:
        parts: one for each client, all for training.
    """
    token = _handed_out.set(parts)
    try:
        yield
    finally:
        _handed_out.reset(token)


@lru_cache(maxsize=2)
def task_of(config: TaskConfig) -> Task:
    """Return the task of a run; cached in the process."""
    return named_task(config)


def local_data(config: TaskConfig, node: NodeConfig, seed: int, tolerant: bool = False) -> LocalData:
    """Return the examples of the node with this node configuration.

    A node's own data is split row by row, by a hash that is keyed with the node's secret. An added or removed row moves
    no other row. A simulated part is split class by class, as in papers, from the run's seed.

    Args:
        config: the run's `task.*`, as `RunConfig.for_clients` has it.
        node: names the file or the part of a benchmark.
        seed: of the run, the same for all clients, so that they agree on the partition.
        tolerant: omit single rows that the task rejects, and log their number. Otherwise such a row raises an error,
            which a run under a client mechanism must not reveal.

    Raises:
        NodeConfigError: it names neither a file nor a part of a benchmark.
        DataError: the data is absent, or the task cannot read it.
    """
    if node.data_path:
        return _own_data(config, node.data_path, node.ledger_folder, tolerant)
    if (parts := _handed_out.get()) is not None and node.partition_id is not None:
        own = parts[node.partition_id]
        return LocalData(own, own.take(np.arange(0)))
    return _part(config, node, seed)


def units_dealt(config: TaskConfig, node: NodeConfig, seed: int) -> NDArray:
    """Return the ids of the training units that a simulation assigns.

    Args: as `local_data`.

    Returns:
        The numbers of examples, or the distinct names of groups. Two clients with the same id have data of the same
        unit.
    """
    if (parts := _handed_out.get()) is not None and node.partition_id is not None:
        first = sum(map(len, parts[: node.partition_id]))
        return np.arange(first, first + len(parts[node.partition_id]))
    train, _ = _dealt_rows(config, node, seed)
    groups = benchmark_of(config).train.groups
    return train if groups is None else np.unique(groups[train])


def dealt(config: TaskConfig, node: NodeConfig, seed: int) -> int:
    """Return the number of units that a simulation assigns, at least 1.

    It is public, like the partition.

    Args: as `local_data`.
    """
    return max(1, len(units_dealt(config, node, seed)))


@lru_cache(maxsize=4)
def _own_data(config: TaskConfig, path: str, folder: Path, tolerant: bool) -> LocalData:
    # Read without a split: the server may request many splits of one file.
    examples = _own_file(config.model_copy(update={"test_fraction": 0.0}), path, tolerant)
    train, test = split(examples, config.held_back, secret_key(folder) if config.held_back else b"")
    return LocalData(examples.take(train), examples.take(test))


@lru_cache(maxsize=16)
def _part(config: TaskConfig, node: NodeConfig, seed: int) -> LocalData:
    """Return a simulated client's examples. The last 16 results are kept, of all configurations."""
    train, test = _dealt_rows(config, node, seed)
    examples = benchmark_of(config).train
    return LocalData(examples.take(train), examples.take(test))


@lru_cache(maxsize=2)
def _own_file(config: TaskConfig, path: str, tolerant: bool) -> Examples:
    task, place = task_of(config), expanded(path)
    if not tolerant:
        examples = read_by(task, place)
        _tell(examples)
    else:
        examples = rows_by(task, place)
        if shapes_of(examples.x) == task.input_shapes:  # else every row has the wrong shape
            keep = task.usable(examples)
            if not keep.all():
                reasons = "; ".join(examples.faults) or "a number or a label is out of range"
                logger.log(WARNING, "%d of %d rows are left out: %s", (~keep).sum(), len(keep), reasons)
            if not keep.any():
                logger.log(WARNING, "%s has no row that can be used: this site trains on noise alone", place)
            examples = examples.take(np.flatnonzero(keep))
        examples = task.checked(examples, place)
    if not config.group:
        # Rows are the units, even if the task reads groups. DP-SGD would otherwise draw one row of a group.
        return replace(examples, groups=None)
    if examples.groups is None:
        # A task without groups would protect each row by itself, contrary to the run's claim.
        raise DataError(f"task.group = {config.group!r}: task {config.name!r} reads no groups from {path}")
    return in_groups(examples, examples.groups, config.group)[0]


def in_groups(examples: Examples, groups: NDArray, group: str) -> tuple[Examples, NDArray[np.intp]]:
    """Return the examples that have a group, by its one spelling, and their places.

    Their faults count the others, for the owner of the file.

    Args:
        examples: n of them.
        groups: of each, shape (n,).
        group: the name of the groups, `task.group`.
    """
    # A name with an extra space in some rows would count as two patients, and all rows without a name as one.
    # Either way one person could move a sum by more than the clipping norm of one group.
    named = np.ones(len(groups), np.bool_)
    if groups.dtype.kind == "U":
        names, spellings = np.unique(only_text(groups), return_inverse=True)
        groups = np.array(list(map(spelt, names.tolist())), np.str_)[spellings.ravel()]
        named = groups != ""
    if not named.all():
        logger.log(WARNING, "%d of %d rows are left out: they do not say whose they are", (~named).sum(), len(named))
    places, examples = np.flatnonzero(named), replace(examples, groups=groups)
    if named.all():
        return examples, places
    fault = f"{(~named).sum()} where {group} is empty, so that task.group does not find whose they are"
    return replace(examples.take(places), faults=(*examples.faults, fault)), places


def _tell(examples: Examples) -> None:
    """Tell the owner of data which rows are left out. The log stays at the site."""
    if examples.faults:
        logger.log(WARNING, "rows are left out: %s", "; ".join(examples.faults))


@lru_cache(maxsize=4)
def tell_ungrouped(config: TaskConfig) -> None:
    """Tell the owner of data that was read, once, of groups that DP-SGD does not protect. The log stays at the site.

    Args: as `local_data`.
    """
    with suppress(Exception):  # a fault of this note must not change the messages of the node
        for text in task_of(config).ungrouped():
            logger.log(WARNING, "%s", text)


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


def _dealt_rows(config: TaskConfig, node: NodeConfig, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return a simulated client's training rows and evaluation rows."""
    if node.partition_id is None or node.num_partitions is None:
        raise NodeConfigError("the node configuration must hold 'data-path', or 'partition-id' and 'num-partitions'")
    own = _parts(config, node.num_partitions, seed)[node.partition_id]
    if not config.held_back:
        return own, own[:0]
    examples, rng = benchmark_of(config).train, np.random.default_rng([seed, node.partition_id])
    groups = None if examples.groups is None else examples.groups[own]
    train, test = holdout(task_of(config).strata(examples.y[own]), config.held_back, rng, groups)
    return own[train], own[test]


@lru_cache(maxsize=1)
def benchmark_of(config: TaskConfig) -> Dataset:
    """Return the benchmark data of a simulation, cached in the process.

    Its training examples are in the groups that `task.group` names, or in none if it is empty. Examples without a group
    are omitted.

    Raises:
        DataError: the data is not on this machine, or has no groups of this name.
    """
    data = dataset_of(task_of(config))
    _tell(data.train)
    if not config.group:
        return replace(data, train=replace(data.train, groups=None), groups={})
    if config.group not in data.groups:
        there = f"there are {', '.join(data.groups)}" if data.groups else "it has none"
        raise DataError(
            f"task.group = {config.group!r} names no groups of task {config.name!r}: {there}; its load() returns them "
            f"in Dataset(..., groups={{{config.group!r}: ARRAY}}), a name for each training example. task.group = '' "
            "protects each example by itself"
        )
    train, rows = in_groups(data.train, data.groups[config.group], config.group)
    owners = None if data.owners is None else data.owners[rows]
    return replace(data, train=train, owners=owners, groups={})


@lru_cache(maxsize=4)
def _parts(config: TaskConfig, clients: int, seed: int) -> list[NDArray]:
    task = task_of(config)
    return deal(config, task.partition, benchmark_of(config), clients, task.classes, seed, task.tables)
