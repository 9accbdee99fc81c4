"""A client's own examples: a file of its node in a deployment, a part of a benchmark in a simulation."""

import logging
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from logging import WARNING
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.client.node import NodeConfig
from cloister.client.split import secret_key, split
from cloister.config.run import TaskConfig
from cloister.core.errors import DataError, NodeConfigError
from cloister.core.files import expanded
from cloister.core.text import only_text
from cloister.tasks.base import Dataset, Examples, Task
from cloister.tasks.making import dataset_of, named_task
from cloister.tasks.partition import deal, holdout
from cloister.tasks.tables import LONGEST

logger = logging.getLogger("cloister.client")
_handed_out: ContextVar[Sequence[Examples] | None] = ContextVar(
    "examples of simulated clients, in place of their parts of a benchmark", default=None
)


@dataclass(frozen=True)
class LocalData:
    """What a client trains on, and what it keeps back to score models with."""

    train: Examples
    test: Examples


@contextmanager
def handing_out(parts: Sequence[Examples]) -> Iterator[None]:
    """The block, in which simulated clients train on these examples instead of their parts of a benchmark.

    Args:
        parts: one for each client; they keep none of it back.
    """
    token = _handed_out.set(parts)
    try:
        yield
    finally:
        _handed_out.reset(token)


@lru_cache(maxsize=2)
def task_of(config: TaskConfig) -> Task:
    """The task of a run; one per process."""
    return named_task(config)


def local_data(config: TaskConfig, node: NodeConfig, seed: int, tolerant: bool = False) -> LocalData:
    """The examples of the node with this node configuration.

    Data of a node's own is split row by row, by a hash that is keyed with the node's secret: one row more or less moves
    no other. A simulated part is split class by class, as papers do, from the run's seed.

    Args:
        config: the run's `task.*`.
        node: says where they are.
        seed: of the run, the same for all clients, so that they agree on the partition.
        tolerant: leave out single rows that the task cannot take, and say so in the log. Otherwise one such row is an
            error, which a run under a client mechanism must not show.

    Raises:
        NodeConfigError: it says neither a file nor a part of a benchmark.
        DataError: the data is absent or is not what the task reads.
    """
    if node.data_path:
        return _own_data(config, node.data_path, node.ledger_folder, tolerant)
    if (parts := _handed_out.get()) is not None and node.partition_id is not None:
        own = parts[node.partition_id]
        return LocalData(own, own.take(np.arange(0)))
    train, test = _dealt_rows(config, node, seed)
    examples = benchmark_of(config).train
    return LocalData(examples.take(train), examples.take(test))


def units_dealt(config: TaskConfig, node: NodeConfig, seed: int) -> NDArray:
    """Return what names each unit that a simulation deals a client to train on.

    Args: as `local_data`.

    Returns:
        The numbers of examples, or the names of groups, each once. Two clients with the same one hold data of the same
        unit.
    """
    if (parts := _handed_out.get()) is not None and node.partition_id is not None:
        first = sum(map(len, parts[: node.partition_id]))
        return np.arange(first, first + len(parts[node.partition_id]))
    train, _ = _dealt_rows(config, node, seed)
    groups = benchmark_of(config).train.groups
    return train if groups is None else np.unique(groups[train])


@lru_cache(maxsize=4)
def _own_data(config: TaskConfig, path: str, folder: Path, tolerant: bool) -> LocalData:
    # Read as if nothing were kept back: the server may ask for many splits of one file.
    examples = _own_file(config.model_copy(update={"test_fraction": 0.0}), path, tolerant)
    train, test = split(examples, config.test_fraction, secret_key(folder) if config.test_fraction else b"")
    return LocalData(examples.take(train), examples.take(test))


@lru_cache(maxsize=2)
def _own_file(config: TaskConfig, path: str, tolerant: bool) -> Examples:
    examples = _read(config, expanded(path), tolerant)
    if not config.group:
        # Rows are units, whatever else the task reads: of a group one row would be drawn, and another take its place.
        return replace(examples, groups=None)
    if examples.groups is None:
        # Whoever wrote the task may not have thought of groups: each row by itself is not what the run promises.
        raise DataError(f"task.group = {config.group!r}: task {config.name!r} reads no groups from {path}")
    groups, named = _one_spelling(examples.groups)
    examples = replace(examples, groups=groups)
    return examples if named.all() else examples.take(np.flatnonzero(named))


def _one_spelling(groups: NDArray) -> tuple[NDArray, NDArray[np.bool_]]:
    """Return the names of groups, each in one spelling, and which rows have one; a warning counts the others.

    A patient whose name has a space more in some rows would be two, and rows without a name one patient together: in
    either case one person would move a sum by more than the clip of one group.
    """
    if groups.dtype.kind != "U":
        return groups, np.ones(len(groups), np.bool_)
    names, places = np.unique(only_text(groups), return_inverse=True)
    groups = np.array([_spelt(name) for name in names.tolist()], np.str_)[places.ravel()]
    named = groups != ""
    if not named.all():
        logger.log(WARNING, "%d of %d rows are left out: they do not say whose they are", (~named).sum(), len(named))
    return groups, named


def _spelt(name: str) -> str:
    """A name in its one spelling; empty for one that is no name, which could take an hour to spell."""
    return " ".join(unicodedata.normalize("NFC", name).split()) if len(name) <= LONGEST else ""


def _read(config: TaskConfig, place: Path, tolerant: bool) -> Examples:
    task = task_of(config)
    if not tolerant:
        return task.read(place)
    rows = task.rows(place)
    if rows.x.shape[1:] != task.input_shape:
        return task.checked(rows, place)  # no single row is at fault
    keep = task.usable(rows)
    if not keep.all():
        logger.log(WARNING, "%d of %d rows are left out: a number or a label is out of range", (~keep).sum(), len(keep))
    return task.checked(rows.take(np.flatnonzero(keep)), place)


def _dealt_rows(config: TaskConfig, node: NodeConfig, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Which training examples of the benchmark a simulated client trains on, and which it scores models with."""
    if node.partition_id is None or node.num_partitions is None:
        raise NodeConfigError("the node configuration must hold 'data-path', or 'partition-id' and 'num-partitions'")
    own = _parts(config, node.num_partitions, seed)[node.partition_id]
    if not config.test_fraction:
        return own, own[:0]
    strata = task_of(config).strata(benchmark_of(config).train.y[own])
    train, test = holdout(strata, config.test_fraction, np.random.default_rng([seed, node.partition_id]))
    return own[train], own[test]


@lru_cache(maxsize=1)
def benchmark_of(config: TaskConfig) -> Dataset:
    """The benchmark data of a task, which a simulation deals out; one per process.

    Its training examples are in the groups that `task.group` names, and in none where it names none.

    Raises:
        DataError: it is not on this machine, or has no groups of this name.
    """
    return _grouped(config, dataset_of(task_of(config)))


def _grouped(config: TaskConfig, data: Dataset) -> Dataset:
    """The data, whose training examples are in the groups of the run; those that name no group are left out."""
    if not config.group:
        return replace(data, train=replace(data.train, groups=None), groups={})
    if config.group not in data.groups:
        there = f"there are {', '.join(data.groups)}" if data.groups else "it has none (Dataset.groups)"
        raise DataError(
            f"task.group = {config.group!r} names no groups of task {config.name!r}: {there}; task.group = '' protects "
            "each example by itself"
        )
    groups, named = _one_spelling(data.groups[config.group])
    train = replace(data.train, groups=groups)
    if named.all():
        return replace(data, train=train, groups={})
    rows = np.flatnonzero(named)
    owners = None if data.owners is None else data.owners[rows]
    return replace(data, train=train.take(rows), owners=owners, groups={})


@lru_cache(maxsize=4)
def _parts(config: TaskConfig, clients: int, seed: int) -> list[NDArray]:
    task = task_of(config)
    return deal(config, task.partition, benchmark_of(config), clients, task.classes, seed, task.tables)
