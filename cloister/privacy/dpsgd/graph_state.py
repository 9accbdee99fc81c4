"""What a traced graph could carry from one unit to the next, which is refused.

A unit's gradient must depend on that unit alone. A model that keeps a running mean, say, gives another gradient to all
that come after. A graph shows what it may write, on any branch.
"""

import tensorflow as tf

from cloister.core.errors import UnsupportedModel
from cloister.core.tensors import Network
from cloister.privacy.dpsgd.graphs import is_used, with_functions
from cloister.privacy.dpsgd.refusals import LEARNT

REFUSED_PREFIXES = ("PyFunc", "EagerPyFunc", "Inplace", "Debug")
"""Of operations that are refused, though TensorFlow counts some as stateless: they call Python, whose inside cannot be
seen, change a constant, or write files."""
REFUSED = ("Batch", "BatchFunction", "Unbatch", "UnbatchGrad", "ReadFile", "MatchingFiles", "Abort")
"""More of those: they wait for other calls, read what one may have written, or end the process. Data sets may use
files."""
UNORDERED = ("CropAndResizeGradImage", "CropAndResizeGradBoxes")
"""Operations that add up in the order in which threads come, and so give another gradient in each call."""
ASSIGN = "AssignVariableOp"
KEEP_NOTHING = (
    *("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd"),
    *("If", "While", "Case", "StatefulPartitionedCall"),
    *("Assert", "CheckNumerics", "CheckNumericsV2"),
)
"""Operations that TensorFlow counts as stateful, and that are accepted. Others make tables or queues, read files, or
draw from a state of their own."""


def refuse_state(graph: tf.Graph, model: Network) -> None:
    """Refuse a graph that may write a variable, keep anything of an example, or never computes the same.

    Args:
        graph: of a traced function that uses the model.
        model: whose variables Keras knows.

    Raises:
        UnsupportedModel: names a variable that Keras does not know, or the operation; not which variable is written.
    """
    known = {id(variable.value) for variable in model.variables}
    for used in graph.variables:
        if id(used) not in known:
            raise UnsupportedModel(f"the model uses {used.name}, a variable that Keras does not know; use add_weight")
    for operation in (one for own in with_functions(graph) for one in own.get_operations()):
        if operation.type == ASSIGN:
            raise UnsupportedModel(f"the model may change a variable {LEARNT}")
        if operation.type == "AddN" and len(operation.inputs) > 2 and is_used(operation):
            raise UnsupportedModel(
                f"the model adds {len(operation.inputs)} terms by a function that was traced before, in an order that "
                "timing decides; leave tf.function out of its layers, or add terms with +"
            )
        if operation.type in UNORDERED:
            raise UnsupportedModel(
                f"the model uses the gradient {operation.type}, which TensorFlow adds up in another order each time; "
                "crop images before they reach a trained layer"
            )
        if _keeps(operation):
            raise UnsupportedModel(
                f"the model uses {operation.type}, which could keep something of an example; use operations without a "
                "state, and random numbers of a keras.random.SeedGenerator"
            )


def _keeps(operation: tf.Operation) -> bool:
    is_stateful = operation.op_def.is_stateful and operation.type not in (ASSIGN, *KEEP_NOTHING)
    is_refused = operation.type.startswith(REFUSED_PREFIXES) or operation.type in REFUSED
    return is_stateful or is_refused or "Dataset" in operation.type
