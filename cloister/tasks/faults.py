"""Validation of a task before training: one line for each fault, with its remedy.

A task is user code. Without these checks, a wrong shape or label raises an error of a numerical library in every
client. By then the server has sent a message, and clients have spent budget.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Examples, Model, Task
from cloister.tasks.labels import described
from cloister.tasks.making import frozen_digest
from cloister.tasks.recipe import recipe_faults
from cloister.utils.crash import explained, show_trace
from cloister.utils.errors import CloisterError, ConfigError

SAMPLE = 64
"""Number of examples that the model is tried on."""
ROWS_AT_ONCE = 1024
"""Number of examples that are checked at once."""
SUM = 1e-3
"""Largest deviation from 1 of the sum of an example's probabilities. Rounding errors of float32 are far smaller."""


@dataclass(frozen=True)
class Fault:
    """One fault of a task.

    Attributes:
        where: the faulty attribute, method or file.
        found: a description of the fault; never a value of an example.
        remedy: how to fix it.
        first: the first faulty example and its value. Only the owner of the data may see it, so the text omits it.
    """

    where: str
    found: str
    remedy: str
    first: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self.remedy}"


def refuse_faulty(task: Task, model: Model, examples: Examples | None) -> None:
    """Raise one error with all faults of a task, its data and its model, a line each.

    Args:
        task: of a run that is about to start.
        model: that the task built.
        examples: some of its benchmark data; None if it is not on this machine.

    Raises:
        ConfigError: there is a fault.
    """
    refuse_faulty_data(task, examples)
    _refuse(task, faults_of_model(task, model, sample(task, examples)))


def refuse_faulty_data(task: Task, examples: Examples | None) -> None:
    """Raise one error with all faults of a task's attributes and data, a line each.

    Args:
        task: of a run that is about to start.
        examples: as in `refuse_faulty`.

    Raises:
        ConfigError: there is a fault.
    """
    of_data = faults_of_examples(task, examples, "load()") if examples is not None else ()
    _refuse(task, [*faults_of_attributes(task), *of_data])


def _refuse(task: Task, faults: Iterable[Fault]) -> None:
    if lines := [f"task {task.config.name!r}: {fault}" for fault in faults]:
        raise ConfigError("\n".join(lines))


def faults_of_attributes(task: Task) -> Iterator[Fault]:
    """Yield the faults of a task's class attributes."""
    if task.classes < 0 or task.classes == 1:
        yield Fault(
            "classes", str(task.classes), "give the number of classes, 2 or more; subclass Regression for numbers"
        )
    names = task.class_names
    if isinstance(names, str) or len(names) not in (0, task.classes) or len(set(names)) != len(names):
        yield Fault("class_names", f"{len(names)} names", f"give {task.classes} different names, or leave them out")
    shape = task.input_shape
    if not isinstance(shape, tuple) or not all(isinstance(size, int) and size > 0 for size in shape):
        yield Fault("input_shape", repr(shape), "give a tuple of whole numbers above 0, such as (13,) for 13 columns")
    elif task.image_shape and int(np.prod(task.image_shape)) != int(np.prod(shape)):
        yield Fault("image_shape", repr(task.image_shape), f"it must have as many pixels as input_shape {shape}")
    else:
        yield from (
            Fault("recipe", found, "change it in the task's recipe") for found in recipe_faults(task, task.recipe)
        )


def faults_of_examples(task: Task, examples: Examples, where: str) -> Iterator[Fault]:
    """Yield the faults that make examples unusable for training.

    Args:
        task: of the examples.
        examples: as the task returns them.
        where: source of the examples, for the message.
    """
    x, y = examples.x, examples.y
    if not len(examples):
        yield Fault(where, "no examples", "at least one is needed")
        return
    if x.shape[1:] != task.input_shape:
        remedy = f"reshape them, or set input_shape to {x.shape[1:]}"
        yield Fault(where, f"inputs of shape {x.shape[1:]}, where input_shape is {task.input_shape}", remedy)
    if x.dtype.kind not in "fiu":
        yield Fault(where, f"inputs of {x.dtype}", "make them numbers: float32")
    elif x.dtype.kind == "f" and (bad := _rows_not_finite(x)).any():
        found, first = f"NaN or infinity in {bad.sum()} of {len(x)} inputs", f"x[{bad.argmax()}] is the first"
        yield Fault(where, found, "leave these rows out, or fill them in", first)
    if y.ndim != 1:
        one_hot = y.ndim == 2 and ((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all()
        remedy = "use .argmax(axis=1) on these one-hot rows" if one_hot else "a task has one label or number a row"
        yield Fault(where, f"targets of shape {y.shape}", f"give shape (n,): {remedy}")
    elif not task.classes:
        if y.dtype.kind not in "fiu" or _rows_not_finite(y).any():
            yield Fault(where, f"targets of {y.dtype} that are not finite numbers", "make them finite float32")
    elif y.dtype.kind not in "iu":
        remedy = "make them integers, the places in class_names; cloister.tasks.labels.classes_of does"
        yield Fault(where, f"labels of {y.dtype}", remedy)
    elif (unknown := (y < 0) | (y >= task.classes)).any():
        found, at = f"labels from {y.min()} to {y.max()}, where classes is {task.classes}", int(unknown.argmax())
        remedy = f"they must lie {described(task.classes, ())}; labels from 1 need - 1"
        yield Fault(where, found, remedy, f"y[{at}] = {y[at]} is the first")


def faults_of_model(task: Task, model: Model, x: NDArray) -> Iterator[Fault]:
    """Yield the faults that prevent federating or scoring a model.

    Args:
        task: that built it.
        model: with any weights.
        x: inputs to try it on, shape (n, *input_shape).
    """
    arrays = model.arrays()
    if not arrays and not getattr(getattr(model, "keras", None), "built", True):
        remedy = f"call model.build({(None, *task.input_shape)}) in build(), or begin with keras.Input"
        yield Fault("build()", "a model that is not built", remedy)
    elif not arrays:
        yield Fault("build()", "a model without weights", "give it a layer that can be trained")
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            yield Fault(
                "build()", f"weight {name} of {array.dtype}", "use a layer with float weights; only these are sent"
            )
    outputs, problem = tried(lambda: model.predict(x))
    expected = (len(x), task.classes) if task.classes else (len(x),)
    fault: Fault | None = None
    if problem:
        remedy = f"it must take inputs of shape {task.input_shape}"
        fault = Fault("build()", f"the model cannot predict: {problem}", remedy)
    elif outputs.shape != expected:
        remedy = f"end it with {task.classes} units" if task.classes else "end it with one unit"
        fault = Fault("build()", f"outputs of shape {outputs.shape}, expected {expected}", remedy)
    elif not np.isfinite(outputs).all():
        remedy = "check the initial weights, and the scale of inputs"
        fault = Fault("build()", "outputs that are NaN or infinite", remedy)
    elif task.classes and (outputs.min() < 0 or np.abs(outputs.sum(axis=1) - 1).max() > SUM):
        remedy = "end the model with activation='softmax', as it is trained on probabilities"
        fault = Fault("build()", "outputs that are no probabilities, such as logits", remedy)
    if fault:
        yield fault
        # Plausible outputs stand in for the model's own, so that one run reports all faults.
        full = np.full((len(x), task.classes), 1 / task.classes) if task.classes else np.zeros(len(x))
        outputs = full.astype(np.float32)
    yield from _faults_of_scores(task, outputs)


def faults_of_naming(task: Task, model: Model) -> Iterator[Fault]:
    """Yield a fault if a second `build` gives other arrays or frozen weights.

    Server and clients build their own models, which must agree.

    Args:
        task: that built it.
        model: one that it built.
    """
    again, problem = tried(task.build)
    if problem:
        yield Fault("build()", f"an error when it is called again: {problem}", "let it leave nothing behind")
        return
    one, other = ({name: array.shape for name, array in each.arrays().items()} for each in (model, again))
    if one != other:
        remedy = "give every layer a name and a fixed shape, so that server and clients agree"
        yield Fault("build()", "arrays of other names or shapes when it is called again", remedy)
    if frozen_digest(model) != frozen_digest(again):
        remedy = "load them from a file of the task: they are not sent, and every site must have the same"
        yield Fault("build()", "frozen weights that differ when it is called again", remedy)


def _faults_of_scores(task: Task, outputs: NDArray) -> Iterator[Fault]:
    """Yield the faults of `metrics` and `losses`."""
    labels = np.arange(len(outputs)) % task.classes if task.classes else np.zeros(len(outputs), np.float32)
    found, problem = tried(lambda: task.metrics(labels, outputs))
    if problem:
        yield Fault("metrics()", problem, "it takes y of shape (n,) and scores as the model predicts them")
    else:
        numbers = (int, float, np.number)
        if not isinstance(found, Mapping) or not all(isinstance(n, numbers) and np.isfinite(n) for n in found.values()):
            yield Fault("metrics()", "values that are no finite numbers", "return a dict of names and floats")
        if isinstance(found, Mapping) and "loss" not in found:
            yield Fault("metrics()", "no 'loss'", "add it, as super().metrics(y, scores) does: early stopping reads it")
    losses, problem = tried(lambda: task.losses(labels, outputs))
    if problem or np.shape(losses) != (len(outputs),):
        yield Fault("losses()", problem or f"shape {np.shape(losses)}", f"return shape (n,), here ({len(outputs)},)")


def tried(work: Callable[[], Any]) -> tuple[Any, str]:
    """Call user code, and return its result and a description of its failure.

    The description contains the type and the place of an exception. Its message may contain data, and other parties see
    a run's errors. So only the owner of all data gets the message (`for_owner`).
    """
    try:
        return work(), ""
    except Exception as error:
        show_trace(error)
        return None, str(error) if isinstance(error, CloisterError) else explained(error)


def _rows_not_finite(x: NDArray) -> NDArray[np.bool_]:
    """Return a mask of the rows that are not finite as float32.

    Rows are read in blocks, as x may be memory-mapped.
    """
    width, starts = int(np.prod(x.shape[1:])), range(0, len(x), ROWS_AT_ONCE)
    with np.errstate(over="ignore"):
        parts = (x[start : start + ROWS_AT_ONCE].astype(np.float32).reshape(-1, width) for start in starts)
        return np.concatenate([~np.isfinite(part).all(axis=1) for part in parts])


def sample(task: Task, examples: Examples | None) -> NDArray[np.float32]:
    """Return inputs to try a model on.

    These are some of the examples, or random ones if there are none.

    Args:
        task: of the inputs.
        examples: of the task.
    """
    if examples is not None:
        return np.asarray(examples.x[:SAMPLE], np.float32)
    return np.random.default_rng(0).random((2, *task.input_shape), np.float32)
