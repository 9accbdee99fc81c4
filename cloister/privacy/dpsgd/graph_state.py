"""What a traced graph could carry from one unit to the next, which is refused.

A unit's gradient must depend on that unit alone. A model that keeps a running mean, say, gives another gradient to all
that come after. A trial sees that only if made-up examples cause it. A graph shows what it may write, on any branch.
"""

from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_only_resource_input_indices_graph

from cloister.core.errors import UnsupportedModel
from cloister.core.model_state import is_seed
from cloister.core.tensors import Network
from cloister.privacy.dpsgd.graphs import with_functions
from cloister.privacy.dpsgd.refusals import LEARNT

PYTHON = ("PyFunc", "EagerPyFunc")
"""Prefixes of operations that call Python. What they do inside cannot be seen."""
CHECKED_BY_VARIABLE = (
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "AssignVariableOp"),
    *("If", "While", "Case", "StatefulPartitionedCall"),
    *("Assert", "CheckNumerics", "CheckNumericsV2"),
)
"""Stateful operations that are accepted. The variables that they read and write are checked by `_of_variables`. The
rest make tables or queues, read files, or draw random numbers from a state of their own."""


def refuse_state(graph: tf.Graph, model: Network) -> None:
    """Refuse a graph that may write anything but the states of random number generators.

    Args:
        graph: of a traced function that uses the model.
        model: whose variables Keras knows.

    Raises:
        UnsupportedModel: names the variable, or the operation.
    """
    for reasons in (_of_variables(graph, model), _of_operations(graph)):
        for reason in reasons:
            raise UnsupportedModel(f"the model {reason}")


def _of_variables(graph: tf.Graph, model: Network) -> Iterator[str]:
    """Reasons to refuse a graph by the variables that it uses."""
    paths = {id(variable.value.handle): variable.path for variable in model.variables}
    for used in graph.variables:
        if id(used.handle) not in paths:
            yield f"uses {used.name}, a variable that Keras does not know; use add_weight"
    seeds = {id(variable.value.handle) for variable in model.variables if is_seed(variable)}
    for written in map(id, _written(graph)):
        if written not in paths:
            yield "uses a table, a queue or another resource that outlives a call; use operations without a state"
        elif written not in seeds:
            yield f"may change {paths[written]} {LEARNT}"


def _of_operations(graph: tf.Graph) -> Iterator[str]:
    """Reasons to refuse a graph by its operations, and by those of the functions that it calls."""
    for operation in (one for own in with_functions(graph) for one in own.get_operations()):
        if _keeps(operation):
            yield (
                f"uses {operation.type}, which could keep something of an example; use operations without a state, "
                "random numbers of a keras.random.SeedGenerator, and unroll=True for recurrent layers"
            )


def _keeps(operation: tf.Operation) -> bool:
    is_stateful = operation.op_def.is_stateful and operation.type not in CHECKED_BY_VARIABLE
    return is_stateful or operation.type.startswith(PYTHON)


def _written(graph: tf.Graph) -> list[tf.Tensor]:
    """Handles of what the graph, or a function that it calls, does not only read. What it is not sure of is among them.

    By a part of TensorFlow that is not public: no public one looks into functions.
    """
    only_read = set(get_read_only_resource_input_indices_graph(graph))
    outside = {id(inner): outer for outer, inner in graph.captures}
    return [
        outside[id(tensor)]
        for number, tensor in enumerate(graph.inputs)
        if tensor.dtype == tf.resource and number not in only_read
    ]
