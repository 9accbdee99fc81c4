"""Sums within a row, computed alike for every row.

TensorFlow adds up over an axis in the middle, and over many terms, in an order that depends on where in memory a row
begins. A trial sees that only where such a sum has several terms: not behind a maximum over positions, or where an
activation is saturated. So each such operation is replaced while a graph is traced, in a layer or in a
gradient. The replacement is a product of matrices, `parts.added_up`. A softmax is replaced by the
operations that it consists of. A sum of three or more terms becomes a chain: two equal calls of `AddN` gave different
sums. What is left in a graph, as in a function that was traced before, is found by `uneven_operations`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from cloister.core.tensors import Tensor
from cloister.privacy.dpsgd.graphs import is_used, with_functions
from cloister.privacy.dpsgd.isolation_rules import StaticValues
from cloister.privacy.dpsgd.parts import added_up

REPLACED = ("Sum", "Mean")
"""Operations whose result depends on the order of terms."""
SOFTMAX = "Softmax"
"""Replaced too: rows were seen to differ, since it computes most exponentials several at a time and some one by one.
Operations whose names begin with it, such as a cross-entropy, differ too. They are only found."""
LEFT = ("Prod", "EuclideanNorm")
"""Others, which are rare: they are only found."""
MANY = 4096
"""Terms, or classes. Rows were seen to differ in sums over the last axis of more than 4,096 terms in double precision,
and of more than 8,192 in single. The lower limit is used for both."""
WITH_CLASSES = ("LogSoftmax", "SparseSoftmaxCrossEntropyWithLogits")
"""Operations that add up over classes within."""
BROADCAST = ("Pow", "Atan2", "Xlogy", "Xlog1py")
"""Operations that were seen to compute rows differently where one argument is repeated along an axis."""


@contextmanager
def even_sums() -> Iterator[None]:
    """Replace the sums, means, softmaxes and sums of terms that are traced in the block, in this thread.

    By a part of TensorFlow that is not public: no public one reaches the operations that gradients make.
    """
    with _calling(_replaced):
        yield


@contextmanager
def chained_sums() -> Iterator[None]:
    """Replace each sum of three or more terms that is traced in the block by a chain, in this thread.

    `AddN` adds its terms in an order that follows from whose memory is free: equal calls gave different sums.
    """
    with _calling(_chained):
        yield


@contextmanager
def _calling(callback: Callable[..., list[Tensor] | None]) -> Iterator[None]:
    """Have TensorFlow ask a callback about each operation that is traced in the block. It asks one alone."""
    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)


def _chained(
    kind: str,
    inputs: Sequence[Tensor],
    attributes: Sequence[tf.compat.v1.AttrValue],
    outputs: Sequence[Tensor],
    op_name: str | None = None,
    graph: tf.Graph | None = None,
) -> list[Tensor] | None:
    """Return the chain in the place of an `AddN`; None: the operation stays."""
    if graph is None or kind != "AddN" or len(inputs) < 3:
        return None
    total = inputs[0]
    for term in inputs[1:]:
        total = tf.raw_ops.AddV2(x=total, y=term)
    return [total]


def _replaced(
    kind: str,
    inputs: Sequence[Tensor],
    attributes: Sequence[tf.compat.v1.AttrValue],
    outputs: Sequence[Tensor],
    op_name: str | None = None,
    graph: tf.Graph | None = None,
) -> list[Tensor] | None:
    """What takes the place of the outputs of an operation that was traced; None: they stay."""
    if graph is None:
        return None
    if kind == "AddN":
        return _chained(kind, inputs, attributes, outputs, op_name, graph)
    if kind == SOFTMAX:
        return [_softmax(*inputs)]
    if kind in REPLACED and _depends_on_place(*inputs):
        options = dict(zip(attributes[::2], attributes[1::2], strict=True))
        tensor, axes = inputs
        total = _total(tensor, axes, mean=kind == "Mean", keep_dims=options["keep_dims"].b)
        total.set_shape(outputs[0].shape)
        return [total]
    return None


def _total(tensor: Tensor, axes: Tensor, mean: bool, keep_dims: bool) -> Tensor:
    """The sum or mean over axes, by a product of matrices."""
    order, as_terms, kept = _arrangement(tensor, axes)
    terms = tf.reshape(tf.transpose(tensor, order), as_terms)
    total = added_up(terms)
    if mean:
        total /= tf.cast(tf.shape(terms)[1], total.dtype)
    return tf.reshape(total, kept[0] if keep_dims else kept[1])


def _softmax(scores: Tensor) -> Tensor:
    """By operations that compute every row alike."""
    powers = tf.exp(scores - tf.reduce_max(scores, axis=-1, keepdims=True))
    classes = powers.shape[-1]
    # What is traced here is not replaced in turn.
    if classes is None or classes > MANY:
        total = tf.matmul(powers[..., None, :], tf.ones_like(powers)[..., None])[..., 0]
    else:
        total = tf.reduce_sum(powers, axis=-1, keepdims=True)
    return powers / total


def _depends_on_place(tensor: Tensor, axes: Tensor) -> bool:
    """Whether terms of an axis with something behind it, or many terms, are added up within what may be a row.

    Not where the first axis is added up, where examples are expected: rows are then mixed. In a tensor whose examples
    lie along another axis such sums came out alike for all examples in all shapes that were tried.
    """
    known, shape = StaticValues().of(axes), tensor.shape
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return False
    if known is None or shape.rank is None:
        return True
    reduced = sorted({int(axis) % shape.rank for axis in np.ravel(known)})
    if not reduced or 0 in reduced:
        return False
    terms = [shape[axis] for axis in reduced]
    return reduced[-1] < shape.rank - 1 or None in terms or math.prod(terms) > MANY


def _arrangement(tensor: Tensor, axes: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """How to get at terms of shape (rows, terms, behind), and what is left of the shape afterwards.

    As numbers where they are known.

    Returns:
        An order of axes; the shape of terms; the shape that is left, with ones for axes that are added up and without.
    """
    known = StaticValues().of(axes)
    if known is None or not tensor.shape.is_fully_defined():
        return _arrangement_in_the_graph(tensor, axes)
    sizes = tuple(tensor.shape)
    reduced = sorted({int(axis) % len(sizes) for axis in np.ravel(known)})
    before = [axis for axis in range(len(sizes)) if axis not in reduced and axis < reduced[-1]]
    behind = list(range(reduced[-1] + 1, len(sizes)))
    rows, terms, last = (math.prod(sizes[axis] for axis in part) for part in (before, reduced, behind))
    ones = [1 if axis in reduced else size for axis, size in enumerate(sizes)]
    return [*before, *reduced, *behind], [rows, terms, last], (ones, [sizes[axis] for axis in (*before, *behind)])


def _arrangement_in_the_graph(tensor: Tensor, axes: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    rank = tf.cast(tf.rank(tensor), axes.dtype)
    reduced = tf.unique(tf.reshape(tf.math.floormod(axes, rank), [-1]))[0]
    others = tf.raw_ops.ListDiff(x=tf.range(rank), y=reduced).out
    sizes = tf.shape(tensor, axes.dtype)
    left = tf.gather(sizes, others)
    terms = [tf.reduce_prod(left), tf.reduce_prod(tf.gather(sizes, reduced)), tf.ones([], axes.dtype)]
    ones = tf.tensor_scatter_nd_update(sizes, reduced[:, None], tf.ones_like(reduced))
    return tf.concat([others, reduced], 0), tf.stack(terms), (ones, left)


def uneven_operations(graph: tf.Graph) -> list[str]:
    """Names of operations, of a graph and of its functions, that may compute rows differently.

    Args:
        graph: of a traced function.
    """
    return [op.name for own in with_functions(graph) for op in own.get_operations() if is_used(op) and _is_uneven(op)]


def _casts_evenly(target: tf.DType) -> bool:
    """Whether numbers too large for a type become the same there wherever they stand: narrow ones wrap, or are cut."""
    return not target.is_integer or target in (tf.int32, tf.int64)


def _is_uneven(operation: tf.Operation) -> bool:
    kind = operation.type
    if kind == "AddN":
        return len(operation.inputs) > 2
    if kind in REPLACED + LEFT:
        return _depends_on_place(*operation.inputs)
    if kind == "Cast":
        return operation.get_attr("SrcT").is_floating and not _casts_evenly(operation.get_attr("DstT"))
    if kind in BROADCAST:
        one, other = (tensor.shape for tensor in operation.inputs)
        return one != other and 0 not in (one.rank, other.rank)
    if kind in WITH_CLASSES:
        classes = operation.inputs[0].shape[-1]
        return classes is None or classes > MANY
    return kind.startswith(SOFTMAX)
