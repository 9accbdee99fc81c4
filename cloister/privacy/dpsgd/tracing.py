"""Traced calls of a model: losses, a backward pass that keeps the inputs and deltas of layers, and exact execution.

A layer's own gradient is a function of its inputs and of the gradients with respect to its outputs alone. Row i of
the gradient of a sum of per-example losses with respect to an output is the gradient of example i's loss, if each
example's output depends on its own input alone.

Equal calls must give equal results, and a unit must not affect later units. TensorFlow departs from this:

- It rewrites a graph before it runs it (Grappler), depending on the names of operations. So equal subgraphs can give
  different results, for example by their place in a batch. `as_traced` disables that.
- `AddN` adds its terms in an order that depends on free memory. `chained_sums` replaces each by a chain.
- A graph may write variables, read files or call Python. `refuse_effects` refuses such a graph, on any branch.

An adversary can choose weights with which the last bit of a sum changes the direction of a whole gradient.
"""

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks

from cloister.privacy.dpsgd.nested import MADE_UP, Examples, Probe
from cloister.utils.arrays import Layer, Network, Tensor, Variable, is_seed
from cloister.utils.errors import ConfigError, PrivacyError, UnsupportedModel

Loss = Callable[[Tensor, Tensor], Tensor]
"""Losses of shape (rows,) from labels and the model's outputs, each of its own example alone."""


def losses_of(model: Network, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """Return the losses of examples in training mode, shape (rows,).

    Raises:
        ConfigError: the loss function returns another type or shape.
    """
    losses = loss(y, model(x, training=True))
    rows = tuple(tf.nest.flatten(x)[0].shape[:1])
    if not isinstance(losses, tf.Tensor) or tuple(losses.shape) != rows:
        got = losses.shape if isinstance(losses, tf.Tensor) else type(losses).__name__
        raise ConfigError(f"loss must give one number per example, shape {rows}; got {got}")
    return losses


def made_up(model: Network) -> Probe:
    """Return dummy examples for a classifier: zeros.

    Raises:
        ConfigError: the shapes of the model's inputs and outputs are unknown; a probe is required.
    """
    inputs, outputs = (list(getattr(model, name, None) or ()) for name in ("inputs", "outputs"))
    if not inputs or len(outputs) != 1 or any(None in end.shape[1:] for end in inputs + outputs):
        raise ConfigError(
            "probe must be given: the model does not name its inputs, or has several outputs, or axes of unknown length"
        )
    given = inputs[0] if len(inputs) == 1 else model.input
    x = tf.nest.map_structure(lambda spec: np.zeros((MADE_UP, *spec.shape[1:]), spec.dtype), given)
    return x, np.zeros((MADE_UP, *outputs[0].shape[1:-1]), np.int64)


def specs_of(rows: Sequence[int | None], examples: Examples) -> Examples:
    """Return a spec of shape (*rows, ...) and of the dtype of each array."""
    return tf.nest.map_structure(lambda array: tf.TensorSpec([*rows, *array.shape[1:]], array.dtype), examples)


def seeds_of(model: Network) -> list[Variable]:
    """Return all states of a model's random number generators; may be empty."""
    return [variable for variable in model.non_trainable_variables if is_seed(variable)]


def seeded(model: Network, seeds: Tensor) -> list[tuple[Variable, Tensor]]:
    """Return values for a `keras.StatelessScope` that set random layers' seeds, of shape (random layers, 2)."""
    return [(state, tf.cast(seeds[number], state.dtype)) for number, state in enumerate(seeds_of(model))]


def named(layer: Layer) -> str:
    """Return the name and the type of a layer, for messages."""
    return f"layer {layer.name!r} ({type(layer).__name__})"


def layer_in(scope: str, model: Network, otherwise: str) -> str:
    """Name the layer of a model in whose scope an operation was traced.

    Args:
        scope: the name of the operation.
        model: with the layer.
        otherwise: returned if the scope is of no layer.
    """
    # TensorFlow appends a number to the scopes of a layer that is called more than once.
    names = {part for each in scope.split("/") for part in (each, re.sub(r"_\d+$", "", each))}
    return next((named(each) for each in model._flatten_layers(include_self=False) if each.name in names), otherwise)


def layer_at(error: BaseException, model: Network, otherwise: str) -> str:
    """Name the innermost layer of a model whose call raised an exception.

    Args:
        error: that was raised.
        model: with the layer.
        otherwise: returned if no layer was being called.
    """
    layers = {id(layer): layer for layer in model._flatten_layers(include_self=False)}
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [each for each in reversed(callers) if id(each) in layers]
    # Keras removes its own frames, and writes the type of the layer into the message.
    if not found and (said := re.match(r"Exception encountered when calling (\w+)\.call", str(error))):
        found = [each for each in layers.values() if type(each).__name__ == said[1]]
    return named(found[0]) if found else otherwise


class NotCapturable(PrivacyError):
    """Error for layers that cannot be captured separately, in a model that can be traced as a whole."""


@dataclass
class Call:
    """Call of a layer.

    Attributes:
        args, kwargs: arguments of the layer.
        weights: values of its trainable variables.
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
    weights: tuple[Tensor, ...] = ()

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


KERNELS = {
    (keras.layers.Conv1D, keras.layers.Conv2D): ("_kernel",),
    (keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose): ("kernel",),
    (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D): ("kernel",),
    (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D): ("depthwise_kernel", "pointwise_kernel"),
}
"""Attributes of convolutions with their kernels."""


def is_plain_convolution(layer: Layer) -> bool:
    """Return whether the layer computes activation(convolution(x, kernels) + bias), channels last, all trained."""
    names = next((names for kinds, names in KERNELS.items() if type(layer) in kinds), ())
    if not names or getattr(layer, "groups", 1) != 1 or layer.data_format != "channels_last":
        return False
    expected = [*(getattr(layer, name) for name in names), *([layer.bias] if layer.use_bias else [])]
    trained = list(map(id, layer.trainable_variables))
    return not getattr(layer, "lora_enabled", False) and trained == list(map(id, expected))


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
    for layer, heard in zip(layers, calls, strict=True):
        if any(call.output.graph is not total.graph for call in heard):
            raise NotCapturable(f"{named(layer)} is called within a loop, a branch or a function of its own")
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
    """Add a row for each of `rows` examples to a call without examples, such as of an embedding of positions.

    This requires that its output is only added to a tensor with examples. Each row of the sum then has the delta of
    its own example.
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
    has_activation = any(is_plain(layer) for is_plain in (is_plain_dense, is_plain_einsum, is_plain_convolution))

    def call(*args: object, **kwargs: object) -> Tensor:
        before = [(variable, variable.value) for variable in layer.trainable_variables]
        own = Call(args, kwargs, weights=tuple(value for _, value in before))
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


PASSES = ("arithmetic_optimization", "constant_folding", "remapping")
"""Grappler passes that replace the traced arithmetic. The memory optimizer does so too."""
LEARNT = "while training: state learnt from data without noise; use a layer without state"
REFUSED_PREFIXES = ("PyFunc", "EagerPyFunc", "Inplace", "Debug")
"""Prefixes of refused types, some of which TensorFlow declares stateless. They call Python code, which a graph does not
show, change a constant, or write files."""
REFUSED = ("Batch", "BatchFunction", "Unbatch", "UnbatchGrad", "ReadFile", "MatchingFiles", "Abort")
"""Further refused types: they wait for other calls, read files that a call may have written, or end the process. Data
sets may use files."""
UNORDERED = ("CropAndResizeGradImage", "CropAndResizeGradBoxes")
"""Operations that sum in the order of threads, and so give another gradient in each call."""
KEEP_NOTHING = (
    *("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd"),
    *("If", "While", "Case", "StatefulPartitionedCall"),
    *("Assert", "CheckNumerics", "CheckNumericsV2"),
)
"""Accepted operations that TensorFlow declares stateful. Further ones make tables or queues, read files, or draw from a
state of their own."""


@contextmanager
def as_traced() -> Iterator[None]:
    """Keep the traced arithmetic of the graphs that this thread calls in the block.

    It sets the thread's own options through a private part of TensorFlow: those of `tf.config.optimizer` apply to the
    whole process, without the memory optimizer.
    """
    own = context.context()
    before = own.function_call_options
    config = config_pb2.ConfigProto.FromString(before.config_proto_serialized)
    options, kinds = config.graph_options.rewrite_options, rewriter_config_pb2.RewriterConfig
    for name in PASSES:
        setattr(options, name, kinds.OFF)
    options.memory_optimization = kinds.NO_MEM_OPT
    own.function_call_options = context.FunctionCallOptions(executor_type=before.executor_type, config_proto=config)
    try:
        yield
    finally:
        own.function_call_options = before


@contextmanager
def chained_sums() -> Iterator[None]:
    """Replace each sum of three or more terms traced in the block by a chain.

    It affects this thread, through a private part of TensorFlow: no public one reaches the operations of gradients.
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
    """Return the chain in place of an `AddN`; None: the operation stays."""
    if graph is None or kind != "AddN" or len(inputs) < 3:
        return None
    total = inputs[0]
    for term in inputs[1:]:
        total = tf.raw_ops.AddV2(x=total, y=term)
    return [total]


def with_functions(graph: tf.Graph) -> Iterator[tf.Graph]:
    """Yield the graph of a traced function, and of each function that it calls, once."""
    return _walk(graph, set())


def _walk(graph: tf.Graph, seen: set[str]) -> Iterator[tf.Graph]:
    yield graph
    for operation in graph.get_operations():
        for attribute in operation.node_def.attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name and function.name not in seen:
                    seen.add(function.name)
                    yield from _walk(graph._get_function(function.name).graph, seen)


def refuse_effects(graph: tf.Graph, model: Network) -> None:
    """Refuse a graph with state, nondeterminism, or indirect reads of weights.

    Args:
        graph: of a traced function that reads each trainable variable once, directly.
        model: with all variables registered in Keras.

    Raises:
        UnsupportedModel: contains the name of a read variable, or the layer and the operation; not that of a written
            variable.
    """
    known = {id(variable.value) for variable in model.variables}
    for used in graph.variables:
        if id(used) not in known:
            raise UnsupportedModel(f"the model uses {used.name}, a variable that Keras does not know; use add_weight")
    trained = {id(variable.value.handle): variable.path for variable in model.trainable_variables}
    for handle, inside in graph.captures:
        if id(handle) in trained and len(inside.consumers()) > 1:
            raise UnsupportedModel(
                f"{trained[id(handle)]} is read by a function that was traced before, past DP-SGD; leave "
                "tf.function and custom gradients over weights out of its layer"
            )
    for operation in (one for own in with_functions(graph) for one in own.get_operations()):
        kind, results = operation.type, {id(output) for output in operation.graph.outputs}
        if kind == "AssignVariableOp":
            raise UnsupportedModel(f"{layer_in(operation.name, model, 'the model')} may change a variable {LEARNT}")
        # A replaced sum is in the graph without being used.
        is_used = any(output.consumers() or id(output) in results for output in operation.outputs)
        if kind == "AddN" and len(operation.inputs) > 2 and is_used:
            raise UnsupportedModel(
                f"{layer_in(operation.name, model, 'the model')} adds {len(operation.inputs)} terms by a function that "
                "was traced before, in an order that timing decides; leave tf.function out of its layers, or add "
                "terms with +"
            )
        if kind in UNORDERED:
            raise UnsupportedModel(
                f"{layer_in(operation.name, model, 'the model')} uses the gradient {kind}, which TensorFlow adds up in "
                "another order each time; "
                "crop images before they reach a trained layer"
            )
        if may_keep(operation):
            raise UnsupportedModel(
                f"{layer_in(operation.name, model, 'the model')} uses {kind}, which could keep something of an "
                "example; use operations without a state, and random numbers of a keras.random.SeedGenerator"
            )


def may_keep(operation: tf.Operation) -> bool:
    """Return whether an operation may write, read a file, call Python or keep a state."""
    kind = operation.type
    is_refused = kind.startswith(REFUSED_PREFIXES) or kind in REFUSED or "Dataset" in kind
    return is_refused or (operation.op_def.is_stateful and kind not in KEEP_NOTHING)
