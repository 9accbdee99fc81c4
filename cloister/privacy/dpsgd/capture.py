"""One backward pass that keeps, for every layer with weights, what went in and the gradient of what came out.

The layer's own gradient is a function of these two alone. The gradient of a sum of per-example losses with respect to
what came out has in row i the gradient of example i's loss, as long as no example's output depends on another's input.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from cloister.core.errors import PrivacyError
from cloister.core.model_state import is_seed
from cloister.core.tensors import Layer, Network, Tensor, Variable


class NotCapturable(PrivacyError):
    """The layers of this model cannot be looked at one by one; the model as a whole can."""


@dataclass
class Call:
    """One call of a layer.

    Attributes:
        args, kwargs: what the layer was called with.
        outputs: what came out (before the activation, for a layer that has a fast path), flat.
        deltas: the gradients of the summed losses with respect to `outputs`; None where the loss does not need it.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    outputs: list[Tensor] = field(default_factory=list)
    deltas: list[Tensor] = field(default_factory=list)

    @property
    def first_input(self) -> Tensor:
        """Return the first argument of the call."""
        return self.args[0] if self.args else self.kwargs["inputs"]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """The one input and the one delta of a layer that has a fast path, of one dtype."""
        return tf.cast(self.first_input, self.deltas[0].dtype), self.deltas[0]


@dataclass(frozen=True)
class CapturedLayer:
    """A layer whose inputs and gradients of outputs are recorded, as a whole.

    Attributes:
        layer: owns the variables, itself or in its sublayers.
        variables: its trainable variables.
        fast: whether it is a plain Dense or Conv2D layer, recorded before its activation.
    """

    layer: Layer
    variables: tuple[Variable, ...]
    fast: bool


def captured_layers(model: Network) -> list[CapturedLayer]:
    """The layers to look at: as small as possible, each trainable variable in exactly one.

    Raises:
        NotCapturable: two layers share a variable, the model owns one itself, or a layer draws random numbers, which
            would be others when its call is repeated.
    """
    found = list(_walk(model))
    claimed = [id(variable) for captured in found for variable in captured.variables]
    if sorted(claimed) != sorted(id(variable) for variable in model.trainable_variables):
        raise NotCapturable("a weight belongs to two layers, or to none")
    for captured in found:
        if not captured.fast and any(map(is_seed, captured.layer.variables)):
            raise NotCapturable(f"layer {captured.layer.name!r} draws random numbers")
    return found


def _walk(layer: Layer, seen: set[int] | None = None) -> Iterator[CapturedLayer]:
    seen = set() if seen is None else seen
    if id(layer) in seen or not layer.trainable_variables:
        return
    seen.add(id(layer))
    if not _opaque(layer):
        for sublayer in layer._layers:
            yield from _walk(sublayer, seen)
        return
    if isinstance(layer, keras.Model):
        raise NotCapturable(f"model {layer.name!r} owns weights itself")
    yield CapturedLayer(layer, tuple(layer.trainable_variables), is_plain_dense(layer) or is_plain_convolution(layer))


def _opaque(layer: Layer) -> bool:
    """Whether a layer's sublayers cannot be looked at: it has weights of its own, or calls them in its own ways."""
    own = any(variable.trainable for variable in layer._trainable_variables)
    return own or isinstance(layer, keras.layers.RNN | keras.layers.Wrapper)


def is_plain_dense(layer: Layer) -> bool:
    """Whether the layer computes activation(x·kernel + bias), all of it trained."""
    return type(layer) is keras.layers.Dense and _is_plain(layer)


def is_plain_convolution(layer: Layer) -> bool:
    """Whether the layer is an ordinary convolution of pictures with channels in the last axis, all of it trained."""
    return (
        type(layer) is keras.layers.Conv2D
        and layer.groups == 1
        and layer.data_format == "channels_last"
        and _is_plain(layer)
    )


def _is_plain(layer: Layer) -> bool:
    expected = [layer._kernel, layer.bias] if layer.use_bias else [layer._kernel]
    trained = [id(variable) for variable in layer.trainable_variables]
    return not layer.lora_enabled and trained == [id(variable) for variable in expected]


def record(found: Sequence[CapturedLayer], forward: Callable[[], Tensor]) -> list[list[Call]]:
    """Run `forward`, which gives a loss per example, and one backward pass.

    Args:
        found: the layers of the model that `forward` runs.
        forward: gives the losses, shape (batch,).

    Returns:
        The calls of each layer, with their gradients.
    """
    calls: list[list[Call]] = [[] for _ in found]
    with tf.GradientTape(watch_accessed_variables=False) as tape, ExitStack() as patches:
        for captured, heard in zip(found, calls, strict=True):
            patches.enter_context(listening(captured, heard, tape))
        total = tf.reduce_sum(forward())
    outputs = [output for heard in calls for call in heard for output in call.outputs]
    if not tf.executing_eagerly() and any(output.graph is not total.graph for output in outputs):
        raise NotCapturable("a layer is called within a loop, a branch or a function of its own")
    deltas = iter(tape.gradient(total, outputs))
    for heard in calls:
        for call in heard:
            call.deltas = [next(deltas) for _ in call.outputs]
    return calls


def leaks(found: Sequence[CapturedLayer], forward: Callable[[], Tensor], values: Sequence[Tensor]) -> list[int]:
    """Which of the trainable values reach the losses by a way that is not a call of their layer.

    Args:
        found: the layers that are known.
        forward: computes the losses.
        values: of the trainable variables.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape, ExitStack() as patches:
        tape.watch(values)
        for captured in found:
            patches.enter_context(listening(captured, [], tape))
        total = tf.reduce_sum(forward())
    return [i for i, gradient in enumerate(tape.gradient(total, values)) if gradient is not None]


@contextmanager
def listening(captured: CapturedLayer, heard: list[Call], tape: tf.GradientTape) -> Iterator[None]:
    """Have the layer tell of its calls while the block runs.

    Its own weights look constant to every tape: what still reaches one of them does not go through its layer.
    """
    layer, original = captured.layer, captured.layer.call

    def call(*args: object, **kwargs: object) -> Tensor:
        constants = [(variable, tf.stop_gradient(variable.value)) for variable in captured.variables]
        own, called = Call(args, kwargs), _call_before_activation if captured.fast else _call_whole
        with keras.StatelessScope(constants):
            outputs = called(layer, original, own, tape)
        heard.append(own)
        return outputs

    with _replaced_call(layer, call):
        yield


def _call_before_activation(layer: Layer, original: Callable[..., Tensor], own: Call, tape: tf.GradientTape) -> Tensor:
    activation = layer.activation

    def listen(output: Tensor) -> Tensor:
        tape.watch(output)
        own.outputs = [output]
        return output if activation is None else activation(output)

    object.__setattr__(layer, "activation", listen)
    try:
        return original(*own.args, **own.kwargs)
    finally:
        object.__setattr__(layer, "activation", activation)


def _call_whole(_: Layer, original: Callable[..., Tensor], own: Call, tape: tf.GradientTape) -> Tensor:
    # Copies: Keras hides the logits in the output of a softmax, and its losses would go past the output to them.
    outputs = tf.nest.map_structure(tf.identity, original(*own.args, **own.kwargs))
    own.outputs = [output for output in tf.nest.flatten(outputs) if output.dtype.is_floating]
    for output in own.outputs:
        tape.watch(output)
    return outputs


@contextmanager
def _replaced_call(layer: Layer, call: Callable[..., Tensor]) -> Iterator[None]:
    """Replace a layer's `call` while the block runs.

    Args:
        layer: of a model.
        call: the replacement.
    """
    replaced = vars(layer).get("call")
    # Past Keras' own bookkeeping of attributes, which would take a function for a part of the layer.
    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")
        if replaced is not None:
            object.__setattr__(layer, "call", replaced)
