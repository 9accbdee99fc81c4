"""Graphs of operations of ATen, in fixed shape: that of a PyTorch module's losses.

`make_fx` writes down the operations of ATen that PyTorch computes for made-up tensors, from parameters, buffers and
examples to losses. Control flow that depends on numbers, and numbers that leave PyTorch, raise an exception there. What
is traced is all that is computed later: a module or a loss that keeps something outside of itself cannot pass it on.
Operations without a rule of `torch_isolation` are written as PyTorch's decompositions compute them.
The draws of dropout become inputs: uniform numbers, of which each row has its own.
Attributes other than parameters and buffers are those at the time of tracing. So are the effects of hooks and of a
function's own backward: those that act on extreme numbers alone are lost.
"""

import pickle
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._decomp import decomposition_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from cloister.privacy.dpsgd.nested import Probe, arrays_in, mapped
from cloister.privacy.dpsgd.torch_calls import Loss, losses_of
from cloister.privacy.dpsgd.torch_isolation import refuse_effects
from cloister.privacy.dpsgd.torch_isolation_rules import RULES, arguments_of, is_tagged, name_of, shape_of
from cloister.utils.arrays import Network, Tensor
from cloister.utils.errors import PrivacyError


class NotCapturable(PrivacyError):
    """Error for a module that cannot be traced with several examples, or a parameter without a form."""


class Inputs(NamedTuple):
    """Flat inputs of a graph, in this order.

    Attributes:
        trained, others: names of parameters that are trained, and of other parameters and buffers.
        x, y: numbers of arrays. Uniform numbers of draws follow them.
    """

    trained: list[str]
    others: list[str]
    x: int
    y: int

    def parts(self, flat: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Return the values of each part."""
        ends = [len(self.trained), len(self.trained) + len(self.others)]
        ends.append(ends[-1] + self.x)
        return flat[: ends[0]], flat[ends[0] : ends[1]], flat[ends[1] : ends[2]], flat[ends[2] : ends[2] + self.y]


class _Losses(torch.nn.Module):
    """A module that returns the losses of its examples."""

    def __init__(self, module: Network, loss: Loss, probe: Probe) -> None:
        super().__init__()
        self.module, self._loss, self._probe = module, loss, probe

    def forward(self, x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
        given = (_structured(own, like) for own, like in zip((x, y), self._probe, strict=True))
        return losses_of(self.module, self._loss, *given)


def _structured(flat: Sequence[Tensor], like: Any) -> Any:
    rest = iter(flat)
    return mapped(lambda _: next(rest), like)


def inputs_of(module: Network, probe: Probe) -> Inputs:
    """Return the inputs of the graphs of a module."""
    named = dict(module.named_parameters())
    trained = [name for name, own in named.items() if own.requires_grad]
    others = [name for name in named if name not in trained] + [name for name, _ in module.named_buffers()]
    return Inputs(trained, others, *(len(arrays_in(given)) for given in probe))


def values_of(module: Network, inputs: Inputs) -> list[Tensor]:
    """Return the current parameters and buffers of a module, as a graph takes them."""
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [every[name].detach() for name in (*inputs.trained, *inputs.others)]


def losses_graph(module: Network, loss: Loss, probe: Probe, inputs: Inputs, flat: Sequence[Tensor]) -> GraphModule:
    """Return the graph of the losses, shape (rows,), from flat inputs.

    Args:
        module: a copy of its own, which tracing may change.
        loss, probe: as in `torch_step.TorchDpSgd`.
        inputs: of the graph.
        flat: values of these shapes.

    Returns:
        The graph. Behind its other inputs are uniform numbers, one tensor for each draw.

    Raises:
        Unproved: the graph has an effect.
        NotCapturable: a global generator has changed meanwhile, or the module reaches parameters or buffers in
            another way than by their names. Their numbers at the time of tracing would be part of the graph.
        Exception: of any kind, from the module or from tracing.
    """
    whole = _Losses(module, loss, probe)

    def losses(*flat: Tensor) -> Tensor:
        trained, others, x, y = inputs.parts(flat)
        names = (f"module.{name}" for name in (*inputs.trained, *inputs.others))
        values = dict(zip(names, (*trained, *others), strict=True))
        return torch.func.functional_call(whole, values, (list(x), list(y)))

    before = _generators()
    graph = traced(losses, flat, _draws_as_inputs, _products_of_a_weight_as_one)
    if _generators() != before:
        raise NotCapturable("the module or its loss draws numbers by Python or NumPy, or seeds a generator")
    named = (*module.parameters(), *module.buffers(), *flat[: len(inputs.trained) + len(inputs.others)])
    own = {each.untyped_storage().data_ptr() for each in named}
    for node in graph.graph.nodes:
        if node.op == "get_attr" and getattr(graph, node.target).untyped_storage().data_ptr() in own:
            raise NotCapturable(
                "the module or its loss reaches a parameter or a buffer by more than the attribute of its layer"
            )
    return graph


def _generators() -> tuple[Any, ...]:
    """Return the states of the global generators."""
    numpy = pickle.dumps(np.random.get_state())
    return random.getstate(), numpy, torch.default_generator.get_state().numpy().tobytes()


def _draws_as_inputs(graph: Graph) -> None:
    """Replace each draw of dropout by uniform numbers that are below its probability."""
    aten = torch.ops.aten
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.target is aten.bernoulli.p]:
        like, probability = node.meta["val"], arguments_of(node)["p"]
        with graph.inserting_after(last):
            last = graph.placeholder(f"uniform_{node.name}")
        with graph.inserting_before(node):
            below = graph.call_function(aten.lt.Scalar, (last, probability))
            drawn = graph.call_function(aten._to_copy.default, (below,), {"dtype": like.dtype})
        last.meta["val"] = torch.empty(like.shape, dtype=torch.float32, device="meta")
        below.meta["val"] = torch.empty(like.shape, dtype=torch.bool, device="meta")
        drawn.meta["val"] = like
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)


def _products_of_a_weight_as_one(graph: Graph) -> None:
    """Replace products of a batch of matrices with copies of one matrix, as of a layer's weight, by one product."""
    aten = torch.ops.aten
    for node in [node for node in graph.nodes if node.target is aten.bmm.default]:
        left, right = node.args
        same = right.target is aten.view.default and shape_of(right) == shape_of(right.args[0])
        copies = right.args[0] if same else right
        if copies.target is not aten.expand.default or shape_of(copies.args[0]) != shape_of(right)[1:]:
            continue
        count, rows, size = shape_of(left)
        with graph.inserting_before(node):
            packed = graph.call_function(aten.clone.default, (left,), {"memory_format": torch.contiguous_format})
            flat = graph.call_function(aten.view.default, (packed, [count * rows, size]))
            made = graph.call_function(aten.mm.default, (flat, copies.args[0]))
            whole = graph.call_function(aten.view.default, (made, list(shape_of(node))))
        packed.meta["val"], whole.meta["val"] = left.meta["val"], node.meta["val"]
        flat.meta["val"], made.meta["val"] = left.meta["val"].flatten(0, 1), node.meta["val"].flatten(0, 1)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def traced(function: Any, flat: Sequence[Tensor], *changes: Callable[[Graph], None]) -> GraphModule:
    """Return the graph of a function, changed, without operations that write or that no output needs."""
    with sdpa_kernel(SDPBackend.MATH):
        found = graph_of(torch.func.functionalize(function), flat)
        called = (node.target for node in found.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
        if any(target._schema.is_mutable for target in called):  # as of attention with dropout, in a first pass
            found = graph_of(torch.func.functionalize(found), flat)
    for change in (_memory_of_zeros, *changes):
        change(found.graph)
    found.graph.eliminate_dead_code()
    found.recompile()
    refuse_effects(found.graph)
    return found


def _memory_of_zeros(graph: Graph) -> None:
    """Replace memory that is not initialized by zeros, so that results depend on inputs alone."""
    aten = torch.ops.aten
    zeros = {aten.empty_like.default: aten.zeros_like.default, aten.new_empty.default: aten.new_zeros.default}
    for node in graph.nodes:
        node.target = zeros.get(node.target, node.target)


def graph_of(function: Any, flat: Sequence[Tensor]) -> GraphModule:
    """Return the graph of a function, in which PyTorch's decompositions replace operations without a rule."""
    return make_fx(function, _decompositions(), "fake", _allow_non_fake_inputs=True)(*flat)


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return functions that compute operations without a rule by others."""
    found = {}
    for each, simpler in decomposition_table.items():
        if not isinstance(each, torch._ops.OpOverload) or is_tagged(each) or name_of(each) in RULES:
            continue
        if each._schema.is_mutable or any(part in name_of(each) for part in ("diagonal", "empty", "scatter")):
            continue  # these write to memory, or do not fill it
        if any("Tensor" in str(own.type) for own in each._schema.arguments):  # others depend on no unit
            found[each] = simpler
    return found
