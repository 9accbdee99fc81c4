"""Calls of a PyTorch module for one unit, which leave no trace for the next one.

A unit's gradient must be a function of the unit, its random numbers and the weights. PyTorch computes eagerly, so that
a module may keep something of a unit, in any of its objects. It is closed off in three places:

    module      each unit is computed in a deep copy of it, with copies of parameters and buffers, thrown away after it
    generators  those of torch, NumPy and Python that are global are seeded for each unit
    memory      that is not initialized is filled, and algorithms that follow timing are off

What a module or its loss keeps outside of the module is not seen: in a class attribute, a global variable, a variable
of an enclosing function, or a file. That they keep nothing there is a premise.
"""

import copy
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from cloister.privacy.dpsgd.nested import Examples, mapped
from cloister.utils.arrays import Network, Tensor
from cloister.utils.errors import ConfigError
from cloister.utils.rows import cast

Loss = Callable[[Any, Any], Tensor]
"""Losses of shape (rows,) from labels and the module's outputs, each of its own example alone."""


def tensors_of(examples: Examples, like: Examples, device: Any) -> Any:
    """Return examples as tensors on a device, in the dtypes of the probe."""
    return mapped(
        lambda own, rows: torch.from_numpy(np.ascontiguousarray(cast(rows, own.dtype))).to(device), like, examples
    )


def losses_of(module: Network, loss: Loss, x: Any, y: Any) -> Tensor:
    """Return the losses of examples, shape (rows,).

    Args:
        module: called with a tensor; with the tensors of a tuple or list in order, of a dict by name.
        loss, x, y: of the examples.

    Raises:
        ConfigError: the loss function returns another type or shape.
    """
    outputs = module(**x) if isinstance(x, dict) else module(*x) if isinstance(x, (tuple, list)) else module(x)
    losses = loss(y, outputs)
    found: list[Tensor] = []
    mapped(found.append, x)
    rows = tuple(found[0].shape[:1])
    if not isinstance(losses, torch.Tensor) or tuple(losses.shape) != rows:
        got = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ConfigError(f"loss must give one number per example, shape {rows}; got {got}")
    return losses


def named(module: Network, part: Network) -> str:
    """Return the name and the type of a layer of a module, for messages."""
    name = next((name for name, each in module.named_modules() if each is part), "")
    return f"layer {name!r} ({type(part).__name__})" if name else f"the module ({type(part).__name__})"


def layer_at(error: BaseException, module: Network, otherwise: str) -> str:
    """Name the innermost layer of a module, or of a copy of it, whose call raised an exception.

    Args:
        error: that was raised.
        module: with the layer.
        otherwise: returned if no layer was being called.
    """
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    whole: Network = next((each for each in callers if type(each) is type(module)), module)
    parts = {id(part) for part in whole.modules()}
    found = [each for each in callers if id(each) in parts]
    return named(whole, found[-1]) if found else otherwise


@contextmanager
def copies(module: Network) -> Iterator[Callable[[], Network]]:
    """Yield a function that returns a new deep copy of a module, in training mode.

    Parts in evaluation mode stay so if the whole is in training already. Gradients are enabled in the block.
    """
    with torch.inference_mode(False), torch.enable_grad():
        own = copy.deepcopy(module)
        if not own.training:
            own.train()
        yield partial(copy.deepcopy, own)


@contextmanager
def seedable(module: Network) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds the global generators; put back their states after the block."""
    device = next(module.parameters()).device
    devices = [device] if device.type != "cpu" else []
    own = {"cuda": torch.cuda.manual_seed, "mps": torch.mps.manual_seed}.get(device.type)
    numpy, python = np.random.get_state(), random.getstate()

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)  # `torch.manual_seed` is slow where a device is absent
        if own:
            own(number)
        np.random.seed(number % 2**32)
        random.seed(number)

    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield seed
        finally:
            np.random.set_state(numpy)
            random.setstate(python)


@contextmanager
def equal_results(fill: bool = True) -> Iterator[None]:
    """Have equal inputs give equal results in the block, in the precision of the tensors.

    Algorithms whose results follow from timing raise an exception. Mixed precision is disabled: a sum in fewer bits
    would exceed the bound. `torch_checks.refuse_coarse_precision` refuses settings that have no block.

    Args:
        fill: whether memory that is not initialized is filled. A graph without such memory is faster without.
    """
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills, tries = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark = False
    accelerator = torch.accelerator.current_accelerator()
    try:
        with ExitStack() as stack:
            for device in ("cpu", *([accelerator.type] if accelerator else [])):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = tries
