"""Checks that refuse PyTorch modules and settings without a guarantee for DP-SGD, with the reason and a remedy."""

import copy
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from cloister.privacy.dpsgd.descent import refuse_coarse_modes
from cloister.privacy.dpsgd.labels import NotIsolated
from cloister.privacy.dpsgd.nested import Examples, Probe, check_probe, mapped
from cloister.privacy.dpsgd.torch_calls import (
    Loss,
    copies,
    equal_results,
    layer_at,
    losses_of,
    named,
    seedable,
    tensors_of,
)
from cloister.utils.arrays import Network, Tensor
from cloister.utils.crash import explained
from cloister.utils.errors import CloisterError, ConfigError, UnsupportedModel

DTYPES = (torch.float32, torch.float64)
GROUPS = 32
"""Most groups of a suggested `GroupNorm`."""
EXACT = ("none", "ieee")
"""Settings of a backend under which products of float32 numbers are products of float32 numbers."""


@contextmanager
def as_unsupported_module(module: Network) -> Iterator[None]:
    """Convert third-party exceptions to UnsupportedModel, with the layer, the type and the place.

    The message is omitted, except for the owner of the data (`crash.for_owner`).
    """
    try:
        yield
    except CloisterError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{layer_at(error, module, 'the module or its loss')} fails on made-up examples, with {explained(error)}"
        ) from error


def why_in_turn(error: Exception, module: Network) -> str:
    """Return why a module is not computed in rows, with the layer where it is known.

    Args:
        error: raised by `TorchInRows`.
        module: that is computed in turn.
    """
    if isinstance(error, NotIsolated):
        return f"the module or its loss is not proved to keep examples apart: {error.kind} {error.reason}"
    if isinstance(error, CloisterError):
        return str(error)
    return f"{layer_at(error, module, 'the module or its loss')} fails with several examples: {explained(error)}"


def trained(module: Network) -> list[Tensor]:
    """Return the parameters that DP-SGD trains.

    Raises:
        UnsupportedModel: there are none, or one has no shape yet, a dtype without a guarantee, or a device of its own.
    """
    found = {name: own for name, own in module.named_parameters() if own.requires_grad}
    if not found:
        raise UnsupportedModel("the module has no parameters to train; set requires_grad = True on some")
    devices = {own.device for own in module.parameters()}
    if len(devices) > 1:
        raise UnsupportedModel(
            f"the module has parameters on {' and '.join(sorted(map(str, devices)))}; move it to one"
        )
    for name, own in found.items():
        if torch.nn.parameter.is_lazy(own):
            raise UnsupportedModel(f"parameter {name!r} has no shape yet; call the module once in build")
        if own.dtype not in DTYPES:
            raise UnsupportedModel(
                f"parameter {name!r} is {own.dtype}, whose norms are too coarse to bound; use float32"
            )
    return list(found.values())


def refuse(module: Network, loss: Loss, probe: Probe) -> None:
    """Refuse a module that DP-SGD cannot train.

    Args:
        module, loss, probe: as in `torch_step.TorchDpSgd`.

    Raises:
        UnsupportedModel: the module cannot be trained with DP-SGD, with the reason and the replacement.
        ConfigError: the probe has another number of examples, or the loss does not return a number for each.
    """
    check_probe(probe)
    own = trained(module)
    x, y = (tensors_of(given, given, own[0].device) for given in probe)
    for part in module.modules():
        for reason in _reasons(part):
            raise UnsupportedModel(f"{named(module, part)} {reason}")
    _refuse_without_copies(module)
    with as_unsupported_module(module), copies(module) as fresh, equal_results(), seedable(module) as seed:
        for part in (whole := fresh()).modules():  # in training mode
            for reason in _reasons(part):
                raise UnsupportedModel(f"{named(whole, part)} {reason}")
        seed(0)
        losses = losses_of(whole, loss, x, y)
        if not losses.requires_grad:
            raise UnsupportedModel("the loss depends on no parameter of the module with requires_grad = True")
        within = [each for each in whole.parameters() if each.requires_grad]
        found = torch.autograd.grad(losses.sum(), [*within, *own], allow_unused=True)
        if any(gradient is not None for gradient in found[len(within) :]):
            raise UnsupportedModel(
                "the module or its loss uses parameters by a function that refers to the module from outside; use self "
                "in a method of the module instead"
            )
        _refuse_changes(module, whole)
        _refuse_mixing(module, fresh(), loss, x, y)


def _refuse_without_copies(module: Network) -> None:
    """Refuse a module that has no deep copy, in which a unit is computed, with the attribute that prevents it."""
    remedy = "DP-SGD computes each unit in copy.deepcopy of the module; keep there what has copies"
    try:
        copied = copy.deepcopy(module)
    except Exception as error:
        for part in module.modules():
            values = {**vars(part), **part._parameters, **part._buffers}
            for name in ("_modules", "_parameters", "_buffers"):
                values.pop(name, None)
            for name, value in values.items():
                try:
                    copy.deepcopy(value)
                except Exception as own:
                    raise UnsupportedModel(
                        f"{named(module, part)} has no copy, as {name!r} is of type {type(value).__name__}; {remedy}, "
                        "make it in forward, detach a tensor, or use torch.nn.utils.parametrizations for a norm"
                    ) from own
        raise UnsupportedModel(f"the module ({type(module).__name__}) has no copy; {remedy}") from error
    within = {id(each) for part in copied.modules() for each in (part, *(own for _, own in _held(part)))}
    for part in module.modules():
        if within & {id(part), *(id(own) for _, own in _held(part))}:
            raise UnsupportedModel(f"{named(module, part)} is shared with copies of the module; {remedy}")


def _refuse_changes(module: Network, called: Network) -> None:
    """Refuse a module if a call has changed parameters, buffers or other tensors of a copy of it.

    What a unit changes is lost with its copy in any case: this tells the owner that such a module cannot learn by it.
    """
    now = {(place, name): own for place, part in called.named_modules() for name, own in _held(part)}
    for place, part in module.named_modules():
        for name, own in _held(part):
            new = now.get((place, name))
            if new is None or new.shape != own.shape or not bool(((new == own) | (new != new) & (own != own)).all()):
                raise UnsupportedModel(
                    f"{named(module, part)} changes {name!r} while training: state learnt from data without noise; use "
                    "a layer without state, such as torch.nn.GroupNorm for a normalization"
                )


def _refuse_mixing(module: Network, copied: Network, loss: Loss, x: Examples, y: Examples) -> None:
    """Refuse a module if, in a copy of it on random inputs, a tensor changes or a loss depends on another example.

    One unit at a time, such a module would be another one than in training without privacy.
    """
    numbers: list[Tensor] = []
    outputs: list[tuple[Network, Tensor]] = []

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        numbers.append(torch.rand_like(tensor).requires_grad_())
        return numbers[-1].clone()  # which the module may change in place

    def mixes(rows: Tensor) -> bool:
        if not isinstance(rows, torch.Tensor) or not rows.requires_grad or not rows.ndim or not numbers:
            return False
        found = torch.autograd.grad(rows[0].sum(), numbers, allow_unused=True, retain_graph=True)
        # A zero may have become NaN where a slope is infinite.
        return any(bool(((own[1:] != 0) & own[1:].isfinite()).any()) for own in found if own is not None)

    for part in copied.modules():
        part.register_forward_hook(lambda part, _, output: outputs.append((part, output)))
    losses = losses_of(copied, loss, mapped(drawn, x), y)
    _refuse_changes(module, copied)
    if mixes(losses):
        place = next((named(copied, part) for part, output in outputs if mixes(output)), "the loss")
        raise UnsupportedModel(
            f"{place} takes the examples of a batch together, so that none has a gradient of its own; use a layer that "
            "works on each example alone, as torch.nn.GroupNorm does for BatchNorm"
        )


def _held(part: Network) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, buffers and other tensors that are attributes of one layer, with their names."""
    for name, value in [*part._parameters.items(), *part._buffers.items(), *vars(part).items()]:
        if isinstance(value, torch.Tensor):
            yield name, value


def _reasons(part: Network) -> Iterator[str]:
    if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and (part.training or part.running_mean is None):
        # A group of one number, as of features without positions, has no variance.
        groups = 1 if isinstance(part, torch.nn.BatchNorm1d) else math.gcd(GROUPS, part.num_features)
        yield (
            f"normalises an example with the others of its batch; use torch.nn.GroupNorm({groups}, {part.num_features})"
        )
    if isinstance(part, torch.jit.ScriptModule) or type(part).__module__.startswith("torch._dynamo"):
        yield "is compiled, and what it computes may follow from earlier calls; compile nothing in build"
    for name, value in vars(part).items():
        if hasattr(value, "_torchdynamo_orig_callable"):
            yield f"has a compiled function, {name!r}, whose results may follow from calls; compile nothing in build"
        if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)):
            yield f"draws from {name!r}, a generator of its own; draw by torch.rand and the like"


def use_single_precision() -> None:
    """Disable products of float32 numbers in fewer bits in this process, which break bounds, and let cuBLAS repeat."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its products are refused as not repeatable
    torch.set_float32_matmul_precision("highest")
    refuse_coarse_precision()


def refuse_coarse_precision() -> None:
    """Refuse settings under which float32 products may be coarser than float32.

    Raises:
        ConfigError: a setting of PyTorch or of the environment allows TensorFloat-32 or bfloat16 products.
    """
    backends = torch.backends
    places = {
        "torch.backends.cuda.matmul": backends.cuda.matmul,
        "torch.backends.mkldnn.matmul": backends.mkldnn.matmul,
    }
    for name, place in places.items():
        if place.fp32_precision not in EXACT:
            raise ConfigError(
                f"{name}.fp32_precision is {place.fp32_precision!r}, and clipping cannot be bounded in it; leave "
                "torch.set_float32_matmul_precision('highest') as DP-SGD sets it"
            )
    refuse_coarse_modes()
