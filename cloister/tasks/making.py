"""Construction of a task, its data and its model with checks of the user's code, and the digest of frozen weights."""

import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloister.config.run import TaskConfig
from cloister.tasks import TASKS
from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task
from cloister.utils.crash import kind, place, quoted
from cloister.utils.errors import CloisterError, ConfigError, PluginError
from cloister.utils.wire import FROZEN


def frozen_digest(model: Model) -> str:
    """Return the SHA-256 of a model's frozen weights; empty without any.

    It is equal for equal names, shapes, dtypes and bits, in any order.
    """
    arrays = model.frozen()
    if not arrays:
        return ""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(repr((name, array.shape, array.dtype.str)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def frozen_digest_field(model: Model) -> dict[str, str]:
    """Return the message fields for the frozen weights: their digest, if any."""
    digest = frozen_digest(model)
    return {FROZEN: digest} if digest else {}


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a model.

    Attributes:
        sent: number of parameters that are sent, with noise if a mechanism adds some.
        frozen: number of parameters that every site builds for itself.
        digest: SHA-256 of the frozen weights; empty: there are none.
    """

    sent: int
    frozen: int
    digest: str

    @classmethod
    def of(cls, model: Model) -> "Parameters":
        """Count the parameters of a model."""
        sent, frozen = (sum(array.size for array in arrays.values()) for arrays in (model.arrays(), model.frozen()))
        return cls(sent, frozen, frozen_digest(model))

    def __str__(self) -> str:
        if not self.frozen:
            return f"{self.sent:,} parameters"
        return f"{self.sent:,} parameters trained and sent, {self.frozen:,} frozen (SHA-256 {self.digest[:12]}…)"


STATED = {
    "recipe": "Recipe(local_epochs=1, batch_size=16, learning_rate=0.1)",
    "classes": "2",
    "models": '("mlp",)',
}
"""Attributes that every task class must have, each with an example."""
METHODS = ("initialise", "arrays", "assign", "predict", "predict_alone", "save", "load")


def named_task(config: TaskConfig) -> Task:
    """Return the task that a configuration names.

    Args:
        config: `task.*` of a run.

    Raises:
        PluginError: the name is unknown, or its plugin is no complete task.
        ConfigError: a setting is not valid for this task.
    """
    kind = TASKS.load(config.name)
    if not isinstance(kind, type) or not issubclass(kind, Task):
        raise PluginError(
            f"task {config.name!r} is no task: its entry point must name a subclass of cloister.tasks.base.Task"
        )
    if inspect.isabstract(kind):
        raise PluginError(f"task {config.name!r} is not complete: write {', '.join(sorted(kind.__abstractmethods__))}")
    for attribute, example in STATED.items():
        if not hasattr(kind, attribute):
            raise PluginError(f"task {config.name!r} states no {attribute}; such as: {attribute} = {example}")
    if not isinstance(kind.recipe, Recipe):
        raise PluginError(f"task {config.name!r}: recipe must be a Recipe, such as {STATED['recipe']}")
    if not isinstance(kind.models, tuple) or not kind.models:
        raise PluginError(f"task {config.name!r}: models must be a tuple of names, the default first, such as ('mlp',)")
    task: Task = kind(config)
    if not hasattr(task, "input_shape"):
        raise PluginError(f"task {config.name!r} states no input_shape; such as: input_shape = (13,) for 13 columns")
    return task


def dataset_of(task: Task) -> Dataset:
    """Return the benchmark data of a task.

    Raises:
        DataError: the data is not on this machine.
        ConfigError: `load` returned another type.
    """
    data = task.load()
    if not isinstance(data, Dataset) or not isinstance(data.train, Examples) or not isinstance(data.test, Examples):
        raise ConfigError(
            f"task {task.config.name!r}: load() gives {_kind(data)}; return Dataset(train, test) of two Examples"
        )
    return data


def read_by(task: Task, path: Path) -> Examples:
    """Return a site's own data, as the task reads and checks it.

    Raises:
        DataError: the file is absent, or is not in the task's format.
        ConfigError: `read` returned another type.
    """
    return _as_examples(task, "read", task.read(path))


def rows_by(task: Task, path: Path) -> Examples:
    """Return the contents of a site's file, before its rows are checked.

    Raises:
        DataError: the file is absent, or is not in the task's format.
        ConfigError: `rows` returned another type.
    """
    return _as_examples(task, "rows", task.rows(path))


def _as_examples(task: Task, method: str, found: object) -> Examples:
    if not isinstance(found, Examples):
        raise ConfigError(f"task {task.config.name!r}: {method}() gives {_kind(found)}; return Examples(x, y)")
    return found


def model_of(task: Task) -> Model:
    """Return a new model of a task.

    Raises:
        ConfigError: `build` returned another type.
    """
    model = task.build()
    if not all(hasattr(model, name) for name in METHODS):
        raise ConfigError(
            f"task {task.config.name!r}: build() gives {_kind(model)}; return a model of Cloister, such as "
            "KerasModel(function that makes a Keras model)"
        )
    return model


def explained_model_of(task: Task) -> Model:
    """Return a new model of a task, and quote the error of a failing `build`.

    For the author of the task and the user who starts a run. `build` sees no examples, so its message contains none. A
    node's errors are visible to others, so nodes use `model_of`.

    Raises:
        ConfigError: `build` failed, or returned another type.
    """
    try:
        return model_of(task)
    except CloisterError:
        raise
    except Exception as error:
        words = quoted(error)
        said = f": {words}" if words else ""
        raise ConfigError(
            f"task {task.config.name!r}: build() fails with {kind(error)} at {place(error)}{said}; change the network, "
            f"or what it is built for: inputs of shape {task.input_shape}"
        ) from error


def _kind(found: object) -> str:
    return f"an object of type {type(found).__name__}"
