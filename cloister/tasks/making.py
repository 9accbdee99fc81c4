"""Construction of a task, its data and its model, with checks of what the user's code returns."""

import inspect
import re

from cloister.config.run import TaskConfig
from cloister.core.crash import kind, place
from cloister.core.errors import CloisterError, ConfigError, PluginError
from cloister.core.text import clean
from cloister.tasks import TASKS
from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task

STATED = {
    "recipe": "Recipe(local_epochs=1, batch_size=16, learning_rate=0.1)",
    "classes": "2",
    "models": '("mlp",)',
}
"""Attributes that every task class must have, each with an example."""
WORDS = 240
"""Largest number of characters quoted from a library's error about a network."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
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
        words = clean(" ".join(COLOURS.sub("", str(error)).split()))
        said = f": {words[:WORDS]}{' ...' if len(words) > WORDS else ''}" if words else ""
        raise ConfigError(
            f"task {task.config.name!r}: build() fails with {kind(error)} at {place(error)}{said}; change the network, "
            f"or what it is built for: inputs of shape {task.input_shape}"
        ) from error


def _kind(found: object) -> str:
    return f"an object of type {type(found).__name__}"
