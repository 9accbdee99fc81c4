"""Sums of several terms, in the order of the terms.

`AddN` adds its terms in an order that follows from whose memory is free: equal calls gave different sums. So each sum
of three or more terms becomes a chain while a graph is traced. `graph_state` refuses one that was traced before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from cloister.core.tensors import Tensor


@contextmanager
def chained_sums() -> Iterator[None]:
    """Replace each sum of three or more terms that is traced in the block by a chain, in this thread.

    By a part of TensorFlow that is not public: no public one reaches the operations that gradients make.
    """
    op_callbacks.add_op_callback(_chained)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(_chained)


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
