"""Quick check of a task: its data, its model, and one round of two clients; and of the name of a new package."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from cloister.client.data import benchmark_of, in_groups, task_of
from cloister.client.dp_sgd import PrivateTrainer
from cloister.client.trainers import model_and_trainer_of
from cloister.config.io import Scalar
from cloister.config.run import RunConfig, parse
from cloister.privacy.mechanisms import MECHANISMS
from cloister.server.build import STRATEGIES
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import Outcome, run
from cloister.simulation.grid import LocalGrid, explaining_failures, quiet
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
from cloister.tasks.making import Parameters, explained_model_of, read_by, rows_by
from cloister.tasks.pictures.task import PictureTask
from cloister.tasks.recipe import Augmentation, recipe_of
from cloister.training.plan import TrainingPlan
from cloister.utils.crash import for_owner
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.rows import fields
from cloister.utils.terminal import format_duration
from cloister.utils.text import spanned

CLIENTS = 2
ONE_ROUND: Mapping[str, Scalar] = {"num-rounds": 1, "privacy.server": "none", "tensorboard": False}
NOTHING: Mapping[str, Scalar] = {}
STATED = 100
"""Stated size of a site in a check, as the site's own statement is unknown here."""
RARE = 0.02
"""Share of the examples below which a class is reported."""
LARGE = 10.0
"""Absolute value of an input above which it seems to be unscaled."""
TIMED_STEPS, QUICK_STEP = 8, 0.1
"""Number of steps that are timed, and most seconds of one of them; of a slower one, a single step is timed."""
Tell = Callable[[str], object]
"""Receives what the check does next."""


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


def check_task(
    name: str, data: Path | None = None, given: Mapping[str, Scalar] = NOTHING, tell: Tell = lambda _: None
) -> Iterator[Line]:
    """Check a task, without leaving files behind.

    The user who runs the check owns the data, so results contain the texts of exceptions.

    Args:
        name: of the task.
        data: a site's own file or folder, and the task's `task.data-path`; None: the task's benchmark data.
        given: settings of a run; only those of the task and of training are used.
        tell: receives what the check does next.

    Yields:
        Results, as they are found. After a fault, checks that depend on it are skipped.
    """
    with explaining_failures():
        config, problem = tried(lambda: _configuration(name, data, given))
        if config is None:
            yield Line("fault", problem)
            return
        if unused := ", ".join(key for key in given if not _counts(key) and key != "task.name"):
            said = f"one round without noise on the server is tried, independent of these settings: {unused}"
            yield Line("note", said)
        faults, found = list[Line](), list[Examples]()
        for line in _data_and_model(config, data, found, tell):
            yield line
            faults += [line] if line.kind == "fault" else []
        if not faults:
            tell(f"one round of {CLIENTS} clients")
            yield from _round(config, data, found[0])


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
    task_of(config.for_clients.task)
    return config


def _counts(key: str) -> bool:
    """Return whether a setting is about the task or training.

    A warm-up is longer than the single test round.
    """
    return key.startswith(("task.", "client.")) and key not in ("task.name", "client.warmup-rounds")


def _data_and_model(config: RunConfig, data: Path | None, found: list[Examples], tell: Tell) -> Iterator[Line]:
    """Yield the results about data and model, and append the examples without faults to `found`.

    If the task's attributes are faulty, only further faults are reported. The user who runs the check owns the data:
    errors contain the first faulty row, and the range of labels that are no classes.
    """
    config = config.for_clients
    task = task_of(config.task)
    rows: list[str] = []

    def read() -> dict[str, Examples]:
        try:
            with quiet("cloister.client"):  # the lines below report rows that are left out
                # With `task.group` these are the examples that have a group; the faults count the others.
                if data is None:
                    loaded = benchmark_of(task.config)
                    parts = {"load(), train": loaded.train, "load(), test": loaded.test}
                else:
                    parts = {"read()": read_by(task, data)}
                group = task.config.group
                return {
                    where: part if not group or part.groups is None else in_groups(part, part.groups, group)[0]
                    for where, part in parts.items()
                }
        except DataError as error:
            rows.append(error.first)
            raise

    attributes = list(faults_of_attributes(task))
    yield from (Line("fault", str(fault)) for fault in attributes)
    if any(fault.where != "recipe" for fault in attributes):
        return
    tell("the data")
    parts, problem = tried(read)
    if problem := "; ".join(filter(None, (problem, *rows))):
        labels = ""
        if data is not None:
            with quiet("cloister.tasks"):  # `read_by` has said it
                examples, _ = tried(lambda: rows_by(task, data))
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
    if isinstance(task.raw, PictureTask):
        yield from (Line(kind, text) for kind, text in task.raw.described())
    about_model = _about_model(config, task, found[0] if found else None, tell)
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
        kind = f"{task.classes} classes, {spanned(counts.min(), counts.max())} examples in each"
    yield Line("ok", f"{where}: {len(examples)} examples of shape {task.input_shape}, {kind}")
    if task.config.group and examples.groups is not None:
        sizes = np.unique(examples.groups, return_counts=True)[1]
        each = spanned(sizes.min(), sizes.max())
        yield Line("ok", f"{where}: {len(sizes)} {task.config.group}s of {each} examples each")
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


def _about_model(config: RunConfig, task: Task, examples: Examples | None, tell: Tell) -> Iterator[Line]:
    tell("the model")
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
        tell("privacy.client='dp-sgd'")
        private = parse(config.flat() | {"privacy.client": "dp-sgd", "client.callbacks": False})
        with for_owner() as failures:
            cost, problem = tried(lambda: _cost(private, task, examples))
        # A unit whose gradient fails contributes zero.
        if problem := next((failure.text for failure in failures), problem):
            yield Line("note", f"it cannot be trained with privacy.client='dp-sgd': {problem}")
        else:
            yield Line("ok", f"it can be trained with privacy.client='dp-sgd'{cost}")
        if task.recipe.callbacks is not None:
            yield Line(
                "note", "recipe: a run with privacy.client refuses its Keras callbacks; use client.callbacks = false"
            )


def _cost(config: RunConfig, task: Task, examples: Examples | None) -> str:
    """Train for some steps; return how DP-SGD trains the model, and the time of a start, a step and a round.

    A round here is one over all of these examples. In a simulation clients train one after another.
    """
    begun = time.perf_counter()
    trainer, recipe = model_and_trainer_of(config).trainer, recipe_of(task, config.client, config.privacy)
    way = ""
    if isinstance(trainer, PrivateTrainer) and trainer.method:
        way = f", in turn (the slow way): {trainer.why_in_turn}" if trainer.why_in_turn else ", in rows (the fast way)"
    if examples is None:
        return way
    grouped = config.privacy.client.clips_gradients and bool(config.task.group)
    own = examples if grouped else replace(examples, groups=None)
    plan = TrainingPlan.of(replace(recipe, local_epochs=1), (0, 0, 0), augmentation=Augmentation.of(task, recipe))

    def units(some: Examples) -> int:
        return len(some) if some.groups is None else len(np.unique(some.groups))

    count, size, noun = units(own), recipe.batch_size, config.task.group if grouped else "example"

    def seconds(steps: int) -> float:
        some, started = own.take(np.arange(min(len(own), -(-steps * size * len(own) // count)))), time.perf_counter()
        trainer.fit(some, plan)
        return (time.perf_counter() - started) / -(-units(some) // size)

    seconds(1)  # compiles what is left
    ready = time.perf_counter() - begun
    step = seconds(1)
    step = seconds(TIMED_STEPS) if step < QUICK_STEP else step
    start = f" {_duration(ready)} to start," if ready > QUICK_STEP else ""
    whole = _duration(recipe.local_epochs * -(-count // size) * step)
    return f"{way};{start} {_duration(step)} a step of {size} {noun}s, about {whole} a round over {count} {noun}s"


def _duration(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{format_duration(seconds)} minutes"


def _round(config: RunConfig, data: Path | None, examples: Examples) -> Iterator[Line]:
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

        with quiet("cloister.client"), for_owner() as failures:  # the result lines report a client's failure
            outcome, problem = tried(explaining_failures()(outcome_of_round))
    if outcome is None:
        yield Line("fault", f"one round of {CLIENTS} clients: {problem}")
        return
    if outcome.ended == "operator":
        raise KeyboardInterrupt  # a run ends in order, and the check at once
    # A round counts without a failing client, and under a mechanism such a client replies as one without examples.
    if failed := [failure.text for failure in failures if not failure.is_foreseen]:
        yield Line("fault", f"one round of {CLIENTS} clients: one failed with {failed[0]}")
        return
    last = outcome.rounds[-1]
    if last.unscored:
        yield Line("note", f"one round of {CLIENTS} clients: one was not scored: {last.unscored[0].detail}")
    found = last.central or last.federated
    scores = ", ".join(f"{name} {found[name]:.4g}" for name in sorted(found, key=lambda name: (name != "loss", name)))
    cost, _ = tried(lambda: _cost(config.for_clients, task_of(config.for_clients.task), examples))
    yield Line("ok", f"one round of {CLIENTS} clients: {scores or 'no scores'}{cost or ''}")


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
