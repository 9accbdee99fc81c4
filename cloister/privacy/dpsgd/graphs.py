"""Look into traced functions: their graphs, their used operations, and XLA's support of them."""

from collections.abc import Iterator, Sequence

import tensorflow as tf

from cloister.core.tensors import Compiled


def with_functions(graph: tf.Graph) -> Iterator[tf.Graph]:
    """A graph, and once each the graphs of all functions that it calls.

    Args:
        graph: of a traced function.
    """
    return _walk(graph, set())


def _walk(graph: tf.Graph, seen: set[str]) -> Iterator[tf.Graph]:
    yield graph
    for operation in graph.get_operations():
        for attribute in operation.node_def.attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name and function.name not in seen:
                    seen.add(function.name)
                    yield from _walk(graph._get_function(function.name).graph, seen)


def is_used(operation: tf.Operation) -> bool:
    """Return whether anything uses an operation: one that was replaced is left in the graph, and is not computed.

    Args:
        operation: of a traced function.
    """
    results = {id(output) for output in operation.graph.outputs}
    return any(output.consumers() or id(output) in results for output in operation.outputs)


def is_known_to_xla(function: Compiled, signature: Sequence[tf.TensorSpec]) -> bool:
    """Return whether XLA can compile a function: nothing is computed to find out.

    Args:
        function: made with `jit_compile=True`.
        signature: of its arguments.
    """
    try:
        function.experimental_get_compiler_ir(*signature)()
    except Exception:  # XLA says what it lacks, and TensorFlow that it has no XLA, in exceptions of many kinds
        return False
    return True
