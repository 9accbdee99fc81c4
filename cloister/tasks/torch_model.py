"""PyTorch models for the federation: parameters are sent, and buffers that training writes are state."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from cloister.tasks.base import NamedArrays, Task
from cloister.tasks.numpy_models import check_same
from cloister.tasks.targets import NO_LOSSES, Loss, Target
from cloister.utils.arrays import Network, Tensor
from cloister.utils.errors import ConfigError, DataError, NodeConfigError
from cloister.utils.files import atomic_path
from cloister.utils.rows import as_rows, cast, fields
from cloister.utils.state import STATE

PREDICT_BATCH = 1024
FLOATS = (torch.float16, torch.float32, torch.float64)
"""The dtypes of arrays that can be sent; NumPy has no others."""
CPU = torch.device("cpu")


class TorchModel:
    """Model whose arrays are identified by the names in the module's state dict.

    What is sent is decided for each array. Parameters with `requires_grad` are sent. Float buffers that a call in
    training mode writes are state, such as the running means of `BatchNorm2d`. All other arrays are frozen, and keep
    the values that `build` gives. A buffer that training writes and that has no average (a count of batches) is neither
    sent nor frozen: each training starts it at the value that `build` gives.

    The outputs are what PyTorch's losses take: logits for `cross-entropy` and `binary-cross-entropy`, else numbers.
    Classes are on axis 1 of an output, as in `CrossEntropyLoss`, or on its last axis. Predictions are probabilities,
    unless the task's loss is a function.

    A module receives several inputs as arguments, by the names that `input_shape` gives, or in its order. It returns
    several outputs as a mapping by the names of the targets, or as a tuple in their order. A submodule that `build`
    puts into evaluation mode stays so in training; a module that is wholly in evaluation mode is trained.

    Args:
        build: makes the module, with random numbers of a fixed seed.
        predict_batch: examples that `predict` scores at once; the activations of a batch must fit into memory.
        loss: of training, for a model of one output; None: that of the task's target.

    Attributes:
        module: the module; there is one after `bind`, as for the other attributes.
        targets: of training, in the order of the task.
        device: that holds the module, its inputs and outputs.
        normalises_batches: whether a training batch needs two examples.
    """

    kind = "torch"
    suffix = ".safetensors"

    def __init__(
        self, build: Callable[[], nn.Module], predict_batch: int = PREDICT_BATCH, loss: Loss | None = None
    ) -> None:
        self._build, self._predict_batch, self._loss = build, predict_batch, loss

    def bind(self, task: Task) -> None:
        """Build the module for the targets and the inputs of a task.

        Args:
            task: that made the model.

        Raises:
            ConfigError: an array of the module cannot be sent or saved.
        """
        self._task, self._predicted = task, task.targets
        self.targets = dict(self._predicted)
        if self._loss is not None and len(self.targets) == 1:
            self.targets = {name: replace(target, loss=self._loss) for name, target in self.targets.items()}
        self.device, self.module = CPU, self._fresh(0)
        if not self.module.training:
            self.module.train()
        self._modes = [(part, part.training) for part in self.module.modules()]
        self.normalises_batches = any(mode and isinstance(part, _BatchNorm) for part, mode in self._modes)
        for name, parameter in self.trained.items():
            if parameter.dtype not in FLOATS:
                raise ConfigError(
                    f"task {task.config.name!r}: build(): parameter {name!r} of {parameter.dtype} cannot be sent; make "
                    "it float32, or frozen with requires_grad_(False)"
                )
        saved = self.module.state_dict()
        for name, value in saved.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"task {task.config.name!r}: build(): {name!r} of the state dict is no tensor, and cannot be saved "
                    "without pickle; store it in a buffer, or leave out get_extra_state"
                )
        buffers, written = dict(self.module.named_buffers()), self._written()
        averaged = [name for name in buffers if name in written and name in saved and buffers[name].dtype in FLOATS]
        self._restarted = {name: buffers[name].clone() for name in buffers if name in written and name not in averaged}
        self._sent = {name: name for name in self.trained} | {STATE + name: name for name in averaged}
        apart = {*self.trained, *written}
        whole = [name for name, _ in self.module.named_parameters()] + list(buffers)
        self._frozen = {name: name for name in whole if name in saved and name not in apart}
        self._kept: dict[str, str] = {}
        self._new: dict[str, NDArray] = {}
        self.move("auto")

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, by name."""
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def _fresh(self, seed: int) -> nn.Module:
        """Return a new module on the CPU, with weights of a seed."""
        with seeded(CPU, seed), torch.no_grad():
            module = self._build()
            if any(nn.parameter.is_lazy(each) for each in module.parameters()):
                called(module, self._inputs(self._placeholders(), module, CPU))
        return module

    def _placeholders(self) -> NDArray:
        """Return two made-up inputs: random ones, or zeros if inputs are whole numbers, which may be ids."""
        x = self._task.placeholders(2).x
        for array in fields(x).values():
            if array.dtype.kind == "f":
                array[...] = np.random.default_rng(0).random(array.shape)
        return x

    def placeholders(self, count: int) -> NDArray:
        """Return inputs of zeros, in the shapes of the task."""
        return self._task.placeholders(count).x

    def _written(self) -> set[str]:
        """Return the names of the buffers that a call in training mode writes. The call is of a copy."""
        trial = copy.deepcopy(self.module)
        before = {}
        with seeded(CPU, 0), torch.no_grad():
            for name, buffer in trial.named_buffers():
                if buffer.is_floating_point():
                    buffer.add_(1)  # a running mean may be that of the inputs already
                before[name] = buffer.clone()
            if before:
                called(trial, self._inputs(self._placeholders(), trial, CPU))
        return {
            name for name, after in trial.named_buffers() if name in before and not torch.equal(before[name], after)
        }

    def move(self, device: str) -> None:
        """Keep the module on a device from now on, and compute there.

        Args:
            device: `cpu`, `cuda` or `mps`; `auto` takes a GPU if there is one.

        Raises:
            NodeConfigError: this machine has no such device.
        """
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        if device == "auto":
            device = next(name for name, usable in there.items() if usable)
        if not there.get(device):
            raise NodeConfigError(f"device = {device!r}: PyTorch finds no such device on this machine; use auto or cpu")
        self.device = torch.device(device)
        self.module.to(self.device)

    @contextmanager
    def in_training(self, seed: int) -> Iterator[None]:
        """Put the module into training mode for a block.

        The masks of dropout depend on the seed alone. PyTorch's own generator stays as it was.

        Args:
            seed: of random layers.
        """
        self._write({name: name for name in self._restarted}, self._restarted)
        for part, mode in self._modes:
            part.training = mode
        try:
            with seeded(self.device, seed):
                yield
        finally:
            self.module.eval()

    def initialise(self, seed: int) -> None:
        """Draw new initial weights and state; equal seeds give equal weights. Frozen weights stay."""
        fresh = _tensors(self._fresh(seed))
        self._write({name: name for name in (*self._sent.values(), *self._kept.values())}, fresh)

    def arrays(self) -> dict[str, NDArray]:
        """Return a copy of every array that is sent, by name."""
        return self._copied(self._sent)

    def frozen(self) -> dict[str, NDArray]:
        """Return a copy of every array that is neither trained nor state, by name."""
        return self._copied(self._frozen)

    def assign(self, arrays: NamedArrays) -> None:
        """Replace every array that is sent.

        Raises:
            FederationError: names or shapes are not this model's.
        """
        self._replace(self._sent, arrays)

    def keep_state(self) -> None:
        """Keep the state of the model out of what is sent, from now on.

        Raises:
            ConfigError: the model has no state.
        """
        self._kept = {name: own for name, own in self._sent.items() if own not in self.trained}
        if not self._kept:
            raise ConfigError(
                "task.statistics = 'local' has no effect: training writes no buffer of the model, such as those of "
                "BatchNorm2d; remove it"
            )
        self._sent = {name: own for name, own in self._sent.items() if name not in self._kept}
        self._new = self.kept()

    def kept(self) -> dict[str, NDArray]:
        """Return a copy of the state that is not sent, by name."""
        return self._copied(self._kept)

    def assign_kept(self, arrays: NamedArrays | None) -> None:
        """Replace the state that is not sent; None: by that of a new model.

        Raises:
            FederationError: names or shapes are not this model's.
        """
        self._replace(self._kept, self._new if arrays is None else arrays)

    def _copied(self, names: Mapping[str, str]) -> dict[str, NDArray]:
        own = _tensors(self.module)
        return {name: _array(own[place]) for name, place in names.items()}

    def _replace(self, names: Mapping[str, str], arrays: NamedArrays) -> None:
        own = _tensors(self.module)
        check_same(arrays, {name: np.broadcast_to(np.float32(0), own[place].shape) for name, place in names.items()})
        # A copy: the arrays of a message are read-only, and may have any order of bytes.
        read = {name: np.array(array, array.dtype.newbyteorder("=")) for name, array in arrays.items()}
        self._write(names, {names[name]: torch.from_numpy(array) for name, array in read.items()})

    def _write(self, names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
        """Write tensors into those of the module, by their names there."""
        own = _tensors(self.module)
        with torch.no_grad():
            for place in names.values():
                own[place].copy_(tensors[place])

    def given(self, x: NDArray) -> Tensor:
        """Return inputs as the module takes them, on its device.

        Floats are in the dtype of its parameters, other numbers in the task's `input_dtype`.

        Args:
            x: n rows; each field is one of several inputs.

        Returns:
            A tensor; of several inputs a dict by name or a tuple in order.
        """
        return self._inputs(x, self.module, self.device)

    def _inputs(self, x: NDArray, module: nn.Module, device: torch.device) -> Tensor:
        kind = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
        floats = np.dtype(self._task.input_dtype).kind == "f"
        dtype = ("float64" if kind == torch.float64 else "float32") if floats else self._task.input_dtype

        def tensor(array: NDArray) -> Tensor:
            own = torch.from_numpy(np.array(cast(array, dtype), order="C"))  # a copy, which the module may write
            return own.to(device, kind if floats else own.dtype)

        named = {name: tensor(array) for name, array in fields(x).items()}
        if set(named) == {""}:
            return named[""]
        return named if isinstance(self._task.input_shape, Mapping) else tuple(named.values())

    def expected(self, y: NDArray) -> list[Tensor]:
        """Return the targets of training in the order of `targets`, on the module's device.

        Args:
            y: n rows; each field is one of several targets.
        """
        own = fields(y)
        arrays = [np.array(cast(own[name], target.dtype), order="C") for name, target in self.targets.items()]
        return [torch.from_numpy(array).to(self.device) for array in arrays]

    def losses(self, y: Sequence[Tensor], outputs: object) -> list[Tensor]:
        """Return the losses of each output for each example: tensors of shape (n,), each depending on its row alone.

        Args:
            y: targets, as `expected` returns them.
            outputs: of the module.

        Raises:
            ConfigError: outputs do not fit the targets, or a loss function returns no loss for each example.
        """
        found = self._ordered(outputs)
        return [_each(target, *pair) for target, *pair in zip(self.targets.values(), y, found, strict=True)]

    def _ordered(self, outputs: object) -> list[Tensor]:
        """Return the outputs of the module in the order of the targets.

        Raises:
            ConfigError: there is no output for each target.
        """
        names = list(self.targets)
        if isinstance(outputs, torch.Tensor):
            found: list[Tensor] = [outputs]
        elif isinstance(outputs, Mapping):
            own = list(outputs) if names == [""] else names
            found = [outputs[name] for name in own if name in outputs]
        else:
            found = list(outputs) if isinstance(outputs, tuple | list) else []
        if len(found) != len(names) or not all(isinstance(each, torch.Tensor) for each in found):
            given = ", ".join(map(repr, outputs)) if isinstance(outputs, Mapping) else f"{len(found)}"
            wanted = (
                "one tensor" if names == [""] else f"a dict of {', '.join(map(repr, names))}, or a tuple in this order"
            )
            raise ConfigError(
                f"task {self._task.config.name!r}: build(): the module returns a {type(outputs).__name__} of outputs "
                f"({given}); return {wanted}"
            )
        return found

    def predict(self, x: NDArray) -> NDArray:
        """Return the predictions for inputs, in batches.

        They are class probabilities of shape (n, classes), or those of another target.
        """
        size = self._predict_batch
        return self._joined([self._predictions(x[start : start + size]) for start in range(0, len(x), size)])

    def predict_alone(self, x: NDArray) -> NDArray:
        """Return the predictions for n > 0 inputs, each computed by itself.

        To the last bit, the output for a row depends on that row and the weights only.
        """
        return self._joined([self._predictions(x[place : place + 1]) for place in range(len(x))])

    def _predictions(self, x: NDArray) -> list[NDArray]:
        """Return the predictions of each output for a batch."""
        self.module.eval()
        with seeded(self.device, 0), torch.no_grad():
            outputs = self._ordered(called(self.module, self.given(x)))
            pairs = zip(self._predicted.values(), outputs, strict=True)
            return [_array(_activated(target, shaped(target, output))) for target, output in pairs]

    def _joined(self, pieces: Sequence[Sequence[NDArray]]) -> NDArray:
        """Return the predictions of all batches, with a field for each of several outputs."""
        named = {name: np.concatenate(parts) for name, *parts in zip(self._predicted, *pieces, strict=True)}
        return named[""] if set(named) == {""} else as_rows(named)

    def save(self, path: Path) -> None:
        """Write the module's state dict with the safetensors library; the header's metadata names its class and task.

        `load_state_dict(safetensors.torch.load_file(path))` loads it into a module of this class.
        """
        tensors = {name: each.detach().to(CPU) for name, each in self.module.state_dict().items()}
        # Shared and transposed tensors have no place in the format: each is written by itself.
        plain = {name: each.clone(memory_format=torch.contiguous_format) for name, each in tensors.items()}
        kind = type(self.module)
        about = {"format": "pt", "class": f"{kind.__module__}.{kind.__qualname__}", "task": self._task.config.name}
        with atomic_path(path) as partial:
            safetensors.torch.save_file(plain, partial, {**about, "model": self._task.model_name})

    def load(self, path: Path) -> None:
        """Replace every array by those in a file that `save` wrote. No pickle is read, and no code of the file is run.

        Raises:
            DataError: the file contains no state dict of this module.
        """
        try:
            self.module.load_state_dict(safetensors.torch.load_file(path))
        except (SafetensorError, RuntimeError, OSError, ValueError, KeyError, TypeError):
            raise DataError(f"{path} holds no model of this task: a .safetensors file of it was expected") from None


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw PyTorch's random numbers from a seed in a block, and restore its generators after it."""
    own = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(own, device_type="cuda"):
        torch.manual_seed(seed)
        yield


def called(module: Network, x: Tensor) -> Tensor:
    """Return the outputs of a module for inputs as `TorchModel.given` returns them."""
    if isinstance(x, Mapping):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


def shaped(target: Target, outputs: Tensor) -> Tensor:
    """Return outputs in the shape (n, *output_shape), with classes on the last axis; others stay as they are."""
    own = tuple(outputs.shape[1:])
    if target.classes and target.shape and own == (target.classes, *target.shape):
        return outputs.movedim(1, -1)
    fits = math.prod(own) == math.prod(target.output_shape)
    return outputs.reshape(outputs.shape[0], *target.output_shape) if fits else outputs


def _activated(target: Target, outputs: Tensor) -> Tensor:
    """Return probabilities for the logits of a classification, and other outputs as they are."""
    if target.loss == "cross-entropy":
        return functional.softmax(outputs, -1)
    return torch.sigmoid(outputs) if target.loss == "binary-cross-entropy" else outputs


def _each(target: Target, y: Tensor, outputs: Tensor) -> Tensor:
    """Return the loss of each example, shape (n,): the mean over the numbers of its target."""
    outputs = shaped(target, outputs)
    if tuple(outputs.shape[1:]) != target.output_shape:
        raise ConfigError(
            f"build(): outputs of shape {tuple(outputs.shape[1:])} for each example, expected {target.output_shape}; "
            f"{target.remedy_for_outputs}"
        )
    if callable(target.loss):
        each = target.loss(y, outputs)
        if not len(each.shape):
            raise ConfigError(NO_LOSSES.format(shape=tuple(each.shape)))
    elif target.loss == "cross-entropy":
        each = functional.cross_entropy(outputs.movedim(-1, 1), y, reduction="none")
    elif target.loss == "binary-cross-entropy":
        each = functional.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), reduction="none")
    elif target.loss == "mae":
        each = torch.abs(outputs - y)
    else:
        each = torch.square(outputs - y)
    return each.flatten(1).mean(1) if len(each.shape) > 1 else each


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the buffers of a module by name, as they are now."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _array(tensor: Tensor) -> NDArray:
    """Return a copy as a NumPy array; numbers of a dtype that NumPy lacks are integers of the same bits."""
    own = tensor.detach().to(CPU)
    if own.dtype not in FLOATS and own.is_floating_point():
        own = own.view({1: torch.uint8, 2: torch.int16}[own.itemsize])
    return np.array(own.numpy())
