"""What a traced graph could carry from one unit to the next, which is refused.

A unit's gradient must depend on that unit alone. A model that keeps a running mean, say, gives another gradient to all
that come after. A trial sees that only if made-up examples cause it. A graph shows what it may write, on any branch.
"""

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_only_resource_input_indices_graph

from cloister.core.errors import UnsupportedModel
from cloister.core.model_state import is_seed
from cloister.core.tensors import Network
from cloister.privacy.dpsgd.reductions import with_functions

PYTHON = ("PyFunc", "EagerPyFunc")
"""Beginnings of operations that call Python. Their inside is not seen."""
CARRY_NOTHING = (
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "AssignVariableOp"),
    *("If", "While", "Case", "StatefulPartitionedCall"),
    *("Assert", "CheckNumerics", "CheckNumericsV2"),
)
"""Operations that TensorFlow counts as stateful, and that keep nothing. What variables they read and write is looked at
by itself. Others make tables or queues, read files, or draw random numbers from a state of their own."""


def refuse_state(graph: tf.Graph, model: Network) -> None:
    """Refuse a graph that may write anything but the states of random number generators.

    Args:
        graph: of a traced function that uses the model.
        model: whose variables Keras knows.

    Raises:
        UnsupportedModel: names the variable, or the operation.
    """
    known = {id(variable.value) for variable in model.variables}
    for used in graph.variables:
        if id(used) not in known:
            raise UnsupportedModel(f"the model uses {used.name}, a variable that Keras does not know; use add_weight")
    seeds = {id(variable.value.handle) for variable in model.variables if is_seed(variable)}
    for written in _written(graph):
        if id(written) not in seeds:
            raise UnsupportedModel(
                f"the model may change {_name(written, model)} while training: state learnt from data without noise; "
                "use a layer without state"
            )
    operations = (operation for own in with_functions(graph) for operation in own.get_operations())
    for kind in (operation.type for operation in operations if _keeps(operation)):
        raise UnsupportedModel(
            f"the model uses {kind}, which could keep something of an example; use operations of Keras or TensorFlow "
            "without a state, and random numbers of a keras.random.SeedGenerator"
        )


def _keeps(operation: tf.Operation) -> bool:
    is_stateful = operation.op_def.is_stateful and operation.type not in CARRY_NOTHING
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


def _name(handle: tf.Tensor, model: Network) -> str:
    """The path of the variable that has the handle."""
    paths = {id(variable.value.handle): variable.path for variable in model.variables}
    return paths.get(id(handle), "a table or a queue")
