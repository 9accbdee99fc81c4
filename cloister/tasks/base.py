"""Interfaces of a task: dataset, model, default training recipe, metrics."""

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cloister.config.io import Scalar
from cloister.config.run import ClientConfig, TaskConfig, listed, optimizer_options
from cloister.tasks.labels import classes_of, described
from cloister.tasks.targets import Target, cast_targets, losses_of, metrics_of
from cloister.utils.arrays import Network, Optimizer, Tensor
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.rows import (
    Shape,
    Shapes,
    as_rows,
    cast,
    each_field,
    fields,
    finite_rows,
    from_fields,
    named_shapes,
    shapes_of,
)

if TYPE_CHECKING:
    import keras

NamedArrays = Mapping[str, NDArray]
ClassCounts = tuple[tuple[int, ...], ...]
"""Number of examples of each class, per client."""
ScheduleName = Literal["constant", "linear", "cosine"]
RateShape = Callable[[float], float]
"""Share of the learning rate, from 0 to 1, where a share of the rounds after the warm-up has passed."""
WEIGHTS = "weights"
"""Name of the array of weights in an `.npz` file."""
Transform = Callable[[NDArray, np.random.Generator], NDArray]
"""Random change of one example: maps its inputs and a generator of its own to inputs of the same shape."""


@dataclass(frozen=True)
class Examples:
    """Inputs x of shape (n, ...) and targets y of shape (n, ...), such as integer labels or the floats of a regression.

    Several inputs, or several targets, are a dict or a tuple of arrays of n rows. They become the fields of one
    structured array (`cloister.utils.rows`).

    `groups`, of shape (n,), contains the group of each example (a patient, a writer). None: each example is a group.
    `weights`, of shape (n,), contains the factor of each example's training loss, at least 0. None: 1 for each.
    `faults` are for the owner of the file: how many of its rows are of no use, a sentence for each column and reason.
    """

    x: NDArray
    y: NDArray
    groups: NDArray | None = None
    weights: NDArray | None = None
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all(isinstance(rows, np.ndarray | Mapping | tuple) for rows in (self.x, self.y)):
            found = f"{type(self.x).__name__} and {type(self.y).__name__}"
            raise DataError(f"x and y must be NumPy arrays, found {found}; np.asarray makes them")
        object.__setattr__(self, "x", as_rows(self.x))
        object.__setattr__(self, "y", as_rows(self.y))
        if len(self.x) != len(self.y):
            raise DataError(f"x and y: {len(self.x)} inputs but {len(self.y)} targets; each input needs one")
        if self.groups is not None and len(self.groups) != len(self.y):
            raise DataError(f"{len(self.y)} examples but {len(self.groups)} of them in groups")
        if self.weights is not None and self.weights.shape != (len(self.y),):
            raise DataError(
                f"weights must have shape ({len(self.y)},), a number for each example; got {self.weights.shape}"
            )

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: NDArray) -> "Examples":
        """Return the examples at `indices`, in that order, with the faults of their file."""
        groups, weights = (None if each is None else each[indices] for each in (self.groups, self.weights))
        return replace(self, x=self.x[indices], y=self.y[indices], groups=groups, weights=weights)

    @classmethod
    def joined(cls, parts: "Sequence[Examples]") -> "Examples":
        """Return all examples of one or more parts, in their order, with the faults of all.

        Raises:
            DataError: some parts have groups or weights, and some do not.
        """
        groups = [part.groups for part in parts if part.groups is not None]
        weights = [part.weights for part in parts if part.weights is not None]
        return cls(
            np.concatenate([part.x for part in parts]),
            np.concatenate([part.y for part in parts]),
            np.concatenate(groups) if groups else None,
            np.concatenate(weights) if weights else None,
            tuple(fault for part in parts for fault in part.faults),
        )


@dataclass(frozen=True)
class Judged:
    """All rows of a file, each judged by itself, for predictions.

    Attributes:
        x: inputs, shape (n, ...); those of an unusable row are any numbers.
        y: targets, shape (n, ...), not valid for a row without one; None: the file has none.
        reasons: n texts, why a row cannot be predicted; empty: it can.
    """

    x: NDArray
    y: NDArray | None
    reasons: Sequence[str]


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
            if array.shape != (len(self.train),) or array.dtype.kind not in "iuU":
                raise DataError(
                    f"Dataset.groups[{name!r}] must hold a whole number or a text for each of {len(self.train)} "
                    f"training examples; found {array.dtype} of shape {array.shape}"
                )


@dataclass(frozen=True)
class Recipe:
    """Training defaults of a task, which `client.*` overrides.

    Args:
        local_epochs, batch_size, learning_rate: E > 0, B > 0 and s > 0 of one round.
        optimizer: the name of a Keras or PyTorch optimizer, and `sgd` for models in NumPy. Of a PyTorch task also a
            function of the parameters and the learning rate, which returns an optimizer.
        schedule: learning rate schedule over the rounds of a run, by name or as a function; see `Schedule`.
        warmup_rounds: number of rounds in which the rate rises to s.
        final_rate_share: least share of s at the end of a schedule that would reach 0, from 0 to 1.
        class_weights: factor of the loss for each class, above 0; empty: 1 for every class. DP-SGD clips the
            gradient of the weighted loss to S times `clip_shares`.
        loss_scale: factor of every loss, above 0.
        augmentation: names of random transforms, applied to each example in each step, in this order.
        callbacks: makes the Keras callbacks of one client's training; None: no callbacks. Callbacks see losses and
            weights without noise, so a client with a privacy mechanism trains without them.
        optimizer_options: arguments of the optimizer by name, such as {"momentum": 0.9}; numbers and booleans.
    """

    local_epochs: int
    batch_size: int
    learning_rate: float
    optimizer: str | Callable[[Sequence[Tensor], float], Optimizer] = "sgd"
    schedule: ScheduleName | RateShape = "constant"
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

    def weights(self, examples: Examples) -> NDArray[np.float32] | None:
        """Return the factors of the losses of examples, shape (n,): scale, class weight and the example's own weight.

        None: the recipe has no class weights and a loss scale of 1, and examples have no weights. A factor depends on
        its own example alone; any label has one.

        Args:
            examples: with labels, if the recipe has class weights.
        """
        if not self.class_weights and self.loss_scale == 1 and examples.weights is None:
            return None
        factors = np.full(len(examples), self.loss_scale, np.float32)
        if self.class_weights:
            weights = np.array(self.class_weights, np.float32)
            factors = np.take(weights, examples.y.astype(np.int64), mode="clip") * np.float32(self.loss_scale)
        return factors if examples.weights is None else factors * cast(examples.weights, np.float32)

    def clip_shares(self, examples: Examples) -> NDArray[np.float64]:
        """Return each example's class weight, relative to the largest one: from 0 to 1, shape (n,).

        Under DP-SGD it scales the clipping norm. A share depends on its own label alone; any label has one.
        """
        if not self.class_weights:
            return np.ones(len(examples))
        weights = np.array(self.class_weights)
        return np.take(weights / weights.max(), examples.y.astype(np.int64), mode="clip")


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

        They are class probabilities of shape (n, classes), or those of another target (`targets.Target`), of several
        outputs in the fields of n rows.
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


@runtime_checkable
class Bound(Protocol):
    """Model that adopts the targets and the input shape of its task."""

    def bind(self, task: "Task") -> None:
        """Adopt them.

        Raises:
            ConfigError: the model's inputs or outputs are not those of the task.
        """


@runtime_checkable
class OnDevice(Protocol):
    """Model that computes on a device which the node chooses."""

    def move(self, device: str) -> None:
        """Compute on `auto`, `cpu`, `cuda` or `mps` from now on.

        Raises:
            NodeConfigError: this machine has no such device.
        """


@runtime_checkable
class KeepsState(Protocol):
    """Model whose state, such as the statistics of batch normalisation, can stay at each site."""

    def keep_state(self) -> None:
        """Keep the state of the model out of what is sent, from now on."""

    def kept(self) -> NamedArrays:
        """Return a copy of the state that is not sent, by name."""

    def assign_kept(self, arrays: NamedArrays | None) -> None:
        """Replace the state that is not sent; None: by that of a new model."""


class Task(ABC):
    """One learning problem: data, a model, and the targets it predicts. Subclasses are plugins, found by name.

    Attributes:
        recipe: training defaults; a task may have others for one of its models.
        partition: the partition that `task.partition = "auto"` selects; with owners, natural in place of iid.
        classes: number of classes, if the target is one label for each example; else 0, with a `target`.
        target: what a model is trained on; a dict or a tuple for several outputs. None: a label of `classes`.
        class_names: names of the classes, in the order of their numbers. A file may contain these names, or one-hot
            rows in this order, in place of numbers. Empty: labels are numbers from 0.
        input_shape: of one example, as the model takes it; a dict or a tuple of shapes for several inputs.
        input_dtype: of inputs read from a site's file, and of a model that is built for `input_shape`.
        models: the names `task.model` may take, the default first.
        rotates: whether the task supports `task.rotated-fraction`.
        decodes: whether the task supports `task.image-size` and `task.skip-damaged`.
        weighted: whether each example has a weight: `Examples.weights`, or the array `weights` of a site's file.
        bundled: whether `load` works without files, so that `task.data-path` has no effect.
        tables: published partitions, by the name that `task.partition` takes: the number of training examples of each
            class, per client.
        image_shape: height and width of the grey image that an example is; None: examples are not images.
        channels_first: whether the channels of a picture are its first axis, as in PyTorch, or its last.
        transforms: by the names that `client.augmentation` may take, in addition to the transforms of pictures.
        public: whether `load` returns public data. If so, a simulation needs no lasting ledger. Not inherited: a
            subclass may load other data.
    """

    recipe: Recipe
    partition: str = "iid"
    classes: ClassVar[int] = 0
    target: ClassVar[Target | Mapping[str, Target] | tuple[Target, ...] | None] = None
    class_names: ClassVar[tuple[str, ...]] = ()
    input_shape: Shapes
    input_dtype: ClassVar[str] = "float32"
    models: ClassVar[tuple[str, ...]]
    rotates: ClassVar[bool] = False
    decodes: ClassVar[bool] = False
    weighted: ClassVar[bool] = False
    bundled: ClassVar[bool] = False
    tables: ClassVar[Mapping[str, ClassCounts]] = {}
    image_shape: tuple[int, int] | None = None
    channels_first: ClassVar[bool] = False
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
            ("rotated-fraction", config.rotated_fraction, self.rotates, "mnist-writers or femnist"),
            ("image-size", config.image_size, self.decodes or config.image_size == "auto", "alzheimer-mri"),
            ("skip-damaged", config.skip_damaged, self.decodes, "alzheimer-mri"),
        ):
            if value and not means_something:
                raise ConfigError(
                    f"task.{key} = {value} has no effect with task.name = {config.name!r}; it belongs to {owner}"
                )
        if config.partition.startswith("table-") and config.partition not in self.tables:
            known = ", ".join(self.tables) or "none"
            raise ConfigError(
                f"task.partition = {config.partition!r} is no table of task.name = {config.name!r}, which has {known}"
            )

    @property
    def targets(self) -> dict[str, Target]:
        """Return the targets by the names of the outputs, as in `rows.fields`; the name of a single one is empty."""
        target = self.target or Target(classes=self.classes)
        if isinstance(target, Target):
            return {"": target}
        return dict(target if isinstance(target, Mapping) else {str(place): each for place, each in enumerate(target)})

    @property
    def input_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the inputs by name, as in `rows.fields`; the name of a single one is empty."""
        return named_shapes(self.input_shape)

    def placeholders(self, count: int) -> Examples:
        """Return examples in the shapes and dtypes of the task.

        Inputs are zeros. Each class is a target in turn, as metrics such as the AUC need several; numbers are zeros.
        """
        x = {name: np.zeros((count, *shape), self.input_dtype) for name, shape in self.input_shapes.items()}
        y = {}
        for name, each in self.targets.items():
            y[name] = np.zeros((count, *each.shape), each.dtype)
            y[name].T[...] = np.arange(count) % (each.classes or (2 if each.loss == "binary-cross-entropy" else 1))
        return Examples(from_fields(x), from_fields(y))

    @abstractmethod
    def load(self) -> Dataset:
        """Return the benchmark data for a simulation. Deterministic.

        Raises:
            DataError: the data is not on this machine; the message contains the remedy.
        """

    def read(self, path: Path) -> Examples:
        """Return a node's own data, after checking it.

        By default this is an `.npz` file with arrays `x` and `y` in the task's units; of several inputs or targets, the
        arrays are `x_NAME` and `y_NAME`.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        return self.checked(self.rows(path), path)

    def rows(self, path: Path) -> Examples:
        """Return the contents of a node's file, before its rows are checked.

        Raises:
            DataError: the file is absent, or is not in the task's format.
        """
        return read_npz(path, self)

    def judged(self, path: Path) -> Judged | None:
        """Return all rows of a file for predictions, with or without targets.

        Tasks with a file format of their own override this. None, the default: `read` returns the rows, and each needs
        a target.

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
        weighted = np.True_ if examples.weights is None else valid_weights(examples.weights)
        return finite_rows(examples.x) & self.usable_targets(examples.y) & weighted

    def usable_targets(self, y: NDArray) -> NDArray[np.bool_]:
        """Return a mask of the valid targets, such as class numbers, shape (n,)."""
        usable = np.ones(len(y), np.bool_)
        for name, array in fields(y).items():
            usable &= self.targets[name].usable(array)
        return usable

    def checked(self, examples: Examples, path: Path) -> Examples:
        """Return the examples in the dtypes of the model, after checking them.

        Args:
            examples: n of them, as a file contains them.
            path: of that file, for the message.

        Raises:
            DataError: the input shape differs from the task's, inputs or targets are not finite, or a label is not a
                class number.
        """
        if (found := shapes_of(examples.x)) != self.input_shapes:
            raise DataError(
                f"data-path: {path} must hold inputs of shape {self.input_shape}, found {found.get('', found)}"
            )
        bad = np.flatnonzero(~finite_rows(examples.x))
        if len(bad):
            first = f"x[{bad[0]}] is the first of {len(bad)}"
            raise DataError(f"data-path: {path} holds inputs that are NaN or infinite as float32", first)
        if examples.weights is not None and not valid_weights(examples.weights).all():
            raise DataError(f"data-path: {path} holds weights that are not finite numbers of at least 0")
        inputs = each_field(lambda _, array: cast(array, self.input_dtype), examples.x)
        return replace(examples, x=inputs, y=self.checked_targets(examples.y, path))

    def checked_targets(self, y: NDArray, path: Path) -> NDArray:
        """Return the targets in the dtypes of this task's metrics and losses.

        Args:
            y: n targets.
            path: of the file that contains them, for the message.

        Raises:
            DataError: a target is not valid, such as a label that is not a class number.
        """
        usable = self.usable_targets(y)
        if self.classes and not usable.all():
            raise DataError(
                f"data-path: {path} must hold labels {described(self.classes, self.class_names)}; subtract 1 from each "
                "where they begin one too high",
                f"y[{usable.argmin()}] is the first that is none of them",
            )
        if not usable.all():
            expected = "; ".join(f"{name} {each.described()}".strip() for name, each in self.targets.items())
            raise DataError(
                f"data-path: {path} holds targets that are not {expected}", f"y[{usable.argmin()}] is the first"
            )
        return cast_targets(self.targets, y)

    def label_of_folder(self, name: str) -> int | None:
        """Return the class, or the target of a regression, of the images in a folder of this name; None: no class."""
        return int(name) if name.isdecimal() else None

    def ungrouped(self) -> Iterable[str]:
        """Return sentences for the owner of the data that was read, on groups in it that `task.group` would protect."""
        return ()

    def strata(self, y: NDArray) -> NDArray:
        """Return integers of shape (n,) that stratify a client's holdout split: labels, or zeros without classes."""
        return y if self.classes else np.zeros(len(y), np.int64)

    @abstractmethod
    def build(self) -> "Model | Network":
        """Return a new, untrained model: a Keras model, a `torch.nn.Module`, or a `Model`."""

    def build_head(self, features: int) -> "Model | Network | None":
        """Return a new model on frozen features (`task.features`), or None, the default, for a linear one.

        Args:
            features: numbers of an example; the model's inputs have shape (n, features).
        """
        return None

    def build_extractor(self) -> "Network | None":
        """Return the `torch.nn.Module` whose weights the `.safetensors` file of `task.features` holds.

        None, the default: the task has none.
        """
        return None

    @property
    def raw(self) -> "Task":
        """Return the task of the examples as files contain them: itself, unless it has frozen features."""
        return self

    def prepared(self, x: NDArray) -> NDArray:
        """Return the inputs of the model for inputs of `raw`: the same, unless the task has frozen features."""
        return x

    def losses(self, y: NDArray, scores: NDArray) -> NDArray:
        """Return the loss of each example, shape (n,), such as the cross-entropy in nats.

        Their mean is the `loss` of `metrics`.

        Args:
            y: n targets.
            scores: n predictions of the model, such as class probabilities of shape (n, classes).
        """
        return losses_of(self.targets, y, scores)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Return named metrics of predictions against targets, those of the losses (`targets.Target`).

        A client that evaluates sends them without noise; no claim covers its scored examples.

        Args:
            y: n targets.
            scores: n predictions of the model, such as class probabilities of shape (n, classes).
        """
        return metrics_of(self.targets, y, scores)


class Regression(Task):
    """Task with one number as target: the loss is the squared error, and the metric is the RMSE."""

    target = Target("mse")


def valid_weights(weights: NDArray) -> NDArray[np.bool_]:
    """Return a mask of the weights that are finite as float32 and at least 0, shape (n,)."""
    return finite_rows(weights) & (weights >= 0)


def read_npz(path: Path, task: Task) -> Examples:
    """Read the inputs, the targets and any groups and weights of a task from an `.npz` file, without pickles.

    Args:
        path: of the file.
        task: names the arrays, and the array of groups.

    Raises:
        DataError: the file is absent or lacks these arrays. The message quotes no values.
    """
    group, arrays = task.config.group, ", ".join(stored_as("x", name) for name in task.input_shapes)
    targets = ", ".join(stored_as("y", name) for name in task.targets)
    expected = f"an .npz file with arrays {arrays} (numbers) and {targets} ({expected_targets(task)})"
    if group:
        expected += f" and {group} (whole numbers or text, one a row)"
    if task.weighted:
        expected += f" and {WEIGHTS} (numbers, one a row)"
    if not path.is_file():
        raise DataError(f"data-path: no file at {path}; expected {expected}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            there = f"the file holds {', '.join(archive.files) or 'no array'}"
            x = {name: archive[stored_as("x", name)] for name in task.input_shapes}
            y = {name: archive[stored_as("y", name)] for name in task.targets}
            groups = archive[group] if group else None
            weights = archive[WEIGHTS] if task.weighted else None
    except KeyError:
        raise DataError(f"data-path: {path} must be {expected}", there) from None
    except (ValueError, TypeError, EOFError, OSError, zipfile.BadZipFile):
        raise DataError(f"data-path: {path} must be {expected}") from None
    if not all(array.dtype.kind in "fiu" for array in x.values()) or not are_targets(y, task):
        found = " and ".join(
            f"{stored_as(letter, name)} of {array.dtype}{f' {array.shape}' if letter == 'y' else ''}"
            for letter, arrays in (("x", x), ("y", y))
            for name, array in arrays.items()
        )
        raise DataError(f"data-path: {path} must be {expected}; found {found}")
    count = len(next(iter(y.values())))
    if groups is not None and (groups.dtype.kind not in "iuU" or groups.shape != (count,)):
        raise DataError(f"data-path: {path} must be {expected}; found {group} of {groups.dtype} {groups.shape}")
    if weights is not None and (weights.dtype.kind not in "fiu" or weights.shape != (count,)):
        raise DataError(f"data-path: {path} must be {expected}; found {WEIGHTS} of {weights.dtype} {weights.shape}")
    inputs = {len(array) if array.ndim else 0 for array in x.values()}
    if inputs != {count}:
        counts = " or ".join(map(str, sorted(inputs)))
        raise DataError(f"data-path: {path} holds {counts} inputs but {count} targets; each input needs one")
    targets_read = classes_of(y[""], task.classes, task.class_names) if task.classes else from_fields(y)
    return Examples(from_fields(x), targets_read, groups, weights)


def stored_as(letter: str, name: str) -> str:
    """Return the name of an array in an `.npz` file: `x`, or of several inputs `x_NAME`; likewise `y`."""
    return f"{letter}_{name}" if name else letter


def expected_targets(task: Task) -> str:
    """Describe the valid targets of a task's file in words."""
    if task.classes:
        return "integer labels, class names or one-hot rows" if task.class_names else "integer labels"
    return "; ".join(target.described() for target in task.targets.values())


def are_targets(y: Mapping[str, NDArray], task: Task) -> bool:
    """Return whether arrays have the shapes and the dtype kinds of a task's targets.

    Args:
        y: as a file contains them, by the names of the targets.
        task: of the file.
    """
    if not task.classes:
        fit = (
            array.dtype.kind in "fiub" and array.ndim > 0 and array.shape[1:] == task.targets[name].shape
            for name, array in y.items()
        )
        return all(fit) and len(set(map(len, y.values()))) == 1
    labels = y[""]
    if task.class_names and (labels.ndim == 2 or labels.dtype.kind in "US"):
        return labels.ndim == 1 or (labels.shape[1] == task.classes and labels.dtype.kind in "biuf")
    return labels.ndim == 1 and labels.dtype.kind in "iu"
