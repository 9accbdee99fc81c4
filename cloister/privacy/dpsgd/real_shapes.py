"""The shapes of what known layers are really given, and give, which Keras' own account does not always tell.

A layer that was built for another rank, a scale with axes of its own, or a layer that is used by itself and by
`TimeDistributed` may repeat examples along an axis that no symbolic tensor has. An inner model may be given narrower
tensors than it was built for. A layer behind it would then mix examples, and a trial may not show it. So a model is run
on made-up examples, with two numbers of them. Only the first axis of a tensor may tell the two apart.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import keras
import tensorflow as tf

from cloister.core.tensors import Layer, Network, Tensor
from cloister.privacy.dpsgd.draws import replaced_call
from cloister.privacy.dpsgd.known_layers import KNOWN, MERGING
from cloister.privacy.dpsgd.layer_trials import MADE_UP

Shape = tuple[int | None, ...]


class RealCall(NamedTuple):
    """A call of a layer.

    Attributes:
        layer: that was called.
        given: shapes of its arguments.
        found: shapes of what came out.
    """

    layer: Layer
    given: list[Shape]
    found: list[Shape]


def keeps_rows(model: Network, forward: Callable[[Sequence[int]], object]) -> bool:
    """Whether all that known layers are given, and give, has one row for each example and is otherwise of one shape.

    What has the same shape for all numbers of examples, such as a mask that hides later words, is of no example. But a
    layer that is given rows has to give rows: a sum over all examples has one shape too. What a merging layer is given
    has to be of one shape.

    Args:
        model: of known layers alone.
        forward: runs it on the made-up examples of these numbers.
    """
    few, more = (_calls(model, partial(forward, order)) for order in MADE_UP)
    return len(few) == len(more) and all(map(_has_rows, few, more)) and all(map(_merges_one_shape, few))


def _calls(model: Network, forward: Callable[[], object]) -> list[RealCall]:
    found: list[RealCall] = []
    with ExitStack() as patches:
        for layer in model._flatten_layers():
            if type(layer) in KNOWN or type(layer) is keras.layers.TimeDistributed:
                patches.enter_context(replaced_call(layer, _noting(layer, found)))
        forward()
    return found


def _noting(layer: Layer, found: list[RealCall]) -> Callable[..., Tensor]:
    """The layer's call, which notes shapes. They are there too where a graph is traced, as within `TimeDistributed`."""
    original = layer.call

    def call(*args: object, **kwargs: object) -> Tensor:
        outputs = original(*args, **kwargs)
        found.append(RealCall(layer, _shapes((args, kwargs)), _shapes(outputs)))
        return outputs

    return call


def _shapes(tensors: object) -> list[Shape]:
    return [tuple(leaf.shape) for leaf in tf.nest.flatten(tensors) if tf.is_tensor(leaf)]


def _has_rows(few: RealCall, more: RealCall) -> bool:
    given, found = (
        list(zip_longest(one, other, fillvalue=(None,))) for one, other in zip(few[1:], more[1:], strict=True)
    )
    is_given_rows = any(one != other for one, other in given)
    gives = _is_of_rows if is_given_rows else _is_constant
    takes = all(_is_constant(*pair) or _is_of_rows(*pair) for pair in given)
    return few.layer is more.layer and takes and all(gives(*pair) for pair in found)


def _is_constant(few: Shape, more: Shape) -> bool:
    return few == more and None not in few


def _is_of_rows(few: Shape, more: Shape) -> bool:
    """Whether there is a row for each example, of one axis at least: layers look along the last one."""
    has_rows = (few[:1], more[:1]) == tuple((len(order),) for order in MADE_UP)
    return has_rows and few[1:] == more[1:] != () and None not in few


def _merges_one_shape(call: RealCall) -> bool:
    return type(call.layer) not in MERGING or len(set(call.given)) == 1
