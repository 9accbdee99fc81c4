"""Backward pass that keeps the inputs of chosen layers and the gradients with respect to their outputs.

A layer's own gradient is a function of these two alone. Row i of the gradient of a sum of per-example losses with
respect to an output is the gradient of example i's loss, if each example's output depends on its own input alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import keras
import tensorflow as tf

from cloister.core.errors import PrivacyError
from cloister.core.tensors import Layer, Network, Tensor, Variable


class NotCapturable(PrivacyError):
    """Error for layers that cannot be captured separately; the model as a whole can be traced."""


@dataclass
class Call:
    """Call of a layer.

    Attributes:
        args, kwargs: arguments of the layer.
        output: of the layer; if it has an activation, before this.
        delta: the gradient of the summed losses with respect to `output`; None if the loss does not need it.
        is_spread: whether the layer was called without an axis of examples, such as an embedding of positions, and a
            row for each example was added to its input and output.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    output: Tensor = None
    delta: Tensor = None
    is_spread: bool = False

    @property
    def first_input(self) -> Tensor:
        """Return the first argument of the call."""
        return self.args[0] if self.args else self.kwargs["inputs"]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Return the input and the delta, of one dtype."""
        return tf.cast(self.first_input, self.delta.dtype), self.delta


class Recorded(NamedTuple):
    """Result of one backward pass.

    Attributes:
        calls: of each layer, with their deltas.
        gradients: for each trainable variable; None for variables of the layers.
    """

    calls: list[list[Call]]
    gradients: list[Tensor]


def is_plain_dense(layer: Layer) -> bool:
    """Return whether the layer computes activation(x·kernel + bias), all of it trained."""
    return type(layer) is keras.layers.Dense and _is_plain(layer)


def is_plain_einsum(layer: Layer) -> bool:
    """Return whether the layer computes activation(einsum(equation, x, kernel) + bias), all of it trained."""
    return type(layer) is keras.layers.EinsumDense and _is_plain(layer)


def _is_plain(layer: Layer) -> bool:
    expected = [each for each in (layer._kernel, layer.bias) if each is not None]
    return not layer.lora_enabled and list(map(id, layer.trainable_variables)) == list(map(id, expected))


def record(
    model: Network,
    layers: Sequence[Layer],
    values: Sequence[Tensor],
    states: Sequence[tuple[Variable, Tensor]],
    losses: Callable[[], Tensor],
) -> Recorded:
    """Compute losses while a graph is traced, and one backward pass.

    Args:
        model: network whose trainable variables have `values`.
        layers: of the model, to capture.
        values: tensors, one for each trainable variable.
        states: values of other variables.
        losses: returns the losses, shape (rows,).

    Raises:
        NotCapturable: a layer is called within a function of its own, or other operations use its weights.
    """
    calls: list[list[Call]] = [[] for _ in layers]
    own = list(zip(model.trainable_variables, values, strict=True))
    with (
        ExitStack() as patches,
        tf.GradientTape(watch_accessed_variables=False) as tape,
        keras.StatelessScope([*own, *states]) as scope,
    ):
        tape.watch(values)
        for layer, heard in zip(layers, calls, strict=True):
            patches.enter_context(_listening(layer, heard, tape, scope))
        found_losses = losses()
        total = tf.reduce_sum(found_losses)
    every = [call for heard in calls for call in heard]
    if any(call.output.graph is not total.graph for call in every):
        raise NotCapturable("a layer is called within a loop, a branch or a function of its own")
    for call in every:
        _spread(call, found_losses.shape[0])
    found = tape.gradient(total, [*(call.output for call in every), *values])
    for call, delta in zip(every, found, strict=False):
        call.delta = delta
    gradients = found[len(every) :]
    captured = {id(variable) for layer in layers for variable in layer.trainable_variables}
    for (variable, _), gradient in zip(own, gradients, strict=True):
        if id(variable) in captured and gradient is not None:
            raise NotCapturable(f"{variable.path} is used by something else than its layer")
    return Recorded(calls, gradients)


def _spread(call: Call, rows: int) -> None:
    """Add a row for each example to a call without examples.

    This requires that its output is only added to a tensor with examples.

    An example is an embedding of positions. Each row of the sum then has the delta of its own example.

    Args:
        call: of a layer. Its input and its output are replaced.
        rows: number of examples.
    """
    shape, consumers = call.output.shape, call.output.consumers()
    if (shape.rank and shape[0] == rows) or len(consumers) != 1 or consumers[0].type != "AddV2":
        return
    (total,) = consumers[0].outputs
    lacking = total.shape.rank - shape.rank  # axes
    if total.shape == [rows, *(shape if lacking else shape[1:])] and lacking in (0, 1):
        inputs = call.first_input[None] if lacking else call.first_input
        call.args, call.kwargs = (tf.repeat(inputs, rows, axis=0),), {}
        call.output, call.is_spread = total, True


@contextmanager
def _listening(layer: Layer, heard: list[Call], tape: tf.GradientTape, scope: keras.StatelessScope) -> Iterator[None]:
    """Record the calls of the layer while the block runs.

    Its own weights are constant for every tape: a gradient that still reaches one of them bypasses its layer. They are
    replaced in the existing scope: a nested one would hide the values of all other variables.
    """
    original, replaced = layer.call, vars(layer).get("call")
    has_activation = is_plain_dense(layer) or is_plain_einsum(layer)

    def call(*args: object, **kwargs: object) -> Tensor:
        own, before = Call(args, kwargs), [(variable, variable.value) for variable in layer.trainable_variables]
        activation = layer.activation if has_activation else None

        def listen(output: Tensor) -> Tensor:
            tape.watch(output)
            own.output = output
            return output if activation is None else activation(output)

        for variable, value in before:
            scope.add_update((variable, tf.stop_gradient(value)))
        if has_activation:
            object.__setattr__(layer, "activation", listen)
            try:
                output = original(*args, **kwargs)
            finally:
                object.__setattr__(layer, "activation", activation)
        else:
            output = listen(original(*args, **kwargs))
        for each in before:
            scope.add_update(each)
        heard.append(own)
        return output

    # Bypasses Keras' tracking of attributes, which would register the function as a part of the layer.
    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")
        if replaced is not None:
            object.__setattr__(layer, "call", replaced)
