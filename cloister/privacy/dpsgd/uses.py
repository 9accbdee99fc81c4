"""Uses of trained variables in a traced graph, and from each the gradients of units.

A variable has an effect on the losses through the operations that take it, as it is or through views: operations that
only move its numbers. The gradient of a unit with respect to the variable is the sum over these uses. That of one use
follows from the other inputs of the operation, and from the gradient with respect to its output, the delta:

    a product with the variable   inputs a and deltas d at T positions, the gradient is Σ_t a_t d_tᵀ
    a sum with it                 Σ_t d_t
    an element-wise operation     the gradient with respect to a copy of the variable for each row
    a choice of its rows          the indices, and a delta for each

Any other use is refused: then units are computed in turn. A use through which TensorFlow has no gradient counts for
none. What is held is proved to be of one unit alone by `isolation`, on the graph with these computations in it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from cloister.privacy.dpsgd.forms import Part, PerUnit, Rows, Table, Turned, back, of_positions, product
from cloister.privacy.dpsgd.tracing import NotCapturable
from cloister.utils.arrays import Tensor

RESHAPES = ("Identity", "Reshape", "ExpandDims", "Squeeze")
VIEWS = (*RESHAPES, "Transpose")
"""Operations that keep each number of their first input once: a gradient keeps its norm on the way back."""
GATHER = "GatherV2"
CONTRACTIONS = ("MatMul", "BatchMatMulV2", "Einsum")
SUMS = ("AddV2", "BiasAdd")
COPIES = ("BroadcastTo", "Tile")
ELEMENTWISE = ("AddV2", "Div", "Maximum", "Minimum", "Mul", "Pow", "RealDiv", "SelectV2", "SquaredDifference", "Sub")
"""Operations that broadcast their inputs and combine them entry by entry."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
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
    views: tuple[tf.Operation, ...] = ()

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
        if kind not in (*CONTRACTIONS, *CONVOLUTIONS, *SUMS, *COPIES, *ELEMENTWISE, GATHER):
            raise NotCapturable(f"used by {kind}, which has no form for gradients of several examples at once")
        if _is_overridden(self.operation):
            raise NotCapturable(f"used by {kind} with a gradient of its own")


def uses_of(total: Tensor, values: Sequence[Tensor], free: Collection[str] = ()) -> list[list[Use]]:
    """Return the uses of each variable that can have an effect on the gradient of a total.

    Args:
        total: sum of losses.
        values: of the variables, in the same graph.
        free: names of choices of rows that are views: those of the same rows for all units.
    """
    needed = _differentiable(total)
    found: list[list[Use]] = []
    for value in values:
        own, todo = list[Use](), [(value, tuple[tf.Operation, ...]())]
        while todo:
            tensor, views = todo.pop()
            for operation in dict.fromkeys(tensor.consumers()):
                if operation.name not in needed:
                    continue
                places = [place for place, each in enumerate(operation.inputs) if each.name == tensor.name]
                moves = operation.type in VIEWS or operation.name in free
                if moves and places == [0] and not _is_overridden(operation):
                    todo.append((operation.outputs[0], (*views, operation)))
                else:
                    own += [Use(operation, place, views) for place in places]
        found.append(own)
    return found


def _is_overridden(operation: tf.Operation) -> bool:
    return "_gradient_op_type" in operation.node_def.attr


def _differentiable(total: Tensor) -> set[str]:
    """Return the names of operations through which a gradient can reach a total."""
    needed, todo = set[str](), [total.op]
    while todo:
        operation = todo.pop()
        if operation.name not in needed and _has_gradient(operation):
            needed.add(operation.name)
            todo += [tensor.op for tensor in operation.inputs]
    return needed


def _has_gradient(operation: tf.Operation) -> bool:
    try:
        return not operation.inputs or ops.get_gradient_function(operation) is not None
    except LookupError:
        return True


class Gradient(NamedTuple):
    """Gradients of units with respect to a variable, by one use.

    Attributes:
        inputs: shape (U, T, numbers in), or indices of a table's rows, shape (U, T). None: see `deltas`.
        deltas: shape (U, T, numbers out). Without inputs the gradient is the sum over T.
        steps: from the gradient, shape (numbers in, numbers out) or (numbers out,), back to the variable.
        size: rows of the table; 0 if there is none.
    """

    inputs: Tensor | None
    deltas: Tensor
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    size: int = 0

    def whole(self) -> Tensor:
        """Return the gradients, shape (U, *variable.shape)."""
        if self.size:
            raise NotCapturable("looked up by rows, and used in other ways too")
        summed = tf.reduce_sum(self.deltas, axis=1) if self.inputs is None else product(self.inputs, self.deltas)
        return back(summed, self.steps, [summed.shape[0]])

    @property
    def origin(self) -> tuple[str, int]:
        """Return the name of the deltas' tensor as it was before its shape changed, and the numbers out."""
        tensor = self.deltas
        while tensor.op.type in RESHAPES:
            tensor = tensor.op.inputs[0]
        return tensor.name, self.deltas.shape[2]


@dataclass(frozen=True)
class Seen:
    """A use with its delta.

    Attributes:
        use: of a variable.
        delta: the gradient of the summed losses with respect to its output.
        axis, inner: entry j of this axis of the output is of unit (j // inner) % U.
        rows: the shape of the call.
    """

    use: Use
    delta: Tensor
    axis: int
    inner: int
    rows: Rows

    def gradient(self) -> Gradient:
        """Return the gradients of units.

        Raises:
            NotCapturable: there is no form for them.
        """
        kind, views = self.use.operation.type, self.use.views
        chooses = [view.type for view in views].count(GATHER)
        if chooses == 0 and kind in CONTRACTIONS:
            return self._contracted()
        if chooses == 0 and kind in CONVOLUTIONS:
            return CONVOLUTIONS[kind](self)
        if chooses == 0 and kind == GATHER and self.use.place == 0:
            return self._chosen()
        if chooses < 2 and kind in (*SUMS, *COPIES, *ELEMENTWISE):
            found = self._added() if kind in SUMS and not chooses else None
            return found or self._copied()
        raise NotCapturable(f"looked up by rows, and used by {kind}")

    def by_unit(self, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Return a tensor whose units are along an axis, by default that of the output, as (U, T, *other axes)."""
        axis = self.axis if axis is None else axis
        if axis:
            tensor = tf.transpose(tensor, [axis, *(each for each in range(tensor.shape.rank) if each != axis)])
        units, (length, *rest) = self.rows.units, tensor.shape
        copies = length // (units * self.inner)
        if copies > 1:
            tensor = tf.transpose(
                tf.reshape(tensor, [copies, units, self.inner, *rest]), [1, 0, *range(2, len(rest) + 3)]
            )
        return tf.reshape(tensor, [units, copies * self.inner, *rest])

    def _contracted(self) -> Gradient:
        """Return the gradients of a product, whose axes have letters: each is one of a position, or of numbers."""
        *terms, made = _letters(self.use.operation)
        own, other = terms[self.use.place], terms[1 - self.use.place]
        factor, unit = self.use.operation.inputs[1 - self.use.place], made[self.axis]
        sizes = dict(zip(other + made, [*factor.shape, *self.delta.shape], strict=True))
        distinct = all(len(set(term)) == len(term) for term in (own, other, made))
        if not distinct or unit in own or unit not in other or set(other) - set(own + made):
            raise NotCapturable("used in a product of another kind than of numbers in and numbers out")
        shapes = (
            ([sizes[letter] for letter in own], self.use.given.shape),
            ([sizes[each] for each in other], factor.shape),
        )
        if set(own) - set(other + made) or any(stated != found for stated, found in shapes):
            raise NotCapturable("repeated or added up in a product")
        steps = _steps(self.use.views)
        inputs, deltas = self.by_unit(factor, other.index(unit)), self.by_unit(self.delta)
        orders = "".join(letter for letter in other if letter != unit), made.replace(unit, "")
        if set(other) & set(made) & set(own):  # such as a matrix for each head
            of_units, along = [each for each in ascii_letters if each not in own + other + made][:2]
            rows = of_units + along
            whole = tf.einsum(f"{rows}{orders[0]},{rows}{orders[1]}->{of_units}{own}", inputs, deltas)
            numbers = math.prod(self.use.given.shape)
            given = ("reshape", tuple(self.use.given.shape))
            return Gradient(None, tf.reshape(whole, [self.rows.units, 1, numbers]), (given, *steps))
        positions = [letter for letter in orders[1] if letter in orders[0]]
        ins, outs = ([letter for letter in order if letter in own] for order in orders)
        flat = []
        for tensor, term, numbers in ((inputs, orders[0], ins), (deltas, orders[1], outs)):
            turned = [term.index(letter) + 2 for letter in (*positions, *numbers)]
            moved = tensor if turned == sorted(turned) else tf.transpose(tensor, [0, 1, *turned])
            width = math.prod(sizes[letter] for letter in numbers)
            flat.append(tf.reshape(moved, [self.rows.units, -1, width]))
        order = ins + outs
        apart = ("reshape", tuple(sizes[letter] for letter in order))
        turn = ("transpose", tuple(order.index(letter) for letter in own))
        return Gradient(flat[0], flat[1], (apart, turn, *steps))

    def _added(self) -> Gradient | None:
        """Return the gradients of a sum whose last axes are those of the variable, or None for another sum."""
        if self.use.operation.type == "BiasAdd" and self.use.operation.get_attr("data_format") != b"NHWC":
            raise NotCapturable("added to channels in front of positions")
        shape = list(self.use.given.shape)
        while shape[:1] == [1]:
            shape = shape[1:]
        before = self.delta.shape.rank - len(shape)
        if self.axis >= before or self.delta.shape[before:] != shape:
            return None
        deltas = tf.reshape(self.by_unit(self.delta), [self.rows.units, -1, math.prod(shape)])
        return Gradient(None, deltas, (("reshape", tuple(self.use.given.shape)), *_steps(self.use.views)))

    def _copied(self) -> Gradient:
        """Return the gradients with respect to a copy of the variable for each row of the operation's output."""
        operation, given, made = self.use.operation, self.use.given, self.delta
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
            inputs = [copy if place == self.use.place else each for place, each in enumerate(operation.inputs)]
            again = getattr(tf.raw_ops, kind)(**dict(zip(names, inputs, strict=True)))
        (rows,) = tf.gradients(again, copy, grad_ys=self.delta)
        if rows is None:
            raise NotCapturable(f"used by {operation.type} without a gradient")
        whole = tf.reduce_sum(self.by_unit(rows), axis=1)
        return self._behind(whole)

    def _behind(self, whole: Tensor) -> Gradient:
        """Return the gradients of what the operation takes as those of the variable, a choice of rows included."""
        units, views = self.rows.units, self.use.views
        numbers = math.prod(self.use.given.shape)
        place = next((number for number, view in enumerate(views) if view.type == GATHER), None)
        if place is None:
            steps = (("reshape", tuple(self.use.given.shape)), *_steps(views))
            return Gradient(None, tf.reshape(whole, [units, 1, numbers]), steps)
        table, indices, _ = views[place].inputs
        _refuse_other_choices(views[place])
        made = back(
            tf.reshape(whole, [units, *self.use.given.shape]),
            (*_steps(views[place + 1 :]), ("reshape", (math.prod(indices.shape), math.prod(table.shape[1:])))),
            [units],
        )
        flat = tf.broadcast_to(tf.reshape(tf.cast(indices, tf.int32), [1, -1]), made.shape[:2])
        return Gradient(flat, made, (("reshape", tuple(table.shape)), *_steps(views[:place])), table.shape[0])

    def _chosen(self) -> Gradient:
        """Return the gradients of a table from which each unit chooses rows."""
        table, indices, _ = self.use.operation.inputs
        _refuse_other_choices(self.use.operation)
        if self.axis >= indices.shape.rank:
            raise NotCapturable("looked up along another axis than the first")
        units, numbers = self.rows.units, math.prod(table.shape[1:])
        flat = tf.reshape(self.by_unit(tf.cast(indices, tf.int32)), [units, -1])
        deltas = tf.reshape(self.by_unit(self.delta), [units, -1, numbers])
        steps = (("reshape", tuple(table.shape)), *_steps(self.use.views))
        return Gradient(flat, deltas, steps, table.shape[0])


def _refuse_other_choices(operation: tf.Operation) -> None:
    if operation.get_attr("batch_dims") or tf.get_static_value(operation.inputs[2]) != 0:
        raise NotCapturable("looked up along another axis than the first")


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
        outer = LETTERS[: operation.outputs[0].shape.rank - 2]
        outer = outer[len(outer) - (tensor.shape.rank - 2) :]
        terms.append(outer + (ends[::-1] if operation.get_attr(name) else ends))
    return [*terms, LETTERS[: operation.outputs[0].shape.rank - 2] + "xz"]


def _steps(views: Sequence[tf.Operation]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the steps from a gradient of what views give back to one of the variable."""
    steps = []
    for view in reversed(views):
        if view.type == "Transpose":
            order = tf.get_static_value(view.inputs[1])
            if order is None:
                raise NotCapturable("transposed in an order that is computed")
            steps.append(("transpose", tuple(np.argsort(order).tolist())))
        else:
            steps.append(("reshape", tuple(view.inputs[0].shape)))
    return tuple(steps)


# Convolutions --------------------------------------------------------------------------------------------------------


def _window(seen: Seen) -> tuple[str, list[int], list[int], list[int]]:
    """Return padding, and the lengths, strides and dilations of the kernel."""
    operation = seen.use.operation
    padding, layout = (operation.get_attr(name).decode() for name in ("padding", "data_format"))
    if layout != "NHWC" or padding not in ("SAME", "VALID") or seen.axis != 0:
        raise NotCapturable("used by a convolution with explicit padding, or with another order of axes")
    strides, dilations = (list(operation.get_attr(name))[1:3] for name in ("strides", "dilations"))
    return padding, list(seen.use.given.shape[:2]), strides, dilations


def _positions(seen: Seen, tensor: Tensor) -> Tensor:
    return tf.reshape(seen.by_unit(tensor), [seen.rows.units, -1, tensor.shape[-1]])


def _convolved(seen: Seen) -> Gradient:
    """Return the gradients of a convolution: a product at each position of its output, with a patch of its input."""
    inputs, shape = seen.use.operation.inputs[0], seen.use.given.shape
    if seen.use.place != 1 or inputs.shape[-1] != shape[2]:
        raise NotCapturable("used by a convolution in groups, or as its input")
    covered = patches(inputs, seen.delta.shape, *_window(seen))
    steps = (("reshape", tuple(shape)), *_steps(seen.use.views))
    return Gradient(_positions(seen, covered), _positions(seen, seen.delta), steps)


def _transposed(seen: Seen) -> Gradient:
    """Return the gradients of a transposed convolution, in which inputs and deltas change places."""
    inputs, shape = seen.use.operation.inputs[2], seen.use.given.shape
    if seen.use.place != 1 or seen.delta.shape[-1] != shape[2]:
        raise NotCapturable("used by a transposed convolution in groups, or as its input")
    covered = patches(seen.delta, inputs.shape, *_window(seen))
    steps = (("reshape", tuple(shape)), *_steps(seen.use.views))
    return Gradient(_positions(seen, covered), _positions(seen, inputs), steps)


def _depthwise(seen: Seen) -> Gradient:
    """Return the gradients of a depthwise convolution: a product for each channel."""
    if seen.use.place != 1:
        raise NotCapturable("used by a convolution as its input")
    shape, units = seen.use.given.shape, seen.rows.units
    covered = _positions(seen, patches(seen.use.operation.inputs[0], seen.delta.shape, *_window(seen)))
    apart = tf.reshape(covered, [units, covered.shape[1], shape[0] * shape[1], shape[2], 1])
    deltas = tf.reshape(_positions(seen, seen.delta), [units, covered.shape[1], 1, *shape[2:]])
    whole = tf.reshape(tf.reduce_sum(apart * deltas, axis=1), [units, 1, math.prod(shape)])
    return Gradient(None, whole, (("reshape", tuple(shape)), *_steps(seen.use.views)))


CONVOLUTIONS: dict[str, Callable[[Seen], Gradient]] = {
    "Conv2D": _convolved,
    "Conv2DBackpropInput": _transposed,
    "DepthwiseConv2dNative": _depthwise,
}


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


def parts_of(gradients: Sequence[Sequence[Gradient]]) -> Iterator[tuple[tuple[int, ...], Part]]:
    """Yield the numbers of variables, and the form of their gradients.

    A variable that is only added to the products of another one, as a bias is, has a form with it: its gradient is
    that of a further input of 1.

    Args:
        gradients: of each variable, by all of its uses; without any, a variable has no part.
    """
    biases = {}
    for number, own in enumerate(gradients):
        if own and all(each.inputs is None for each in own) and len({each.steps for each in own}) == 1:
            biases[tuple(sorted(each.origin for each in own))] = number
    shared: dict[int, int] = {}
    for number, own in enumerate(gradients):
        if _is_product(own) and (bias := biases.pop(tuple(sorted(each.origin for each in own)), None)) is not None:
            shared[number] = bias
    for number, own in enumerate(gradients):
        if not own or number in shared.values():
            continue
        steps = [own[0].steps]
        if _is_product(own):
            if number in shared:
                steps.append(gradients[shared[number]][0].steps)
            found = of_positions([(each.inputs, each.deltas) for each in own], number in shared)
            yield (number, shared[number]) if number in shared else (number,), Turned(found, steps)
        elif all(each.size for each in own) and len({each.steps for each in own}) == 1:
            indices, deltas = (tf.concat([each[place] for each in own], axis=1) for place in (0, 1))
            yield (number,), Turned(Table(indices, deltas, own[0].size), steps)
        else:
            first, *rest = (each.whole() for each in own)
            yield (number,), PerUnit([sum(rest, first)])


def _is_product(own: Sequence[Gradient]) -> bool:
    inputs = [each.inputs for each in own if each.inputs is not None and not each.size]
    widths = {(one.steps, each.shape[2], one.deltas.shape[2]) for one, each in zip(own, inputs, strict=False)}
    return len(inputs) == len(own) and len(widths) == 1
