"""What a task is: a dataset, a model, and how they are trained and scored when the user does not say."""

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.config.run import ClientConfig, TaskConfig, listed
from cloister.core.errors import ConfigError, DataError
from cloister.tasks.labels import classes_of, described

if TYPE_CHECKING:
    import keras

NamedArrays = Mapping[str, NDArray]
ClassCounts = tuple[tuple[int, ...], ...]
"""How many examples of each class each client has."""
Loss = Literal["cross-entropy", "squared-error"]
"""What training makes small: of class probabilities against labels, or of numbers against numbers."""
ScheduleName = Literal["constant", "linear", "cosine"]
Transform = Callable[[NDArray, np.random.Generator], NDArray]
"""Changes one example at random: from its inputs, and a generator for it alone, to inputs of the same shape."""


@dataclass(frozen=True)
class Examples:
    """Inputs x of shape (n, ...) and targets y of shape (n,): integer labels, or the floats of a regression.

    `groups`, of shape (n,), says whose each example is (a patient's, a writer's); None: each is its own.
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
        """The examples at `indices`, in that order."""
        return Examples(self.x[indices], self.y[indices], None if self.groups is None else self.groups[indices])


@dataclass(frozen=True)
class Dataset:
    """A benchmark's examples: `train` is dealt out to the clients, `test` stays with the server.

    Attributes:
        train, test: the two parts.
        owners: the site of each training example (a hospital, a writer), from 0 on, shape (n,): `natural` deals by it.
            None: the dataset has no sites of its own.
        test_owners: the same of the test examples, where they have sites of their own, which train nothing: a
            federation without them can be validated on them.
        validation: what the server may train an initial model on: no client has any of it, and no model is scored on
            it.
        groups: the arrays that `task.group` may name, each of shape (n,): whose each training example is (a patient's,
            a writer's). A person may be at several sites.
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
    """How a task trains when `client.*` does not say.

    Args:
        local_epochs, batch_size, learning_rate: E > 0, B > 0 and s > 0 of one round.
        optimizer: the name of a Keras optimizer; `sgd` for models in NumPy.
        schedule: how the rate changes over the rounds of a run, see `Schedule`.
        warmup_rounds: in which the rate rises to s.
        final_rate_share: the share of s that `linear` and `cosine` end with, from 0 to 1.
        class_weights: what the loss of an example of each class is multiplied with, above 0; empty: with 1.
        loss_scale: what every loss is multiplied with, above 0.
        augmentation: names of transforms, in their order, by which each example is changed at random in each step.
        callbacks: makes the Keras callbacks of one client's training; None: there are none. They see losses and weights
            without noise, so that no client that protects itself trains with them.
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

    def resolved(self, client: ClientConfig) -> "Recipe":
        """What a run trains with: `client.*` where it says something, this recipe where it says `auto`."""
        said = {name: value for name in client.recipe_keys if (value := getattr(client, name)) != "auto"}
        if "class_weights" in said:
            said["class_weights"] = tuple(map(float, listed(said["class_weights"])))
        if "augmentation" in said:
            said["augmentation"] = listed(said["augmentation"])
        return replace(self, **said, callbacks=self.callbacks if client.callbacks else None)

    @property
    def maximum_weight(self) -> float:
        """The largest number that the loss of an example is multiplied with."""
        return self.loss_scale * max(self.class_weights, default=1.0)

    def weights(self, y: NDArray) -> NDArray[np.float32] | None:
        """What the losses of examples are multiplied with, shape (n,); None: nothing.

        Args:
            y: labels or targets, shape (n,).
        """
        if not self.class_weights:
            return None if self.loss_scale == 1 else np.full(len(y), self.loss_scale, np.float32)
        return np.array(self.class_weights, np.float32)[y] * np.float32(self.loss_scale)


class Model(Protocol):
    """A model as the federation sees it: named float arrays that can be read, replaced, scored and saved."""

    kind: str
    suffix: str

    def initialise(self, seed: int) -> None:
        """New initial weights, the same for the same seed; frozen ones stay."""
        ...

    def arrays(self) -> dict[str, NDArray]:
        """A copy of every weight that is trained and sent, by name, in a fixed order."""
        ...

    def frozen(self) -> dict[str, NDArray]:
        """A copy of every weight that is neither trained nor sent, by name: `build` gives it the same at every site."""
        ...

    def assign(self, arrays: NamedArrays) -> None:
        """Replace every weight that is sent; names and shapes must be those of `arrays()`."""
        ...

    def predict(self, x: NDArray) -> NDArray:
        """Class probabilities of shape (n, classes), or the predicted numbers of a regression, of shape (n,)."""
        ...

    def predict_alone(self, x: NDArray) -> NDArray:
        """As `predict`, for n > 0; what a row gets depends, to the last bit, on that row and the weights alone."""
        ...

    def save(self, path: Path) -> None:
        """Write the model so that it can be loaded without Cloister."""
        ...

    def load(self, path: Path) -> None:
        """Replace every weight by what `save` wrote.

        Raises:
            DataError: the file holds no such model.
        """
        ...


class Task(ABC):
    """One learning problem, a classification unless it is a `Regression`. Subclasses are plugins, found by name.

    Attributes:
        recipe: training defaults; a task may have others for one of its models.
        partition: how the training examples are dealt out when `task.partition` is `auto`.
        classes: number of classes; 0 for a regression.
        class_names: what the classes are called, in the order of their numbers: a file may hold these names, or one-hot
            rows in this order, in place of numbers. Empty: labels are numbers from 0.
        input_shape: of one example, as the model takes it.
        models: the names `task.model` may take, the default first.
        rotates: whether `task.rotated-fraction` means anything to it.
        decodes: whether `task.image-size` and `task.skip-damaged` mean anything to it.
        bundled: whether `load` needs no file, so that `task.data-path` means nothing to it.
        tables: published partitions by the name that `task.partition` takes: for each client the number of training
            examples of each class.
        image_shape: height and width of the grey image that an example is; None: it is none.
        transforms: that `client.augmentation` may name, beside those of pictures.
        public: whether anybody can have the data that `load` returns: a simulation on it needs no lasting ledger. Not
            inherited: a subclass may load other data.
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
        self._refuse_settings_of_others()

    def _refuse_settings_of_others(self) -> None:
        config = self.config
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
        """The benchmark data, for a simulation. Deterministic.

        Raises:
            DataError: the data is not on this machine; the message says how to get it.
        """

    def read(self, path: Path) -> Examples:
        """A node's own data, in a deployment: an `.npz` file with arrays `x` and `y` in the task's units.

        Raises:
            DataError: the file is absent or is not what the task reads.
        """
        return self.checked(self.rows(path), path)

    def rows(self, path: Path) -> Examples:
        """What a node's file holds, before anything is asked of single rows.

        Raises:
            DataError: the file is absent or is no such file.
        """
        return read_npz(path, self.classes, self.class_names, self.config.group)

    def unlabelled(self, path: Path) -> NDArray | None:
        """The inputs of a file without labels, shape (n, *input_shape), to be predicted; None: it has labels.

        For tasks with a format of their own; one that has none takes files with labels alone.

        Raises:
            DataError: the file is not what the task reads.
        """
        return None

    def refuse_groups(self, path: Path) -> None:
        """Refuse `task.group` for a table, which has no column for it.

        Raises:
            DataError: the run protects groups.
        """
        if self.config.group:
            raise DataError(f"task.group = {self.config.group!r} needs an .npz file with that array, found {path}")

    def usable(self, examples: Examples) -> NDArray[np.bool_]:
        """Which rows this task's model can take, shape (n,), each decided by itself: finite, with a target it knows."""
        finite = np.isfinite(_single(examples.x)).reshape(len(examples), -1).all(axis=1)
        return finite & self.usable_targets(examples.y)

    def usable_targets(self, y: NDArray) -> NDArray[np.bool_]:
        """Which targets are classes, shape (n,)."""
        return (y >= 0) & (y < self.classes)

    def checked(self, examples: Examples, path: Path) -> Examples:
        """The examples, if this task's model can take them.

        Args:
            examples: n of them, as a file holds them.
            path: of that file, for the message.

        Raises:
            DataError: inputs are of another shape than the benchmark's, inputs or targets are not finite, or labels
                are no classes.
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
        """The targets, as this task's metrics and losses take them.

        Args:
            y: shape (n,).
            path: of the file that holds them, for the message.

        Raises:
            DataError: a label is no class.
        """
        if len(y) and not (y.min() >= 0 and y.max() < self.classes):
            raise DataError(
                f"data-path: {path} must hold labels {described(self.classes, self.class_names)}; subtract 1 from each "
                "where they begin one too high",
                f"y[{((y >= 0) & (y < self.classes)).argmin()}] is the first that is none of them",
            )
        return y.astype(np.int64)

    def label_of_folder(self, name: str) -> int | None:
        """The class of the images in a folder of this name; None where it names none."""
        return int(name) if name.isdecimal() else None

    def strata(self, y: NDArray) -> NDArray:
        """What a client's examples are stratified by when some are kept back: integers of shape (n,)."""
        return y

    @abstractmethod
    def build(self) -> Model:
        """A new, untrained model."""

    def losses(self, y: NDArray, scores: NDArray) -> NDArray:
        """The loss of each example, shape (n,); their mean is the `loss` of `metrics`.

        Args:
            y: shape (n,).
            scores: what the model predicts, shape (n, classes); in nats.
        """
        return cross_entropies(y, scores)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Named figures of merit of class probabilities against labels.

        Args:
            y: shape (n,).
            scores: what the model predicts, shape (n, classes).
        """
        return {"loss": cross_entropy(y, scores), "accuracy": float(np.mean(scores.argmax(axis=1) == y))}


class Regression(Task):
    """A task whose targets are numbers: no classes, squared error for a loss, and the RMSE for a figure of merit."""

    classes = 0

    def usable_targets(self, y: NDArray) -> NDArray[np.bool_]:
        """Which targets are finite as float32, shape (n,)."""
        with np.errstate(over="ignore"):
            finite: NDArray[np.bool_] = np.isfinite(y.astype(np.float32))
        return finite

    def checked_targets(self, y: NDArray, path: Path) -> NDArray:
        """The targets as float32.

        Args:
            y: shape (n,).
            path: of the file that holds them, for the message.

        Raises:
            DataError: one is not finite as float32.
        """
        targets = y.astype(np.float32)
        if not np.isfinite(targets).all():
            raise DataError(f"data-path: {path} holds targets that are NaN or infinite as float32")
        return targets

    def label_of_folder(self, name: str) -> int | None:
        """The class of the images in a folder of this name; None where it names none."""
        return int(name) if name.isdecimal() else None

    def strata(self, y: NDArray) -> NDArray:
        """One stratum: no two targets need be equal."""
        return np.zeros(len(y), np.int64)

    def losses(self, y: NDArray, scores: NDArray) -> NDArray:
        """The squared error of each example, shape (n,).

        Args:
            y: shape (n,).
            scores: what the model predicts, shape (n,), in the units of y.
        """
        return np.square(scores.astype(np.float64) - y)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Mean squared error as `loss`, and its root as `rmse`.

        Args:
            y: shape (n,).
            scores: what the model predicts, shape (n,), in the units of y.
        """
        mean = float(self.losses(y, scores).mean())
        return {"loss": mean, "rmse": mean**0.5}


def cross_entropy(y: NDArray, scores: NDArray) -> float:
    """The mean negative log-likelihood of a set of examples, in nats.

    Args:
        y: labels, shape (n,), n > 0.
        scores: class probabilities, shape (n, classes).
    """
    return float(cross_entropies(y, scores).mean())


def cross_entropies(y: NDArray, scores: NDArray) -> NDArray:
    """The negative log-likelihood of each example, in nats; probabilities are floored at 1e-7, as Keras does.

    Args:
        y: labels, shape (n,).
        scores: class probabilities, shape (n, classes).

    Returns:
        Shape (n,).
    """
    chosen = np.take_along_axis(scores, y.astype(np.int64)[:, None], axis=1)[:, 0]
    return -np.log(np.maximum(chosen, 1e-7))


def _single(x: NDArray) -> NDArray[np.float32]:
    """Inputs in single precision.

    Whole numbers pass through double precision: a file has them so where one row is no whole number, and no other row
    may become another one by it.
    """
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is told of or left out as such
        return (x.astype(np.float64) if x.dtype.kind in "iu" else x).astype(np.float32, copy=False)


def read_npz(path: Path, classes: int, names: tuple[str, ...] = (), group: str = "") -> Examples:
    """Read `x` and `y` from an `.npz` file, without pickles; and whose each row is, if `group` names that array.

    Args:
        path: of the file.
        classes: how many there are; 0: y holds numbers.
        names: of the classes; empty: y holds whole numbers (see `classes_of`).
        group: name of an array of whole numbers or text, shape (n,); empty: none.

    Raises:
        DataError: the file is absent or holds no such arrays. What is in it is not quoted.
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
    """What a file may hold as targets, in words.

    Args:
        classes, names: as in `read_npz`.
    """
    if not classes:
        return "numbers"
    return "integer labels, class names or one-hot rows" if names else "integer labels"


def are_targets(y: NDArray, classes: int, names: tuple[str, ...]) -> bool:
    """Whether an array can hold targets, by its shape and kind.

    Args:
        y: as a file holds it.
        classes, names: as in `read_npz`.
    """
    if not classes:
        return y.ndim == 1 and y.dtype.kind in "fiu"
    if names and (y.ndim == 2 or y.dtype.kind in "US"):
        return y.ndim == 1 or (y.shape[1] == classes and y.dtype.kind in "biuf")
    return y.ndim == 1 and y.dtype.kind in "iu"
