"""Interfaces of a task: dataset, model, default training recipe, metrics."""

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.config.io import Scalar
from cloister.config.run import ClientConfig, TaskConfig, listed, optimizer_options
from cloister.tasks.labels import classes_of, described
from cloister.utils.errors import ConfigError, DataError

if TYPE_CHECKING:
    import keras

NamedArrays = Mapping[str, NDArray]
ClassCounts = tuple[tuple[int, ...], ...]
"""Number of examples of each class, per client."""
Loss = Literal["cross-entropy", "squared-error"]
"""Training loss: cross-entropy of class probabilities against labels, or squared error of numbers."""
ScheduleName = Literal["constant", "linear", "cosine"]
Transform = Callable[[NDArray, np.random.Generator], NDArray]
"""Random change of one example: maps its inputs and a generator of its own to inputs of the same shape."""


@dataclass(frozen=True)
class Examples:
    """Inputs x of shape (n, ...) and targets y of shape (n,): integer labels, or the floats of a regression.

    `groups`, of shape (n,), contains the group of each example (a patient, a writer). None: each example is a group.
    """

    x: NDArray
    y: NDArray
    groups: NDArray | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.x, np.ndarray) or not isinstance(self.y, np.ndarray):
            found = f"{type(self.x).__name__} and {type(self.y).__name__}"
            raise DataError(f"x and y must be NumPy arrays, found {found}; np.asarray makes them")
        if len(self.x) != len(self.y):
            raise DataError(f"x and y: {len(self.x)} inputs but {len(self.y)} targets; each input needs one")
        if self.groups is not None and len(self.groups) != len(self.y):
            raise DataError(f"{len(self.y)} examples but {len(self.groups)} of them in groups")

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: NDArray) -> "Examples":
        """Return the examples at `indices`, in that order."""
        return Examples(self.x[indices], self.y[indices], None if self.groups is None else self.groups[indices])


@dataclass(frozen=True)
class Dataset:
    """Benchmark examples: `train` is partitioned among the clients, `test` stays with the server.

    Attributes:
        train, test: the two parts.
        owners: the site of each training example (a hospital, a writer), from 0, shape (n,). The `natural` partition
            follows it. None: the dataset has no sites.
        test_owners: the site of each test example. These sites train nothing, so they can validate a federation.
            None: the test examples have no sites.
        validation: examples that the server may train an initial model on. They are disjoint from the clients' data and
            from the test set.
        groups: arrays of shape (n,) that `task.group` may name: the group of each training example (a patient, a
            writer). A group may be at several sites.
    """

    train: Examples
    test: Examples
    owners: NDArray | None = None
    test_owners: NDArray | None = None
    validation: Examples | None = None
    groups: Mapping[str, NDArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Mapping):
            raise DataError(
                f"Dataset.groups must hold arrays by name, found {type(self.groups).__name__}; use groups={{'patient': "
                "array}, and owners=array for the sites of examples"
            )
        for name, array in self.groups.items():
            if array.shape != self.train.y.shape[:1] or array.dtype.kind not in "iuU":
                raise DataError(
                    f"Dataset.groups[{name!r}] must hold a whole number or a text for each of {len(self.train)} "
                    f"training examples; found {array.dtype} of shape {array.shape}"
                )


@dataclass(frozen=True)
class Recipe:
    """Training defaults of a task, which `client.*` overrides.

    Args:
        local_epochs, batch_size, learning_rate: E > 0, B > 0 and s > 0 of one round.
        optimizer: the name of a Keras optimizer; `sgd` for models in NumPy.
        schedule: learning rate schedule over the rounds of a run, see `Schedule`.
        warmup_rounds: number of rounds in which the rate rises to s.
        final_rate_share: the share of s that `linear` and `cosine` end with, from 0 to 1.
        class_weights: factor of the loss for each class, above 0; empty: 1 for every class.
        loss_scale: factor of every loss, above 0.
        augmentation: names of random transforms, applied to each example in each step, in this order.
        callbacks: makes the Keras callbacks of one client's training; None: no callbacks. Callbacks see losses and
            weights without noise, so a client with a privacy mechanism trains without them.
        optimizer_options: arguments of the Keras optimizer by name, such as {"momentum": 0.9}; numbers and booleans.
    """

    local_epochs: int
    batch_size: int
    learning_rate: float
    optimizer: str = "sgd"
    schedule: ScheduleName = "constant"
    warmup_rounds: int = 0
    final_rate_share: float = 0.0
    class_weights: tuple[float, ...] = ()
    loss_scale: float = 1.0
    augmentation: tuple[str, ...] = ()
    callbacks: "Callable[[], Sequence[keras.callbacks.Callback]] | None" = None
    optimizer_options: Mapping[str, Scalar] = field(default_factory=dict, hash=False)

    def resolved(self, client: ClientConfig) -> "Recipe":
        """Return this recipe with the values of `client.*` that are not `auto`."""
        said = {name: value for name in client.recipe_keys if (value := getattr(client, name)) != "auto"}
        if "class_weights" in said:
            said["class_weights"] = tuple(map(float, listed(said["class_weights"])))
        if "augmentation" in said:
            said["augmentation"] = listed(said["augmentation"])
        if "optimizer_options" in said:
            said["optimizer_options"] = optimizer_options(said["optimizer_options"])
        elif said.get("optimizer", self.optimizer) != self.optimizer:
            said["optimizer_options"] = {}  # those of the recipe are of its own optimizer
        return replace(self, **said, callbacks=self.callbacks if client.callbacks else None)

    @property
    def maximum_weight(self) -> float:
        """Return the largest factor of an example's loss."""
        return self.loss_scale * max(self.class_weights, default=1.0)

    def weights(self, y: NDArray) -> NDArray[np.float32] | None:
        """Return the factors of the losses of examples, shape (n,).

        None: the recipe has no class weights, and a loss scale of 1.

        Args:
            y: labels or targets, shape (n,).
        """
        if not self.class_weights:
            return None if self.loss_scale == 1 else np.full(len(y), self.loss_scale, np.float32)
        return np.array(self.class_weights, np.float32)[y] * np.float32(self.loss_scale)


class Model(Protocol):
    """Model interface of the federation: named float arrays that can be read, replaced, scored and saved."""

    kind: str
    suffix: str

    def initialise(self, seed: int) -> None:
        """Draw new initial weights; equal seeds give equal weights. Frozen weights stay."""
        ...

    def arrays(self) -> dict[str, NDArray]:
        """Return a copy of every weight that is trained and sent, in a fixed order."""
        ...

    def frozen(self) -> dict[str, NDArray]:
        """Return a copy of every weight that is neither trained nor sent, by name.

        `build` gives these weights the same values at every site.
        """
        ...

    def assign(self, arrays: NamedArrays) -> None:
        """Replace every weight that is sent; names and shapes must be those of `arrays()`."""
        ...

    def predict(self, x: NDArray) -> NDArray:
        """Return the predictions for inputs.

        They are class probabilities of shape (n, classes), or the numbers of a regression, of shape (n,).
        """
        ...

    def predict_alone(self, x: NDArray) -> NDArray:
        """Return the predictions for n > 0 inputs, each independent of the others.

        To the last bit, the output for a row depends on that row and the weights only.
        """
        ...

    def save(self, path: Path) -> None:
        """Write the model in a format that can be loaded without Cloister."""
        ...

    def load(self, path: Path) -> None:
        """Replace every weight by those in a file that `save` wrote.

        Raises:
            DataError: the file contains no such model.
        """
        ...


class Task(ABC):
    """One learning problem: a classification, or a `Regression`. Subclasses are plugins, found by name.

    Attributes:
        recipe: training defaults; a task may have others for one of its models.
        partition: the partition that `task.partition = "auto"` selects.
        classes: number of classes; 0 for a regression.
        class_names: names of the classes, in the order of their numbers. A file may contain these names, or one-hot
            rows in this order, in place of numbers. Empty: labels are numbers from 0.
        input_shape: of one example, as the model takes it.
        models: the names `task.model` may take, the default first.
        rotates: whether the task supports `task.rotated-fraction`.
        decodes: whether the task supports `task.image-size` and `task.skip-damaged`.
        bundled: whether `load` works without files, so that `task.data-path` has no effect.
        tables: published partitions, by the name that `task.partition` takes: the number of training examples of each
            class, per client.
        image_shape: height and width of the grey image that an example is; None: examples are not images.
        transforms: by the names that `client.augmentation` may take, in addition to the transforms of pictures.
        public: whether `load` returns public data. If so, a simulation needs no lasting ledger. Not inherited: a
            subclass may load other data.
    """

    recipe: Recipe
    partition: ClassVar[str] = "iid"
    classes: ClassVar[int]
    class_names: ClassVar[tuple[str, ...]] = ()
    input_shape: tuple[int, ...]
    models: ClassVar[tuple[str, ...]]
    rotates: ClassVar[bool] = False
    decodes: ClassVar[bool] = False
    bundled: ClassVar[bool] = False
    tables: ClassVar[Mapping[str, ClassCounts]] = {}
    image_shape: tuple[int, int] | None = None
    transforms: ClassVar[Mapping[str, Transform]] = {}
    public: ClassVar[bool] = False

    def __init__(self, config: TaskConfig) -> None:
        self.config = config
        self.model_name = self.models[0] if config.model == "auto" else config.model
        if self.model_name not in self.models:
            raise ConfigError(
                f"task.model must be one of {', '.join(self.models)} for task {config.name!r}; got {config.model!r}"
            )
        if config.data_path and self.bundled:
            raise ConfigError(
                f"task.data-path = {config.data_path!r} has no effect with task.name = {config.name!r}, whose data is "
                "built in; a node names its own file in its node configuration, and data of another kind needs a task "
                "of its own (cloister new task)"
            )
        for key, value, means_something, owner in (
            ("rotated-fraction", config.rotated_fraction, self.rotates, "mnist-writers"),
            ("image-size", config.image_size, self.decodes or config.image_size == "auto", "alzheimer-mri"),
            ("skip-damaged", config.skip_damaged, self.decodes, "alzheimer-mri"),
        ):
            if value and not means_something:
                raise ConfigError(
                    f"task.{key} = {value} has no effect with task.name = {config.name!r}; it belongs to {owner!r}"
                )
        if config.partition.startswith("table-") and config.partition not in self.tables:
            known = ", ".join(self.tables) or "none"
            raise ConfigError(
                f"task.partition = {config.partition!r} is no table of task.name = {config.name!r}, which has {known}"
            )

    @abstractmethod
    def load(self) -> Dataset:
        """Return the benchmark data for a simulation. Deterministic.

        Raises:
            DataError: the data is not on this machine; the message contains the remedy.
        """

    def read(self, path: Path) -> Examples:
        """Return a node's own data, after checking it.

        By default this is an `.npz` file with arrays `x` and `y` in the task's units.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        return self.checked(self.rows(path), path)

    def rows(self, path: Path) -> Examples:
        """Return the contents of a node's file, before its rows are checked.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        return read_npz(path, self.classes, self.class_names, self.config.group)

    def unlabelled(self, path: Path) -> NDArray | None:
        """Return the inputs of a file without labels, shape (n, *input_shape).

        None: the file has labels. Tasks with a file format of their own override this. By default, every file needs
        labels.

        Raises:
            DataError: the file is not in the task's format.
        """
        return None

    def refuse_groups(self, path: Path) -> None:
        """Refuse `task.group` for a table, which has no column of groups.

        Raises:
            DataError: the run protects groups.
        """
        if self.config.group:
            raise DataError(f"task.group = {self.config.group!r} needs an .npz file with that array, found {path}")

    def usable(self, examples: Examples) -> NDArray[np.bool_]:
        """Return a mask of the rows that the model accepts, shape (n,).

        Each row is checked by itself: its inputs are finite as float32, and its target is valid.
        """
        finite = np.isfinite(_single(examples.x)).reshape(len(examples), -1).all(axis=1)
        return finite & self.usable_targets(examples.y)

    def usable_targets(self, y: NDArray) -> NDArray[np.bool_]:
        """Return a mask of the targets that are valid class numbers, shape (n,)."""
        return (y >= 0) & (y < self.classes)

    def checked(self, examples: Examples, path: Path) -> Examples:
        """Return the examples in the dtypes of the model, after checking them.

        Args:
            examples: n of them, as a file contains them.
            path: of that file, for the message.

        Raises:
            DataError: the input shape differs from the task's, inputs or targets are not finite, or a label is not a
                class number.
        """
        if examples.x.shape[1:] != self.input_shape:
            raise DataError(
                f"data-path: {path} must hold inputs of shape {self.input_shape}, found {examples.x.shape[1:]}"
            )
        inputs = _single(examples.x)
        bad = np.flatnonzero(~np.isfinite(inputs).all(axis=tuple(range(1, inputs.ndim))))
        if len(bad):
            first = f"x[{bad[0]}] is the first of {len(bad)}"
            raise DataError(f"data-path: {path} holds inputs that are NaN or infinite as float32", first)
        return Examples(inputs, self.checked_targets(examples.y, path), examples.groups)

    def checked_targets(self, y: NDArray, path: Path) -> NDArray:
        """Return the targets in the dtype of this task's metrics and losses.

        Args:
            y: shape (n,).
            path: of the file that contains them, for the message.

        Raises:
            DataError: a label is not a class number.
        """
        if len(y) and not (y.min() >= 0 and y.max() < self.classes):
            raise DataError(
                f"data-path: {path} must hold labels {described(self.classes, self.class_names)}; subtract 1 from each "
                "where they begin one too high",
                f"y[{((y >= 0) & (y < self.classes)).argmin()}] is the first that is none of them",
            )
        return y.astype(np.int64)

    def label_of_folder(self, name: str) -> int | None:
        """Return the class, or the target of a regression, of the images in a folder of this name; None: no class."""
        return int(name) if name.isdecimal() else None

    def strata(self, y: NDArray) -> NDArray:
        """Return integers of shape (n,) that stratify a client's holdout split."""
        return y

    @abstractmethod
    def build(self) -> Model:
        """Return a new, untrained model."""

    def losses(self, y: NDArray, scores: NDArray) -> NDArray:
        """Return the loss of each example in nats, shape (n,).

        Their mean is the `loss` of `metrics`.

        Args:
            y: shape (n,).
            scores: class probabilities that the model predicts, shape (n, classes).
        """
        return cross_entropies(y, scores)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Return named metrics of class probabilities against labels.

        Args:
            y: shape (n,).
            scores: class probabilities that the model predicts, shape (n, classes).
        """
        loss = float(cross_entropies(y, scores).mean())
        return {"loss": loss, "accuracy": float(np.mean(scores.argmax(axis=1) == y))}


class Regression(Task):
    """Task with numeric targets: `classes` is 0, the loss is the squared error, and the metric is the RMSE."""

    classes = 0

    def usable_targets(self, y: NDArray) -> NDArray[np.bool_]:
        """Return a mask of the targets that are finite as float32, shape (n,)."""
        with np.errstate(over="ignore"):
            finite: NDArray[np.bool_] = np.isfinite(y.astype(np.float32))
        return finite

    def checked_targets(self, y: NDArray, path: Path) -> NDArray:
        """Return the targets as float32.

        Args:
            y: shape (n,).
            path: of the file that contains them, for the message.

        Raises:
            DataError: a target is not finite as float32.
        """
        targets = y.astype(np.float32)
        if not np.isfinite(targets).all():
            raise DataError(f"data-path: {path} holds targets that are NaN or infinite as float32")
        return targets

    def strata(self, y: NDArray) -> NDArray:
        """Return a single stratum: targets of a regression need not repeat."""
        return np.zeros(len(y), np.int64)

    def losses(self, y: NDArray, scores: NDArray) -> NDArray:
        """Return the squared error of each example, shape (n,).

        Args:
            y: shape (n,).
            scores: predictions of the model, shape (n,), in the units of y.
        """
        return np.square(scores.astype(np.float64) - y)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Return the mean squared error as `loss`, and its root as `rmse`.

        Args:
            y: shape (n,).
            scores: predictions of the model, shape (n,), in the units of y.
        """
        mean = float(self.losses(y, scores).mean())
        return {"loss": mean, "rmse": mean**0.5}


def cross_entropies(y: NDArray, scores: NDArray) -> NDArray:
    """Return the negative log-likelihood of each example, in nats.

    Like Keras, floor probabilities at 1e-7.

    Args:
        y: labels, shape (n,).
        scores: class probabilities, shape (n, classes).

    Returns:
        Shape (n,).
    """
    chosen = np.take_along_axis(scores, y.astype(np.int64)[:, None], axis=1)[:, 0]
    return -np.log(np.maximum(chosen, 1e-7))


def _single(x: NDArray) -> NDArray[np.float32]:
    """Cast inputs to float32, integers by way of float64.

    If a row contains a fraction, NumPy stores the whole file as float64. The detour gives every other row the same
    float32 value in both cases.
    """
    with np.errstate(over="ignore"):  # overflow gives infinity, which the caller refuses or leaves out
        return (x.astype(np.float64) if x.dtype.kind in "iu" else x).astype(np.float32, copy=False)


def read_npz(path: Path, classes: int, names: tuple[str, ...] = (), group: str = "") -> Examples:
    """Read `x`, `y` and any groups from an `.npz` file, without pickles.

    Args:
        path: of the file.
        classes: number of classes; 0: y contains numbers.
        names: of the classes; empty: y contains whole numbers (see `classes_of`).
        group: name of an array of whole numbers or text, shape (n,); empty: no groups.

    Raises:
        DataError: the file is absent or lacks these arrays. The message quotes no values.
    """
    expected = f"an .npz file with arrays x (numbers) and y ({expected_targets(classes, names)})"
    if group:
        expected += f" and {group} (whole numbers or text, one a row)"
    if not path.is_file():
        raise DataError(f"data-path: no file at {path}; expected {expected}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            there = f"the file holds {', '.join(archive.files) or 'no array'}"
            x, y, groups = archive["x"], archive["y"], archive[group] if group else None
    except KeyError:
        raise DataError(f"data-path: {path} must be {expected}", there) from None
    except (ValueError, TypeError, EOFError, OSError, zipfile.BadZipFile):
        raise DataError(f"data-path: {path} must be {expected}") from None
    if x.dtype.kind not in "fiu" or not are_targets(y, classes, names):
        raise DataError(f"data-path: {path} must be {expected}; found x of {x.dtype} and y of {y.dtype} {y.shape}")
    if groups is not None and (groups.dtype.kind not in "iuU" or groups.shape != y.shape[:1]):
        raise DataError(f"data-path: {path} must be {expected}; found {group} of {groups.dtype} {groups.shape}")
    inputs = len(x) if x.ndim else 0
    if inputs != len(y):
        raise DataError(f"data-path: {path} holds {inputs} inputs but {len(y)} targets; each input needs one")
    return Examples(x, classes_of(y, classes, names) if classes else y, groups)


def expected_targets(classes: int, names: tuple[str, ...]) -> str:
    """Describe the valid targets of a file in words.

    Args:
        classes, names: as in `read_npz`.
    """
    if not classes:
        return "numbers"
    return "integer labels, class names or one-hot rows" if names else "integer labels"


def are_targets(y: NDArray, classes: int, names: tuple[str, ...]) -> bool:
    """Return whether an array has the shape and the dtype kind of targets.

    Args:
        y: as a file contains it.
        classes, names: as in `read_npz`.
    """
    if not classes:
        return y.ndim == 1 and y.dtype.kind in "fiu"
    if names and (y.ndim == 2 or y.dtype.kind in "US"):
        return y.ndim == 1 or (y.shape[1] == classes and y.dtype.kind in "biuf")
    return y.ndim == 1 and y.dtype.kind in "iu"
