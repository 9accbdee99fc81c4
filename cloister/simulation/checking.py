"""Quick check of a task: its data, its model, and one round of two clients; and of the name of a new package."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from cloister.client.data import benchmark_of, task_of
from cloister.client.trainers import model_and_trainer_of
from cloister.config.io import Scalar
from cloister.config.run import RunConfig, parse
from cloister.privacy.mechanisms import MECHANISMS
from cloister.server.build import STRATEGIES
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import Outcome, run
from cloister.simulation.grid import LocalGrid, quiet
from cloister.simulation.simulate import simulate
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
from cloister.tasks.labels import NO_CLASS
from cloister.tasks.making import Parameters, explained_model_of
from cloister.tasks.pictures.task import PictureTask
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.rows import fields

CLIENTS = 2
ONE_ROUND: Mapping[str, Scalar] = {"num-rounds": 1, "privacy.server": "none", "tensorboard": False}
NOTHING: Mapping[str, Scalar] = {}
STATED = 100
"""Stated size of a site in a check, as the site's own statement is unknown here."""
RARE = 0.02
"""Share of the examples below which a class is reported."""
LARGE = 10.0
"""Absolute value of an input above which it seems to be unscaled."""


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
    config, problem = tried(lambda: _configuration(name, data, given))
    if config is None:
        yield Line("fault", problem)
        return
    if unused := ", ".join(key for key in given if not _counts(key) and key != "task.name"):
        yield Line("note", f"one round without noise on the server is tried, independent of these settings: {unused}")
    faults = []
    for line in _data_and_model(config, data):
        yield line
        faults += [line] if line.kind == "fault" else []
    if not faults:
        yield from _round(config, data)


def _configuration(name: str, data: Path | None, given: Mapping[str, Scalar]) -> RunConfig:
    """Return the configuration of the test round, after making its task once.

    Raises:
        ConfigError: the settings contradict each other, or are about another task.
    """
    if given.get("task.name", name) != name:
        raise ConfigError(f"task.name = {given['task.name']!r} contradicts the task that is to be checked, {name!r}")
    # DP-SGD clips by groups: without it they are refused.
    grouped: dict[str, Scalar] = {"privacy.client": "dp-sgd"} if given.get("task.group") else {}
    parse({**grouped, **given, "task.name": name})
    own = {key: value for key, value in given.items() if _counts(key)}
    if data and not getattr(TASKS.load(name), "bundled", False):
        own = {"task.data-path": str(data), **own}
    config = parse({**ONE_ROUND, **grouped, **own, "task.name": name})
    task_of(config.task)
    return config


def _counts(key: str) -> bool:
    """Return whether a setting is about the task or training.

    A warm-up is longer than the single test round.
    """
    return key.startswith(("task.", "client.")) and key not in ("task.name", "client.warmup-rounds")


def _data_and_model(config: RunConfig, data: Path | None) -> Iterator[Line]:
    """Yield the results about data and model.

    If the task's attributes are faulty, only further faults are reported. The user who runs the check owns the data:
    errors contain the first faulty row, and the range of labels that are no classes.
    """
    task = task_of(config.task)
    rows: list[str] = []
    found: list[Examples] = []

    def read() -> dict[str, Examples]:
        try:
            if data is not None:
                return {"read()": task.read(data)}
            with quiet("cloister.client"):  # the lines below report rows that are left out
                loaded = benchmark_of(task.config)
            return {"load(), train": loaded.train, "load(), test": loaded.test}
        except DataError as error:
            rows.append(error.first)
            raise

    attributes = list(faults_of_attributes(task))
    yield from (Line("fault", str(fault)) for fault in attributes)
    if any(fault.where != "recipe" for fault in attributes):
        return
    parts, problem = tried(read)
    if problem := "; ".join(filter(None, (problem, *rows))):
        labels = ""
        if data is not None:
            examples, _ = tried(lambda: task.rows(data))
            if examples is not None and task.classes and len(examples):
                low, high = examples.y.min(), examples.y.max()
                if low != NO_CLASS and not 0 <= low <= high < task.classes:
                    labels = f"; found labels from {low} to {high}"
        yield Line("fault", f"{'read()' if data else 'load()'}: {problem}{labels}")
    for where, examples in (parts or {}).items():
        about = list(_about_examples(task, examples, where))
        yield from (line for line in about if not attributes or line.kind == "fault")
        if all(line.kind != "fault" for line in about):
            found.append(examples)
    if isinstance(task, PictureTask):
        yield from (Line(kind, text) for kind, text in task.described())
    about_model = _about_model(config, task, found[0] if found else None)
    yield from (line for line in about_model if (found and not attributes) or line.kind == "fault")


def _about_examples(task: Task, examples: Examples, where: str) -> Iterator[Line]:
    """Yield the results about one part of the data: shape, classes or targets, groups, inputs and balance."""
    if examples.faults:
        yield Line("warn", f"{where}: rows are left out: {'; '.join(examples.faults)}")
    faults = list(faults_of_examples(task, examples, where))
    yield from (Line("fault", "; ".join(filter(None, (str(fault), fault.first)))) for fault in faults)
    if faults:
        return
    kind, counts = "; ".join(target.described() for target in task.targets.values()), np.zeros(0, np.intp)
    if task.classes:
        counts = np.bincount(examples.y, minlength=task.classes)
        low, high = counts.min(), counts.max()
        kind = f"{task.classes} classes, {low}{f' to {high}' if high > low else ''} examples in each"
    yield Line("ok", f"{where}: {len(examples)} examples of shape {task.input_shape}, {kind}")
    if task.config.group and examples.groups is not None:
        sizes = np.unique(examples.groups, return_counts=True)[1]
        yield Line("ok", f"{where}: {len(sizes)} groups of {sizes.min()} to {sizes.max()} examples each")
    inputs = [x for x in fields(sample(task, examples)).values() if x.dtype.kind == "f" and np.abs(x).max() > LARGE]
    if inputs:
        ids = " unless they are ids for an Embedding" if all((x == np.rint(x)).all() for x in inputs) else ""
        note = f"{where}: inputs beyond {LARGE:g}, on which networks train badly; scale them in the task{ids}"
        yield Line("note", note)
    if not task.classes:
        return
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
        # A failure is a note instead of a fault, as a run need not use DP-SGD.
        private = parse(config.flat() | {"privacy.client": "dp-sgd", "client.callbacks": False})
        _, problem = tried(lambda: model_and_trainer_of(private).trainer)
        if problem:
            yield Line("note", f"it cannot be trained with privacy.client='dp-sgd': {problem}")
        else:
            yield Line("ok", "it can be trained with privacy.client='dp-sgd'")
        if task.recipe.callbacks is not None:
            yield Line(
                "note", "recipe: a run with privacy.client refuses its Keras callbacks; use client.callbacks = false"
            )


def _round(config: RunConfig, data: Path | None) -> Iterator[Line]:
    """Run one round of two clients in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        settings = config.flat() | {"output-dir": folder}

        def outcome_of_round() -> Outcome:
            unheard = ConsoleReporter(1, Console(quiet=True))
            if data is None:
                return simulate(settings, CLIENTS, unheard)
            from cloister.client.app import app

            own = parse(settings | {"evaluation.central": False, "evaluation.federated": "on"})
            node: dict[str, Scalar] = {"data-path": str(data), "ledger-dir": folder}
            if own.privacy.client.clips_gradients:
                node["public-size"] = STATED
            return run(LocalGrid(app, own.flat(), [node] * CLIENTS), own, unheard)

        with quiet("cloister.client"):  # the result line reports a client's failure
            outcome, problem = tried(outcome_of_round)
    if outcome is None:
        yield Line("fault", f"one round of {CLIENTS} clients: {problem}")
        return
    if outcome.ended == "operator":
        raise KeyboardInterrupt  # a run ends in order, and the check at once
    last = outcome.rounds[-1]
    if last.unscored:
        yield Line("note", f"one round of {CLIENTS} clients: one was not scored: {last.unscored[0].detail}")
    found = last.central or last.federated
    scores = ", ".join(f"{name} {found[name]:.4g}" for name in sorted(found, key=lambda name: (name != "loss", name)))
    yield Line("ok", f"one round of {CLIENTS} clients: {scores or 'no scores'}")


KNOWN = {"task": TASKS, "strategy": STRATEGIES, "mechanism": MECHANISMS}


def refuse_taken(kind: str, name: str) -> None:
    """Refuse the name of an installed plugin or package.

    With the same name, one of the two would become unreachable.

    Args:
        kind: task, strategy or mechanism; for other kinds, only packages are checked.
        name: of the plugin and of its package.

    Raises:
        ConfigError: the name is taken.
    """
    if kind in KNOWN and name in KNOWN[kind].names():
        raise ConfigError(f"the {kind} {name!r} is there already; choose another name")
    module = name.replace("-", "_")
    if module.isidentifier() and find_spec(module) is not None:
        raise ConfigError(f"the name {name!r} is that of an installed package, {module}; choose another")
