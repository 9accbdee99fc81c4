"""Each layer and the loss tried by itself: whether what they give for an example depends on other examples.

In a trial of the whole model a layer meets only the numbers that other layers give it, and shows only through those
behind it. One that is off, such as a threshold that made-up examples do not reach, hides what the others do. So each
layer is also given random numbers, of several sizes, in the shapes of its inputs and for more examples. That is for
models with a layer or loss that is not known (`known_layers`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.core.errors import UnsupportedModel
from cloister.core.tensors import Layer, Network, Tensor
from cloister.privacy.dpsgd.draws import replaced_call
from cloister.privacy.dpsgd.probe import EXAMPLES
from cloister.privacy.dpsgd.vectorised import Loss

ROWS = 11
"""Examples that a layer is given: enough for what acts on a few of many, such as a median."""
KEPT = (0, 7)
"""Places whose example stays the same while the others change. To reverse the batch does not exchange them."""
SIZES = {1.0: (1.0, 1e4, 1e8, np.nan), 1e8: (1.0,)}
"""How large the numbers of an example are, and those of the others beside it."""
MADE_UP = (tuple(range(EXAMPLES)), (*range(EXAMPLES), 0))
"""Numbers of made-up examples in two runs. A tensor with as many rows in both has one row per example."""
TOLERANCE = 1e-4
"""Relative to the largest number of what comes out for the example."""
Scope = Callable[[], AbstractContextManager[object]]
"""In which nothing changes the model, and random layers draw the same numbers each time."""


class LayerCall(NamedTuple):
    """What a layer, an operation or the loss was given.

    Attributes:
        name: for a person.
        function: what was called.
        arguments: positional ones, and those by name.
        outputs: shapes of what came out.
    """

    name: str
    function: Callable[..., Tensor]
    arguments: tuple[tuple[object, ...], dict[str, object]]
    outputs: list[tuple[int, ...]]


class Rows(NamedTuple):
    """Where a call has its examples.

    Attributes:
        given: of each leaf of its arguments, whether the first axis is that of examples.
        found: of each output, the axis of examples; None: it has none.
    """

    given: list[bool]
    found: list[int | None]


def refuse_coupled_layers(
    model: Network, loss: Loss, forward: Callable[[Sequence[int], Loss], object], scope: Scope
) -> None:
    """Refuse a model of which some layer, or the loss, gives something else for an example beside other examples.

    Args:
        model: built.
        loss: of each example by itself.
        forward: runs both on the made-up examples of these numbers.
        scope: of each computation: nothing in it changes the model, and random layers draw the same numbers each time.

    Raises:
        UnsupportedModel: names the layer, the operation or the loss.
    """
    fewer, more = (_calls(model, loss, partial(forward, order)) for order in MADE_UP)
    for call, longer in zip(fewer, more, strict=True):
        rows = _rows(call, longer)
        cases = [(own, positive) for positive in (False, True) for own in SIZES]
        if any(rows.given) and any(_couples(call, rows, scope, *case) for case in cases):
            raise UnsupportedModel(
                f"{call.name}: what it gives for an example changes with the other examples of its batch, and DP-SGD "
                "computes each example by itself; use one that takes no mean, maximum or sum over the batch"
            )


def _calls(model: Network, loss: Loss, forward: Callable[[Loss], object]) -> list[LayerCall]:
    """The calls of all layers, of operations between them, and of the loss."""
    found: list[LayerCall] = []
    with ExitStack() as patches:
        for layer in _layers_and_operations(model):
            name = f"layer {layer.name!r} ({type(layer).__name__})"
            patches.enter_context(replaced_call(layer, _noting(name, layer.call, found)))
        forward(_noting("the loss", loss, found))
    return found


def _layers_and_operations(model: Network) -> Iterator[Layer]:
    """Each once. The graph of a functional model has operations that are no layers, such as those of `keras.ops`."""
    seen: set[int] = set()
    for layer in model._flatten_layers():
        for one in (layer, *getattr(layer, "operations", ())):
            if id(one) not in seen:
                seen.add(id(one))
                yield one


def _noting(name: str, function: Callable[..., Tensor], found: list[LayerCall]) -> Callable[..., Tensor]:
    def noting(*args: object, **kwargs: object) -> Tensor:
        outputs = function(*args, **kwargs)
        # What is called within comes first, so that an error names the innermost one. What is called while a graph is
        # traced, as within `TimeDistributed`, has no numbers to give: what traces it is tried.
        if tf.executing_eagerly():
            shapes = [tuple(output.shape) for output in tf.nest.flatten(outputs) if tf.is_tensor(output)]
            found.append(LayerCall(name, function, (args, kwargs), shapes))
        return outputs

    return noting


def _rows(call: LayerCall, longer: LayerCall) -> Rows:
    """What has as many rows as there are examples, however many."""
    few, many = (len(order) for order in MADE_UP)
    pairs = zip(tf.nest.flatten(call.arguments), tf.nest.flatten(longer.arguments), strict=True)
    given = [tf.is_tensor(one) and [*one.shape[:1], *more.shape[:1]] == [few, many] for one, more in pairs]
    found = [
        next((axis for axis, (one, more) in enumerate(zip(*shapes, strict=True)) if one < more), None)
        for shapes in zip(call.outputs, longer.outputs, strict=True)
    ]
    return Rows(given, found)


def _couples(call: LayerCall, rows: Rows, scope: Scope, own: float, positive: bool) -> bool:
    """Whether what comes out for an example changes with the others.

    Some layers raise an exception for such numbers. With those they cannot be tried.
    """

    def found(others: float, seed: int) -> list[NDArray]:
        with scope(), suppress(tf.errors.InvalidArgumentError):
            return _kept(call, rows, _filled(call, rows, own, others, seed, positive))
        return []

    usual = found(own, seed=1)
    changed = [found(others, seed=2) for others in (SIZES[own] if not positive else SIZES[own][:1])]
    return any(not _same(one, other) for outputs in changed for one, other in zip(usual, outputs, strict=False))


def _filled(call: LayerCall, rows: Rows, own: float, others: float, seed: int, positive: bool) -> Iterator[object]:
    """The leaves of a call's arguments, with random numbers in those that have rows, the same ones at `KEPT`.

    Whole numbers are those of the made-up examples, in any order.
    """
    for number, (leaf, has_rows) in enumerate(zip(tf.nest.flatten(call.arguments), rows.given, strict=True)):
        mine, rest = (np.random.default_rng([number, one]) for one in (0, seed))
        if not has_rows:
            yield leaf
        elif leaf.dtype.is_floating:
            shape = (ROWS, *leaf.shape[1:])
            numbers = others * rest.standard_normal(shape)
            numbers[list(KEPT)] = own * mine.standard_normal(shape)[list(KEPT)]
            yield tf.constant(np.abs(numbers) if positive else numbers, leaf.dtype)
        else:
            order = rest.integers(0, EXAMPLES, ROWS)
            order[list(KEPT)] = mine.integers(0, EXAMPLES, ROWS)[list(KEPT)]
            yield tf.gather(leaf, order)


def _kept(call: LayerCall, rows: Rows, leaves: Iterator[object]) -> list[NDArray]:
    """What comes out for the examples at `KEPT`, and all of what has no axis of examples: it is made of all of them."""
    args, kwargs = tf.nest.pack_sequence_as(call.arguments, list(leaves))
    outputs = [np.asarray(output) for output in tf.nest.flatten(call.function(*args, **kwargs)) if tf.is_tensor(output)]
    return [part for output, axis in zip(outputs, rows.found, strict=True) for part in _parts(output, axis)]


def _parts(output: NDArray, axis: int | None) -> list[NDArray]:
    """Of each kept example what is there along an axis, of one or several rows for each; without an axis everything."""
    if axis is None:
        return [output]
    by_example = np.moveaxis(output, axis, 0).reshape(ROWS, -1)
    return [by_example[place] for place in KEPT]


def _same(usual: NDArray, found: NDArray) -> bool:
    """Whether numbers are the same to rounding. Those that are not finite cannot be compared."""
    known = np.isfinite(usual)
    usual, found = (np.asarray(one[known], np.complex128) for one in (usual, found))
    return bool(np.all(np.abs(found - usual) <= TOLERANCE * np.max(np.abs(usual), initial=0.0)))
