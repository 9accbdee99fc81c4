"""Uses of trained parameters in the graph of a PyTorch module's losses, and the graph of the gradients of each row.

Each trained parameter is used at some operation of the graph of losses, `Use`. The gradient of a row with respect to
the parameter follows from the inputs and from the gradient with respect to the output of that operation. A second graph
computes both, by the formulas of PyTorch's autograd, and the squared norms of the gradients.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from cloister.privacy.dpsgd.labels import Label, Refused, Rows, Unproved
from cloister.privacy.dpsgd.torch_forms import Form, joined, of_positions, of_whole
from cloister.privacy.dpsgd.torch_isolation import labels, prove
from cloister.privacy.dpsgd.torch_isolation_rules import arguments_of, is_tagged, name_of, shape_of, tensors_in
from cloister.privacy.dpsgd.torch_tracing import Inputs, NotCapturable, graph_of, traced
from cloister.utils.arrays import Tensor

VIEWS = {
    *("t.default", "transpose.int", "permute.default", "view.default", "_unsafe_view.default", "unsqueeze.default"),
    *("squeeze.dim", "squeeze.dims", "slice.Tensor", "select.int", "alias.default", "clone.default"),
}
"""Operations that take each entry of a parameter at most once: a gradient keeps its norm on the way back."""
MAKES_ROWS = ("expand.default", "mm.default", "addmm.default")
"""Operations that give a row for each example from parameters, and from numbers that depend on no example."""
NORMS = {"native_layer_norm.default": "input", "native_group_norm.default": "input"}


@dataclass(frozen=True)
class Shape:
    """Number of units, and of the rows of each.

    Attributes:
        units: U ≥ 2.
        cap: examples of a unit.
    """

    units: int
    cap: int


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
            if name_of(node) in MAKES_ROWS and shape_of(node)[:1] == (rows,) != shape_of(mine[0][1])[:1]:
                uses[node] = Use(node, {name: derived[each] for name, each in mine})
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
    if name in ("mm.default", "addmm.default", "bmm.default", "convolution.default", "embedding.default", *NORMS):
        return name
    return "pointwise" if is_tagged(node.target) else ""


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
        self.module = traced(graph_of(self._held, flat), flat)  # autograd writes to its own sums
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
        """Return the label of a use of a parameter, by that of its output, or by the rows that it makes."""
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
        if name == "bmm.default":
            return self._of_matrices(argument, own, delta, label)
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

    def _of_matrices(self, argument: str, own: Any, delta: Tensor, label: Rows) -> Gradient:
        """Return gradients of several matrices, each of which multiplies inputs of its own from the right."""
        if argument != "mat2" or label.axis != 1:
            raise NotCapturable(
                "a product of several matrices has a parameter to the left, or units along another axis"
            )
        left, right = (self._by_unit(each.movedim(1, 0), label) for each in (own["self"].detach(), delta))
        if left.shape[2] == 1:
            return Gradient((left.squeeze(2), right.squeeze(2)))  # (U, T, numbers)
        return Gradient((left.permute(0, 2, 3, 1) @ right.transpose(1, 2),))

    def _of_convolution(self, argument: str, own: Any, delta: Tensor, label: Rows) -> Gradient:
        if argument == "bias":
            return Gradient((self._by_unit(delta.flatten(2).sum(2), label).sum(1),))
        given, groups = own["input"].detach(), own["groups"]
        if own["transposed"]:  # then each input is multiplied with a patch of outputs
            given, delta = delta, given
        patches = _patches(given, own["weight"].shape[2:], own["stride"], own["padding"], own["dilation"])
        flat = delta.flatten(2)  # (rows, out, positions)
        if patches.shape[2] != flat.shape[2]:
            raise NotCapturable("a transposed convolution with more outputs than its inputs reach has no form")
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


def _patches(
    given: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return the inputs of each position of a convolution, shape (rows, in·taps, positions)."""
    count = len(kernel)
    settings = [list(each) * count if len(each) == 1 else list(each) for each in (stride, padding, dilation)]
    given = torch.nn.functional.pad(given, [each for own in reversed(settings[1]) for each in (own, own)])
    for axis, (size, step, _, spread) in enumerate(zip(kernel, *settings, strict=True), 2):
        given = given.unfold(axis, spread * (size - 1) + 1, step)[..., ::spread]
    places, taps = range(2, 2 + count), range(2 + count, 2 + 2 * count)
    return given.permute(0, 1, *taps, *places).flatten(1, 1 + count).flatten(2)
