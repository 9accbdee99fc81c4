"""Validation of a task before training: one line for each fault, with its remedy.

A task is user code. Without these checks, a wrong shape or label raises an error of a numerical library in every
client. By then the server has sent a message, and clients have spent budget.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Examples, Model, Task, valid_weights
from cloister.tasks.keras_model import KerasModel
from cloister.tasks.labels import described
from cloister.tasks.making import frozen_digest, model_of
from cloister.tasks.recipe import recipe_faults
from cloister.tasks.targets import Target
from cloister.utils.crash import explained, show_trace
from cloister.utils.errors import CloisterError, ConfigError
from cloister.utils.rows import cast, each_field, fields, finite_rows, from_fields, shapes_of

NAME = re.compile(r"([A-Za-z0-9]\w{0,19})?", re.ASCII)
"""Valid names of targets; that of a single one is empty."""
SAMPLE = 64
"""Number of examples that the model is tried on."""


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


def refuse_unlike_builds(task: Task, model: Model) -> None:
    """Raise one error if a model has frozen weights, and a second `build` gives others.

    Args:
        task: of a run that is about to start.
        model: that the task built.

    Raises:
        ConfigError: every node would refuse the run.
    """
    if model.frozen():
        _refuse(task, faults_of_naming(task, model))


def _refuse(task: Task, faults: Iterable[Fault]) -> None:
    if lines := [f"task {task.config.name!r}: {fault}" for fault in faults]:
        raise ConfigError("\n".join(lines))


def faults_of_attributes(task: Task) -> Iterator[Fault]:
    """Yield the faults of a task's class attributes."""
    if task.target is None and task.classes < 2:
        remedy = "give the number of classes, 2 or more; state a target for other targets, such as Target('mse')"
        yield Fault("classes", str(task.classes), remedy)
    elif task.target is not None and task.classes:
        yield Fault("classes", f"{task.classes} beside a target", "leave them out; Target(classes=...) states them")
    elif task.target is not None:
        for name, each in task.targets.items():
            if not NAME.fullmatch(name):
                remedy = "use 1 to 20 letters, digits and _, as metrics are called after it"
                yield Fault("target", f"the name {name!r}", remedy)
            elif each.fault:
                yield Fault("target", f"{name}: {each.fault}".removeprefix(": "), "correct it in the task")
            elif not name and each.classes and not each.shape:
                remedy = f"state classes = {each.classes} in its place; a loss of your own is an argument of the model"
                yield Fault("target", "one label for each example", remedy)
    names = task.class_names
    if isinstance(names, str) or len(names) not in (0, task.classes) or len(set(names)) != len(names):
        yield Fault("class_names", f"{len(names)} names", f"give {task.classes} different names, or leave them out")
    shape = task.input_shape
    if not _are_shapes(shape):
        yield Fault("input_shape", repr(shape), "give a tuple of whole numbers above 0, such as (13,) for 13 columns")
    elif task.image_shape and {math.prod(own) for own in task.input_shapes.values()} != {math.prod(task.image_shape)}:
        yield Fault("image_shape", repr(task.image_shape), f"it must have as many pixels as input_shape {shape}")
    else:
        yield from (
            Fault("recipe", found, "change it in the task's recipe") for found in recipe_faults(task, task.recipe)
        )


def _are_shapes(shapes: object) -> bool:
    """Return whether an `input_shape` is one shape, or a dict or tuple of them."""
    if isinstance(shapes, Mapping):
        return bool(shapes) and all(isinstance(name, str) and _is_shape(own) for name, own in shapes.items())
    return _is_shape(shapes) or (isinstance(shapes, tuple) and all(map(_is_shape, shapes)))


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)


def faults_of_examples(task: Task, examples: Examples, where: str) -> Iterator[Fault]:
    """Yield the faults that make examples unusable for training.

    Args:
        task: of the examples.
        examples: as the task returns them.
        where: source of the examples, for the message.
    """
    if not len(examples):
        yield Fault(where, "no examples", "at least one is needed")
        return
    found = shapes_of(examples.x)
    if _are_shapes(task.input_shape) and found != task.input_shapes:
        own = found.get("", found)
        remedy = f"reshape them, or set input_shape to {own}"
        yield Fault(where, f"inputs of shape {own}, where input_shape is {task.input_shape}", remedy)
    for name, x in fields(examples.x).items():
        what = f"inputs {name}".strip()
        if x.dtype.kind not in "fiu":
            yield Fault(where, f"{what} of {x.dtype}", "make them numbers: float32")
        elif x.dtype.kind == "f" and (bad := ~finite_rows(x)).any():
            count, first = f"NaN or infinity in {bad.sum()} of {len(x)} {what}", f"x[{bad.argmax()}] is the first"
            yield Fault(where, count, "leave these rows out, or fill them in", first)
    if task.weighted != (examples.weights is not None):
        held = "no weights of examples" if task.weighted else "weights of examples"
        yield Fault(where, held, "give Examples weights and state weighted = True, or neither")
    elif examples.weights is not None and not valid_weights(examples.weights).all():
        yield Fault(where, "weights that are negative or not finite", "give each example a number of at least 0")
    yield from _faults_of_targets(task, examples.y, where)


def _faults_of_targets(task: Task, y: NDArray, where: str) -> Iterator[Fault]:
    """Yield the faults of targets, by the number of their axes first: other numbers cannot be judged."""
    arrays = fields(y)
    if set(arrays) != set(task.targets):
        remedy = f"the task states the targets {', '.join(map(repr, task.targets))}"
        yield Fault(where, f"targets {', '.join(map(repr, arrays))}", f"give a dict of arrays by name: {remedy}")
        return
    for name, target in task.targets.items():
        own, what = arrays[name], f"targets {name}".strip()
        if own.shape[1:] != target.shape:
            yield Fault(where, f"{what} of shape {own.shape}", _remedy_for_shape(task, own, target))
        elif not target.classes:
            usable = target.usable(own) if own.dtype.kind in "fiub" else np.zeros(len(own), np.bool_)
            if not usable.all():
                remedy = "make them 0 or 1" if target.loss == "binary-cross-entropy" else "make them finite float32"
                bad, first = f"{what} of {own.dtype} that are not {target.described()}", usable.argmin()
                yield Fault(where, bad, remedy, f"y[{first}] is the first")
        elif own.dtype.kind not in "iu":
            remedy = "make them integers, the places in class_names; cloister.tasks.labels.classes_of does"
            yield Fault(where, f"labels of {own.dtype}", remedy)
        elif (unknown := ~target.usable(own)).any():
            at = int(unknown.argmax())
            found = f"labels from {own.min()} to {own.max()}, where classes is {target.classes}"
            remedy = f"they must lie {described(target.classes, ())}; labels from 1 need - 1"
            yield Fault(where, found, remedy, f"y[{at}] = {own[at]} is the first" if own.ndim == 1 else "")


def _remedy_for_shape(task: Task, y: NDArray, target: Target) -> str:
    """Return how a task states targets of the shape that was found; only rows with exactly one 1 are one-hot labels."""
    shape = y.shape[1:]
    if task.target is not None:
        return f"reshape them to {('n', *target.shape)}, or state shape={shape} in the target".replace("'n'", "n")
    is_hot = y.ndim == 2 and y.shape[1] == task.classes and ((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all()
    if shape == (1,):
        return "give shape (n,): use y[:, 0]"
    if is_hot:
        return "give shape (n,): use .argmax(axis=1) on one-hot rows"
    if y.dtype.kind == "f" and not np.isin(y, (0, 1)).all():
        return f"leave out classes, and state target = Target('mse', shape={shape})"
    if ((y == 0) | (y == 1)).all():
        return f"leave out classes, and state target = Target('binary-cross-entropy', shape={shape})"
    return f"leave out classes, and state target = Target('cross-entropy', shape={shape}, classes={task.classes})"


def faults_of_model(task: Task, model: Model, x: NDArray) -> Iterator[Fault]:
    """Yield the faults that prevent federating or scoring a model.

    Args:
        task: that built it.
        model: with any weights.
        x: inputs to try it on, shape (n, *input_shape).
    """
    arrays = model.arrays()
    if not arrays:
        yield Fault("build()", "a model without weights", "give it a layer that can be trained")
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            yield Fault(
                "build()", f"weight {name} of {array.dtype}", "use a layer with float weights; only these are sent"
            )
    if isinstance(model, KerasModel):
        _, problem = tried(model.configuration)
        if problem:
            remedy = "write get_config() in every layer and model of your own that takes arguments"
            yield Fault("build()", f"the model cannot be saved: {problem}", remedy)
    outputs, problem = tried(lambda: model.predict(x))
    if problem:
        remedy = f"it must take inputs of shape {task.input_shape}"
        yield Fault("build()", f"the model cannot predict: {problem}", remedy)
        outputs = None
    found = {} if outputs is None else fields(outputs)
    plausible: dict[str, NDArray] = {}
    for name, target in task.targets.items():
        own, what = found.get(name), f"outputs {name}".strip()
        expected = (len(x), *target.output_shape)
        fault: Fault | None = None
        if own is not None and own.shape != expected:
            fault = Fault("build()", f"{what} of shape {own.shape}, expected {expected}", target.remedy_for_outputs)
        elif own is not None and not np.isfinite(own).all():
            remedy = "check the initial weights, and the scale of inputs"
            fault = Fault("build()", f"{what} that are NaN or infinite", remedy)
        elif own is not None and any(complaint := target.fault_of_outputs(own)):
            fault = Fault("build()", *complaint)
        if fault:
            yield fault
        # Plausible outputs stand in for the model's own, so that one run reports all faults.
        made_up = np.full(expected, 1 / target.classes if target.classes else 0, np.float32)
        plausible[name] = made_up if own is None or fault else own
    yield from _faults_of_scores(task, from_fields(plausible))


def faults_of_naming(task: Task, model: Model) -> Iterator[Fault]:
    """Yield a fault if a second `build` gives other arrays or frozen weights.

    Server and clients build their own models, which must agree.

    Args:
        task: that built it.
        model: one that it built.
    """
    again, problem = tried(lambda: model_of(task))
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
    count = len(outputs)
    labels = task.placeholders(count).y
    found, problem = tried(lambda: task.metrics(labels, outputs))
    if problem:
        yield Fault("metrics()", problem, "it takes y as the task states it, and scores as the model predicts them")
    else:
        numbers = (int, float, np.number)
        # An undefined metric is NaN, such as the AUC of one class; early stopping needs the loss.
        if not isinstance(found, Mapping) or not all(isinstance(number, numbers) for number in found.values()):
            yield Fault("metrics()", "values that are no numbers", "return a dict of names and floats")
        elif not np.isfinite(found.get("loss", 0.0)):
            yield Fault("metrics()", "a 'loss' that is not finite", "return the mean of losses(y, scores)")
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


def sample(task: Task, examples: Examples | None, made_up: int = 2) -> NDArray:
    """Return inputs to try a model on.

    These are some of the examples, or random ones if there are none.

    Args:
        task: of the inputs.
        examples: of the task.
        made_up: number of the random ones.
    """
    if examples is not None:
        return each_field(lambda _, x: cast(x, task.input_dtype), examples.x[:SAMPLE])
    rng = np.random.default_rng(0)
    return each_field(lambda _, x: cast(rng.random(x.shape, np.float32), x.dtype), task.placeholders(made_up).x)
