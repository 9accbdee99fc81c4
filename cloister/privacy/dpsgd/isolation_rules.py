"""Rules that label the outputs of one operation of a graph, by type of operation.

A rule reads an operation's type, attributes, static shapes and the labels of its inputs (`labels`). A type without a
rule is refused as soon as an input depends on a unit.

Rules describe the computation of an operation. They have these premises:

    Kernels   in a call of fixed shape, a kernel computes each row from this row alone (tested on each platform)
    Shapes    a static shape is true; a wrong `set_shape` in a model is not detected
    Errors    a gather, a sparse cross-entropy, an integer division or an integer power may raise for integers of a
              unit's own data; for computed or drawn numbers it is refused (`isolation`)
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

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
from cloister.utils.arrays import Tensor

FOLDED = {
    *("Add", "AddV2", "BroadcastGradientArgs", "Cast", "ConcatOffset", "ConcatV2", "DynamicStitch", "Equal"),
    *("ExpandDims", "Fill", "FloorDiv", "FloorMod", "GatherV2", "Greater", "GreaterEqual", "Identity"),
    *("InvertPermutation", "Less", "LessEqual", "ListDiff", "Max", "Maximum", "Min", "Minimum", "Mul", "Neg"),
    *("NotEqual", "Pack", "Prod", "Range", "RealDiv", "Reshape", "ReverseV2", "Select", "SelectV2", "Slice"),
    *("Squeeze", "StridedSlice", "Sub", "Sum", "Tile", "Transpose", "Where"),
}
"""Types that are evaluated during the proof, for sizes and axes."""
MOST_FOLDED = 1 << 12
"""Largest number of entries of such an evaluated result."""


class StaticValues:
    """Integers of one graph that are computed from constants and static shapes alone."""

    def __init__(self) -> None:
        self._known: dict[str, NDArray | None] = {}

    def of(self, tensor: Tensor) -> NDArray | None:
        """Return the numbers of a tensor, or None if they are unknown."""
        if tensor.name not in self._known:
            self._known[tensor.name] = self._folded(tensor)
        return self._known[tensor.name]

    def _folded(self, tensor: Tensor) -> NDArray | None:
        value = tf.get_static_value(tensor)
        if value is not None:
            return np.asarray(value)
        operation, counts = tensor.op, tensor.dtype.is_integer or tensor.dtype.is_bool
        if operation.type == "ShapeN":
            shape = operation.inputs[tensor.value_index].shape
            return np.array(shape, tensor.dtype.as_numpy_dtype) if shape.is_fully_defined() else None
        if operation.type not in FOLDED or not counts or (tensor.shape.num_elements() or 0) > MOST_FOLDED:
            return None
        values = [value for one in operation.inputs if (value := self.of(one)) is not None]
        if len(values) < len(operation.inputs):
            return None
        result = executed(operation, values)[tensor.value_index]
        return result if result.size <= MOST_FOLDED else None


def executed(operation: tf.Operation, values: Sequence[NDArray]) -> list[NDArray]:
    """Execute an operation without state eagerly: one of `FOLDED`, or of `uses.MOVES`."""
    function, rest = getattr(tf.raw_ops, operation.type), iter(values)
    arguments: dict[str, object] = {}
    for argument in operation.op_def.input_arg:
        many = operation.get_attr(argument.number_attr) if argument.number_attr else None
        arguments[argument.name] = next(rest) if many is None else [next(rest) for _ in range(many)]
    for name in set(inspect.signature(function).parameters) - {*arguments, "name"}:
        arguments[name] = operation.get_attr(name)
    with tf.init_scope():
        results = function(**arguments)
    return list(map(np.asarray, results if isinstance(results, (list, tuple)) else [results]))


@dataclass(frozen=True)
class Step:
    """Operation with the labels of its inputs."""

    operation: tf.Operation
    labels: tuple[Label, ...]
    units: int
    values: StaticValues

    def attribute(self, name: str) -> tf.compat.v1.AttrValue:
        """Return an attribute of the operation, or None if its type has no such attribute."""
        known = any(one.name == name for one in self.operation.op_def.attr)
        return self.operation.get_attr(name) if known else None

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return a fully known shape."""
        if not tensor.shape.is_fully_defined():
            raise Unproved(f"has a shape that is not known: {tensor.shape}")
        return tuple(tensor.shape)

    def rank(self, place: int) -> int:
        """Return the rank of an input."""
        rank = self.operation.inputs[place].shape.rank
        if rank is None:
            raise Unproved(f"has an input {place} whose rank is not known")
        return int(rank)

    def value(self, place: int) -> NDArray:
        """Return the numbers of a unit-independent input, known while tracing."""
        value = self.values.of(self.operation.inputs[place]) if self.labels[place] is None else None
        if value is None:
            raise Unproved(f"has an input {place} that is not known while tracing")
        return value

    def axes(self, place: int, rank: int) -> list[int]:
        """Return the axes in an input, counted from the first axis."""
        return [int(axis) % rank for axis in np.ravel(self.value(place))]

    def only(self, *places: int) -> Rows:
        """Return the common label of some inputs; the rest must have none."""
        others = (label for place, label in enumerate(self.labels) if place not in places)
        return agreed((self.labels[place] for place in places), others)


Rule: TypeAlias = Callable[[Step], Sequence[Label]]
RULES: dict[str, Rule] = {}
"""Rule of each type of operation that may have inputs of units."""
GUARDS = ("Assert", "CheckNumerics", "CheckNumericsV2")
RAISING = dict.fromkeys(("FloorDiv", "FloorMod", "GatherV2", "Pow", "SparseSoftmaxCrossEntropyWithLogits"), 1)
"""Types with a rule that raise an exception for some integers, and the index of the deciding input."""
SIZES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
"""Types with equal outputs for all inputs of one static shape."""
KEYS = ("StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg", "StatelessRandomGetAlg")
DRAWS = ("StatelessRandomNormalV2", "StatelessRandomUniformIntV2", "StatelessRandomUniformV2")


def outputs(step: Step) -> Sequence[Label]:
    """Return the labels of the outputs of an operation without function calls.

    Raises:
        Mixes: the operation combines several units.
        Unproved: its rule does not cover these axes or options.
    """
    operation, kind, labels = step.operation, step.operation.type, step.labels
    if kind == "AddN" and len(labels) > 2:
        raise Unproved("adds three or more inputs in an order that follows from timing; add two at a time")
    if kind in ("Identity", "IdentityN"):
        return labels
    if kind in SIZES and all(tensor.shape.is_fully_defined() for tensor in operation.inputs):
        return [None] * len(operation.outputs)
    refused = [label for label in labels if isinstance(label, Refused)]
    if refused:
        return refused[:1] * len(operation.outputs)
    if kind.startswith("Stateless") and kind not in KEYS:
        if kind not in DRAWS or any(label is not None for label in labels):
            raise Unproved("draws random numbers in a way that has no rule")
        shape = step.shape(operation.outputs[0])
        if not shape or not shape[0] or shape[0] % step.units:
            raise Unproved("draws random numbers that several units share")
        return [Rows(0, shape[0] // step.units)]  # each unit has an independent slice of the first axis
    if all(label is None for label in labels):
        return [None] * len(operation.outputs)
    if kind not in RULES:
        raise Unproved("has no rule for these axes or options")
    return RULES[kind](step)


def has_rule(kind: str) -> bool:
    """Return whether `outputs` covers a type of operation with inputs of units."""
    return kind in RULES or kind in ("Identity", "IdentityN", *SIZES) or kind.startswith("Stateless")


_rule = partial(adding, RULES)


# Rules that keep an axis ---------------------------------------------------------------------------------------------

Axes: TypeAlias = Callable[[Step], Iterable[int]]


def _apart(kinds: str, taken: Axes, reason: str, error: type[NotIsolated] = Unproved) -> None:
    """Add a rule that keeps the first input's label on an uncombined axis."""

    def kept(step: Step) -> Sequence[Label]:
        return [step.only(0).outside(set(taken(step)), reason, error)] * len(step.operation.outputs)

    _rule(kinds)(kept)


_apart(  # a copy of whole rounds of units is whole rounds too
    "Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil Cos Cosh Elu EnsureShape Erf Erfc Erfinv Exp Expm1 Floor IsFinite "
    "IsInf IsNan LeakyRelu Log Log1p LogicalNot Neg Reciprocal Relu Relu6 Round Rsqrt Selu Sigmoid Sign Sin Sinh "
    "Softplus Softsign Sqrt Square StopGradient Tan Tanh BiasAdd MatrixBandPart Tile",
    lambda step: (),
    "",
)
_apart("Softmax LogSoftmax TopKV2", lambda step: [step.rank(0) - 1], "compares entries along the axis of units", Mixes)
_apart("Cumsum Cumprod", lambda step: step.axes(1, step.rank(0)), "accumulates along the axis of units", Mixes)
_apart("ReverseV2", lambda step: step.axes(1, step.rank(0)), "moves units to places of other units")
_apart("Roll", lambda step: step.axes(2, step.rank(0)), "moves units to places of other units")
_apart(
    "MatrixDiagPartV3",
    lambda step: range(step.rank(0) - 2, step.rank(0)),
    "takes a diagonal along the axis of units",
)
_apart(
    "Pad PadV2 MirrorPad MirrorPadGrad",
    lambda step: np.flatnonzero(step.value(1).any(axis=1)),
    "pads the axis of units",
)
_apart(  # blocks are outermost along the first axis, so units repeat in order
    "SpaceToBatchND BatchToSpaceND", lambda step: range(1, step.rank(0)), "has units along another axis than the first"
)


@_rule("Sum Mean Max Min Prod Any All ArgMax ArgMin")
def _reduced(step: Step) -> Sequence[Label]:
    axes = step.axes(1, step.rank(0))
    label = step.only(0).outside(axes, "reduces the axis of units")
    return [label if step.attribute("keep_dims") else label.without(axes)]


@_rule(
    "AddN AddV2 Atan2 BitwiseAnd BitwiseOr BitwiseXor DivNoNan Equal FloorDiv FloorMod Greater GreaterEqual LeftShift "
    "Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mul NotEqual Pow RealDiv RightShift SelectV2 "
    "SquaredDifference Sub EluGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad "
    "SoftsignGrad SqrtGrad TanhGrad"
)
def _broadcast(step: Step) -> Sequence[Label]:
    return [broadcast(step.labels, [step.rank(place) for place in range(len(step.labels))])]


_rule("Select")(lambda step: [agreed(step.labels)])  # a condition of lower rank is aligned at the first axis
_rule("BroadcastTo")(lambda step: [step.only(0).shifted(len(step.shape(step.operation.outputs[0])) - step.rank(0))])

EXAMPLES = {
    "Conv2D Conv3D DepthwiseConv2dNative MaxPool AvgPool MaxPool3D AvgPool3D": (0,),
    "ResizeBilinear ResizeBicubic ResizeNearestNeighbor ResizeNearestNeighborGrad": (0,),
    "AvgPoolGrad AvgPool3DGrad": (1,),
    "ResizeBilinearGrad ResizeBicubicGrad": (0, 1),
    "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits": (0, 1),
    "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput": (2,),
    "MaxPoolGrad MaxPool3DGrad": (0, 1, 2),
}
"""Inputs, by index, that hold examples along the first axis. Further inputs hold weights or sizes."""


@_rule(" ".join(EXAMPLES))
def _on_examples(step: Step) -> Sequence[Label]:
    (places,) = (places for kinds, places in EXAMPLES.items() if step.operation.type in kinds.split())
    label = step.only(*places)
    if label.axis != 0 or step.attribute("data_format") not in (None, b"NHWC", b"NDHWC"):
        raise Unproved("has units along another axis than the first, or channels before positions")
    windows = [step.attribute(name) for name in ("ksize", "strides", "dilations")]
    if any(isinstance(window, list) and window and window[0] != 1 for window in windows):
        raise Unproved("has a window over units")
    if any((step.attribute("explicit_paddings") or [])[:2]):
        raise Unproved("pads the axis of units")
    return [label] * len(step.operation.outputs)


@_rule(
    "BiasAddGrad L2Loss Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter "
    "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3"
)
def _adds_up_examples(step: Step) -> Sequence[Label]:
    along_first = all(label is None or (isinstance(label, Rows) and label.axis == 0) for label in step.labels)
    if along_first and step.attribute("is_training") is not False:
        raise Mixes("adds up over units")
    raise Unproved("has no rule for these axes or options")


# Products ------------------------------------------------------------------------------------------------------------


@_rule("MatMul BatchMatMulV2")
def _product(step: Step) -> Sequence[Label]:
    names = ("transpose_a", "transpose_b") if step.operation.type == "MatMul" else ("adj_x", "adj_y")
    return [product(step.labels, (step.rank(0), step.rank(1)), [bool(step.attribute(name)) for name in names])]


@_rule("Einsum")
def _einsum(step: Step) -> Sequence[Label]:
    left, right = step.attribute("equation").decode().replace(" ", "").split("->")
    if "." in left + right:
        raise Unproved("has an ellipsis")
    pairs = zip(left.split(","), step.labels, strict=True)
    letters = {(term[label.axis], label.inner) for term, label in pairs if isinstance(label, Rows)}
    if len(letters) > 1:
        raise Mixes("multiplies units with each other")
    ((letter, inner),) = letters
    if letter not in right:
        raise Mixes("adds up over units")
    return [Rows(right.index(letter), inner)]


# Shapes --------------------------------------------------------------------------------------------------------------


@_rule("Reshape Squeeze")
def _reshaped(step: Step) -> Sequence[Label]:
    old, new = step.shape(step.operation.inputs[0]), step.shape(step.operation.outputs[0])
    return [step.only(0).reshaped(old, new, step.units)]


def _own_axis(step: Step, more: int = 0) -> int:
    """Return the attribute `axis`, counted from the first axis."""
    return int(step.attribute("axis") % (step.rank(0) + more))


_rule("ExpandDims")(lambda step: [step.only(0).beside(step.axes(1, step.rank(0) + 1)[0])])
_rule("OneHot")(lambda step: [step.only(0).beside(_own_axis(step, 1))])
_rule("Pack")(lambda step: [agreed(step.labels).beside(_own_axis(step, 1))])


@_rule("Transpose")
def _transposed(step: Step) -> Sequence[Label]:
    return [step.only(0).permuted(step.axes(1, step.rank(0)))]


@_rule("ConcatV2")
def _appended(step: Step) -> Sequence[Label]:
    """Keep an axis of units, or append whole rounds of all units to it."""
    *labels, _ = step.labels
    label, (axis,) = agreed(labels), step.axes(len(labels), step.rank(0))
    if label.axis == axis and None in labels:
        raise Unproved("appends other entries to the axis of units")
    return [label]


@_rule("Unpack")
def _unpacked(step: Step) -> Sequence[Label]:
    axes = [_own_axis(step)]
    label = step.only(0).outside(axes, "takes units apart", Unproved)
    return [label.without(axes)] * len(step.operation.outputs)


# Choices -------------------------------------------------------------------------------------------------------------


def _cut(numbers: NDArray, label: Rows, units: int, axis: int) -> Rows | None:
    """Return the label of kept entries of the axis of units; None: none fits."""
    own = numbers // label.inner % units
    for inner in (label.inner, 1, own.size // units):
        if inner and own.size % (units * inner) == 0 and np.array_equal(own, np.arange(own.size) // inner % units):
            return Rows(axis, inner)
    return None


def _cut_or_refuse(step: Step, numbers: NDArray, label: Rows, axis: int) -> Rows:
    found = _cut(numbers, label, step.units, axis)
    if found is None:
        raise Unproved("keeps some units and drops others, or changes their order")
    return found


def _kept(step: Step, shape: tuple[int, ...], axis: int) -> tuple[NDArray, int]:
    """Return the entries of an axis kept by a strided slice, and their new axis."""
    masks = {name: step.attribute(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    index: list[int | slice | EllipsisType | None] = []
    for place, (begin, end, stride) in enumerate(zip(*(map(int, step.value(i)) for i in (1, 2, 3)), strict=True)):
        marked = {name for name, mask in masks.items() if mask >> place & 1}
        if "ellipsis" in marked or "new_axis" in marked:
            index.append(... if "ellipsis" in marked else None)
        elif "shrink_axis" in marked:
            index.append(begin)
        else:
            index.append(slice(None if "begin" in marked else begin, None if "end" in marked else end, stride))
    along = [-1 if one == axis else 1 for one in range(len(shape))]
    taken = np.broadcast_to(np.arange(shape[axis]).reshape(along), shape)[tuple(index)]
    moving = [one for one, length in enumerate(taken.shape) if length > 1 and taken.strides[one]]
    if not taken.size:
        raise Unproved("gives an empty tensor")
    if not moving:
        return np.ravel(taken.flat[0]), 0
    return taken[tuple(slice(None) if one == moving[0] else 0 for one in range(taken.ndim))], moving[0]


@_rule("StridedSlice")
def _strided_slice(step: Step) -> Sequence[Label]:
    label = step.only(0)
    numbers, axis = _kept(step, step.shape(step.operation.inputs[0]), label.axis)
    return [_cut_or_refuse(step, numbers, label, axis)]


@_rule("StridedSliceGrad")
def _strided_slice_gradient(step: Step) -> Sequence[Label]:
    """Find the larger tensor's axis along which entries keep their units' places."""
    label, shape = step.only(4), tuple(map(int, step.value(0)))
    for axis, length in enumerate(shape):
        for inner in {label.inner, length // step.units} - {0}:
            if length % (step.units * inner) == 0:
                numbers, place = _kept(step, shape, axis)
                if _cut(numbers, Rows(axis, inner), step.units, place) == label:
                    return [Rows(axis, inner)]
    raise Unproved("puts units into a tensor that has no axis of units")


@_rule("Slice")
def _slice(step: Step) -> Sequence[Label]:
    label = step.only(0)
    length = step.shape(step.operation.outputs[0])[label.axis]
    return [_cut_or_refuse(step, int(step.value(1)[label.axis]) + np.arange(length), label, label.axis)]


@_rule("Split SplitV")
def _split(step: Step) -> Sequence[Label]:
    place, at = (1, 0) if step.operation.type == "Split" else (0, 2)
    label, (axis,) = step.only(place), step.axes(at, step.rank(place))
    if axis != label.axis:
        return [label] * len(step.operation.outputs)
    lengths = [step.shape(tensor)[axis] for tensor in step.operation.outputs]
    parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    return [_cut_or_refuse(step, numbers, label, axis) for numbers in parts]


@_rule("GatherV2")
def _gather(step: Step) -> Sequence[Label]:
    """Follow the axis of units of the table and of the indices into the result."""
    table, indices, _ = step.labels
    batch, (axis,) = step.attribute("batch_dims"), step.axes(2, step.rank(0))
    if not 0 <= batch <= axis or (isinstance(table, Rows) and table.axis == axis):
        raise Unproved("chooses among units, or counts its axes in a way that has no rule")
    if isinstance(table, Rows) and table.axis > axis:
        table = table.shifted(step.rank(1) - 1 - batch)
    if isinstance(indices, Rows) and indices.axis >= batch:
        indices = indices.shifted(axis - batch)
    return [agreed((table, indices))]
