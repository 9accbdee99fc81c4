"""Predictions with a trained model, of a run directory or of a client's `model-dir`."""

import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.config.renamed import translated
from cloister.config.run import parse
from cloister.tasks.base import Examples, Task, are_targets, expected_targets, stored_as
from cloister.tasks.columns import MISSING
from cloister.tasks.csv_files import number_of, read_rows
from cloister.tasks.labels import NO_CLASS, classes_of
from cloister.tasks.making import model_of, named_task, read_by
from cloister.tasks.pictures.decode import SUFFIXES, content_of, decode, is_image
from cloister.tasks.pictures.finding import ABSENT, TABLE, LabelledFiles
from cloister.tasks.pictures.form import Form, Unreadable
from cloister.tasks.pictures.sources import files_below
from cloister.tasks.pictures.task import PictureTask
from cloister.tasks.tables import UNEVEN
from cloister.tasks.targets import Target, Targets
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.files import atomic_path
from cloister.utils.rows import fields, finite_rows, from_fields

SPREADSHEETS = (".xlsx", ".xls", ".ods")
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""First characters of a cell that a spreadsheet evaluates as a formula. A leading apostrophe makes it text (OWASP)."""
OF_MODELS = ("npz", "keras", "safetensors")
"""Suffixes of files with a model."""
LABELS = ("y", "label")
"""Names of the last column of a CSV file if it contains labels."""


@dataclass(frozen=True)
class Scored:
    """Examples to be scored, m of n that can be.

    Attributes:
        names: n names of the examples in the predictions.
        reasons: n texts, why an example cannot be scored; empty: it can.
        x: of the m usable examples, in the task's units.
        y: their labels, or None: no example has one.
        labelled: which of the m have a label; None: all, if there are labels.
    """

    names: tuple[str, ...]
    reasons: tuple[str, ...]
    x: NDArray
    y: NDArray | None = None
    labelled: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for examples.

    Attributes:
        names: of all examples.
        outputs: class probabilities of shape (n, classes), or other predictions of n rows, of the usable examples.
        metrics: named metrics, if there were labels.
        hypothesis: index of the model.
        hypotheses: number of models.
        class_names: of a task of one label; empty if it has none.
        targets: of the task. Those with classes have probabilities on the last axis of their outputs.
        reasons: of each name, why it is unusable, empty if it is usable; no texts: all examples are usable.
        labelled: number of examples that the metrics are of.
    """

    names: tuple[str, ...]
    outputs: NDArray
    metrics: dict[str, float]
    hypothesis: int = 0
    hypotheses: int = 1
    class_names: tuple[str, ...] = ()
    targets: Targets = field(default_factory=lambda: {"": Target("mse")})
    reasons: tuple[str, ...] = ()
    labelled: int = 0

    def lines(self) -> Iterator[str]:
        """Yield CSV lines with a header.

        The first column is the example. A label has its class number, the probability of that class, its name if there
        is one, and the probability of each class. Several labels, as of a sequence, have the class number of each.
        Other predictions have a column for each of their numbers. Several columns of a kind are numbered from 1. Of
        several outputs each column has the name of its output. If an example is unusable, its cells are empty, and a
        last column has the reason.
        """
        columns, parts = ["example"], list[list[list[str]]]()
        for name, outputs in fields(self.outputs).items():
            found = self._label if self.targets[name].classes and outputs.ndim == 2 else self._numbers
            headers, cells = found(name, outputs)
            columns += headers
            parts.append(cells)
        usable, blank = zip(*parts, strict=True), [""] * (len(columns) - 1)
        has_reasons = any(self.reasons)
        yield ",".join(map(_quoted, columns + ["reason"] * has_reasons))
        for name, reason in zip(self.names, self.reasons or repeat("")):
            row = blank if reason else list(chain.from_iterable(next(usable)))
            yield ",".join([_quoted(name), *row, *[_quoted(reason)] * has_reasons])

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
    try:
        content = json.loads((model_dir / "config.json").read_text())
        settings = dict(content["config"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(
            f"{model_dir} is no run directory and no model-dir of a client: it has no config.json of one"
        ) from None
    try:
        config = parse(translated(settings)).task
    except ConfigError as error:
        raise ConfigError(f"{model_dir / 'config.json'}: {error}") from None
    task = named_task(config)
    files = _models(model_dir)
    if hypothesis is not None and hypothesis >= len(files):
        raise ConfigError(f"--hypothesis {hypothesis}: {model_dir} holds {len(files)}, counted from 0")
    scored, model = read(task.raw, data), model_of(task)
    if hypothesis is None and len(files) > 1 and scored.y is None:
        raise ConfigError(
            f"{model_dir} holds {len(files)} hypotheses, and {data} no labels to choose by; name one with "
            f"--hypothesis (0 to {len(files) - 1}), or score with the model that a client keeps for itself"
        )
    found, x = [], task.prepared(scored.x)
    for number in range(len(files)) if hypothesis is None else [hypothesis]:
        if files[number].suffix != model.suffix:
            raise DataError(f"{files[number]} is not of the kind of the task's model, {model.suffix}")
        model.load(files[number])
        outputs, metrics, rows = model.predict(x), dict[str, float](), np.zeros(0, np.intp)
        if scored.y is not None:
            rows = np.arange(len(outputs)) if scored.labelled is None else np.flatnonzero(scored.labelled)
            metrics = task.metrics(scored.y[rows], outputs[rows])
        names = tuple(task.class_names) if task.classes else ()
        about = (number, len(files), names, task.targets, scored.reasons, len(rows))
        found.append(Predictions(scored.names, outputs, metrics, *about))
    losses = [each.metrics.get("loss", 0.0) for each in found]
    return found[int(np.argmin(np.where(np.isnan(losses), np.inf, losses)))]


def read(task: Task, data: Path) -> Scored:
    """Read examples from a CSV file, an `.npz` file, or a folder of images.

    A CSV file has a header, and one column for each number of an example, in the task's order and units. A last column
    `y` or `label` contains labels. If the task defines a table format of its own, the file must have that format; its
    column of labels, or some of its labels, may be missing. An `.npz` file has `x`, and optionally `y`. A folder
    contains images. If they lie in subfolders that are named by class numbers or names, these names are their labels;
    so are those of `labels.csv` in the folder.

    Raises:
        DataError: the data has another format, does not fit the task, or has no usable example.
    """
    is_archive = data.suffix.lower() == ".npz"
    has_format = type(task).read is not Task.read or type(task).rows is not Task.rows
    try:
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
        if not has_format:
            return _table(task, data)
        if (found := task.judged(data)) is not None:
            labelled = None if found.y is None else task.usable_targets(found.y)
            return _scored(task, data, found.x, found.y, found.reasons, labelled)
        examples = read_by(task, data)
        if examples.faults:
            # Predictions are numbered like rows.
            faults = "; ".join(examples.faults)
            raise DataError(f"{data} has rows that cannot be scored: {faults}; remove or correct them")
        return _scored(task, data, examples.x, examples.y)
    except DataError as error:
        raise error.of("") from None


def _models(folder: Path) -> list[Path]:
    """Return the file of the model, or those of all hypotheses in their order."""
    found = {
        int(match.group(1)): path
        for path in folder.iterdir()
        if (match := re.fullmatch(rf"hypothesis-(\d+)\.({'|'.join(OF_MODELS)})", path.name))
    }
    alone = [path for suffix in OF_MODELS if (path := folder / f"model.{suffix}").is_file()]
    files = [found[number] for number in sorted(found)] or alone
    if not files or sorted(found) != list(range(len(found))) or (found and alone) or len(alone) > 1:
        named = " or ".join(f"model.{suffix}" for suffix in OF_MODELS)
        raise DataError(f"{folder} must hold one {named}, or hypothesis-0 to hypothesis-(k - 1)")
    return files


def _scored(
    task: Task,
    data: Path,
    x: NDArray,
    y: NDArray | None,
    reasons: Sequence[str] = (),
    labelled: NDArray[np.bool_] | None = None,
    names: Sequence[str] = (),
) -> Scored:
    """Return the usable examples in the task's dtypes, after checking them.

    If there are no labels, or not for every example, placeholders stand in for them during the check.

    Args:
        task, data: of the examples.
        x, y: n inputs, and their labels.
        reasons: n texts, why an example is unusable; no text: none is known to be.
        labelled: which examples have a label; None: all, if there are labels.
        names: of the examples; none: they are numbered.
    """
    if not len(x):
        raise DataError(f"{data} holds no examples to score")
    if y is not None and len(x) != len(y):
        raise DataError(f"{data} must hold as many labels as inputs, found {len(y)} and {len(x)}")
    names = names or tuple(map(str, range(len(x))))
    reasons = [
        reason or ("" if is_finite else "has a number that is missing, NaN or infinite")
        for reason, is_finite in zip(reasons or [""] * len(x), finite_rows(x).tolist(), strict=True)
    ]
    usable = np.flatnonzero([not reason for reason in reasons])
    if not len(usable):
        raise DataError(f"{data}: no example can be scored; {names[0]}: {reasons[0]}")
    targets, has_label = task.placeholders(len(usable)).y, None if labelled is None else labelled[usable]
    if y is None or (has_label is not None and not has_label.any()):
        y = None
    elif has_label is None:
        targets = y[usable]
    else:
        targets = np.where(has_label, y[usable].T, targets.T).T
    examples = task.checked(Examples(x[usable], targets), data)
    return Scored(tuple(names), tuple(reasons), examples.x, None if y is None else examples.y, has_label)


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
    return _scored(task, data, from_fields(x), labels)


def _table(task: Task, data: Path) -> Scored:
    if data.suffix.lower() in SPREADSHEETS:
        raise DataError(f"{data} is a spreadsheet; save it as a CSV file")
    found = read_rows(data)
    names, width = found.names, len(found.names)
    takes_labels = [target.shape for target in task.targets.values()] == [()]
    has_labels = takes_labels and bool(names) and names[-1].lower() in LABELS
    features = int(np.prod(task.input_shapes[""]))
    if width - has_labels != features:
        raise DataError(
            f"{data} must have {features} columns in the task's order, and may have a last one called y or label; "
            f"found {width - has_labels}"
        )
    rows = [row or [""] * width for row in found.rows]
    numbers = np.array([[number_of(cell) for cell in row[:features]] for row in rows], np.float64)
    reasons = ["" if row else UNEVEN for row in found.rows]
    for at, column in np.argwhere(np.isnan(numbers))[::-1]:  # backwards: a row's first column is named
        if found.rows[at]:
            reasons[at] = f"column {names[column]} {'must hold numbers only' if rows[at][column] else 'is empty'}"
    y: NDArray | None = None
    labelled = None
    if has_labels:
        cells = [row[-1] for row in rows]
        labelled = np.array([cell.lower() not in MISSING for cell in cells], bool)
        # Labels are names or whole numbers. A number with a fraction is invalid.
        y = classes_of(cells, task.classes, task.class_names) if task.classes else np.array(list(map(number_of, cells)))
    return _scored(task, data, numbers.reshape(len(rows), *task.input_shapes[""]), y, reasons, labelled)


def _images(task: Task, folder: Path) -> Scored:
    form = task.form if isinstance(task, PictureTask) else task.image_shape and Form(task.image_shape)
    if form is None:
        raise DataError(f"{folder}: examples of this task are no images; give a CSV or an .npz file")
    classes = task.class_names or tuple(map(str, range(task.classes)))
    table = LabelledFiles.at(folder / TABLE, classes, "", False) if classes and (folder / TABLE).is_file() else None
    # A row of the table is an example, and so is an image that has none.
    files = table.files if table else ()
    known = set(files)
    listed = []
    for path, picture in zip(files, table.pictures if table else (), strict=True):
        name = picture.name if path.name == ABSENT else path.relative_to(folder).as_posix()
        listed.append((name, picture.label, picture.fault))
    beside = [path for path in files_below(folder) if is_image(path) and path not in known]
    for path in beside:
        label = None if path.parent == folder else task.label_of_folder(path.parent.name)
        listed.append((str(path.relative_to(folder)), NO_CLASS if label is None else label, ""))
    if not listed:
        raise DataError(f"{folder} holds no images ({', '.join(SUFFIXES)}, or DICOM under any name)")
    images, reasons = list[NDArray[np.float32]](), list[str]()
    for path, (_, _, fault) in zip((*files, *beside), listed, strict=True):
        image, reason = np.zeros(form.example, np.float32), fault
        if not fault:
            try:
                image = decode(content_of(path), form)[0]
            except Unreadable as error:
                reason = str(error)
        images.append(image)
        reasons.append(reason)
    x = np.stack(images).reshape(len(images), *task.input_shapes[""])
    y = np.array([label for _, label, _ in listed])
    labelled = task.usable_targets(y) & (y != NO_CLASS)
    return _scored(task, folder, x, y, reasons, labelled, [name for name, _, _ in listed])


def _titled(*words: str) -> str:
    return " ".join(filter(None, words))


def _quoted(name: str) -> str:
    """Return a name as a CSV cell, quoted if necessary and never a formula."""
    name = f"'{name}" if name.startswith(FORMULAS) else name
    return '"' + name.replace('"', '""') + '"' if set(name) & set(',;"\t\n\r') else name
