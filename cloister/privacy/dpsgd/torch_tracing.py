"""Graphs of a PyTorch module in fixed shape: its losses, and from them what holds the gradients of each row.

`make_fx` writes down the operations of ATen that PyTorch computes for made-up tensors, from parameters, buffers and
examples to losses. Control flow that depends on numbers, and numbers that leave PyTorch, raise an exception there. What
is traced is all that is computed later: a module or a loss that keeps something outside of itself cannot pass it on.
The draws of dropout become inputs: uniform numbers, of which each row has its own.
Attributes other than parameters and buffers are those at the time of tracing. So are the effects of hooks and of a
function's own backward: those that act on extreme numbers alone are lost.

Each trained parameter is used at some operation of this graph, `Use`. The gradient of a row with respect to the
parameter follows from the inputs and from the gradient with respect to the output of that operation. A second graph
computes both, by the formulas of PyTorch's autograd, and the squared norms of the gradients.
"""

import operator
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from cloister.privacy.dpsgd.labels import Label, Refused, Rows, Unproved
from cloister.privacy.dpsgd.nested import Probe, arrays_in, mapped
from cloister.privacy.dpsgd.torch_calls import Loss, losses_of
from cloister.privacy.dpsgd.torch_forms import Form, joined, of_positions, of_whole
from cloister.privacy.dpsgd.torch_isolation import (
    _is_tagged,
    arguments_of,
    labels,
    name_of,
    prove,
    refuse_effects,
    shape_of,
    tensors_in,
)
from cloister.utils.arrays import Network, Tensor
from cloister.utils.errors import PrivacyError

VIEWS = {
    *("t.default", "transpose.int", "permute.default", "view.default", "_unsafe_view.default", "unsqueeze.default"),
    *("squeeze.dim", "squeeze.dims", "slice.Tensor", "select.int", "alias.default", "clone.default"),
}
"""Operations that take each entry of a parameter at most once: a gradient keeps its norm on the way back."""
NORMS = {"native_layer_norm.default": "input", "native_group_norm.default": "input"}


class NotCapturable(PrivacyError):
    """Error for a module that cannot be traced with several examples, or a parameter without a form."""


@dataclass(frozen=True)
class Shape:
    """Number of units, and of the rows of each.

    Attributes:
        units: U ≥ 2.
        cap: examples of a unit.
    """

    units: int
    cap: int


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


class _Losses(torch.nn.Module):  # type: ignore[misc]
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
    made = _traced(losses, flat, _draws_as_inputs, _products_of_a_weight_as_one)
    if _generators() != before:
        raise NotCapturable("the module or its loss draws numbers by Python or NumPy, or seeds a generator")
    named = (*module.parameters(), *module.buffers(), *flat[: len(inputs.trained) + len(inputs.others)])
    own = {each.untyped_storage().data_ptr() for each in named}
    for node in made.graph.nodes:
        if node.op == "get_attr" and getattr(made, node.target).untyped_storage().data_ptr() in own:
            raise NotCapturable(
                "the module or its loss reaches a parameter or a buffer by more than the attribute of its layer"
            )
    return made


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


def _traced(function: Any, flat: Sequence[Tensor], *changes: Callable[[Graph], None]) -> GraphModule:
    """Return the graph of a function, changed, without operations that write or that no output needs."""
    with sdpa_kernel(SDPBackend.MATH):
        made = _made(torch.func.functionalize(function), flat)
        called = (node.target for node in made.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
        if any(target._schema.is_mutable for target in called):  # as of attention with dropout, in a first pass
            made = _made(torch.func.functionalize(made), flat)
    for change in changes:
        change(made.graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    refuse_effects(made.graph)
    return made


def _made(function: Any, flat: Sequence[Tensor]) -> GraphModule:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)


@dataclass
class Use:
    """A use of trained parameters, at one operation of the graph of losses.

    Attributes:
        node: of the operation.
        parameters: for each argument, the number of the parameter and its views on the way to the operation.
    """

    node: Node
    parameters: dict[str, tuple[int, tuple[Node, ...]]] = field(default_factory=dict)


def uses_of(graph: Graph, found: dict[Node, Any], inputs: Inputs, rows: int) -> dict[Node, Use]:
    """Return the uses of trained parameters by their operations.

    Args:
        graph: of losses.
        found: labels of its tensors.
        inputs: of the graph.
        rows: of examples.

    Raises:
        NotCapturable: a parameter is used in a way that has no form.
    """
    derived = dict(zip(graph.nodes, ((number, ()) for number in range(len(inputs.trained))), strict=False))
    uses: dict[Node, Use] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        arguments = arguments_of(node)
        mine = [(name, each) for name, own in arguments.items() for each in tensors_in(own) if each in derived]
        if not mine:
            continue
        number, views = derived[mine[0][1]]
        what = f"parameter {inputs.trained[number]!r}"
        label = first_of(found[node])
        if isinstance(label, Refused):
            raise label.error
        if label is None:
            if name_of(node) == "expand.default" and shape_of(node)[:1] == (rows,) != shape_of(mine[0][1])[:1]:
                uses[node] = Use(node, {"self": (number, views)})
            elif len(mine) == 1 and name_of(node) in VIEWS:
                derived[node] = number, (*views, node)
            else:
                raise NotCapturable(f"{what} is changed by {node.target} before it is used")
        elif _form_name(node) == "":
            raise NotCapturable(f"{what} is used by {node.target}, which has no form")
        else:
            uses[node] = Use(node, {name: derived[each] for name, each in mine})
            if len(uses[node].parameters) != len(mine):
                raise NotCapturable(f"{what} is joined with others by {node.target}")
    return uses


def first_of(label: Any) -> Label:
    """Return the label of the first output of an operation."""
    return label[0] if isinstance(label, list) else label


def _form_name(node: Node) -> str:
    name = name_of(node)
    if name in ("mm.default", "addmm.default", "convolution.default", "embedding.default", *NORMS):
        return name
    return "pointwise" if _is_tagged(node) else ""


class Gradient(NamedTuple):
    """Gradients of rows with respect to one view of a parameter: two factors, or one whole tensor.

    Attributes:
        held: (U, T, in) and (U, T, out), or (U, *view.shape).
        turned: whether the factors are of (out, in).
        size: rows of a table, of which the first factor is indices, shape (U, T, 1); 0 for others.
    """

    held: tuple[Tensor, ...]
    turned: bool = False
    size: int = 0

    def whole(self, shape: Sequence[int]) -> Tensor:
        """Return the gradients, shape (U, *shape)."""
        if len(self.held) == 1:
            return self.held[0].reshape(-1, *shape)
        if self.size:
            raise NotCapturable("a table is used in other ways too")
        one, other = self.held[::-1] if self.turned else self.held
        return (one.transpose(1, 2) @ other).reshape(-1, *shape)


@dataclass
class Part:
    """Gradients with respect to one parameter.

    Attributes:
        number: of the parameter among those that are trained.
        form: of the gradients.
        views: on the way from the parameter to what the gradients are of.
        shape: of the latter.
        bytes: of the held tensors of a round.
    """

    number: int
    form: Form
    views: tuple[Node, ...]
    shape: tuple[int, ...]
    bytes: int

    def back(self, summed: Tensor, like: Tensor) -> Tensor:
        """Return a sum of gradients with respect to the parameter."""
        summed = summed.reshape(self.shape)
        if not self.views:
            return summed
        start = torch.zeros(like.shape, dtype=summed.dtype, requires_grad=True)
        value = start
        for node in self.views:
            target: Any = node.target
            value = target(*(value if isinstance(each, Node) else each for each in node.args), **node.kwargs)
        return torch.autograd.grad(value, start, summed)[0]


class HeldGraph:
    """Graph of one round: from parameters, buffers, examples and their shares to held tensors and squared norms.

    Args:
        losses: graph of losses.
        inputs: of that graph.
        shape: of the round.
        flat: values of parameters, buffers and examples.

    Attributes:
        module: the graph. Its last inputs are uniform numbers, and the shares of examples in the losses of their
            units. Its last output are the squared norms.
        draws: shapes of the uniform numbers.
        parts: in the order of the other outputs.

    Raises:
        NotIsolated: an operation is not proved to keep units apart.
        NotCapturable: a parameter is used in a way that has no form.
    """

    def __init__(self, losses: GraphModule, inputs: Inputs, shape: Shape, flat: Sequence[Tensor]) -> None:
        self._losses, self._inputs, self._shape = losses.graph, inputs, shape
        self._constants = losses
        self.parts: list[Part] = []
        self._found = labels(losses.graph, shape.units, self._given(losses.graph))
        self._uses = uses_of(losses.graph, self._found, inputs, shape.units * shape.cap)
        every = [node for node in losses.graph.nodes if node.op == "placeholder"]
        self.draws = [shape_of(node) for node in every[len(flat) :]]
        shares = torch.ones(shape.units * shape.cap, dtype=torch.float64)
        flat = [*flat, *map(torch.zeros, self.draws), shares]
        self.module = _traced(_made(self._held, flat), flat)  # autograd writes to its own sums
        output = next(node for node in self.module.graph.nodes if node.op == "output")
        targets = tensors_in(output.args[0])
        self._proved = prove(self.module.graph, shape.units, self._given(self.module.graph), targets)

    def _given(self, graph: Graph) -> dict[Node, Label]:
        """Return the labels of inputs: those behind parameters and buffers have examples in their rows."""
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        first = len(self._inputs.trained) + len(self._inputs.others)
        given: dict[Node, Label] = {}
        for node in inputs[first:]:
            length = (*shape_of(node), 0)[0]
            if not length or length % (self._shape.units * self._shape.cap):
                raise Unproved(f"has no row for each example: {shape_of(node)}").at("input", node.name)
            given[node] = Rows(0, length // self._shape.units)
        return given

    def _held(self, *flat: Tensor) -> list[Tensor]:
        """Return held tensors and squared norms; record their forms."""
        *given, shares = flat
        with torch.enable_grad():
            losses, outputs, inputs = self._forward(given)
            wanted = [each for each in outputs.values() if each.requires_grad]
            found = torch.autograd.grad(losses, wanted, shares.to(losses.dtype), allow_unused=True)
        deltas = dict(zip((id(each) for each in wanted), found, strict=True))
        gradients: dict[int, list[tuple[tuple[Node, ...], Gradient]]] = {}
        for (node, name), output in outputs.items():
            delta = deltas.get(id(output))
            if delta is not None:
                use = self._uses[node]
                for argument, (number, views) in use.parameters.items():
                    if name in (argument, ""):
                        gradient = self._gradient(use, argument, inputs.get(node), delta.detach())
                        gradients.setdefault(number, []).append((views, gradient))
        with torch.no_grad():
            held, total = [], torch.zeros(self._shape.units, dtype=torch.float64)
            self.parts = []
            for number, several in sorted(gradients.items()):
                own, squared = self._part(number, several, given[number])
                held += own
                total = total + squared
        return [*(each.contiguous() for each in held), total]

    def _forward(self, given: Sequence[Tensor]) -> tuple[Tensor, dict[Any, Tensor], dict[Node, Any]]:
        """Return losses, the tensors with respect to which gradients are taken, and the inputs of uses."""
        values: dict[Node, Any] = {}
        outputs: dict[Any, Tensor] = {}
        kept: dict[Node, Any] = {}
        rest = iter(given)
        for node in self._losses.nodes:
            if node.op == "placeholder":
                values[node] = next(rest, None)
                continue
            if node.op == "get_attr":
                values[node] = getattr(self._constants, node.target)
                continue
            arguments, options = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: values[each])
            if node.op == "output":
                return arguments[0][0] if isinstance(arguments[0], (list, tuple)) else arguments[0], outputs, kept
            use = self._uses.get(node)
            if use is None:
                values[node] = node.target(*arguments, **options)
                continue
            named = arguments_of(node)
            own = torch.fx.node.map_arg(named, lambda each: values[each])
            if _form_name(node) in NORMS or _form_name(node) == "pointwise":
                values[node] = self._spread(use, own, outputs)
            else:
                made = node.target(*arguments, **options)
                if not made.requires_grad:
                    made = made.detach().requires_grad_()
                values[node] = outputs[node, ""] = made
                kept[node] = own
        raise NotCapturable("the graph of losses has no output")

    def _spread(self, use: Use, own: dict[str, Any], outputs: dict[Any, Tensor]) -> Any:
        """Compute a use in which each row has its own copy of the parameters, and record the copies."""
        name, node = name_of(use.node), use.node
        label = self._label(node)
        is_norm = name in NORMS
        made = node.meta["val"][0] if is_norm else node.meta["val"]

        def copied(argument: str, value: Tensor) -> Tensor:
            offset = made.ndim - value.ndim
            if is_norm and name == "native_group_norm.default":  # a number for each channel, along the second axis
                shape = [1, -1, *[1] * (made.ndim - 2)]
                value, offset = value.reshape(shape), 0
            shape = [1] * offset + list(value.shape)
            if offset < 0 or shape[label.axis] != 1:
                raise NotCapturable(f"{node.target} has a parameter of its own for each row")
            shape[label.axis] = made.shape[label.axis]
            copy = value.expand(shape).detach().requires_grad_()
            outputs[node, argument] = copy
            return copy

        if not is_norm:
            return node.target(
                **{key: copied(key, value) if key in use.parameters else value for key, value in own.items()}
            )
        weight, bias = own["weight"], own["bias"]
        target: Any = node.target
        result = list(target(**{**own, "weight": None, "bias": None}))
        for argument, value in (("weight", weight), ("bias", bias)):
            if value is None:
                continue
            if argument in use.parameters:
                each = copied(argument, value)
            elif name == "native_group_norm.default":
                each = value.reshape([1, -1, *[1] * (made.ndim - 2)])
            else:
                each = value
            result[0] = result[0] * each if argument == "weight" else result[0] + each
        return tuple(result)

    def _label(self, node: Node) -> Rows:
        """Return the label of a use of a parameter; `expand` makes a row of each example from a parameter alone."""
        label = first_of(self._found[node])
        return label if isinstance(label, Rows) else Rows(0, self._shape.cap)

    def _by_unit(self, tensor: Tensor, label: Rows) -> Tensor:
        """Return a tensor of shape (L, ...) with a label along the first axis as (U, T, ...)."""
        split = tensor.reshape(-1, self._shape.units, label.inner, *tensor.shape[1:])
        return split.transpose(0, 1).flatten(1, 2)

    def _gradient(self, use: Use, argument: str, own: Any, delta: Tensor) -> Gradient:
        name, node = name_of(use.node), use.node
        label = self._label(node)
        if name == "expand.default":
            shape = [1] * (delta.ndim - len(shape_of(node.args[0]))) + list(shape_of(node.args[0]))
            summed = [axis for axis in range(1, delta.ndim) if shape[axis] == 1 and delta.shape[axis] > 1]
            whole = delta.sum(summed, keepdim=True) if summed else delta
            return Gradient((self._by_unit(whole, Rows(0, self._shape.cap)).sum(1),))
        if label.axis != 0 and name in ("mm.default", "addmm.default", "convolution.default"):
            raise NotCapturable(f"{node.target} has units along another axis than the first")
        if name == "addmm.default" and argument == "self":
            return Gradient((self._by_unit(delta, label).sum(1),))
        if name in ("mm.default", "addmm.default"):
            left = "mat1" if "mat1" in own else "self"
            if argument != "mat2":
                raise NotCapturable(f"{node.target} has a parameter to the left")
            return Gradient((self._by_unit(own[left].detach(), label), self._by_unit(delta, label)))
        if name == "convolution.default":
            return self._of_convolution(argument, own, delta, label)
        if name == "embedding.default":
            return self._of_embedding(own, delta, label)
        moved = delta.movedim(label.axis, 0)
        rows = self._by_unit(moved, label).sum(1)  # (U, ...), the units' axis gone
        if name == "native_group_norm.default":
            return Gradient((rows.sum([axis for axis in range(1, rows.ndim) if axis != 1]),))
        return Gradient((rows,))

    def _of_convolution(self, argument: str, own: Any, delta: Tensor, label: Rows) -> Gradient:
        flat = delta.flatten(2)  # (rows, out, positions)
        if argument == "bias":
            return Gradient((self._by_unit(flat.sum(2), label).sum(1),))
        given, groups = own["input"].detach(), own["groups"]
        if own["transposed"] or given.ndim not in (3, 4):
            raise NotCapturable("a transposed or three-dimensional convolution has no form")
        kernel, settings = list(own["weight"].shape[2:]), [own[key] for key in ("dilation", "padding", "stride")]
        settings = [list(each) * (given.ndim - 2) if len(each) == 1 else list(each) for each in settings]
        if given.ndim == 3:
            given, kernel = given[:, :, None], [1, *kernel]
            settings = [[default, *each] for default, each in zip((1, 0, 1), settings, strict=True)]
        dilation, padding, stride = settings
        patches = torch.ops.aten.im2col(given, kernel, dilation, padding, stride)  # (rows, in·taps, positions)
        if groups == 1:
            pair = (self._by_unit(each.transpose(1, 2), label).flatten(1, 2) for each in (patches, flat))
            return Gradient(tuple(pair), turned=True)
        both = (each.unflatten(1, (groups, -1)) for each in (flat, patches))
        out, into = (self._by_unit(each, label) for each in both)  # (U, T, groups, numbers, positions)
        return Gradient(((out @ into.transpose(3, 4)).sum(1).flatten(1, 2),))

    def _of_embedding(self, own: Any, delta: Tensor, label: Rows) -> Gradient:
        if own["scale_grad_by_freq"] or label.axis != 0:
            raise NotCapturable("an embedding whose gradients are scaled, or whose rows are not of one example each")
        indices = own["indices"]
        kept = (indices != own["padding_idx"]).unsqueeze(-1)
        pair = indices.unsqueeze(-1), torch.where(kept, delta, torch.zeros_like(delta))
        flat = (self._by_unit(each, label).flatten(1, -2) for each in pair)
        return Gradient(tuple(flat), size=own["weight"].shape[0])

    def _part(
        self, number: int, several: list[tuple[tuple[Node, ...], Gradient]], parameter: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return held tensors and squared norms of a parameter, and append its part."""
        views = several[0][0]
        shape = tuple(views[-1].meta["val"].shape) if views else tuple(parameter.shape)
        chains = {tuple((str(node.target), str(node.args[1:])) for node in views) for views, _ in several}
        if len(chains) > 1:
            raise NotCapturable(f"parameter {self._inputs.trained[number]!r} is used in different orders of its axes")
        gradients = [gradient for _, gradient in several]
        if all(len(each.held) == 2 for each in gradients) and len({each[1:] for each in gradients}) == 1:
            inputs, deltas = (joined(same, 1) for same in zip(*(each.held for each in gradients), strict=True))
            form, held, squared = of_positions(inputs, deltas, *gradients[0][1:])
            if form.kernel == "whole":
                held = [held[0].reshape(-1, *shape)]
        else:
            first, *rest = (each.whole(shape) for each in gradients)
            for each in rest:
                first = first + each
            form, held, squared = of_whole(first)
        self.parts.append(Part(number, form, views, shape, sum(each.nbytes for each in held)))
        return held, squared

    def sizes(self) -> Iterator[int]:
        """Yield the bytes of each tensor of the graph that has rows of units."""
        for node, label in self._proved.items():
            if isinstance(label, Rows):
                yield node.meta["val"].nbytes
