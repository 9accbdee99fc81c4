"""A client's own examples: a file of its node in a deployment, a part of a benchmark in a simulation."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from flwr.app import UserConfig
from numpy.typing import NDArray

from cloister.core.config import TaskConfig
from cloister.core.errors import ConfigError
from cloister.tasks import TASKS
from cloister.tasks.base import Dataset, Examples, Task
from cloister.tasks.partition import deal, holdout

DATA_PATH = "data-path"
PARTITION = "partition-id"
PARTITIONS = "num-partitions"


@dataclass(frozen=True)
class LocalData:
    """What a client trains on, and what it keeps back to score models with."""

    train: Examples
    test: Examples


@lru_cache(maxsize=2)
def task_of(config: TaskConfig) -> Task:
    """The task of a run; one per process."""
    task: Task = TASKS.load(config.name)(config)
    return task


def local_data(config: TaskConfig, node: UserConfig, seed: int) -> LocalData:
    """The examples of the node with this node configuration.

    Args:
        config: the run's `task.*`.
        node: `data-path`, or `partition-id` and `num-partitions`.
        seed: of the run, the same for all clients, so that they agree on the partition.

    Raises:
        ConfigError: the node configuration has neither.
        DataError: the data is absent or is not what the task reads.
    """
    examples = _own_file(config, str(node[DATA_PATH])) if DATA_PATH in node else _partition(config, node, seed)
    if not config.test_fraction:
        return LocalData(examples, examples.take(np.arange(0)))
    strata = task_of(config).strata(examples.y)
    train, test = holdout(strata, config.test_fraction, np.random.default_rng([seed, owner_of(node)]))
    return LocalData(examples.take(train), examples.take(test))


def owner_of(node: UserConfig) -> int:
    """The number of a simulated client; 0 for a node with a file of its own."""
    return int(node.get(PARTITION, 0))


@lru_cache(maxsize=4)
def _own_file(config: TaskConfig, path: str) -> Examples:
    return task_of(config).read(Path(path).expanduser())


def _partition(config: TaskConfig, node: UserConfig, seed: int) -> Examples:
    if type(node.get(PARTITION)) is not int or type(node.get(PARTITIONS)) is not int:
        raise ConfigError(
            f"the node configuration must hold {DATA_PATH!r}, or {PARTITION!r} and {PARTITIONS!r} as whole numbers"
        )
    index, count = int(node[PARTITION]), int(node[PARTITIONS])
    if not 0 <= index < count:
        raise ConfigError(f"{PARTITION} = {index} must be at least 0 and below {PARTITIONS} = {count}")
    return _dataset(config).train.take(_parts(config, count, seed)[index])


@lru_cache(maxsize=1)
def _dataset(config: TaskConfig) -> Dataset:
    return task_of(config).load()


@lru_cache(maxsize=4)
def _parts(config: TaskConfig, clients: int, seed: int) -> list[NDArray]:
    task = task_of(config)
    return deal(config, task.partition, _dataset(config), clients, task.classes, seed)
