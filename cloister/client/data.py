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
    examples = _partition(config, node, seed)
    if not config.test_fraction:
        return LocalData(examples, examples.take(np.arange(0)))
    strata = task_of(config).strata(examples.y)
    train, test = holdout(strata, config.test_fraction, np.random.default_rng([seed, node.partition_id or 0]))
    return LocalData(examples.take(train), examples.take(test))


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
    return _of_somebody(examples)


def _of_somebody(examples: Examples) -> Examples:
    """The examples whose group has a name, each name in one spelling.

    A patient whose name has a space more in some rows would be two, and rows without a name one patient together: in
    either case one person would move a sum by more than the clip of one group.
    """
    if examples.groups is None or examples.groups.dtype.kind != "U":
        return examples
    names, places = np.unique(only_text(examples.groups), return_inverse=True)
    spelt = [_spelt(name) for name in names.tolist()]
    groups = np.array(spelt, np.str_)[places.ravel()]
    examples, named = replace(examples, groups=groups), groups != ""
    if named.all():
        return examples
    logger.log(WARNING, "%d of %d rows are left out: they do not say whose they are", (~named).sum(), len(named))
    return examples.take(np.flatnonzero(named))


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


def _partition(config: TaskConfig, node: NodeConfig, seed: int) -> Examples:
    if node.partition_id is None or node.num_partitions is None:
        raise NodeConfigError("the node configuration must hold 'data-path', or 'partition-id' and 'num-partitions'")
    dataset, own = benchmark_of(config), _parts(config, node.num_partitions, seed)[node.partition_id]
    return replace(dataset.train.take(own), groups=_groups(config, dataset, own))


def _groups(config: TaskConfig, dataset: Dataset, own: NDArray) -> NDArray | None:
    """Whose each example is, where the run protects groups: the benchmark's natural owners."""
    if not config.group:
        return None
    if dataset.groups is None:
        raise DataError(f"task.group = {config.group!r} needs examples with owners, and task {config.name!r} has none")
    return dataset.groups[own]


@lru_cache(maxsize=1)
def benchmark_of(config: TaskConfig) -> Dataset:
    """The benchmark data of a task, which a simulation deals out; one per process.

    Raises:
        DataError: it is not on this machine.
    """
    return dataset_of(task_of(config))


@lru_cache(maxsize=4)
def _parts(config: TaskConfig, clients: int, seed: int) -> list[NDArray]:
    task = task_of(config)
    return deal(config, task.partition, benchmark_of(config), clients, task.classes, seed, task.tables)
