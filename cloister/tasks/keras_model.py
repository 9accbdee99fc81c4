"""Keras models for the federation. Keras is imported when a model is made, not when this module is imported."""

import logging
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import NamedArrays, Task
from cloister.tasks.numpy_models import check_same
from cloister.tasks.targets import NO_LOSSES, Target
from cloister.utils.arrays import Compiled, Network, Tensor, Variable, is_seed
from cloister.utils.errors import ConfigError, DataError, FederationError
from cloister.utils.files import atomic_path, quiet_libraries
from cloister.utils.rows import as_rows, cast, fields, named_shapes
from cloister.utils.state import STATE, is_state


def import_keras() -> ModuleType:
    """Import and return `keras` with the TensorFlow backend."""
    if "keras" not in sys.modules:
        with quiet_libraries():
            import tensorflow  # noqa: F401
    import keras

    log = logging.getLogger("tensorflow")
    if log.level == logging.NOTSET:  # else its user has chosen what it shows
        log.setLevel(logging.ERROR)
    return keras


PREDICT_BATCH = 1024


class KerasModel:
    """Model whose weights are identified by Keras' variable paths, not by position.

    What is sent is decided for each weight. Trained weights are sent, and state: weights that a training call writes
    without a gradient, such as the statistics of batch normalisation. All other weights are frozen: those of layers
    with `trainable = False`, and the base of LoRA. They keep the values that `build` gives.

    A subclassed model, or a `Sequential` without `Input`, is built for the task's `input_shape` by `bind`.

    Args:
        build: makes the uncompiled model; its outputs are the predictions of the task's targets (`targets.Target`).
        loss: refused; the task's target states the loss.
        predict_batch: examples that `predict` scores at once; the activations of a batch must fit into memory.

    Attributes:
        keras: the Keras model.
        targets: of training, in the order of the model's outputs.
        variables: the weights that are sent, by path, in Keras' order. `STATE` stands before the path of state.

    Raises:
        ConfigError: a loss is given.
        FederationError: two weights have the same path.
    """

    kind = "keras"
    suffix = ".keras"

    def __init__(self, build: Callable[[], Network], loss: object = None, predict_batch: int = PREDICT_BATCH) -> None:
        if loss is not None:
            raise ConfigError(
                f"KerasModel(loss={loss!r}): leave the loss out here; the task states it, as in "
                "target = Target('mae'). A Regression has Target('mse')"
            )
        self._build = build
        self._task: Task | None = None
        self._predict_batch = predict_batch
        self._use(self._fresh())

    def bind(self, task: Task) -> None:
        """Adopt the targets of a task, and build a model without inputs for the task's input shape.

        Args:
            task: that made the model.

        Raises:
            ConfigError: the model's inputs or outputs are not those of the task.
        """
        self._task = task
        try:
            if not _has_inputs(self.keras):
                self._use(self._fresh())
            self.targets = self._ordered_targets()
            self._order_of_inputs(list(task.input_shapes))
        except ConfigError as error:
            raise ConfigError(f"task {task.config.name!r}: build(): {error}") from None

    def _use(self, model: Network) -> None:
        """Adopt a Keras model with its weights and, if it states its outputs, the targets that they imply."""
        self.keras = model
        if len({weight.path for weight in self.keras.weights}) != len(self.keras.weights):
            raise FederationError("two weights of the model have the same path; give its layers different names")
        trained, written = {id(weight) for weight in self.keras.trainable_variables}, _written_in_training(self.keras)
        self.variables: dict[str, Variable] = {}
        self._frozen: dict[str, Variable] = {}
        for weight in self.keras.weights:
            if id(weight) in trained:
                self.variables[weight.path] = weight
            elif id(weight) in written:
                self.variables[STATE + weight.path] = weight
            else:
                self._frozen[weight.path] = weight
        self._kept: dict[str, Variable] = {}
        self._new: dict[str, NDArray] = {}
        self.targets = self._ordered_targets() if _has_inputs(model) else {}
        self._forward: Compiled | None = None
        self._forward_alone: Compiled | None = None

    def _fresh(self) -> Network:
        """Return a new model with reproducible automatic names.

        They are independent of models built earlier in this process.
        """
        keras = import_keras()
        keras.utils.clear_session(free_memory=False)
        model = self._build()
        if self._task is None or _has_inputs(model):
            return model
        dtype, shape = self._task.input_dtype, self._task.input_shape
        named, by_name = named_shapes(shape), isinstance(shape, Mapping)
        inputs = {name: keras.Input(own, name=name if by_name else None, dtype=dtype) for name, own in named.items()}
        # The model's `call` takes its inputs as the task states their shapes: by name, in order, or alone.
        given = inputs[""] if "" in inputs else inputs if by_name else list(inputs.values())
        outputs = model(given)
        return model if _has_inputs(model) else keras.Model(given, outputs)

    def _ordered_targets(self) -> dict[str, Target]:
        """Return the targets in the order of the model's outputs; without a task, those that the outputs imply.

        Raises:
            ConfigError: the task has targets of other names than the model's outputs.
        """
        outputs = self.keras.outputs
        if self._task is not None:
            stated, names = self._task.targets, _names(self.keras.output if len(outputs) > 1 else None, outputs)
            order = _places("outputs", names, [output.shape[1:] for output in outputs], list(stated), "target")
            targets = {list(stated)[place]: list(stated.values())[place] for place in order}
        else:
            targets = {}
            for name, output in zip(_names(None, outputs), outputs, strict=True):
                shape = tuple(output.shape[1:])
                target = (
                    Target("mse", shape[:-1]) if shape[-1:] == (1,) else Target(shape=shape[:-1], classes=shape[-1])
                )
                targets[name if len(outputs) > 1 else ""] = target
        return targets

    def initialise(self, seed: int) -> None:
        """Draw new initial weights and state; equal seeds give equal weights. Frozen weights stay."""
        import_keras().utils.set_random_seed(seed)
        fresh = {weight.path: weight for weight in self._fresh().weights}
        for variable in (*self.variables.values(), *self._kept.values()):
            variable.assign(fresh[variable.path])

    def arrays(self) -> dict[str, NDArray]:
        """Return a copy of every weight that is sent, by path."""
        return _copied(self.variables)

    def frozen(self) -> dict[str, NDArray]:
        """Return a copy of every weight that is neither trained nor state, by path."""
        return _copied(self._frozen)

    def keep_state(self) -> None:
        """Keep the state of the model out of what is sent, from now on.

        Raises:
            ConfigError: the model has no state.
        """
        self._kept = {name: variable for name, variable in self.variables.items() if is_state(name)}
        if not self._kept:
            raise ConfigError(
                "task.statistics = 'local' has no effect: no layer of the model has statistics, such as those of "
                "BatchNormalization; remove it"
            )
        self.variables = {name: variable for name, variable in self.variables.items() if name not in self._kept}
        self._new = self.kept()

    def kept(self) -> dict[str, NDArray]:
        """Return a copy of the state that is not sent, by name."""
        return _copied(self._kept)

    def assign_kept(self, arrays: NamedArrays | None) -> None:
        """Replace the state that is not sent; None: by that of a new model.

        Raises:
            FederationError: names or shapes are not this model's.
        """
        arrays = self._new if arrays is None else arrays
        check_same(arrays, self._kept)
        for name, variable in self._kept.items():
            variable.assign(arrays[name])

    def assign(self, arrays: NamedArrays) -> None:
        """Replace every weight that is sent.

        Raises:
            FederationError: names or shapes are not this model's.
        """
        check_same(arrays, self.variables)
        for path, variable in self.variables.items():
            variable.assign(arrays[path])

    def reseed(self, seed: int) -> None:
        """Set the seeds of dropout and similar layers.

        So a round is independent of earlier rounds.
        """
        weights = {id(weight) for weight in self.keras.weights}
        states = [variable for variable in self.keras.variables if id(variable) not in weights]
        for number, state in enumerate(filter(is_seed, states)):
            state.assign(np.array([(seed + number) % 2**31, 0], state.dtype))

    def given(self, x: NDArray) -> Tensor:
        """Return inputs as the Keras model takes them, in its own dtypes.

        Training, DP-SGD and predictions pass their inputs through this function.

        Args:
            x: n rows; each field is one of several inputs.

        Returns:
            An array of n inputs, or the list or dict of them that the model has.

        Raises:
            ConfigError: the model has other inputs.
        """
        own = fields(x)
        arrays, order = list(own.values()), self._order_of_inputs(list(own))
        pairs = zip(order, self.keras.inputs, strict=True)
        return _packed(self.keras, [cast(arrays[place], like.dtype) for place, like in pairs])

    def _order_of_inputs(self, stated: list[str]) -> list[int]:
        """Return the place among stated arrays of each of the model's inputs.

        Raises:
            ConfigError: the model has other inputs.
        """
        inputs = self.keras.inputs
        names = _names(self.keras.input if len(inputs) > 1 else None, inputs)
        return _places("inputs", names, [each.shape[1:] for each in inputs], stated, "input_shape")

    def expected(self, y: NDArray) -> list[NDArray]:
        """Return the targets of training, in the order of the model's outputs and in their dtypes.

        Args:
            y: n rows; each field is one of several targets.
        """
        own = fields(y)
        return [cast(own[name], target.dtype) for name, target in self.targets.items()]

    @property
    def specs(self) -> Tensor:
        """Return a `tf.TensorSpec` of a batch of any size, for each of the inputs of `given`."""
        import tensorflow as tf

        return _packed(self.keras, [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in self.keras.inputs])

    def losses(self, y: Sequence[Tensor], outputs: Tensor) -> list[Tensor]:
        """Return the losses of each output for each example: tensors of shape (n,), each depending on its row alone.

        Args:
            y: targets, as `expected` returns them.
            outputs: of the Keras model.

        Raises:
            ConfigError: a loss function of the task returns no loss for each example.
        """
        import tensorflow as tf

        flat = tf.nest.flatten(outputs)
        return [_each(target, *pair) for target, *pair in zip(self.targets.values(), y, flat, strict=True)]

    def predict(self, x: NDArray) -> NDArray:
        """Return the predictions for inputs.

        They are class probabilities of shape (n, classes), or the numbers of a regression, of shape (n,).
        """
        import tensorflow as tf

        if self._forward is None:
            self._forward = self._compile(self._at_once)
        size = self._predict_batch
        pieces = [self._forward(self.given(x[start : start + size])) for start in range(0, len(x), size)]
        return self._shaped(tf.nest.map_structure(lambda *parts: np.concatenate(parts), *pieces))

    def predict_alone(self, x: NDArray) -> NDArray:
        """Return the predictions for n > 0 inputs, each independent of the others.

        To the last bit, the output for a row depends on that row and the weights only.
        """

        def one_by_one(x: Tensor) -> Tensor:
            # Inside the graph: for a small model, calls from Python take eight times as long.
            import tensorflow as tf

            like = [tf.TensorSpec(output.shape[1:], output.dtype) for output in self.keras.outputs]

            def alone(row: Tensor) -> Tensor:
                return [output[0] for output in self._at_once(tf.nest.map_structure(lambda each: each[None], row))]

            return tf.map_fn(alone, x, parallel_iterations=1, fn_output_signature=like)

        if self._forward_alone is None:
            self._forward_alone = self._compile(one_by_one)
        return self._shaped(self._forward_alone(self.given(x)))

    def _shaped(self, outputs: Sequence[Tensor]) -> NDArray:
        """Return the outputs in the shapes of predictions, with a field for each of several."""
        pairs = zip(self.targets.items(), outputs, strict=True)
        shaped = {name: target.shaped(np.asarray(output)) for (name, target), output in pairs}
        return shaped[""] if set(shaped) == {""} else as_rows(shaped)

    def _at_once(self, x: Tensor) -> Tensor:
        import tensorflow as tf

        found: list[Tensor] = tf.nest.flatten(self.keras(x, training=False))
        return found

    def _compile(self, forward: Compiled) -> Compiled:
        import tensorflow as tf

        return tf.function(forward, input_signature=[self.specs])

    def configuration(self) -> object:
        """Return the architecture as `save` writes it.

        Raises:
            NotImplementedError: a class of the task's own has no `get_config`, and arguments that Keras cannot store.
        """
        return import_keras().saving.serialize_keras_object(self.keras)

    def save(self, path: Path) -> None:
        """Write the model in Keras' own format."""
        with atomic_path(path) as partial:
            self.keras.save(partial)

    def load(self, path: Path) -> None:
        """Replace every weight by those in a file that `save` wrote.

        Only weights are read: no code of the file is run.

        Raises:
            DataError: the file contains no model of this architecture.
        """
        try:
            self.keras.load_weights(path)
        except (ValueError, TypeError, KeyError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error):
            raise DataError(f"{path} holds no model of this task: a .keras file of it was expected") from None


def _packed(model: Network, inputs: Sequence[object]) -> Tensor:
    """Return one value for each input of a model, in the structure of its inputs."""
    if len(inputs) == 1:
        return inputs[0]
    return import_keras().tree.pack_sequence_as(model.input, list(inputs))


def _has_inputs(model: Network) -> bool:
    """Return whether a model states its inputs and outputs, as functional models do."""
    return bool(getattr(model, "inputs", None))


def _names(structure: object, tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of a model's inputs or outputs, in Keras' order.

    Args:
        structure: of several tensors; the names are the keys of a dict.
        tensors: of the model. A list of inputs is named by `Input`, a list of outputs by their layers.
    """
    if isinstance(structure, dict):
        return sorted(structure)
    return [tensor._keras_history.operation.name for tensor in tensors]


def _places(what: str, names: list[str], shapes: Sequence[object], stated: list[str], key: str) -> list[int]:
    """Return, for each input or output of the model, the place of the task's array for it.

    Args:
        what: `inputs` or `outputs`.
        names, shapes: of the model's.
        stated: names of the task's arrays; numbers stand for the order of the model.
        key: attribute of the task that names the arrays.

    Raises:
        ConfigError: the two do not agree.
    """
    if len(names) == len(stated) == 1 or stated == [str(place) for place in range(len(names))]:
        return list(range(len(names)))
    if sorted(names) == sorted(stated):
        return [stated.index(name) for name in names]
    own = ", ".join(f"{name!r} {shape}" for name, shape in zip(names, shapes, strict=True))
    task = "one array without a name" if stated == [""] else ", ".join(map(repr, stated))
    raise ConfigError(
        f"the model has the {what} {own}, and the task {task}; give Examples a tuple of arrays in this order, or a "
        f"dict by these names, and state {key} alike"
    )


def _each(target: Target, y: Tensor, outputs: Tensor) -> Tensor:
    """Return the loss of each example, shape (n,): the mean over the numbers of its target."""
    import keras

    is_column = len(outputs.shape) == len(target.shape) + 2 and outputs.shape[-1] == 1
    if is_column and target.loss == "binary-cross-entropy":
        y = keras.ops.expand_dims(y, -1)  # Keras takes the logits of a sigmoid only where its output is not reshaped
    elif tuple(outputs.shape[1:]) != target.output_shape:
        outputs = keras.ops.reshape(outputs, (-1, *target.output_shape))
    if callable(target.loss):
        each = target.loss(y, outputs)
        if not len(each.shape):
            raise ConfigError(NO_LOSSES.format(shape=tuple(each.shape)))
    elif target.loss == "cross-entropy":
        each = keras.losses.sparse_categorical_crossentropy(y, outputs)
    elif target.loss == "binary-cross-entropy":
        each = keras.ops.binary_crossentropy(y, outputs)
    elif target.loss == "mae":
        each = keras.ops.absolute(outputs - y)
    else:
        each = keras.ops.square(outputs - y)
    return keras.ops.mean(each, axis=tuple(range(1, len(each.shape)))) if len(each.shape) > 1 else each


def _written_in_training(model: Network) -> frozenset[int]:
    """Return the identities of the weights that a training call writes without a gradient.

    The call is on zeros, and its writes go to a scope that is dropped. Models whose weights are all trained, or in
    layers that are not, need none.
    """
    settled = {id(weight) for layer in model._flatten_layers() if not layer.trainable for weight in layer.weights}
    settled |= {id(weight) for weight in model.trainable_variables}
    if all(id(weight) in settled for weight in model.weights):
        return frozenset()
    keras = import_keras()
    inputs = [np.zeros([size or 2 for size in one.shape], one.dtype) for one in model.inputs]
    with keras.StatelessScope() as scope:
        model(_packed(model, inputs), training=True)
    return frozenset(id(weight) for weight in model.weights if scope.get_current_value(weight) is not None)


def _copied(variables: Mapping[str, Variable]) -> dict[str, NDArray]:
    return {path: np.array(variable.numpy()) for path, variable in variables.items()}
