"""Quick check of a task: its data, its model, and one round of two clients."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from cloister.client.data import benchmark_of, task_of
from cloister.client.workbench import workbench_of
from cloister.config.run import RunConfig, parse
from cloister.config.section import Scalar
from cloister.core.errors import ConfigError, DataError
from cloister.local.grid import LocalGrid
from cloister.local.simulation import simulate
from cloister.server.reports.console import Narrator
from cloister.server.run import Outcome, run
from cloister.tasks import TASKS
from cloister.tasks.base import Examples, Task
from cloister.tasks.faults import (
    Fault,
    faults_of_attributes,
    faults_of_examples,
    faults_of_model,
    faults_of_naming,
    sample,
    tried,
)
from cloister.tasks.frozen import Parameters
from cloister.tasks.labels import NO_CLASS
from cloister.tasks.making import explained_model_of

CLIENTS = 2
ONE_ROUND: Mapping[str, Scalar] = {"num-rounds": 1, "privacy.server": "none", "tensorboard": False}
NOTHING: Mapping[str, Scalar] = {}
RARE = 0.02
"""Share of the examples below which a class is reported."""
LARGE = 10.0
"""Absolute value of an input above which it seems to be unscaled."""


STATED = 100
"""Stated size of a site in a check, as the site's own statement is unknown here."""


@dataclass(frozen=True)
class Line:
    """One result of a check.

    Attributes:
        kind: `fault`: the task is unusable; `warn`: it is usable, but hardly as intended; `note`: information; `ok`: it
            works.
        text: one sentence, with the remedy of a fault.
    """

    kind: Literal["fault", "warn", "note", "ok"]
    text: str

    def __str__(self) -> str:
        return f"{self.kind:5}  {self.text}"


def check_task(name: str, data: Path | None = None, given: Mapping[str, Scalar] = NOTHING) -> Iterator[Line]:
    """Check a task, without leaving files behind.

    Args:
        name: of the task.
        data: a site's own file or folder, and the task's `task.data-path`; None: the task's benchmark data.
        given: settings of a run; only those of the task and of training are used.

    Yields:
        Results, as they are found. After a fault, checks that depend on it are skipped.
    """
    config, problem = tried(lambda: _checked(parse(_settings(name, data, given))))
    if config is None:
        yield Line("fault", problem)
        return
    if unused := ", ".join(key for key in given if not _counts(key) and key != "task.name"):
        yield Line("note", f"one round without noise on the server is tried, whatever these settings say: {unused}")
    faults = []
    for line in _lines(config, data):
        yield line
        faults += [line] if line.kind == "fault" else []
    if not faults:
        yield from _round(config, data)


def _settings(name: str, data: Path | None, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings of the test round.

    Raises:
        ConfigError: the settings contradict each other, or are about another task.
    """
    if given.get("task.name", name) != name:
        raise ConfigError(f"task.name = {given['task.name']!r} contradicts the task that is to be checked, {name!r}")
    # DP-SGD clips by groups: without it they are refused.
    grouped: dict[str, Scalar] = {"privacy.client": "dp-sgd"} if given.get("task.group") else {}
    parse({**grouped, **given, "task.name": name})
    own = {key: value for key, value in given.items() if _counts(key)}
    return {**ONE_ROUND, **grouped, **_place(name, data), **own, "task.name": name}


def _counts(key: str) -> bool:
    """Return whether a setting is about the task or training.

    A warm-up is longer than the single test round.
    """
    return key.startswith(("task.", "client.")) and key not in ("task.name", "client.warmup-rounds")


def _place(name: str, data: Path | None) -> dict[str, Scalar]:
    """Return the setting of the data path, if the task reads data."""
    return {"task.data-path": str(data)} if data and not getattr(TASKS.load(name), "bundled", False) else {}


def _checked(config: RunConfig) -> RunConfig:
    """Return the configuration, if its task can be made."""
    task_of(config.task)
    return config


def _lines(config: RunConfig, data: Path | None) -> Iterator[Line]:
    """Yield the results about data and model.

    If the task's attributes are faulty, only further faults are reported.
    """
    task = task_of(config.task)
    attributes = list(faults_of_attributes(task))
    yield from (Line("fault", str(fault)) for fault in attributes)
    if all(fault.where == "recipe" for fault in attributes):
        yield from (line for line in _data_and_model(config, task, data) if not attributes or line.kind == "fault")


def _data_and_model(config: RunConfig, task: Task, data: Path | None) -> Iterator[Line]:
    parts, problem = _told_to_owner(lambda: _parts(task, data))
    if problem:
        yield Line("fault", f"{'read()' if data else 'load()'}: {problem}{_labels_in(task, data) if data else ''}")
    found = []
    for where, examples in (parts or {}).items():
        about = list(_about(task, examples, where))
        yield from about
        if all(line.kind != "fault" for line in about):
            found.append(examples)
    about_model = _about_model(config, task, found[0] if found else None)
    yield from (line for line in about_model if found or line.kind == "fault")


def _labels_in(task: Task, data: Path) -> str:
    """Describe the range of a file's labels if some are no classes.

    Only the owner of the file sees it here.
    """
    examples, _ = tried(lambda: task.rows(data))
    if examples is None or not task.classes or not len(examples):
        return ""
    low, high = examples.y.min(), examples.y.max()
    return "" if low == NO_CLASS or 0 <= low <= high < task.classes else f"; found labels from {low} to {high}"


def _parts(task: Task, data: Path | None) -> dict[str, Examples]:
    """Return the examples by their source: a site's file, or the benchmark data."""
    if data is not None:
        return {"read()": task.read(data)}
    loaded = benchmark_of(task.config)
    return {"load(), train": loaded.train, "load(), test": loaded.test}


def _told_to_owner(read: Callable[[], dict[str, Examples]]) -> tuple[dict[str, Examples] | None, str]:
    """Return the examples and the error message with the first faulty row.

    The user who runs the check owns the data.
    """
    rows = []

    def noted() -> dict[str, Examples]:
        try:
            return read()
        except DataError as error:
            rows.append(error.first)
            raise

    parts, problem = tried(noted)
    return parts, "; ".join(filter(None, (problem, *rows)))


def _about(task: Task, examples: Examples, where: str) -> Iterator[Line]:
    faults = list(faults_of_examples(task, examples, where))
    yield from (Line("fault", "; ".join(filter(None, (str(fault), fault.first)))) for fault in faults)
    if faults:
        return
    kind = _classes(task, examples) if task.classes else "numbers as targets"
    yield Line("ok", f"{where}: {len(examples)} examples of shape {task.input_shape}, {kind}")
    if task.config.group and examples.groups is not None:
        yield Line("ok", f"{where}: {_groups(examples.groups)}")
    if examples.x.dtype != np.float32:
        note = (
            f"{where}: inputs of {examples.x.dtype} are used as float32, with the same values; scale them in the task"
        )
        yield Line("note", note)
    elif np.abs(sample(task, examples)).max() > LARGE:
        yield Line("note", f"{where}: inputs beyond {LARGE:g}, on which networks train badly; scale them in the task")
    if task.classes:
        yield from _about_balance(task, examples, where)


def _groups(groups: NDArray) -> str:
    """Describe the groups of the examples.

    This is their number, and the sizes of the smallest and the largest.
    """
    counts = np.unique(groups, return_counts=True)[1]
    return f"{len(counts)} groups of {counts.min()} to {counts.max()} examples each"


def _classes(task: Task, examples: Examples) -> str:
    """Describe the classes of the examples.

    This is their number, and the sizes of the rarest and the most frequent.
    """
    counts = np.bincount(examples.y, minlength=task.classes)
    low, high = counts.min(), counts.max()
    return f"{task.classes} classes, {low}{f' to {high}' if high > low else ''} examples in each"


def _about_balance(task: Task, examples: Examples, where: str) -> Iterator[Line]:
    counts = np.bincount(examples.y, minlength=task.classes)
    names = task.class_names or tuple(map(str, range(task.classes)))
    absent = [name for name, count in zip(names, counts, strict=True) if not count]
    rare = [name for name, count in zip(names, counts, strict=True) if 0 < count < RARE * len(examples)]
    if len(absent) == task.classes - 1:
        (name,) = (name for name, count in zip(names, counts, strict=True) if count)
        yield Line("warn", f"{where}: all examples are of one class, {name}; is a folder or a file missing?")
    if absent:
        yield Line("note", f"{where}: no example of {', '.join(absent)}")
    if rare:
        yield Line("note", f"{where}: fewer than {RARE:.0%} of the examples are of {', '.join(rare)}")


def _about_model(config: RunConfig, task: Task, examples: Examples | None) -> Iterator[Line]:
    model, problem = tried(lambda: explained_model_of(task))
    if model is None:
        yield Line("fault", problem.removeprefix(f"task {task.config.name!r}: "))
        return
    inputs = sample(task, examples)
    faults: list[Fault] = [*faults_of_naming(task, model), *faults_of_model(task, model, inputs)]
    yield from (Line("fault", str(fault)) for fault in faults)
    if not faults:
        yield Line("ok", f"build(): a model of {Parameters.of(model)}, which predicts and is scored")
        yield _about_dp_sgd(config)
        if task.recipe.callbacks is not None:
            yield Line(
                "note", "recipe: a run with privacy.client refuses its Keras callbacks; use client.callbacks = false"
            )


def _about_dp_sgd(config: RunConfig) -> Line:
    """Return a line on whether DP-SGD can train the task.

    A failure is a note instead of a fault, as a run need not use DP-SGD.
    """
    private = parse(config.flat() | {"privacy.client": "dp-sgd", "client.callbacks": False})
    _, problem = tried(lambda: workbench_of(private).trainer)
    if problem:
        return Line("note", f"it cannot be trained with privacy.client='dp-sgd': {problem}")
    return Line("ok", "it can be trained with privacy.client='dp-sgd'")


def _round(config: RunConfig, data: Path | None) -> Iterator[Line]:
    """Run one round of two clients in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        settings = config.flat() | {"output-dir": folder}
        with quiet("cloister.client"):  # the result line reports a client's failure
            outcome, problem = tried(lambda: _outcome(settings, data, folder))
    if outcome is None:
        yield Line("fault", f"one round of {CLIENTS} clients: {problem}")
        return
    last = outcome.rounds[-1]
    if last.unscored:
        yield Line("note", f"one round of {CLIENTS} clients: one was not scored: {last.unscored[0].detail}")
    found = last.central or last.federated
    scores = ", ".join(f"{name} {found[name]:.4g}" for name in sorted(found, key=lambda name: (name != "loss", name)))
    yield Line("ok", f"one round of {CLIENTS} clients: {scores or 'no scores'}")


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Disable this logger during the block."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _outcome(settings: dict[str, Scalar], data: Path | None, folder: str) -> Outcome:
    quiet = Narrator(1, Console(quiet=True))
    if data is None:
        return simulate(settings, CLIENTS, quiet)
    from cloister.client.app import app

    config = parse(settings | {"evaluation.central": False, "evaluation.federated": "on"})
    node: dict[str, Scalar] = {"data-path": str(data), "ledger-dir": folder}
    if config.privacy.client.clips_gradients:
        node["public-size"] = STATED
    return run(LocalGrid(app, config.flat(), [node] * CLIENTS), config, quiet)
