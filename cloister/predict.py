"""Predictions with a trained model, of a run directory or of a client's `model-dir`."""

import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.config.renamed import translated
from cloister.config.run import parse
from cloister.tasks.base import Examples, Task, are_targets, expected_targets, stored_as
from cloister.tasks.csv_files import number_of, read_rows
from cloister.tasks.labels import classes_of
from cloister.tasks.making import model_of, named_task, read_by
from cloister.tasks.pictures.decode import SUFFIXES, content_of, decode, is_image
from cloister.tasks.pictures.form import Form, Unreadable
from cloister.tasks.pictures.task import PictureTask
from cloister.tasks.targets import Target, Targets
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.files import atomic_path, read_text
from cloister.utils.rows import fields, from_fields

SPREADSHEETS = (".xlsx", ".xls", ".ods")
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""First characters of a cell that a spreadsheet evaluates as a formula. A leading apostrophe makes it text (OWASP)."""
LABELS = ("y", "label")
"""Names of the last column of a CSV file if it contains labels."""


@dataclass(frozen=True)
class Scored:
    """Examples to be scored.

    Attributes:
        names: of the examples in the predictions.
        x: in the task's units.
        y: their labels, or None.
    """

    names: tuple[str, ...]
    x: NDArray
    y: NDArray | None = None


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for examples.

    Attributes:
        names: of the examples.
        outputs: class probabilities of shape (n, classes), or other predictions of n rows.
        metrics: named metrics, if there were labels.
        hypothesis: index of the model.
        hypotheses: number of models.
        class_names: of a task of one label; empty if it has none.
        targets: of the task. Those with classes have probabilities on the last axis of their outputs.
    """

    names: tuple[str, ...]
    outputs: NDArray
    metrics: dict[str, float]
    hypothesis: int = 0
    hypotheses: int = 1
    class_names: tuple[str, ...] = ()
    targets: Targets = field(default_factory=lambda: {"": Target("mse")})

    def lines(self) -> Iterator[str]:
        """Yield CSV lines with a header.

        The first column is the example. A label has its class number, the probability of that class, its name if there
        is one, and the probability of each class. Several labels, as of a sequence, have the class number of each.
        Other predictions have a column for each of their numbers. Several columns of a kind are numbered from 1. Of
        several outputs each column has the name of its output.
        """
        columns, parts = ["example"], [[[_quoted(name)] for name in self.names]]
        for name, outputs in fields(self.outputs).items():
            found = self._label if self.targets[name].classes and outputs.ndim == 2 else self._numbers
            headers, cells = found(name, outputs)
            columns += headers
            parts.append(cells)
        yield ",".join(map(_quoted, columns))
        for rows in zip(*parts, strict=True):
            yield ",".join(chain.from_iterable(rows))

    def _label(self, output: str, scores: NDArray) -> tuple[list[str], list[list[str]]]:
        """Return the columns of a label and their cells, from probabilities of shape (n, classes)."""
        classes = self.class_names or range(scores.shape[1])
        columns = ["prediction", "probability", *(["class"] if self.class_names else [])]
        columns = [_titled(kind, output) for kind in columns]
        columns += [_titled("probability", output, f"of {name}") for name in classes]
        rows = []
        for row in scores:
            number = int(row.argmax())
            chosen = [_quoted(self.class_names[number])] if self.class_names else []
            rows.append([str(number), f"{row[number]:.6g}", *chosen, *(f"{share:.6g}" for share in row)])
        return columns, rows

    def _numbers(self, output: str, outputs: NDArray) -> tuple[list[str], list[list[str]]]:
        """Return the columns of class numbers or other numbers, and their cells."""
        numbers = outputs.argmax(axis=-1) if self.targets[output].classes else outputs
        flat = numbers.reshape(len(numbers), -1)
        places = [""] if numbers.ndim == 1 else map(str, range(1, flat.shape[1] + 1))
        return [_titled("prediction", output, place) for place in places], [
            [f"{number:.9g}" for number in row] for row in flat
        ]

    def write(self, path: Path) -> None:
        """Write the CSV atomically.

        Raises:
            ConfigError: the path is not writable.
        """
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"--out: {path} is no file that could be replaced; without --out they are printed")
        try:
            with atomic_path(path) as partial:
                partial.write_text("\n".join(self.lines()) + "\n")
        except OSError as error:
            raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from None


def predict(model_dir: Path, data: Path, hypothesis: int | None = None) -> Predictions:
    """Score examples with a trained model.

    Args:
        model_dir: a run directory or a client's `model-dir`. It holds a configuration, and one model or several
            hypotheses.
        data: see `read`.
        hypothesis: its index. None selects the only one, or that of least loss on the labels.

    Raises:
        DataError: there is no model, or the examples are not in the task's format.
        ConfigError: there are several hypotheses without labels to select by, or the number is out of range.
    """
    task = _task(model_dir)
    files = _models(model_dir)
    if hypothesis is not None and hypothesis >= len(files):
        raise ConfigError(f"--hypothesis {hypothesis}: {model_dir} holds {len(files)}, counted from 0")
    scored, model = read(task, data), model_of(task)
    if hypothesis is None and len(files) > 1 and scored.y is None:
        raise ConfigError(
            f"{model_dir} holds {len(files)} hypotheses, and {data} no labels to choose by; name one with "
            f"--hypothesis (0 to {len(files) - 1}), or score with the model that a client keeps for itself"
        )
    found = []
    for number in range(len(files)) if hypothesis is None else [hypothesis]:
        if files[number].suffix != model.suffix:
            raise DataError(f"{files[number]} is not of the kind of the task's model, {model.suffix}")
        model.load(files[number])
        outputs = model.predict(scored.x)
        metrics = {} if scored.y is None else task.metrics(scored.y, outputs)
        names = tuple(task.class_names) if task.classes else ()
        found.append(Predictions(scored.names, outputs, metrics, number, len(files), names, task.targets))
    return min(found, key=_loss)


def read(task: Task, data: Path) -> Scored:
    """Read examples from a CSV file, an `.npz` file, or a folder of images.

    A CSV file has a header, and one column for each number of an example, in the task's order and units. A last column
    `y` or `label` contains labels. If the task defines a table format of its own, the file must have that format; its
    column of labels is optional. An `.npz` file has `x`, and optionally `y`. A folder contains images. If they lie in
    subfolders that are named by class numbers or names, these names are their labels.

    Raises:
        DataError: the data has another format, or does not fit the task.
    """
    is_archive = data.suffix.lower() == ".npz"
    has_format = type(task).read is not Task.read or type(task).rows is not Task.rows
    if not data.is_dir() and not data.is_file():
        raise DataError(f"no file or folder at {data}")
    if set(task.input_shapes) != {""} and (data.is_dir() or not (is_archive or has_format)):
        raise DataError(f"{data}: a task of several inputs reads .npz files, with an array x_NAME for each")
    if data.is_dir():
        return _images(task, data)
    if is_image(data):
        raise DataError(f"{data} is one image; give the folder that it lies in")
    if is_archive:
        return _archive(task, data)
    if has_format:
        if (inputs := task.unlabelled(data)) is not None:
            return _checked(task, inputs, None, data)
        examples = read_by(task, data)
        if examples.faults:
            # Predictions are numbered like rows.
            raise DataError(
                f"{data} has rows that cannot be scored: {'; '.join(examples.faults)}; remove or correct them"
            )
        return _numbered(examples, data)
    return _table(task, data)


def _task(folder: Path) -> Task:
    try:
        content = json.loads(read_text(folder / "config.json"))
        settings = dict(content["config"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            f"{folder} is no run directory and no model-dir of a client: it has no config.json of one"
        ) from None
    try:
        config = parse(translated(settings)).task
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None
    return named_task(config)


def _models(folder: Path) -> list[Path]:
    """Return the file of the model, or those of all hypotheses in their order."""
    found = {
        int(match.group(1)): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"hypothesis-(\d+)\.(npz|keras)", path.name))
    }
    alone = [path for path in (folder / "model.npz", folder / "model.keras") if path.is_file()]
    files = [found[number] for number in sorted(found)] or alone
    if not files or sorted(found) != list(range(len(found))) or (found and alone) or len(alone) > 1:
        raise DataError(f"{folder} must hold one model.npz or model.keras, or hypothesis-0 to hypothesis-(k - 1)")
    return files


def _loss(found: Predictions) -> float:
    loss = found.metrics.get("loss", 0.0)
    return loss if loss == loss else np.inf


def _numbered(examples: Examples, data: Path, labelled: bool = True) -> Scored:
    if not len(examples):
        raise DataError(f"{data} holds no examples to score")
    return Scored(tuple(map(str, range(len(examples)))), examples.x, examples.y if labelled else None)


def _checked(task: Task, x: NDArray, y: NDArray | None, data: Path) -> Scored:
    """Return the examples in the task's dtypes, after checking them.

    If there are no labels, zeros stand in for them during the check.
    """
    if y is not None and len(x) != len(y):
        raise DataError(f"{data} must hold as many labels as inputs, found {len(y)} and {len(x)}")
    targets = task.placeholders(len(x)).y if y is None else y
    try:
        return _numbered(task.checked(Examples(x, targets), data), data, y is not None)
    except DataError as error:
        raise DataError(str(error).removeprefix("data-path: ")) from None


def _archive(task: Task, data: Path) -> Scored:
    arrays = ", ".join(stored_as("x", name) for name in task.input_shapes)
    targets = ", ".join(stored_as("y", name) for name in task.targets)
    refused = DataError(
        f"{data} must be an .npz file with an array {arrays} (numbers), and may hold {targets} "
        f"({expected_targets(task)})"
    )
    try:
        with np.load(data, allow_pickle=False) as archive:
            x = {name: archive[stored_as("x", name)] for name in task.input_shapes}
            y = {name: archive[key] for name in task.targets if (key := stored_as("y", name)) in archive}
    except (KeyError, ValueError, TypeError, EOFError, OSError, zipfile.BadZipFile):
        raise refused from None
    are_wrong = bool(y) and (len(y) < len(task.targets) or not are_targets(y, task))
    if are_wrong or any(array.dtype.kind not in "fiu" for array in x.values()):
        raise refused
    labels = from_fields(y) if y else None
    if labels is not None and task.classes:
        labels = classes_of(labels, task.classes, task.class_names)
    return _checked(task, from_fields(x), labels, data)


def _table(task: Task, data: Path) -> Scored:
    if data.suffix.lower() in SPREADSHEETS:
        raise DataError(f"{data} is a spreadsheet; save it as a CSV file")
    try:
        found = read_rows(data)
    except DataError as error:
        raise DataError(str(error).removeprefix("data-path: "), error.first) from None
    names, rows = found.names, found.rows
    if not rows:
        raise DataError(f"{data} has no rows below its header")
    if not all(rows):
        raise DataError(f"{data}: row {rows.index([]) + 1} below the header has another number of cells than it")
    takes_labels = [target.shape for target in task.targets.values()] == [()]
    has_labels = takes_labels and names[-1].lower() in LABELS
    y: NDArray | None = None
    if has_labels and task.classes:
        # Labels are names or whole numbers. A number with a fraction is invalid.
        y = classes_of([row.pop() for row in rows], task.classes, task.class_names)
    numbers = np.array([[number_of(cell) for cell in row] for row in rows], np.float64)
    for row, place in np.argwhere(np.isnan(numbers))[:1]:
        kind = "no number" if rows[row][place] else "an empty cell"
        raise DataError(
            f"{data} must be a CSV file with a header, and numbers below it; row {row + 1} below the header has {kind} "
            f"in column {names[place]!r}"
        )
    x, y = (numbers[:, :-1], numbers[:, -1]) if has_labels and y is None else (numbers, y)
    features = int(np.prod(task.input_shapes[""]))
    if x.shape[1] != features:
        raise DataError(
            f"{data} must have {features} columns in the task's order, and may have a last one called y or label; "
            f"found {x.shape[1]}"
        )
    return _checked(task, x.reshape(len(x), *task.input_shapes[""]), y, data)


def _images(task: Task, folder: Path) -> Scored:
    form = task.form if isinstance(task, PictureTask) else task.image_shape and Form(task.image_shape)
    if form is None:
        raise DataError(f"{folder}: examples of this task are no images; give a CSV or an .npz file")
    paths = sorted(path for path in folder.rglob("*") if is_image(path))
    if not paths:
        raise DataError(f"{folder} holds no images ({', '.join(SUFFIXES)}, or DICOM under any name)")
    images = []
    for path in paths:
        try:
            images.append(decode(content_of(path), form)[0])
        except Unreadable as reason:
            raise DataError(f"{path} {reason}") from None
    x = np.stack(images).reshape(len(paths), *task.input_shapes[""])
    labels = [None if path.parent == folder else task.label_of_folder(path.parent.name) for path in paths]
    y = None if None in labels else np.array(labels)
    if y is None and any(label is not None for label in labels):
        raise DataError(f"{folder}: some images lie in folders named by a label and some do not")
    return replace(_checked(task, x, y, folder), names=tuple(str(path.relative_to(folder)) for path in paths))


def _titled(*words: str) -> str:
    return " ".join(filter(None, words))


def _quoted(name: str) -> str:
    """Return a name as a CSV cell, quoted if necessary and never a formula."""
    name = f"'{name}" if name.startswith(FORMULAS) else name
    return '"' + name.replace('"', '""') + '"' if set(name) & set(',;"\t\n\r') else name
