"""Rules that label the outputs of one operation of a graph, by type of operation.

A rule reads an operation's type, attributes, static shapes and the labels of its inputs (`labels`). A type without a
rule is refused as soon as an input depends on a unit.

Rules describe the computation of an operation. One that only moves entries is executed on the numbers of units. Rules
have these premises:

    Kernels   in a call of fixed shape, a kernel computes each row from this row alone (tested on each platform)
    Shapes    a static shape is true; a wrong `set_shape` in a model is not detected
    Errors    a gather, a sparse cross-entropy, an integer division or an integer power may raise for integers of a
              unit's own data; for computed or drawn numbers it is refused (`isolation`)
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
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
    *("StridedSlice", "Sub", "Sum", "Tile", "Transpose", "Where"),
}
"""Types that are evaluated during the proof, for sizes and axes."""
MOST_FOLDED = 1 << 12
"""Largest number of entries of such an evaluated result."""
MOST_MOVED = 1 << 26
"""Most entries of a tensor in which the numbers of units are moved: a quarter of a gigabyte."""


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
    """Execute an operation without state eagerly: one of `FOLDED`, of `uses.MOVES` or of `_moved`."""
    function, rest = getattr(tf.raw_ops, operation.type), iter(values)
    names = [name for name in inspect.signature(function).parameters if name != "name"]
    inputs = operation.op_def.input_arg  # in the order of parameters, some of which have other names
    arguments: dict[str, object] = {name: operation.get_attr(name) for name in names[len(inputs) :]}
    for name, argument in zip(names, inputs, strict=False):
        many = operation.get_attr(argument.number_attr) if argument.number_attr else None
        arguments[name] = next(rest) if many is None else [next(rest) for _ in range(many)]
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


_apart(
    "Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil Cos Cosh Elu EnsureShape Erf Erfc Erfinv Exp Expm1 Floor IsFinite "
    "IsInf IsNan LeakyRelu Log Log1p LogicalNot Neg Reciprocal Relu Relu6 Round Rsqrt Selu Sigmoid Sign Sin Sinh "
    "Softplus Softsign Sqrt Square StopGradient Tan Tanh BiasAdd MatrixBandPart",
    lambda step: (),
    "",
)
_apart("Softmax LogSoftmax TopKV2", lambda step: [step.rank(0) - 1], "compares entries along the axis of units", Mixes)
_apart("Cumsum Cumprod", lambda step: step.axes(1, step.rank(0)), "accumulates along the axis of units", Mixes)
_apart(
    "MatrixDiagPartV3",
    lambda step: range(step.rank(0) - 2, step.rank(0)),
    "takes a diagonal along the axis of units",
)
_apart("MirrorPadGrad", lambda step: np.flatnonzero(step.value(1).any(axis=1)), "adds up along the axis of units")


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


_rule("OneHot")(lambda step: [step.only(0).beside(int(step.attribute("axis") % (step.rank(0) + 1)))])


@_rule(
    "BatchToSpaceND BroadcastTo ConcatV2 ExpandDims MirrorPad Pack Pad PadV2 ReverseV2 Roll Slice SpaceToBatchND Split "
    "SplitV StridedSlice StridedSliceGrad Tile Transpose Unpack"
)
def _moved(step: Step) -> Sequence[Label]:
    """Execute the operation on the numbers of units, and find the axis along which they then change.

    An entry of unit u has number u + 1. One that depends on no unit, such as padding, has 0.
    """
    operation, given, moved = step.operation, list[NDArray](), list[Label]()
    arguments = (
        [argument] * (operation.get_attr(argument.number_attr) if argument.number_attr else 1)
        for argument in operation.op_def.input_arg
    )
    if max(tensor.shape.num_elements() or 0 for tensor in (*operation.inputs, *operation.outputs)) > MOST_MOVED:
        raise Unproved("moves too many entries to be executed on the numbers of units")
    for place, argument in enumerate(chain.from_iterable(arguments)):
        if argument.type_attr != "T":
            given.append(step.value(place))
            continue
        label, shape = step.labels[place], step.shape(operation.inputs[place])
        moved.append(label)
        given.append(np.zeros(shape, np.int32))
        if isinstance(label, Rows):
            given[-1] += _numbers(label, shape, step.units)
    inner = agreed(moved).inner
    try:
        results = executed(operation, given)
    except (tf.errors.OpError, ValueError) as error:
        raise Unproved("could not be executed on the numbers of units") from error
    return [_along(numbers, step.units, inner) for numbers in results]


def _numbers(label: Rows, shape: Sequence[int], units: int) -> NDArray:
    """Return the number of the unit at each entry along an axis of units, which broadcasts to a shape."""
    numbers = np.arange(shape[label.axis], dtype=np.int32) // label.inner % units + 1
    return numbers.reshape([-1 if axis == label.axis else 1 for axis in range(len(shape))])


def _along(numbers: NDArray, units: int, inner: int) -> Rows:
    """Return the label of entries of units by their numbers."""
    for axis, length in enumerate(numbers.shape if numbers.any() else ()):
        for run in (inner, 1, length // units):
            label, fits = Rows(axis, run), run and length % (units * run) == 0
            if fits and np.all((numbers == 0) | (numbers == _numbers(label, numbers.shape, units))):
                return label
    raise Unproved("keeps some units and drops others, or changes their order")


# Choices -------------------------------------------------------------------------------------------------------------


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
