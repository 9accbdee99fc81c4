"""All graphs that a traced function consists of."""

from collections.abc import Iterator

import tensorflow as tf


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
