"""Prediction with a trained model: that of a run directory, or the one that a client keeps for itself."""

import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.config.run import parse
from cloister.tasks.base import Examples, Task, are_targets, expected_targets
from cloister.tasks.labels import classes_of
from cloister.tasks.making import model_of, named_task, read_by
from cloister.tasks.pictures.decode import SUFFIXES, grey, is_image
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.files import atomic_path, read_text

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
        outputs: class probabilities of shape (n, classes), or numbers of shape (n,).
        metrics: named metrics, if there were labels.
        hypothesis, hypotheses: number of the model, and how many there are.
        class_names: of the task; empty if it has none.
    """

    names: tuple[str, ...]
    outputs: NDArray
    metrics: dict[str, float]
    hypothesis: int = 0
    hypotheses: int = 1
    class_names: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield CSV lines with a header.

        Columns are the example and its prediction. For classes they include the probability, and the class name if
        there is one.
        """
        columns = ["example", "prediction"]
        columns += ["probability", *(["class"] if self.class_names else [])] if self.outputs.ndim == 2 else []
        yield ",".join(columns)
        for name, output in zip(self.names, self.outputs, strict=True):
            cells = [_quoted(name)]
            if output.ndim:
                number = int(output.argmax())
                cells += [str(number), f"{output[number]:.6g}"]
                cells += [_quoted(self.class_names[number])] if self.class_names else []
            else:
                cells.append(f"{output:.9g}")
            yield ",".join(cells)

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
        model_dir: a run directory, or a client's model-dir: a configuration, and a model or several hypotheses.
        data: see `read`.
        hypothesis: its number; None selects the only one, or the one of least loss on the labels.

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
        found.append(Predictions(scored.names, outputs, metrics, number, len(files), tuple(task.class_names)))
    return min(found, key=_loss)


def read(task: Task, data: Path) -> Scored:
    """Read examples from a CSV file, an `.npz` file, or a folder of images.

    A CSV file has a header, and one column for each number of an example, in the task's order and units. A last column
    `y` or `label` contains labels. If the task has a table format of its own, the file must be in that format; the
    column of labels is optional. An `.npz` file has `x`, and optionally `y`. A folder contains images. If they are in
    subfolders named 0, 1, ..., or by the task's class names, these are their labels.

    Raises:
        DataError: the data has another format, or does not fit the task.
    """
    if data.is_dir():
        return _images(task, data)
    if not data.is_file():
        raise DataError(f"no file or folder at {data}")
    if is_image(data):
        raise DataError(f"{data} is one image; give the folder that it lies in")
    if data.suffix.lower() == ".npz":
        return _archive(task, data)
    if type(task).read is not Task.read or type(task).rows is not Task.rows:
        inputs = task.unlabelled(data)
        return _numbered(read_by(task, data), data) if inputs is None else _checked(task, inputs, None, data)
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
        config = parse(settings).task
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

    Unlabelled ones are checked with zeros as labels.
    """
    if y is not None and len(x) != len(y):
        raise DataError(f"{data} must hold as many labels as inputs, found {len(y)} and {len(x)}")
    stand_ins = np.zeros(len(x), np.int64 if task.classes else np.float32)
    try:
        return _numbered(task.checked(Examples(x, stand_ins if y is None else y), data), data, y is not None)
    except DataError as error:
        raise DataError(str(error).removeprefix("data-path: ")) from None


def _archive(task: Task, data: Path) -> Scored:
    expected = expected_targets(task.classes, task.class_names)
    refused = DataError(f"{data} must be an .npz file with an array x (numbers), and may hold y ({expected})")
    try:
        with np.load(data, allow_pickle=False) as archive:
            x, y = archive["x"], archive.get("y")
    except (KeyError, ValueError, TypeError, EOFError, OSError, zipfile.BadZipFile):
        raise refused from None
    if x.dtype.kind not in "fiu" or (y is not None and not are_targets(y, task.classes, task.class_names)):
        raise refused
    return _checked(
        task, x, classes_of(y, task.classes, task.class_names) if y is not None and task.classes else y, data
    )


def _table(task: Task, data: Path) -> Scored:
    import pandas

    if data.suffix.lower() in SPREADSHEETS:
        raise DataError(f"{data} is a spreadsheet; save it as a CSV file")
    # Not chained: the messages of pandas quote cells.
    refused = DataError(f"{data} must be a CSV file with a header, and numbers below it")
    try:
        frame = pandas.read_csv(data)
    except (ValueError, OSError):
        raise refused from None
    if frame.empty:
        raise DataError(f"{data} has no rows below its header")
    last = str(frame.columns[-1]) if str(frame.columns[-1]).strip().lower() in LABELS else None
    y: NDArray | None = None
    if last is not None and task.classes:
        # Labels are names or whole numbers. A number with a fraction is invalid.
        y = classes_of(frame.pop(last).to_numpy().astype(np.str_), task.classes, task.class_names)
    try:
        numbers = frame.to_numpy(dtype=np.float64)
    except (ValueError, TypeError):
        raise refused from None
    if np.isnan(numbers).any():
        raise DataError(f"{data} has empty cells; every cell needs a number")
    x, y = (numbers[:, :-1], numbers[:, -1]) if last is not None and y is None else (numbers, y)
    features = int(np.prod(task.input_shape))
    if x.shape[1] != features:
        raise DataError(
            f"{data} must have {features} columns in the task's order, and may have a last one called y or label; "
            f"found {x.shape[1]}"
        )
    return _checked(task, x.reshape(len(x), *task.input_shape), y, data)


def _images(task: Task, folder: Path) -> Scored:
    if task.image_shape is None:
        raise DataError(f"{folder}: examples of this task are no images; give a CSV or an .npz file")
    paths = sorted(path for path in folder.rglob("*") if is_image(path))
    if not paths:
        raise DataError(f"{folder} holds no images ({', '.join(SUFFIXES)})")
    images = []
    for path in paths:
        image = grey(path.read_bytes(), task.image_shape)
        if image is None:
            raise DataError(f"{path} is not an image that can be read")
        images.append(image)
    x = np.stack(images).reshape(len(paths), *task.input_shape)
    labels = [None if path.parent == folder else task.label_of_folder(path.parent.name) for path in paths]
    y = None if None in labels else np.array(labels)
    if y is None and any(label is not None for label in labels):
        raise DataError(f"{folder}: some images lie in folders named by a label and some do not")
    return replace(_checked(task, x, y, folder), names=tuple(str(path.relative_to(folder)) for path in paths))


def _quoted(name: str) -> str:
    """Return a name as a CSV cell, quoted if necessary and never a formula."""
    name = f"'{name}" if name.startswith(FORMULAS) else name
    return '"' + name.replace('"', '""') + '"' if set(name) & set(',;"\t\n\r') else name
