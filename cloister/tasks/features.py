"""Frozen features: a fixed extractor is applied once to a task's inputs, and the run trains a head on the result.

Noise grows with the number of trained weights, so that a linear head on good features is more accurate under DP-SGD
than a network (Tramèr and Boneh, 2021, arXiv:2011.11660). The extractor is public: the wavelet scattering of
`cloister.tasks.scattering`, or a model in a file whose SHA-256 the configuration states.

Guarantee: the features of an example are a function of this example and public constants alone, up to roundings of
    kernels, which depend on no other example. The extractor receives one example in a call, so that no statistics of a
    batch exist. Normalisation is within an example. So one unit's joining or leaving changes no other unit's features,
    and each claim about units of examples holds as it does for raw inputs. The extractor's own training data is not
    protected.
"""

import hashlib
import inspect
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from cloister.config.run import SCATTERING, TaskConfig
from cloister.tasks.base import Dataset, Examples, Model, Task
from cloister.tasks.making import dataset_of, read_by, rows_by
from cloister.tasks.pictures.cache import CACHE, forget_the_oldest, places_of
from cloister.tasks.scattering import CHANNELS, Filters
from cloister.tasks.targets import Target
from cloister.utils.arrays import Network
from cloister.utils.errors import ConfigError
from cloister.utils.files import atomic_path, expanded
from cloister.utils.rows import shapes_of

GROUPS = 27
"""Groups of channels that are normalised together (Tramèr and Boneh, 2021, §3.2)."""
VERSION = 1
"""Version of the built-in features. Another version uses other cache files."""
FOLDER = "CLOISTER_FEATURES"
"""Environment variable that names this machine's folder of extractors, in place of the folders in `task.features`."""
HEADS = ("softmax", "keras")
"""Linear heads that `task.model` may name: softmax regression in NumPy, and the same in Keras."""
SHARED = (
    *("recipe", "partition", "classes", "target", "class_names", "rotates", "decodes", "weighted", "bundled", "tables"),
    "public",
)
"""Attributes of a task that do not depend on its inputs."""
TINY = 1e-5
"""Added to a variance, as in GroupNorm."""
IN_MEMORY = 4
"""Largest number of arrays that are kept where no folder is writable."""
logger = logging.getLogger("cloister.tasks")
_kept: dict[str, NDArray[np.float32]] = {}
_making = threading.Lock()


class Extractor(Protocol):
    """Fixed function of one example.

    Attributes:
        identity: changes whenever the function does.
        count: numbers that it returns.
    """

    identity: str
    count: int

    def __call__(self, example: NDArray) -> NDArray[np.float32]:
        """Return the features of an example, shape (count,)."""
        ...


def normalised(values: NDArray[np.float32], groups: int) -> NDArray[np.float32]:
    """Return one example's numbers with mean 0 and variance 1 in each of equal, consecutive groups, flat.

    Args:
        values: any shape; the groups cut its flat order.
        groups: their number, which divides that of the values.
    """
    parts = values.reshape(groups, -1).astype(np.float64)
    parts -= parts.mean(axis=1, keepdims=True)
    parts /= np.sqrt(np.square(parts).mean(axis=1, keepdims=True) + TINY)
    return parts.astype(np.float32).ravel()


class Scattering:
    """Scattering coefficients of an image, of each colour by itself, normalised in `GROUPS` of channels.

    Args:
        task: of images, whose inputs may be flat.

    Raises:
        ConfigError: the inputs are no images.
    """

    def __init__(self, task: Task) -> None:
        own = task.input_shapes[""]
        shape = own if len(own) in (2, 3) else task.image_shape or ()
        if prod(shape) != prod(own):
            raise ConfigError(
                f"task.features = {SCATTERING!r} needs images, and task {task.config.name!r} has inputs of shape {own}"
            )
        self._shape, self._first = shape, task.channels_first and len(shape) == 3
        height, width = shape[1:] if self._first else shape[:2]
        colours = prod(shape) // (height * width)
        self._filters = Filters.of(height, width)
        self.count = colours * CHANNELS * len(self._filters.rows) * len(self._filters.columns)
        self.identity = f"{SCATTERING} {VERSION} {shape} {self._first}"

    def __call__(self, example: NDArray) -> NDArray[np.float32]:
        """Return the features of an image, shape (count,)."""
        image = example.reshape(self._shape)
        if image.ndim == 2:
            image = image[..., None]
        colours = image if self._first else np.moveaxis(image, -1, 0)
        found = [self._filters.scattered(np.ascontiguousarray(colour, np.float32)) for colour in colours]
        return normalised(np.stack(found), GROUPS)


class KerasExtractor:
    """Outputs of a Keras model in inference mode, of one example in a call, normalised together.

    Args:
        path: of a `.keras` file. Lambda layers and other code in it are refused by Keras' safe mode.
        shape: of an example.
        identity: the SHA-256 of the file.

    Raises:
        ConfigError: the file is no Keras model, or one of other inputs or of several outputs.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], identity: str) -> None:
        from cloister.tasks.keras_model import import_keras

        keras = import_keras()
        import tensorflow as tf

        try:
            model = keras.saving.load_model(path, compile=False)
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise ConfigError(
                f"task.features: {path} is no Keras model of Keras' own layers ({type(error).__name__}); make it with "
                "model.save(), without lambda layers"
            ) from error
        inputs = [tuple(each.shape[1:]) for each in model.inputs]
        if inputs != [shape] or len(model.outputs) != 1 or None in model.outputs[0].shape[1:]:
            raise ConfigError(
                f"task.features: {path} must be a model of one input of shape {shape} and one output of fixed shape; "
                f"found inputs {inputs}"
            )
        self.identity, self.count, self._dtype = identity, prod(model.outputs[0].shape[1:]), model.inputs[0].dtype
        signature = [tf.TensorSpec((1, *shape), self._dtype)]
        self._forward = tf.function(lambda x: model(x, training=False), input_signature=signature)

    def __call__(self, example: NDArray) -> NDArray[np.float32]:
        """Return the features of an example, shape (count,)."""
        return normalised(np.asarray(self._forward(example[None].astype(self._dtype)), np.float32), 1)


class TorchExtractor:
    """Outputs of a PyTorch module in evaluation mode, of one example in a call, normalised together.

    Args:
        path: of a `.safetensors` file with the module's state dict.
        module: that `Task.build_extractor` returned.
        shape: of an example.
        identity: the SHA-256 of the file.

    Raises:
        ConfigError: the file holds another state dict, or the module takes other inputs.
    """

    def __init__(self, path: Path, module: Network, shape: tuple[int, ...], identity: str) -> None:
        import safetensors.torch
        import torch

        try:
            module.load_state_dict(safetensors.torch.load_file(path))
            self._module = module.eval()
            # The file has the weights alone; the rest of the function is in the module's settings and its code.
            self.identity = f"{identity} {module!r} {inspect.getsource(type(module))}"
            with torch.no_grad():
                self.count = module(torch.zeros(1, *shape)).numel()
        except Exception as error:  # of the user's module, for which any may be right
            raise ConfigError(
                f"task.features: {path} does not fit the module of build_extractor() on inputs of shape {shape} "
                f"({type(error).__name__}); save its own state dict with safetensors.torch.save_file"
            ) from error

    def __call__(self, example: NDArray) -> NDArray[np.float32]:
        """Return the features of an example, shape (count,)."""
        import torch

        with torch.no_grad():
            outputs = self._module(torch.from_numpy(np.array(example[None], np.float32)))
        return normalised(outputs.numpy().astype(np.float32), 1)


def extractor_of(task: Task, features: str) -> Extractor:
    """Return the extractor that `task.features` names.

    Args:
        task: of the raw inputs.
        features: `scattering`, or a file and its SHA-256.

    Raises:
        ConfigError: the task has several inputs; or the file is absent, has another digest, or does not fit.
    """
    if set(task.input_shapes) != {""}:
        raise ConfigError(f"task.features = {features!r} needs one input; task {task.config.name!r} has several")
    if features == SCATTERING:
        return Scattering(task)
    name, _, digest = features.rpartition("@")  # as the run configuration is validated
    path = expanded(name)
    if folder := os.environ.get(FOLDER):
        path = expanded(folder) / path.name
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(
            f"task.features: {path} cannot be read ({error.strerror}); {FOLDER} names the folder of such files on this "
            "machine"
        ) from None
    if found != digest:
        raise ConfigError(
            f"task.features: {path} has SHA-256 {found[:12]}…, and the run states {digest[:12]}…; use the same file at "
            "every site"
        )
    if path.suffix == ".keras":
        return KerasExtractor(path, task.input_shapes[""], digest)
    module = task.build_extractor()
    if module is None:
        raise ConfigError(
            f"task.features: {path.name} holds weights alone; task {task.config.name!r} needs build_extractor(), which "
            "returns their torch.nn.Module"
        )
    return TorchExtractor(path, module, task.input_shapes[""], digest)


class FeatureTask(Task):
    """Task on the frozen features of another one's inputs: its data and targets, and a head as model.

    Args:
        raw: task of the raw inputs.
        config: of the run, with `task.features`.

    Raises:
        ConfigError: the extractor is not usable, or `task.model` names no head.
    """

    models: tuple[str, ...] = HEADS  # type: ignore[misc]  # a task with a head of its own has others

    def __init__(self, raw: Task, config: TaskConfig) -> None:
        self._raw, self._extractor = raw, extractor_of(raw, config.features)
        self.input_shape = (self._extractor.count,)
        for name in SHARED:
            setattr(self, name, getattr(raw, name))
        if type(raw).build_head is not Task.build_head:
            self.models = raw.models
        super().__init__(config)

    @property
    def raw(self) -> Task:
        """Return the task of the raw inputs."""
        return self._raw

    @property
    def targets(self) -> dict[str, Target]:
        """Return the targets of the raw task."""
        return self._raw.targets

    def prepared(self, x: NDArray) -> NDArray:
        """Return the features of n raw inputs, shape (n, count)."""
        features = np.empty((len(x), self._extractor.count), np.float32)
        for place, row in enumerate(self._rows(x)):
            features[place] = row
        return features

    def load(self) -> Dataset:
        """Return the benchmark data with features as inputs, from a cache beside `task.data-path`."""
        data = dataset_of(self._raw)
        place = expanded(self.config.data_path) if self.config.data_path else None
        train, test = (self._of(part, place) for part in (data.train, data.test))
        return replace(data, train=train, test=test, validation=data.validation and self._of(data.validation, place))

    def read(self, path: Path) -> Examples:
        """Return a node's own data with features as inputs, after checking it."""
        return self.checked(self._of(read_by(self._raw, path), path), path)

    def rows(self, path: Path) -> Examples:
        """Return a node's own data with features as inputs, which are NaN for an unusable row."""
        examples = rows_by(self._raw, path)
        if shapes_of(examples.x) != self._raw.input_shapes:
            return self._raw.checked(examples, path)  # every row has the wrong shape
        usable = self._raw.usable(examples)
        kept = self._of(self._raw.checked(examples.take(np.flatnonzero(usable)), path), path)
        if usable.all():
            return kept
        features = np.full((len(examples), self._extractor.count), np.nan, np.float32)
        features[usable] = kept.x
        return replace(examples, x=features)

    def build(self) -> Model | Network:
        """Return the head of the raw task, or else a linear one.

        Raises:
            ConfigError: the raw task has no classes and no head.
        """
        head = self._raw.build_head(self._extractor.count)
        if head is not None:
            return head
        if not self.classes:
            raise ConfigError(
                f"task.features = {self.config.features!r}: a linear head predicts classes, and task "
                f"{self.config.name!r} has other targets; write its build_head(features)"
            )
        if self.model_name == "softmax":
            from cloister.tasks.numpy_models import SoftmaxRegression

            return SoftmaxRegression(self._extractor.count, self.classes)
        from cloister.tasks.keras_model import KerasModel

        return KerasModel(lambda: linear_head(self._extractor.count, self.classes))

    def usable_targets(self, y: NDArray) -> NDArray[np.bool_]:
        """Return the raw task's mask of the valid targets."""
        return self._raw.usable_targets(y)

    def checked_targets(self, y: NDArray, path: Path) -> NDArray:
        """Return the targets as the raw task checks them."""
        return self._raw.checked_targets(y, path)

    def ungrouped(self) -> Iterable[str]:
        """Return the raw task's sentences on groups in the data that was read."""
        return self._raw.ungrouped()

    def strata(self, y: NDArray) -> NDArray:
        """Return the raw task's strata of a holdout split."""
        return self._raw.strata(y)

    def losses(self, y: NDArray, scores: NDArray) -> NDArray:
        """Return the raw task's loss of each example."""
        return self._raw.losses(y, scores)

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Return the raw task's metrics."""
        return self._raw.metrics(y, scores)

    def _rows(self, x: NDArray) -> Iterator[NDArray[np.float32]]:
        """Yield the features of each input, from the same memory: kernels may depend on alignment."""
        example = np.empty(x.shape[1:], x.dtype)
        for row in x:
            example[...] = row
            yield self._extractor(example)

    def _of(self, examples: Examples, place: Path | None) -> Examples:
        """Return examples with features as inputs, kept in a cache beside their data.

        The name of a file is a digest of the inputs and the extractor. Without a place that is writable, the features
        stay in this process.

        Args:
            examples: with raw inputs.
            place: of their file or folder; None: they have none.
        """
        digest = hashlib.sha256(repr((self._extractor.identity, examples.x.shape, examples.x.dtype.str)).encode())
        digest.update(np.ascontiguousarray(examples.x).tobytes())
        key, shape = digest.hexdigest()[:32], (len(examples), self._extractor.count)
        root = place if place is None or place.is_dir() else place.parent
        folders = [] if root is None else [each / "features" for each in places_of(root)]
        with _making:
            for folder in folders:
                if (found := _opened(folder / f"{key}.npy", shape)) is not None:
                    return replace(examples, x=found)
            if key not in _kept:
                for folder in folders:
                    with suppress(OSError):  # it is not writable, or full
                        if (found := self._written(examples.x, folder, folder / f"{key}.npy")) is not None:
                            return replace(examples, x=found)
                while len(_kept) >= IN_MEMORY:
                    del _kept[next(iter(_kept))]
                _kept[key] = self.prepared(examples.x)
            return replace(examples, x=_kept[key])

    def _written(self, x: NDArray, folder: Path, path: Path) -> NDArray[np.float32] | None:
        """Write the features row by row to a file that its user alone may read, and return them."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shape = (len(x), self._extractor.count)
        with atomic_path(path) as partial:
            logger.warning("features of %d examples are kept in %s; %s names another folder", len(x), folder, CACHE)
            with partial.open("wb") as file:
                npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
                for row in self._rows(x):
                    file.write(row.astype("<f4", copy=False).tobytes())
            found = _opened(partial, shape)  # before another process can remove it
        forget_the_oldest(folder)
        return found


def _opened(path: Path, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    """Return the features in a file, mapped into memory; None if the file is missing or damaged."""
    try:
        found: NDArray[np.float32] = np.load(path, mmap_mode="r" if shape[0] else None, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.float32 else None


def linear_head(features: int, classes: int) -> Network:
    """Return softmax regression in Keras, which starts at 0 as in NumPy."""
    import keras

    return keras.Sequential(
        [
            keras.Input((features,), name="features"),
            keras.layers.Dense(classes, activation="softmax", kernel_initializer="zeros", name="softmax"),
        ],
        name="linear",
    )
