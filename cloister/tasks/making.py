"""Construction of a task, its data and its model with checks of the user's code, and the digest of frozen weights."""

import hashlib
import inspect
import sys
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import numpy as np

from cloister.config.run import TaskConfig
from cloister.tasks import TASKS
from cloister.tasks.base import Bound, Dataset, Examples, KeepsState, Model, Recipe, Task
from cloister.utils.crash import kind, missing_extra, place, quoted
from cloister.utils.errors import CloisterError, ConfigError, PluginError
from cloister.utils.state import is_state
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
        state: number of the sent parameters that are state, and averaged.
        kept: number of parameters of state that stay at each site.
    """

    sent: int
    frozen: int
    digest: str
    state: int = 0
    kept: int = 0

    @classmethod
    def of(cls, model: Model) -> "Parameters":
        """Count the parameters of a model."""
        arrays, kept = model.arrays(), model.kept() if isinstance(model, KeepsState) else {}
        sent, frozen, own = (sum(array.size for array in each.values()) for each in (arrays, model.frozen(), kept))
        state = sum(array.size for name, array in arrays.items() if is_state(name))
        return cls(sent, frozen, frozen_digest(model), state, own)

    @property
    def are_all_trained(self) -> bool:
        """Return whether the model has nothing but trained weights."""
        return not (self.frozen or self.state or self.kept)

    def __str__(self) -> str:
        if self.are_all_trained:
            return f"{self.sent:,} parameters"
        told = [f"{self.sent - self.state:,} parameters trained and sent"]
        told += [f"{self.state:,} of statistics averaged"] if self.state else []
        told += [f"{self.kept:,} of statistics kept at each site"] if self.kept else []
        told += [f"{self.frozen:,} frozen (SHA-256 {self.digest[:12]}…)"] if self.frozen else []
        return ", ".join(told)


STATED = {"recipe": "Recipe(local_epochs=1, batch_size=16, learning_rate=0.1)", "models": '("mlp",)'}
"""Attributes that every task class must have, each with an example."""
METHODS = ("initialise", "arrays", "assign", "predict", "predict_alone", "save", "load")
NETWORKS = {
    "keras": ("Model", "cloister.tasks.keras_model", "KerasModel"),
    "torch": ("nn.Module", "cloister.tasks.torch_model", "TorchModel"),
}
"""By library: the class of its networks, and the model that trains one, with its module."""


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
    if kind.target is None and not kind.classes:
        raise PluginError(
            f"task {config.name!r} states no classes; such as: classes = 2, or target = Target('mse') for numbers"
        )
    if not isinstance(kind.recipe, Recipe):
        raise PluginError(f"task {config.name!r}: recipe must be a Recipe, such as {STATED['recipe']}")
    if not isinstance(kind.models, tuple) or not kind.models:
        raise PluginError(f"task {config.name!r}: models must be a tuple of names, the default first, such as ('mlp',)")
    own = config
    if config.features:  # without a head of its own, the task's models have no meaning
        model = "auto" if kind.build_head is Task.build_head else config.model
        own = config.model_copy(update={"features": "", "model": model})
    task: Task = kind(own)
    if not hasattr(task, "input_shape"):
        raise PluginError(f"task {config.name!r} states no input_shape; such as: input_shape = (13,) for 13 columns")
    if config.features:
        from cloister.tasks.features import FeatureTask

        return FeatureTask(task, config)
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
    """Return a new model of a task. A network of Keras or PyTorch adopts the task's targets and input shape.

    With `task.statistics = "local"` the model does not send its state.

    Raises:
        ConfigError: `build` returned another type, a network of other inputs or outputs, or one without state while it
            is to be kept; or its framework is not installed.
    """
    try:
        model = task.build()
        for library, (network, module, name) in NETWORKS.items():  # no library is imported for the question
            if library in sys.modules and isinstance(model, attrgetter(network)(sys.modules[library])):
                model = getattr(import_module(module), name)(task.build)
                break
    except ModuleNotFoundError as error:
        if missing := missing_extra(error):
            raise ConfigError(f"task {task.config.name!r}, model {task.model_name!r}: {missing}") from None
        raise
    if not all(hasattr(model, name) for name in METHODS):
        raise ConfigError(
            f"task {task.config.name!r}: build() gives {_kind(model)}; return a Keras model, a torch.nn.Module, or a "
            "model of Cloister, such as KerasModel(function that makes a Keras model)"
        )
    if isinstance(model, Bound):
        model.bind(task)
    if task.config.statistics == "local":
        if not isinstance(model, KeepsState):
            raise ConfigError(
                f"task.statistics = 'local' has no effect: {_kind(model)} has no statistics that can stay at a site; "
                "remove it"
            )
        model.keep_state()
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
