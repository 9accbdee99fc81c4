"""Rules of `torch_isolation`: labels of the outputs of an operation of ATen from those of its inputs.

A rule describes what the operation computes. That kernels compute it row by row is a premise.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import Node

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
"""Rule of each operation, by the name of its overload. A rule gives a label for each output.

It is called if an input has a label. If none has, that there is a rule states: the operation fills all that it returns,
from its arguments alone.
"""


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape that an operation's only output had while tracing."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise unproved(node, "gives several outputs in the place of one")
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


def name_of(operation: Any) -> str:
    """Return the name of an operation of ATen, or of a call of it, without its namespace, as in `RULES`."""
    return str(operation.target if isinstance(operation, Node) else operation).removeprefix("aten.")


def unproved(node: Node, reason: str) -> Unproved:
    """Return the error for an operation that is not proved to keep units apart."""
    return Unproved(reason).at(str(node.target), node.name)


def is_tagged(target: Any) -> bool:
    """Return whether PyTorch itself says that an operation is element-wise; users may tag their own as they like."""
    is_own = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
    return is_own and torch.Tag.pointwise in target.tags


_rule = partial(adding, RULES)


def _refuse_computed(step: Step, name: str, count: int) -> None:
    """Refuse an exception that may depend on more than the integers of a unit's own data; see `isolation`.

    Draws are no integers. A cast of numbers that are none may give another one at another place. Places that a sort or
    a maximum gives are from 0 to the length of its axis less one, for any numbers. They raise nothing if there are as
    many to choose from.

    Args:
        step: whose argument has indices.
        name: of the argument.
        count: of what the indices choose from.
    """
    todo = [(each, True) for each in tensors_in(step[name])]
    while todo:
        node, is_moved = todo.pop()
        if step.found[node] is None or (is_moved and _is_place(node, count)):
            continue
        value = node.meta["val"]
        if not _is_whole(value) or not (
            node.op == "placeholder" or name_of(node) in MOVES or _is_alike_at_places(node, step.found)
        ):
            raise Unproved("may raise an exception for numbers that were computed or drawn")
        # A cast to fewer bits may turn a place into a negative number.
        todo += [(each, is_moved and name_of(node) in MOVES - {"_to_copy.default"}) for each in node.all_input_nodes]


def _is_whole(value: Any) -> bool:
    """Return whether a value is a tensor of integers or of truth values."""
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()


def _is_place(node: Node, count: int) -> bool:
    """Return whether a tensor has places along an axis of at most so many entries, by a sort or a maximum."""
    if node.target is not operator.getitem or node.args[1] != 1 or name_of(node.args[0]) not in SORTS:
        return False
    given = arguments_of(node.args[0])
    return shape_of(given["self"])[given["dim"]] <= count


def _forward_of(backward: Step, name: str) -> Node:
    """Return the call whose second output an argument is: a backward kernel trusts the integers of its forward call.

    Args:
        backward: the operation; it writes to places by integers without a check.
        name: of the argument.

    Raises:
        Unproved: the argument is no such output.
    """
    found = _original(backward[name])
    if found.target is operator.getitem and found.args[1] == 1 and name_of(found.args[0]) in FORWARD:
        return found.args[0]
    raise Unproved("takes integers that are not from its own forward call")


def _original(node: Node) -> Node:
    """Return the tensor that aliases stand for."""
    while name_of(node) in ("alias.default", "detach.default"):
        (node,) = node.all_input_nodes
    return node


def _is_alike_at_places(node: Node, found: Mapping[Node, Any]) -> bool:
    """Return whether an element-wise operation has constants that are the same for the rows of all units."""
    label = found[node]

    def is_same_for_all(constant: Node) -> bool:
        axis = label.axis - (len(shape_of(node)) - len(shape_of(constant)))
        return axis < 0 or shape_of(constant)[axis] == 1

    inputs = node.all_input_nodes
    return is_tagged(node.target) and all(found[each] is not None or is_same_for_all(each) for each in inputs)


MOVES = {
    *("_to_copy.default", "clone.default", "expand.default", "permute.default", "select.int", "slice.Tensor"),
    *("squeeze.dim", "squeeze.dims", "t.default", "transpose.int", "unsqueeze.default", "view.default"),
    *("_unsafe_view.default", "alias.default", "detach.default"),
}
"""Operations that pass on the integers of their input."""
SORTS = ("max.dim", "min.dim", "sort.default", "sort.stable", "topk.default")
"""Operations whose second output has places along an axis of their input."""
FORWARD = {
    *("max_pool2d_with_indices.default", "max_pool3d_with_indices.default", "adaptive_max_pool2d.default"),
    *("adaptive_max_pool3d.default", "nll_loss_forward.default", "nll_loss2d_forward.default"),
}
"""Operations that check the integers which their backward kernels trust."""


# Rules that keep an axis ---------------------------------------------------------------------------------------------


@_rule(
    "_to_copy.default alias.default copy.default detach.default elu_backward.default fill.Scalar fill.Tensor "
    "floor_divide.default hardshrink_backward.default hardsigmoid_backward.default hardswish.default "
    "hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default lift_fresh_copy.default "
    "log_sigmoid_backward.default log_sigmoid_forward.default mish_backward.default prims.where.default "
    "softplus_backward.default softshrink_backward.default"
)
def elementwise(step: Step) -> Rows:
    """Return the common label of inputs that are aligned at their last axes.

    An axis of units is longer than 1, so it is never repeated.
    """
    every = [each for argument in step.arguments.values() for each in tensors_in(argument)]
    whole = tuple(torch.broadcast_shapes(*map(shape_of, every)))
    value = step.node.meta["val"]
    if any(tuple(each.shape) != whole for each in (value if isinstance(value, (list, tuple)) else [value])):
        raise Unproved("gives another shape than that of its inputs")
    integers = _is_whole(value) and value.dtype != torch.bool
    divisor = step.arguments.get("other")
    is_safe = isinstance(divisor, int) and divisor > 0 and not name_of(step.node).startswith("pow")
    if integers and not is_safe and name_of(step.node).startswith(("div", "floor_divide", "fmod", "pow", "remainder")):
        raise Unproved("may raise an exception for integers")
    return broadcast([step.found[each] for each in every], [len(shape_of(each)) for each in every])


@_rule(
    "arange.default arange.start arange.start_step eye.default eye.m full.default full_like.default linspace.default "
    "new_full.default new_ones.default new_zeros.default ones.default ones_like.default scalar_tensor.default "
    "zeros.default zeros_like.default"
)
def _filled(step: Step) -> None:
    """Return the label of a tensor that is filled with constants; inputs give its shape and type alone."""


@_rule(
    "binary_cross_entropy_with_logits.default huber_loss.default huber_loss_backward.default mse_loss.default "
    "mse_loss_backward.default smooth_l1_loss.default smooth_l1_loss_backward.default soft_margin_loss.default "
    "soft_margin_loss_backward.default"
)
def _loss(step: Step) -> Label | Sequence[Label]:
    if step["reduction"]:
        raise Mixes("reduces the axis of units")
    return elementwise(step)


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
    "max_pool2d_with_indices.default avg_pool2d.default avg_pool2d_backward.default _adaptive_avg_pool2d.default "
    "_adaptive_avg_pool2d_backward.default adaptive_max_pool2d.default",
    lambda s, n: range(n - 2, n),
    "takes the axis of units for one of pixels",
)
_apart(
    "max_pool3d_with_indices.default avg_pool3d.default avg_pool3d_backward.default _adaptive_avg_pool3d.default "
    "_adaptive_avg_pool3d_backward.default adaptive_max_pool3d.default",
    lambda s, n: range(n - 3, n),
    "takes the axis of units for one of pixels",
)


@_rule(
    "max_pool2d_with_indices_backward.default max_pool3d_with_indices_backward.default "
    "adaptive_max_pool2d_backward.default adaptive_max_pool3d_backward.default"
)
def _pooled_back(step: Step) -> Label:
    if _original(_forward_of(step, "indices").args[0]) is not _original(step["self"]):
        raise Unproved("takes integers that are not from its own forward call")
    pixels = 2 if "2d" in name_of(step.node) else 3
    rank = len(step.shape("self"))
    label = step.only("grad_output", "self", "indices")
    return label.outside(range(rank - pixels, rank), "takes the axis of units for one of pixels")


_apart("unfold.default", lambda s, n: {s["dimension"] % n}, "takes the axis of units for one of pixels")
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
_apart("slice_scatter.default", lambda s, n: {s["dim"] % n}, "puts numbers at a part of the units", Unproved)
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
    _refuse_computed(step, "indices", step.shape("weight")[0])
    return label


@_rule("gather.default scatter.src scatter.value scatter_add.default")
def _gathered(step: Step) -> Label:
    """Return the common label of a tensor, of indices along one of its axes, and of what is put there."""
    every = [name for name in ("self", "index", "src") if name in step.arguments]
    label, count = step.only(*every), step.shape()[step["dim"]]
    if label.axis == step["dim"] % len(step.shape()) or len({step.shape(name)[label.axis] for name in every}) > 1:
        raise Unproved("takes a part of the units")
    _refuse_computed(step, "index", count)
    return label


def _places(step: Step) -> tuple[list[int], int, int]:
    """Return the axes that indices choose from, and the first one and the number of the axes of indices in the result.

    These are where the chosen axes were if those adjoin, else in front.
    """
    axes = [axis for axis, each in enumerate(step["indices"]) if each is not None]
    several = tensors_in(step["indices"])
    if any(each.meta["val"].dtype in (torch.bool, torch.uint8) for each in several):
        raise Unproved("has a mask in the place of indices")
    adjoin = axes[-1] - axes[0] == len(axes) - 1
    return axes, axes[0] if adjoin else 0, max(len(shape_of(each)) for each in several)


@_rule("index.Tensor _unsafe_index.Tensor")
def _indexed(step: Step) -> Label:
    axes, first, rank = _places(step)
    if step.labels("self") == [None]:
        several = tensors_in(step["indices"])
        label = broadcast([step.found[each] for each in several], [len(shape_of(each)) for each in several])
        _refuse_computed(step, "indices", min(step.shape()[axis] for axis in axes))
        return label.shifted(first)
    label = step.own.outside(axes, "takes a part of the units", Unproved).without(axes)
    return label.shifted(rank if label.axis >= first else 0)


@_rule("index_put.default _unsafe_index_put.default")
def _put(step: Step) -> Label:
    """Return the label of a tensor in which numbers of the same units are put, at the same places for all units."""
    axes, first, rank = _places(step)
    if any(label is not None for label in step.labels("indices")):
        raise Unproved("puts numbers at places that depend on units")
    (own,), (values,) = step.labels("self"), step.labels("values")
    if isinstance(values, Rows):  # as of the result of `_indexed`
        axis = values.axis + len(step.shape()) - len(axes) + rank - len(step.shape("values"))
        if first <= axis < first + rank:
            raise Unproved("puts numbers of units at places of others")
        left = axis - (rank if axis >= first else 0)
        kept = [axis for axis in range(len(step.shape())) if axis not in axes]
        values = Rows(kept[left], values.inner)
    return agreed([own, values]).outside(axes, "puts numbers of units at places of others", Unproved)


@_rule("select_scatter.default")
def _put_at_one(step: Step) -> Label:
    """Return the common label of a tensor, and of numbers that are put at one place of one of its axes."""
    (own,), (values,) = step.labels("self"), step.labels("src")
    return agreed([own, values.beside(step["dim"] % len(step.shape())) if isinstance(values, Rows) else values])


@_rule("nll_loss_forward.default nll_loss2d_forward.default nll_loss_backward.default nll_loss2d_backward.default")
def _nll(step: Step) -> Label | Sequence[Label]:
    if step["reduction"]:
        raise Mixes("reduces the axis of units")
    _refuse_computed(step, "target", step.shape("self")[min(1, len(step.shape("self")) - 1)])
    if "total_weight" in step.arguments:
        forward = _forward_of(step, "total_weight")
        if _original(forward.args[1]) is not _original(step["target"]) or shape_of(forward.args[0]) != step.shape(
            "self"
        ):
            raise Unproved("takes integers that are not from its own forward call")
    names = [name for name in ("grad_output", "self", "target") if name in step.arguments]
    classes = range(1, len(step.shape("self")))
    label = step.only(*names).outside(classes, "takes the axis of units for one of classes")
    # Without a reduction there is no total weight.
    return [label, None] if "forward" in name_of(step.node) else label
