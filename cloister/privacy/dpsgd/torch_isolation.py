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

    def shape(self, name: str | None = None) -> tuple[int, ...]:
        """Return the shape of a tensor that is an argument, by default the first one."""
        return shape_of(self.arguments[name or next(iter(self.arguments))])

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

    @property
    def own(self) -> Rows:
        """Return the label of the first argument; all others must have none."""
        return self.only(next(iter(self.arguments)))

    def axes(self, *names: str, rank: int | None = None) -> set[int]:
        """Return the axes in some arguments, counted from the first; all axes if there are none.

        Args:
            names: of the arguments.
            rank: of the tensor with these axes. None: of the first argument.
        """
        rank = len(self.shape()) if rank is None else rank
        given = [self[name] for name in names]
        flat = [axis for each in given for axis in ([each] if isinstance(each, int) else each or ())]
        return {axis % rank for axis in flat} or set(range(rank))


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
    """Return whether PyTorch itself says that an operation is element-wise; users may tag their own as they like."""
    target = node.target
    is_own = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    return is_own and torch.Tag.pointwise in target.tags


_rule = partial(adding, RULES)


def _refuse_computed(step: Step, name: str) -> None:
    """Refuse an exception that may depend on more than the integers of a unit's own data; see `isolation`.

    Draws are no integers. A cast of numbers that are none may give another one at another place.
    """
    todo = tensors_in(step[name])
    while todo:
        node = todo.pop()
        if step.found[node] is None:
            continue
        value = node.meta["val"]
        is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
        if not is_whole or not (
            node.op == "placeholder" or name_of(node) in MOVES or _is_alike_at_places(node, step.found)
        ):
            raise Unproved("may raise an exception for numbers that were computed or drawn")
        todo += node.all_input_nodes


def _is_alike_at_places(node: Node, found: Mapping[Node, Any]) -> bool:
    """Return whether an element-wise operation has constants that are the same for the rows of all units."""
    label = found[node]

    def is_same_for_all(constant: Node) -> bool:
        axis = label.axis - (len(shape_of(node)) - len(shape_of(constant)))
        return axis < 0 or shape_of(constant)[axis] == 1

    inputs = node.all_input_nodes
    return _is_tagged(node) and all(found[each] is not None or is_same_for_all(each) for each in inputs)


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


def _apart(
    names: str, taken: Callable[[Step, int], Iterable[int]], reason: str, error: type[NotIsolated] = Mixes
) -> None:
    """Add a rule for inputs of one rank that keeps their common label if its axis is not taken."""

    def kept(step: Step) -> Label:
        every = [each for argument in step.arguments.values() for each in tensors_in(argument)]
        ranks = {len(shape_of(each)) for each in every}
        if len(ranks) > 1:
            raise Unproved("has no rule for inputs of several ranks")
        return agreed(step.found[each] for each in every).outside(set(taken(step, *ranks)), reason, error)

    _rule(names)(kept)


_apart(
    "_softmax.default _log_softmax.default _safe_softmax.default _softmax_backward_data.default "
    "_log_softmax_backward_data.default cumsum.default cumprod.default glu.default glu_backward.default sort.default "
    "sort.stable topk.default",
    lambda s, n: s.axes("dim", rank=n),
    "takes units together",
)
_apart(
    "max_pool2d_with_indices.default max_pool2d_with_indices_backward.default avg_pool2d.default "
    "avg_pool2d_backward.default _adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default "
    "adaptive_max_pool2d.default upsample_nearest2d.default upsample_nearest2d.vec reflection_pad2d.default "
    "replication_pad2d.default",
    lambda s, n: range(n - 2, n),
    "takes the axis of units for one of pixels",
)
_apart("im2col.default", lambda s, n: range(1, n) if n == 4 else range(n), "takes the axis of units for one of pixels")
_apart(
    "sum.default mean.default max.default min.default prod.default any.default all.default equal.default "
    "var.default std.default",
    lambda s, n: range(n),
    "reduces the axis of units",
)
_apart("tril.default triu.default", lambda s, n: (), "")
_apart("constant_pad_nd.default", lambda s, n: range(n - len(s["pad"]) // 2, n), "pads the axis of units", Unproved)
_apart("flip.default roll.default", lambda s, n: s.axes("dims", rank=n), "moves units to places of others", Unproved)
_apart("cat.default", lambda s, n: s.axes("dim", rank=n), "appends units to others", Unproved)
_apart("split.Tensor split_with_sizes.default", lambda s, n: s.axes("dim"), "takes a part of the units", Unproved)
_apart(
    "slice.Tensor slice_backward.default",
    lambda s, n: s.axes("dim") if s.made != s.shape() else (),
    "takes a part of the units",
    Unproved,
)


@_rule(
    "sum.dim_IntList mean.dim amax.default amin.default var.correction std.correction var_mean.correction "
    "prod.dim_int any.dim all.dim any.dims all.dims argmax.default argmin.default logsumexp.default max.dim min.dim "
    "linalg_vector_norm.default norm.ScalarOpt_dim"
)
def _reduced(step: Step) -> Label:
    axes = step.axes("dim")
    label = step.own.outside(axes, "reduces the axis of units")
    return label if step["keepdim"] else label.without(axes)


# Rules that move an axis ---------------------------------------------------------------------------------------------


@_rule("view.default _unsafe_view.default reshape.default")
def _reshaped(step: Step) -> Label:
    return step.own.reshaped(step.shape(), step.made, step.units)


@_rule("permute.default")
def _permuted(step: Step) -> Label:
    return step.own.permuted([axis % len(step.made) for axis in step["dims"]])


@_rule("transpose.int t.default")
def _transposed(step: Step) -> Label:
    order = list(range(len(step.made)))
    one, other = (step.arguments.get(name, end) for name, end in (("dim0", 0), ("dim1", -1)))  # `t` has no arguments
    order[one], order[other] = order[other], order[one]
    return step.own.permuted(order)


@_rule("diagonal.default")
def _diagonal(step: Step) -> Label:
    """Return the label of a diagonal, which becomes the last axis."""
    axes = step.axes("dim1", "dim2")
    return step.own.outside(axes, "takes a diagonal along the axis of units").without(axes)


@_rule("unsqueeze.default stack.default select_backward.default")
def _inserted(step: Step) -> Label:
    return step.own.beside(step["dim"] % len(step.made))


@_rule("squeeze.dim squeeze.dims")
def _squeezed(step: Step) -> Label:
    if step["dim"] == []:  # no axis; all of them elsewhere
        return step.own
    return step.own.without([axis for axis in step.axes("dim") if step.shape()[axis] == 1])


@_rule("expand.default repeat.default")
def _repeated(step: Step) -> Label:
    label = step.own.shifted(len(step.made) - len(step.shape()))
    if step.made[label.axis] != step.shape()[step.own.axis]:
        raise Unproved("repeats the axis of units")
    return label


@_rule("select.int unbind.int")
def _selected(step: Step) -> Label:
    axes = step.axes("dim")
    return step.own.outside(axes, "takes a part of the units", Unproved).without(axes)


@_rule("index_select.default")
def _index_selected(step: Step) -> Label:
    return step.own.outside(step.axes("dim"), "takes a part of the units", Unproved)


# Rules of products, layers and losses --------------------------------------------------------------------------------


@_rule("mm.default addmm.default bmm.default baddbmm.default")
def _product(step: Step) -> Label:
    *added, left, right = (each for argument in step.arguments.values() for each in tensors_in(argument))
    label = product([step.found[left], step.found[right]], [len(shape_of(each)) for each in (left, right)])
    return agreed([label], [step.found[each] for each in added])


EXAMPLES = ("grad_output", "grad_out", "input", "mean", "rstd")
"""Arguments of layers that hold examples; others hold weights."""


@_rule(
    "convolution.default convolution_backward.default native_layer_norm.default native_layer_norm_backward.default "
    "native_group_norm.default native_group_norm_backward.default"
)
def _layer(step: Step) -> Label | Sequence[Label]:
    """Return the label of examples for the output, and for the gradient with respect to the input.

    Gradients with respect to weights are sums over units.
    """
    rank, axes = len(step.shape("input")), 1
    if "group" in step.arguments:
        _refuse_other_sizes(step)
    if "normalized_shape" in step.arguments:
        axes = rank - len(step["normalized_shape"])
    examples = step.only(*(name for name in EXAMPLES if name in step.arguments))
    label = examples.outside(range(axes, rank), "takes the axis of units for one within an example")
    sums = Refused(Mixes("adds up the gradients of units").at(str(step.node.target), step.node.name))
    wanted = step.arguments.get("output_mask")
    return label if wanted is None else [label, *(sums if each else None for each in wanted[1:])]


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


@_rule("gather.default")
def _gathered(step: Step) -> Label:
    label = step.only("self", "index")
    if label.axis == step["dim"] % len(step.shape()) or step.shape()[label.axis] != step.shape("index")[label.axis]:
        raise Unproved("takes a part of the units")
    _refuse_computed(step, "index")
    return label


@_rule("nll_loss_forward.default nll_loss2d_forward.default nll_loss_backward.default nll_loss2d_backward.default")
def _nll(step: Step) -> Label | Sequence[Label]:
    if step["reduction"]:
        raise Mixes("reduces the axis of units")
    _refuse_computed(step, "target")
    names = [name for name in ("grad_output", "self", "target") if name in step.arguments]
    classes = range(1, len(step.shape("self")))
    label = step.only(*names).outside(classes, "takes the axis of units for one of classes")
    # Without a reduction there is no total weight.
    return [label, None] if "forward" in name_of(step.node) else label
