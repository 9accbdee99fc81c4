"""Traced calls of a model: losses, and exact execution.

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
from contextlib import contextmanager

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
    """Error for variables whose gradients have no form for several units, in a model that can be traced."""


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
    todo, seen = [graph], set[str]()
    while todo:
        own = todo.pop()
        yield own
        attributes = (each for operation in own.get_operations() for each in operation.node_def.attr.values())
        called = {function.name for each in attributes for function in (each.func, *each.list.func)} - seen - {""}
        seen |= called
        todo += [own._get_function(name).graph for name in sorted(called)]


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
        kind, results, reason = operation.type, {id(output) for output in operation.graph.outputs}, ""
        # A replaced sum is in the graph without being used.
        is_used = any(output.consumers() or id(output) in results for output in operation.outputs)
        if kind == "AssignVariableOp":
            reason = f"may change a variable {LEARNT}"
        elif kind == "AddN" and len(operation.inputs) > 2 and is_used:
            reason = (
                f"adds {len(operation.inputs)} terms by a function that was traced before, in an order that timing "
                "decides; leave tf.function out of its layers, or add terms with +"
            )
        elif kind in UNORDERED:
            reason = (
                f"uses the gradient {kind}, which TensorFlow adds up in another order each time; crop images before "
                "they reach a trained layer"
            )
        elif may_keep(operation):
            reason = (
                f"uses {kind}, which could keep something of an example; use operations without a state, and random "
                "numbers of a keras.random.SeedGenerator"
            )
        if reason:
            raise UnsupportedModel(f"{layer_in(operation.name, model, 'the model')} {reason}")


def may_keep(operation: tf.Operation) -> bool:
    """Return whether an operation may write, read a file, call Python or keep a state."""
    kind = operation.type
    is_refused = kind.startswith(REFUSED_PREFIXES) or kind in REFUSED or "Dataset" in kind
    return is_refused or (operation.op_def.is_stateful and kind not in KEEP_NOTHING)
