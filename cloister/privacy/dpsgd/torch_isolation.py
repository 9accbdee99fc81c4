"""Proof that each row of a traced PyTorch graph depends on the data of one unit alone.

`labels` follows the units from a graph's inputs through its operations. The graph consists of operations of ATen, as
`make_fx` writes them down: all that PyTorch computes, forward and backward, in fixed shapes. `RULES` has a rule for an
operation; an operation without one is refused as soon as an input depends on a unit. Elementwise operations are those
that PyTorch tags so, and whose outputs have the shape of their inputs.

Rules describe what an operation computes. As in `isolation_rules`, that a kernel computes each row of a call of fixed
shape from this row alone is a premise. An index may raise an exception for integers of a unit's own data alone.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from cloister.privacy.dpsgd.labels import (
    Label,
    Mixes,
    NotIsolated,
    Refused,
    Rows,
    Unproved,
    adding,
    agreed,
    broadcast,
    misfit,
    product,
)


@dataclass(frozen=True)
class Step:
    """Operation with its arguments by name, and the labels of those that are tensors."""

    node: Node
    arguments: Mapping[str, Any]
    found: Mapping[Node, Any]
    units: int

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def shape(self, name: str = "self") -> tuple[int, ...]:
        """Return the shape of a tensor that is an argument."""
        return shape_of(self.arguments[name])

    @property
    def made(self) -> tuple[int, ...]:
        """Return the shape of the output."""
        return shape_of(self.node)

    def labels(self, name: str) -> list[Label]:
        """Return the labels of an argument: one for each tensor in it."""
        return [self.found[each] for each in tensors_in(self.arguments[name])]

    def only(self, *names: str) -> Rows:
        """Return the common label of some arguments; all others must have none."""
        others = (label for name in self.arguments if name not in names for label in self.labels(name))
        return agreed((label for name in names for label in self.labels(name)), others)

    def axes(self, dims: Any, rank: int) -> set[int]:
        """Return axes counted from the first; all of them if there are none."""
        given = [dims] if isinstance(dims, int) else list(dims or ())
        return {axis % rank for axis in given} or set(range(rank))


Rule: TypeAlias = Callable[[Step], Label | Sequence[Label]]
RULES: dict[str, Rule] = {}
"""Rule of each operation with inputs of units, by the name of its overload. A rule gives a label for each output."""


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape that an operation's only output had while tracing."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise _unproved(node, "gives several outputs in the place of one")
    return tuple(map(int, value.shape))


def tensors_in(argument: Any) -> list[Node]:
    """Return the tensors in an argument, in order."""
    if isinstance(argument, Node):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [each for part in argument for each in tensors_in(part)]
    return []


def arguments_of(node: Node) -> dict[str, Any]:
    """Return all arguments of a call by name, defaults included."""
    target: Any = node.target
    schema = target._schema.arguments
    found = {each.name: each.default_value for each in schema}
    found.update(zip((each.name for each in schema), node.args, strict=False))
    found.update(node.kwargs)
    return found


def name_of(node: Node) -> str:
    """Return the name of an operation of ATen without its namespace, as in `RULES`."""
    return str(node.target).removeprefix("aten.")


def refuse_effects(graph: Graph) -> None:
    """Refuse a graph that writes to a tensor, draws random numbers or reads memory that is not initialized.

    Args:
        graph: without operations that no output needs.

    Raises:
        Unproved: such an operation is in the graph.
    """
    called = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    for node in called:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise _unproved(node, "is no operation of ATen")
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise _unproved(node, "draws random numbers")
    for node in called:
        if node.target._schema.is_mutable:
            raise _unproved(node, "writes to a tensor")
        if "empty" in name_of(node):
            raise _unproved(node, "gives memory that is not initialized")
        if not node.users:
            raise _unproved(node, "has an effect")


def prove(graph: Graph, units: int, given: Mapping[Node, Label], targets: Sequence[Node]) -> dict[Node, Any]:
    """Prove that each row of each target depends on one unit alone, or on no unit.

    Args:
        graph: of a traced function.
        units: at least 2.
        given: labels of inputs; those of others are None.
        targets: with a unit in each entry of the first axis, in order. Those that depend on no unit have any shape.

    Returns:
        The labels, as `labels`.

    Raises:
        Mixes: an operation takes several units together.
        Unproved: no rule covers an operation, or a target has its units in another order.
    """
    refuse_effects(graph)
    found = labels(graph, units, given)
    for target in targets:
        label = found[target]
        if isinstance(label, Refused):
            raise label.error
        if label is not None and (label != Rows(0) or shape_of(target)[0] != units):
            raise _unproved(target, f"does not give a row for each of {units} units in order: {label}")
    return found


def labels(graph: Graph, units: int, given: Mapping[Node, Label]) -> dict[Node, Any]:
    """Return the label of each tensor of a graph; of an operation with several outputs, a list of them.

    Args: as `prove`.
    """
    if units < 2:
        raise ValueError(f"units must be at least 2, got {units}")
    found: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            label: Any = given.get(node)
        elif node.op == "output":
            continue
        elif node.target is operator.getitem:
            several = found[node.args[0]]
            label = several[node.args[1]] if isinstance(several, list) else several
        else:
            label = _label(node, units, found)
        found[node] = label
        if isinstance(label, Rows) and (reason := misfit(label, shape_of(node), units)):
            found[node] = Refused(_unproved(node, reason))
    return found


def _label(node: Node, units: int, found: Mapping[Node, Any]) -> Any:
    arguments = arguments_of(node)
    own = [found[each] for argument in arguments.values() for each in tensors_in(argument)]
    refused = [label for label in own if isinstance(label, Refused)]
    several = isinstance(node.meta["val"], (list, tuple))
    if refused or all(label is None for label in own):
        label = refused[0] if refused else None
        return [label] * len(node.meta["val"]) if several else label
    step = Step(node, arguments, found, units)
    try:
        rule: Rule | None = RULES.get(name_of(node)) or (_elementwise if _is_tagged(node) else None)
        if rule is None:
            raise _unproved(node, "has no rule")
        made: Any = rule(step)
        if several and not isinstance(made, list):
            return [made] * len(node.meta["val"])
        return made
    except NotIsolated as error:
        error.at(str(node.target), node.name)
        return [Refused(error)] * len(node.meta["val"]) if several else Refused(error)


def _unproved(node: Node, reason: str) -> Unproved:
    return Unproved(reason).at(str(node.target), node.name)


def _is_tagged(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


_rule = partial(adding, RULES)


def _refuse_computed(step: Step, name: str) -> None:
    """Refuse an exception that may depend on more than the integers of a unit's own data; see `isolation`."""
    todo = tensors_in(step[name])
    while todo:
        node = todo.pop()
        if step.found[node] is None or node.op == "placeholder":
            continue
        value = node.meta["val"]
        moves = name_of(node) in MOVES or _is_tagged(node)
        if not moves or not isinstance(value, torch.Tensor) or value.is_floating_point():
            raise Unproved("may raise an exception for numbers that were computed")
        todo += node.all_input_nodes


MOVES = {
    *("_to_copy.default", "clone.default", "expand.default", "permute.default", "select.int", "slice.Tensor"),
    *("squeeze.dim", "squeeze.dims", "t.default", "transpose.int", "unsqueeze.default", "view.default"),
    *("_unsafe_view.default", "alias.default", "detach.default"),
}
"""Operations that pass on the integers of their input."""


# Rules that keep an axis ---------------------------------------------------------------------------------------------


@_rule(
    "_to_copy.default alias.default copy.default detach.default elu_backward.default fill.Scalar floor_divide.default "
    "hardsigmoid_backward.default hardswish.default hardswish_backward.default hardtanh_backward.default "
    "leaky_relu_backward.default lift_fresh_copy.default log_sigmoid_backward.default log_sigmoid_forward.default "
    "mish_backward.default softplus_backward.default"
)
def _elementwise(step: Step) -> Rows:
    """Return the common label of inputs that are aligned at their last axes.

    An axis of units is longer than 1, so it is never repeated.
    """
    every = [each for argument in step.arguments.values() for each in tensors_in(argument)]
    whole = tuple(torch.broadcast_shapes(*map(shape_of, every)))
    value = step.node.meta["val"]
    if any(tuple(each.shape) != whole for each in (value if isinstance(value, (list, tuple)) else [value])):
        raise Unproved("gives another shape than that of its inputs")
    integers = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    if integers and name_of(step.node).startswith(("div", "floor_divide", "fmod", "pow", "remainder")):
        raise Unproved("may raise an exception for integers")
    return broadcast([step.found[each] for each in every], [len(shape_of(each)) for each in every])


for _name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"):
    RULES[f"{_name}.default"] = lambda step: None


@_rule(
    "binary_cross_entropy_with_logits.default huber_loss.default huber_loss_backward.default mse_loss.default "
    "mse_loss_backward.default smooth_l1_loss.default smooth_l1_loss_backward.default soft_margin_loss.default "
    "soft_margin_loss_backward.default"
)
def _loss(step: Step) -> Label | Sequence[Label]:
    if step["reduction"]:
        raise Mixes("reduces the axis of units")
    return _elementwise(step)


def _apart(names: str, taken: Callable[[Step, int], Iterable[int]], reason: str, inputs: str = "self") -> None:
    """Add a rule that keeps the label of some inputs of equal rank if its axis is not taken."""

    def kept(step: Step) -> Label:
        own = inputs.split()
        return step.only(*own).outside(set(taken(step, len(step.shape(own[0])))), reason)

    _rule(names)(kept)


_apart(
    "_softmax.default _log_softmax.default _safe_softmax.default", lambda s, n: s.axes(s["dim"], n), "compares units"
)
_apart(
    "_softmax_backward_data.default _log_softmax_backward_data.default",
    lambda s, n: s.axes(s["dim"], n),
    "compares units",
    "grad_output output",
)
_apart(
    "cumsum.default cumprod.default glu.default sort.default sort.stable topk.default",
    lambda s, n: s.axes(s["dim"], n),
    "takes units together",
)
_apart("glu_backward.default", lambda s, n: s.axes(s["dim"], n), "takes units together", "grad_output self")
_apart("flip.default roll.default", lambda s, n: s.axes(s["dims"], n), "moves units to places of others")
_apart("tril.default triu.default", lambda s, n: (), "")
_apart("constant_pad_nd.default", lambda s, n: range(n - len(s["pad"]) // 2, n), "pads the axis of units")

_SPATIAL = "takes the axis of units for one of pixels"
_apart(
    "max_pool2d_with_indices.default avg_pool2d.default _adaptive_avg_pool2d.default adaptive_max_pool2d.default "
    "upsample_nearest2d.default upsample_nearest2d.vec reflection_pad2d.default replication_pad2d.default",
    lambda s, n: range(n - 2, n),
    _SPATIAL,
)
_apart("avg_pool2d_backward.default", lambda s, n: range(n - 2, n), _SPATIAL, "grad_output self")
_apart("_adaptive_avg_pool2d_backward.default", lambda s, n: range(n - 2, n), _SPATIAL, "grad_output self")
_apart("max_pool2d_with_indices_backward.default", lambda s, n: range(n - 2, n), _SPATIAL, "grad_output self indices")
_apart("im2col.default", lambda s, n: range(1, n) if n == 4 else range(n), _SPATIAL)


@_rule(
    "sum.dim_IntList mean.dim amax.default amin.default var.correction std.correction var_mean.correction "
    "prod.dim_int any.dim all.dim any.dims all.dims argmax.default argmin.default logsumexp.default max.dim min.dim "
    "linalg_vector_norm.default norm.ScalarOpt_dim"
)
def _reduced(step: Step) -> Label:
    axes = step.axes(step["dim"], len(step.shape()))
    label = step.only("self").outside(axes, "reduces the axis of units")
    return label if step["keepdim"] else label.without(axes)


@_rule(
    "sum.default mean.default max.default min.default prod.default any.default all.default equal.default "
    "var.default std.default"
)
def _reduced_to_one(step: Step) -> Label:
    raise Mixes("reduces the axis of units")


# Rules that move an axis ---------------------------------------------------------------------------------------------


@_rule("view.default _unsafe_view.default reshape.default")
def _reshaped(step: Step) -> Label:
    return step.only("self").reshaped(step.shape(), step.made, step.units)


@_rule("permute.default")
def _permuted(step: Step) -> Label:
    label, rank = step.only("self"), len(step.shape())
    return label.permuted([axis % rank for axis in step["dims"]])


@_rule("transpose.int t.default")
def _transposed(step: Step) -> Label:
    label, rank = step.only("self"), len(step.shape())
    if name_of(step.node) == "t.default":
        one, other = (0, 1) if rank == 2 else (0, 0)
    else:
        one, other = step["dim0"] % rank, step["dim1"] % rank
    return Rows({one: other, other: one}.get(label.axis, label.axis), label.inner)


@_rule("diagonal.default")
def _diagonal(step: Step) -> Label:
    """Return the label of a diagonal, which becomes the last axis."""
    taken = step.axes((step["dim1"], step["dim2"]), len(step.shape()))
    return step.only("self").outside(taken, "takes a diagonal along the axis of units").without(taken)


@_rule("unsqueeze.default")
def _unsqueezed(step: Step) -> Label:
    label = step.only("self")
    return label.beside(step["dim"] % len(step.made))


@_rule("squeeze.dim squeeze.dims")
def _squeezed(step: Step) -> Label:
    label, shape = step.only("self"), step.shape()
    given = [step["dim"]] if isinstance(step["dim"], int) else step["dim"]  # none, not all of them, if there are none
    gone = [axis for axis in {each % len(shape) for each in given} if shape[axis] == 1]
    return label.without(gone)


@_rule("expand.default")
def _expanded(step: Step) -> Label:
    return step.only("self").shifted(len(step.made) - len(step.shape()))


@_rule("repeat.default")
def _repeated(step: Step) -> Label:
    label = step.only("self").shifted(len(step.made) - len(step.shape()))
    if step["repeats"][label.axis] != 1:
        raise Unproved("repeats the axis of units")
    return label


@_rule("slice.Tensor slice_backward.default")
def _sliced(step: Step) -> Label:
    name = "self" if "self" in step.arguments else "grad_output"
    label, shape = step.only(name), step.shape(name)
    if label.axis == step["dim"] % len(shape) and step.made != shape:
        raise Unproved("takes a part of the units")
    return label


@_rule("select.int unbind.int")
def _selected(step: Step) -> Label:
    axes = step.axes(step["dim"], len(step.shape()))
    return step.only("self").outside(axes, "takes a part of the units", Unproved).without(axes)


@_rule("select_backward.default")
def _selected_backward(step: Step) -> Label:
    label = step.only("grad_output")
    return label.beside(step["dim"] % len(step.made))


_apart("split.Tensor split_with_sizes.default", lambda s, n: s.axes(s["dim"], n), "takes a part of the units")


@_rule("cat.default")
def _joined(step: Step) -> Label:
    label = step.only("tensors")
    if label.axis == step["dim"] % len(step.made):
        raise Unproved("appends units to others")
    return label


@_rule("stack.default")
def _stacked(step: Step) -> Label:
    label = step.only("tensors")
    return label.beside(step["dim"] % len(step.made))


# Rules of products, layers and losses --------------------------------------------------------------------------------


@_rule("mm.default addmm.default bmm.default baddbmm.default")
def _product(step: Step) -> Label:
    *added, left, right = (each for argument in step.arguments.values() for each in tensors_in(argument))
    label = product([step.found[left], step.found[right]], [len(shape_of(each)) for each in (left, right)])
    return agreed([label], [step.found[each] for each in added])


def _first(step: Step, *names: str) -> Rows:
    label = step.only(*names)
    if label.axis != 0:
        raise Mixes("has units along another axis than that of examples")
    return label


@_rule("convolution.default")
def _convolution(step: Step) -> Label:
    return _first(step, "input")


@_rule("convolution_backward.default")
def _convolution_backward(step: Step) -> Sequence[Label]:
    return _of_weights(step, _first(step, "grad_output", "input"))


def _of_weights(step: Step, label: Label) -> list[Label]:
    """Return labels of gradients with respect to the input, and to weights, which are sums over units."""
    sums = Refused(Mixes("adds up the gradients of units"))
    return [label, *(sums if wanted else None for wanted in step["output_mask"][1:])]


@_rule("native_layer_norm.default")
def _layer_norm(step: Step) -> Label:
    label = step.only("input")
    if label.axis >= len(step.shape("input")) - len(step["normalized_shape"]):
        raise Mixes("normalises units together")
    return label


@_rule("native_layer_norm_backward.default")
def _layer_norm_backward(step: Step) -> Sequence[Label]:
    label = step.only("grad_out", "input", "mean", "rstd")
    if label.axis >= len(step.shape("input")) - len(step["normalized_shape"]):
        raise Mixes("normalises units together")
    return _of_weights(step, label)


@_rule("native_group_norm.default")
def _group_norm(step: Step) -> Label:
    _refuse_other_sizes(step)
    return _first(step, "input")


@_rule("native_group_norm_backward.default")
def _group_norm_backward(step: Step) -> Sequence[Label]:
    _refuse_other_sizes(step)
    return _of_weights(step, _first(step, "grad_out", "input", "mean", "rstd"))


def _refuse_other_sizes(step: Step) -> None:
    """Refuse groups in stretches of memory that are not within a row: the sizes are arguments beside the input."""
    shape = step.shape("input")
    if (step["N"], step["C"], step["HxW"]) != (*shape[:2], math.prod(shape[2:])) or step["C"] % step["group"]:
        raise Mixes("groups numbers by other sizes than those of its input")


@_rule("embedding.default")
def _embedding(step: Step) -> Label:
    label = step.only("indices")
    _refuse_computed(step, "indices")
    return label


@_rule("index_select.default")
def _index_selected(step: Step) -> Label:
    label = step.only("self")
    if label.axis == step["dim"] % len(step.shape()):
        raise Unproved("takes a part of the units")
    return label


@_rule("gather.default")
def _gathered(step: Step) -> Label:
    label = step.only("self", "index")
    if label.axis == step["dim"] % len(step.shape()) or step.shape()[label.axis] != step.shape("index")[label.axis]:
        raise Unproved("takes a part of the units")
    _refuse_computed(step, "index")
    return label


@_rule("nll_loss_forward.default nll_loss2d_forward.default")
def _nll(step: Step) -> Sequence[Label]:
    if step["reduction"]:
        raise Mixes("reduces the axis of units")
    _refuse_computed(step, "target")
    return [_first(step, "self", "target"), None]  # the total weight is that of a reduction


@_rule("nll_loss_backward.default nll_loss2d_backward.default")
def _nll_backward(step: Step) -> Label:
    if step["reduction"]:
        raise Mixes("reduces the axis of units")
    return _first(step, "grad_output", "self", "target")
