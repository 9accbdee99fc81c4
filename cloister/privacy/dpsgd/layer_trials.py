"""Each layer and the loss tried by itself: whether what they give for an example depends on other examples.

In a trial of the whole model a layer meets only the numbers that other layers give it, and shows only through those
behind it. One that is off, such as a threshold that made-up examples do not reach, hides what the others do. So each
layer is also given random numbers, of several sizes, in the shapes of its inputs and for more examples.
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
"""Examples that a layer is given: enough for what acts on a few of many, such as a median. A size that other things
rarely have."""
OWN = (0, 7)
"""Places that do not change; neither is the other's in the opposite order."""
SIZES = {1.0: (1.0, 1e4, 1e8, np.nan), 1e8: (1.0,)}
"""How large the numbers of an example are, and those of the others beside it."""
ORDERS = (tuple(range(EXAMPLES)), (*range(EXAMPLES), 0))
"""Two numbers of examples: what has as many rows as the first by chance has as many with the second."""
TOLERANCE = 1e-4
"""Relative to the largest number of what comes out for the example."""
Scope = Callable[[], AbstractContextManager[object]]
"""In which nothing changes the model, and random layers draw the same numbers each time."""


class Call(NamedTuple):
    """What a layer, an operation or the loss was given.

    Attributes:
        name: for a person.
        function: what was called.
        arguments: positional ones, and those by name.
    """

    name: str
    function: Callable[..., Tensor]
    arguments: tuple[tuple[object, ...], dict[str, object]]


def refuse_coupled_layers(
    model: Network, loss: Loss, forward: Callable[[Sequence[int], Loss], object], scope: Scope
) -> None:
    """Raises UnsupportedModel if what some layer, or the loss, gives for one example depends on the others.

    Args:
        model: built.
        loss: of each example by itself.
        forward: runs both on the made-up examples of these numbers.
        scope: as the type says.
    """
    fewer, more = (_calls(model, loss, partial(forward, order)) for order in ORDERS)
    for call, longer in zip(fewer, more, strict=True):
        rows = _have_rows(call, longer)
        # Some layers raise an exception for such numbers: they are tried with those that other layers give them alone.
        with suppress(tf.errors.OpError):
            if any(rows) and any(_depends_on_others(call, rows, scope, own) for own in SIZES):
                raise UnsupportedModel(
                    f"{call.name}: what it gives for an example changes with the other examples of its batch, so no "
                    "gradient can be clipped alone; use one that takes no mean, maximum or sum over the batch"
                )


def _calls(model: Network, loss: Loss, forward: Callable[[Loss], object]) -> list[Call]:
    """The calls of all layers, of operations between them, and of the loss."""
    found: list[Call] = []
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


def _noting(name: str, function: Callable[..., Tensor], found: list[Call]) -> Callable[..., Tensor]:
    def noting(*args: object, **kwargs: object) -> Tensor:
        outputs = function(*args, **kwargs)
        # What is called within comes first, so that an error names the innermost one.
        found.append(Call(name, function, (args, kwargs)))
        return outputs

    return noting


def _have_rows(call: Call, longer: Call) -> list[bool]:
    """Which leaves of a call's arguments have a row for each example: as many as there are, however many."""
    pairs = zip(tf.nest.flatten(call.arguments), tf.nest.flatten(longer.arguments), strict=True)
    return [
        tf.is_tensor(one) and [*one.shape[:1], *more.shape[:1]] == [len(order) for order in ORDERS]
        for one, more in pairs
    ]


def _depends_on_others(call: Call, rows: Sequence[bool], scope: Scope, own: float) -> bool:
    """Whether what comes out for an example changes with the others."""

    def found(others: float, seed: int) -> list[NDArray]:
        with scope():
            return _at_own_places(call, _filled(call, rows, own, others, seed))

    usual = found(own, seed=1)
    changed = (found(others, seed=2) for others in SIZES[own])
    return any(not _same(one, other) for outputs in changed for one, other in zip(usual, outputs, strict=True))


def _filled(call: Call, rows: Sequence[bool], own: float, others: float, seed: int) -> Iterator[object]:
    """The leaves of a call's arguments, with random numbers in those that have rows, the same ones at `OWN`.

    Whole numbers are those of the made-up examples, in any order.
    """
    for number, (leaf, has_rows) in enumerate(zip(tf.nest.flatten(call.arguments), rows, strict=True)):
        mine, rest = (np.random.default_rng([number, one]) for one in (0, seed))
        if not has_rows:
            yield leaf
        elif leaf.dtype.is_floating:
            shape = (ROWS, *leaf.shape[1:])
            numbers = others * rest.standard_normal(shape)
            numbers[list(OWN)] = own * mine.standard_normal(shape)[list(OWN)]
            yield tf.constant(numbers, leaf.dtype)
        else:
            order = rest.integers(0, EXAMPLES, ROWS)
            order[list(OWN)] = mine.integers(0, EXAMPLES, ROWS)[list(OWN)]
            yield tf.gather(leaf, order)


def _at_own_places(call: Call, leaves: Iterator[object]) -> list[NDArray]:
    """What comes out there; all of what has no rows: where that changes with the others, it is made of them."""
    args, kwargs = tf.nest.pack_sequence_as(call.arguments, list(leaves))
    outputs = [np.asarray(output) for output in tf.nest.flatten(call.function(*args, **kwargs)) if tf.is_tensor(output)]
    return [part for output in outputs for part in _parts(output)]


def _parts(output: NDArray) -> list[NDArray]:
    """The examples at `OWN`, each of one or several rows, along the first axis that has them."""
    for axis, size in enumerate(output.shape):
        if size and size % ROWS == 0:
            rows = np.moveaxis(output, axis, 0).reshape(ROWS, -1)
            return [rows[place] for place in OWN]
    return [output]


def _same(usual: NDArray, found: NDArray) -> bool:
    """To rounding; where the usual numbers are not finite, nothing can be compared."""
    usual, found = (np.asarray(one, np.complex128) for one in (usual, found))
    size = np.max(np.abs(usual), initial=0.0)
    return not np.isfinite(size) or bool(np.all(np.abs(found - usual) <= TOLERANCE * size))
