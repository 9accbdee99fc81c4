"""Uses of trained variables in a traced graph, and from each the gradients of units.

A variable has an effect on the losses through the operations that take it, as it is or through views: operations that
only move or drop its numbers. The gradient of a unit with respect to the variable is the sum over these uses. That of
one use follows from the other inputs of the operation, and from the gradient with respect to its output, the delta:

    a product with the variable   inputs a and deltas d at T positions, the gradient is Σ_t a_t d_tᵀ
    an element-wise operation     the gradient with respect to a copy of the variable for each row
    a choice of its rows          the indices, and a delta for each

Any other use is refused: then units are computed in turn. A use through which TensorFlow has no gradient counts for
none. What is held is proved to be of one unit alone by `isolation`, on the graph with these computations in it.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from string import ascii_letters
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from cloister.privacy.dpsgd.forms import Origins, Part, back, of_positions, product, table, whole
from cloister.privacy.dpsgd.isolation_rules import StaticValues, executed
from cloister.privacy.dpsgd.tracing import NotCapturable
from cloister.utils.arrays import Tensor

GATHER = "GatherV2"
MOVES = ("StridedSlice", "Transpose", GATHER)
VIEWS = ("Identity", "Reshape", "ExpandDims", "Squeeze", *MOVES)
"""Operations that keep a number of their first input once, or drop it: a gradient keeps its norm on the way back. A
gather is one if its indices are known. `Use.origins` refuses repeated numbers."""
CONTRACTIONS = ("MatMul", "BatchMatMulV2", "Einsum")
COPIES = ("BroadcastTo", "Tile")
ELEMENTWISE = (
    *("AddV2", "BiasAdd", "Div", "Maximum", "Minimum", "Mul", "Pow", "RealDiv", "SelectV2", "SquaredDifference"),
    "Sub",
)
"""Operations that broadcast their inputs and combine them entry by entry."""
TRANSPOSED, DEPTHWISE = "Conv2DBackpropInput", "DepthwiseConv2dNative"
FEW_CHANNELS = 3
"""Most channels of a picture whose patches a convolution copies faster than a gather."""
SMALL_PATCH = 100
"""Most numbers of such a patch: the convolution multiplies each by all of them."""


@dataclass(frozen=True)
class Use:
    """An operation that takes a variable.

    Attributes:
        operation: that has an effect on the losses.
        place: of the variable among its inputs.
        views: operations on the way from the variable.
    """

    operation: tf.Operation
    place: int
    views: tuple[tf.Operation, ...]

    @property
    def output(self) -> Tensor:
        """Return the first output."""
        return self.operation.outputs[0]

    @property
    def given(self) -> Tensor:
        """Return the variable as the operation takes it."""
        return self.operation.inputs[self.place]

    def refuse_unknown(self) -> None:
        """Raise NotCapturable if the operation is of no type that has a form, or has a gradient of its own."""
        kind = self.operation.type
        if kind not in FORMS:
            raise NotCapturable(f"used by {kind}, which has no form for gradients of several examples at once")
        if is_overridden(self.operation):
            raise NotCapturable(f"used by {kind} with a gradient of its own")

    def origins(self, order: Sequence[int] = ()) -> Origins:
        """Return the place in the variable of each number that the operation takes.

        Args:
            order: in which the axes of these numbers are read; empty: as they are.
        """
        variable = self.views[0].inputs[0] if self.views else self.given
        shape, is_turned = tuple(variable.shape), list(order) != sorted(order)
        if not is_turned and not any(view.type in MOVES for view in self.views):
            return Origins(shape)
        places, known = np.arange(math.prod(shape), dtype=np.int32).reshape(shape), StaticValues()
        for view in self.views:
            if view.type in MOVES:
                others = [other for each in view.inputs[1:] if (other := known.of(each)) is not None]
                if len(others) < len(view.inputs) - 1:
                    raise NotCapturable("cut at places that are computed")
                (places,) = executed(view, [places, *others])
            else:
                places = places.reshape(tuple(view.outputs[0].shape))
        if np.unique(places).size < places.size:
            raise NotCapturable("read more than once through one view")
        return Origins(shape, (places.transpose(order) if is_turned else places).ravel())


def uses_of(total: Tensor, values: Sequence[Tensor]) -> list[list[Use]]:
    """Return the uses of each variable that can have an effect on the gradient of a total.

    Args:
        total: sum of losses.
        values: of the variables, in the same graph.
    """
    needed, known = _differentiable(total), StaticValues()
    found: list[list[Use]] = []
    for value in values:
        own, todo = list[Use](), [(value, tuple[tf.Operation, ...]())]
        while todo:
            tensor, views = todo.pop()
            for operation in dict.fromkeys(tensor.consumers()):
                if operation.name not in needed:
                    continue
                places = [place for place, each in enumerate(operation.inputs) if each.name == tensor.name]
                is_view = operation.type in VIEWS and places == [0] and not is_overridden(operation)
                if is_view and (operation.type != GATHER or known.of(operation.inputs[1]) is not None):
                    todo.append((operation.outputs[0], (*views, operation)))
                else:
                    own += [Use(operation, place, views) for place in places]
        found.append(own)
    return found


def is_overridden(operation: tf.Operation) -> bool:
    """Return whether an operation has a gradient of its own."""
    return "_gradient_op_type" in operation.node_def.attr


def _differentiable(total: Tensor) -> set[str]:
    """Return the names of operations through which a gradient can reach a total."""
    needed, todo = set[str](), [total.op]
    while todo:
        operation = todo.pop()
        with suppress(LookupError):  # of a type without a registered gradient, which `tf.gradients` refuses
            if operation.name in needed or (operation.inputs and ops.get_gradient_function(operation) is None):
                continue
        needed.add(operation.name)
        todo += [tensor.op for tensor in operation.inputs]
    return needed


class Gradient(NamedTuple):
    """Gradients of units with respect to a variable, by one use.

    Attributes:
        inputs: shape (U, T, numbers in), or indices of a table's rows, shape (U, T). None: `deltas` are the gradients.
        deltas: shape (U, T, numbers out), or without inputs (U, ...).
        origins: of the gradients' numbers in the variable.
        size: rows of the table; 0 if there is none.
    """

    inputs: Tensor | None
    deltas: Tensor
    origins: Origins
    size: int = 0

    def whole(self) -> Tensor:
        """Return the gradients, shape (U, *variable.shape)."""
        if self.size:
            raise NotCapturable("looked up by rows, and used in other ways too")
        summed = self.deltas if self.inputs is None else product(self.inputs, self.deltas)
        return back(summed, self.origins, [summed.shape[0]])

    def continues(self, other: "Gradient") -> bool:
        """Return whether the positions may follow those of another use."""
        if self.inputs is None or other.inputs is None or self.size != other.size:
            return False
        alike = self.inputs.shape[2:] == other.inputs.shape[2:] and self.deltas.shape[2:] == other.deltas.shape[2:]
        mine, others = self.origins.places, other.origins.places
        return alike and (mine is others or (mine is not None and others is not None and np.array_equal(mine, others)))


@dataclass(frozen=True)
class UseByUnits(Use):
    """A use with its delta, by units.

    Attributes:
        delta: the gradient of the summed losses with respect to its output.
        axis, inner: entry j of this axis of the output is of unit (j // inner) % U.
        units: U of the call.
    """

    delta: Tensor
    axis: int
    inner: int
    units: int

    def gradient(self) -> Gradient:
        """Return the gradients of units.

        Raises:
            NotCapturable: there is no form for them.
        """
        return FORMS[self.operation.type](self)

    def by_unit(self, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Return a tensor whose units are along an axis, by default that of the output, as (U, T, *other axes)."""
        axis = self.axis if axis is None else axis
        if axis:
            tensor = tf.transpose(tensor, [axis, *(each for each in range(tensor.shape.rank) if each != axis)])
        units, (length, *rest) = self.units, tensor.shape
        copies = length // (units * self.inner)
        if copies > 1:
            tensor = tf.transpose(
                tf.reshape(tensor, [copies, units, self.inner, *rest]), [1, 0, *range(2, len(rest) + 3)]
            )
        return tf.reshape(tensor, [units, copies * self.inner, *rest])

    def contracted(self) -> Gradient:
        """Return the gradients of a product, whose axes have letters.

        A letter of the variable is of numbers in, if the other factor has it too, else of numbers out. All other
        letters are of positions.
        """
        *terms, made = _letters(self.operation)
        own, other = terms[self.place], terms[1 - self.place]
        factor, unit = self.operation.inputs[1 - self.place], made[self.axis]
        if unit in own or unit not in other or any(len(set(term)) < len(term) for term in (own, other, made)):
            raise NotCapturable("used in a product of another kind than of numbers in and numbers out")
        sizes = dict(zip(own + other + made, [*self.given.shape, *factor.shape, *self.delta.shape], strict=True))
        is_repeated = any(
            [sizes[letter] for letter in term] != tensor.shape for term, tensor in ((own, self.given), (other, factor))
        )
        if is_repeated or set(other) - set(own + made) or set(own) - set(other + made):
            raise NotCapturable("repeated or added up in a product")
        inputs, deltas = self.by_unit(factor, other.index(unit)), self.by_unit(self.delta)
        of_inputs, of_deltas = other.replace(unit, ""), made.replace(unit, "")
        if set(own) & set(other) & set(made):  # such as a matrix for each head
            front = "".join(each for each in ascii_letters if each not in own + other + made)[:2]
            whole = tf.einsum(f"{front}{of_inputs},{front}{of_deltas}->{front[0]}{own}", inputs, deltas)
            return Gradient(None, whole, self.origins())
        positions = [letter for letter in of_deltas if letter in of_inputs]
        ins, outs = ([letter for letter in term if letter in own] for term in (of_inputs, of_deltas))

        def flat(tensor: Tensor, term: str, numbers: list[str]) -> Tensor:
            order = [term.index(letter) + 2 for letter in (*positions, *numbers)]
            moved = tensor if order == sorted(order) else tf.transpose(tensor, [0, 1, *order])
            return tf.reshape(moved, [self.units, -1, math.prod(sizes[letter] for letter in numbers)])

        origins = self.origins([own.index(letter) for letter in ins + outs])
        return Gradient(flat(inputs, of_inputs, ins), flat(deltas, of_deltas, outs), origins)

    def copied(self) -> Gradient:
        """Return the gradients with respect to a copy of the variable for each row of the operation's output."""
        operation, given, made = self.operation, self.given, self.delta
        if operation.type == "BiasAdd" and operation.get_attr("data_format") != b"NHWC":
            raise NotCapturable("added to channels in front of positions")
        shape = [1] * (made.shape.rank - given.shape.rank) + list(given.shape)
        fits = len(shape) == made.shape.rank and all(
            one in (1, all_) for one, all_ in zip(shape, made.shape, strict=True)
        )
        if not fits or shape[self.axis] != 1:
            raise NotCapturable(f"repeated by {operation.type} in a way that has no form")
        copies = [made.shape[place] if place == self.axis else length for place, length in enumerate(shape)]
        copy = tf.broadcast_to(tf.reshape(given, shape), copies)
        if operation.type in COPIES:
            again = tf.broadcast_to(copy, made.shape)
        else:
            kind = "AddV2" if operation.type == "BiasAdd" else operation.type
            names = [each.name for each in operation.op_def.input_arg] if kind == operation.type else ["x", "y"]
            inputs = [copy if place == self.place else each for place, each in enumerate(operation.inputs)]
            again = getattr(tf.raw_ops, kind)(**dict(zip(names, inputs, strict=True)))
        (rows,) = tf.gradients(again, copy, grad_ys=self.delta)
        if rows is None:
            raise NotCapturable(f"used by {operation.type} without a gradient")
        return Gradient(None, tf.reduce_sum(self.by_unit(rows), axis=1), self.origins())

    def chosen(self) -> Gradient:
        """Return the gradients of a table from which each unit chooses rows."""
        table, indices, axis = self.operation.inputs
        if self.place or self.operation.get_attr("batch_dims"):
            raise NotCapturable("looked up separately for each example, or the indices of a choice")
        if tf.get_static_value(axis) != 0 or self.axis >= indices.shape.rank:
            raise NotCapturable("looked up along an axis that is not the first, or not known")
        units, numbers = self.units, math.prod(table.shape[1:])
        flat = tf.reshape(self.by_unit(tf.cast(indices, tf.int32)), [units, -1])
        deltas = tf.reshape(self.by_unit(self.delta), [units, -1, numbers])
        return Gradient(flat, deltas, self.origins(), table.shape[0])


def _letters(operation: tf.Operation) -> list[str]:
    """Return letters for the axes of both factors of a product, and of its result."""
    if operation.type == "Einsum":
        equation = operation.get_attr("equation").decode().replace(" ", "")
        if "." in equation or equation.count(",") != 1:
            raise NotCapturable("used in a product of another kind than of numbers in and numbers out")
        return equation.replace("->", ",").split(",")
    names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    terms = []
    for tensor, name, ends in zip(operation.inputs, names, ("xy", "yz"), strict=True):
        outer = ascii_letters[: operation.outputs[0].shape.rank - 2]
        outer = outer[len(outer) - (tensor.shape.rank - 2) :]
        terms.append(outer + (ends[::-1] if operation.get_attr(name) else ends))
    return [*terms, ascii_letters[: operation.outputs[0].shape.rank - 2] + "xz"]


# Convolutions --------------------------------------------------------------------------------------------------------


def _convolved(used: UseByUnits) -> Gradient:
    """Return the gradients of a convolution: a product at each position of its output, with a patch of its input.

    In a transposed convolution inputs and deltas change places. In a depthwise one the product is of each channel.
    """
    operation, shape, units = used.operation, used.given.shape, used.units
    is_transposed, is_depthwise = operation.type == TRANSPOSED, operation.type == DEPTHWISE
    positions, covered = (operation.inputs[2], used.delta) if is_transposed else (used.delta, operation.inputs[0])
    padding, layout = (operation.get_attr(name).decode() for name in ("padding", "data_format"))
    if layout != "NHWC" or padding not in ("SAME", "VALID") or used.axis != 0:
        raise NotCapturable("used by a convolution with explicit padding, or with another order of axes")
    if used.place != 1 or covered.shape[-1] != shape[2]:
        raise NotCapturable("used by a convolution in groups, or as its input")
    strides, dilations = (list(operation.get_attr(name))[1:3] for name in ("strides", "dilations"))
    covered = patches(covered, positions.shape, padding, list(shape[:2]), strides, dilations)
    inputs, deltas = (
        tf.reshape(used.by_unit(tensor), [units, -1, tensor.shape[-1]]) for tensor in (covered, positions)
    )
    if not is_depthwise:
        return Gradient(inputs, deltas, used.origins())
    apart = tf.reshape(inputs, [units, -1, math.prod(shape[:2]), shape[2], 1])
    product_of_each = apart * tf.reshape(deltas, [units, -1, 1, *shape[2:]])
    return Gradient(None, tf.reduce_sum(product_of_each, axis=1), used.origins())


FORMS: dict[str, Callable[[UseByUnits], Gradient]] = {
    **dict.fromkeys(CONTRACTIONS, UseByUnits.contracted),
    **dict.fromkeys((*COPIES, *ELEMENTWISE), UseByUnits.copied),
    GATHER: UseByUnits.chosen,
    **dict.fromkeys(("Conv2D", TRANSPOSED, DEPTHWISE), _convolved),
}
"""Gradients of units by the type of the operation that takes the variable."""


def patches(
    inputs: Tensor, made: Sequence[int], padding: str, lengths: list[int], strides: list[int], dilations: list[int]
) -> Tensor:
    """Return the numbers that the kernel of a convolution covers at each position of its output.

    Args:
        inputs: shape (rows, *positions, channels).
        made: shape of the output.
        padding: `SAME` or `VALID`.
        lengths, strides, dilations: of the kernel along each axis of positions.

    Returns:
        Shape (rows, *positions of the output, numbers in).
    """
    around, indices = [[0, 0]], np.zeros((1, 1), np.int32)
    windows = zip(inputs.shape[1:-1], made[1:-1], lengths, strides, dilations, strict=True)
    for size, positions, taps, stride, dilation in windows:
        more = max((positions - 1) * stride + (taps - 1) * dilation + 1 - size, 0) if padding == "SAME" else 0
        around.append([more // 2, more - more // 2])  # the odd one is behind
        own = np.arange(positions)[:, None] * stride + np.arange(taps) * dilation
        both = indices[:, None, :, None] * (size + more) + own[:, None, :]
        indices = both.reshape(len(indices) * positions, -1)
    padded, channels = tf.pad(inputs, [*around, [0, 0]]), inputs.shape[-1]
    numbers = math.prod(lengths) * channels
    if channels <= FEW_CHANNELS and numbers <= SMALL_PATCH and max(dilations) == 1:
        kernel = tf.reshape(tf.eye(numbers, dtype=inputs.dtype), [*lengths, channels, numbers])
        return tf.nn.convolution(padded, kernel, strides, "VALID")
    flat = tf.reshape(padded, [inputs.shape[0], -1, channels])
    return tf.reshape(tf.gather(flat, tf.constant(indices), axis=1), [*made[:-1], numbers])


# Variables -----------------------------------------------------------------------------------------------------------


def part_of(gradients: Sequence[Gradient]) -> Part:
    """Return the form of the gradients of a variable.

    Args:
        gradients: by each of its uses, of which there are some.
    """
    first = gradients[0]
    if all(each.continues(first) for each in gradients):
        pairs = ([each.inputs for each in gradients], [each.deltas for each in gradients])
        inputs, deltas = (same[0] if len(same) == 1 else tf.concat(same, axis=1) for same in pairs)
        part = table(inputs, deltas, first.size) if first.size else of_positions(inputs, deltas)
        return replace(part, origins=first.origins)
    total, *rest = (each.whole() for each in gradients)
    return whole(sum(rest, total))
