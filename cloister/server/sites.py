"""What nodes are called: the names under which an operator has registered them at the SuperLink."""

from collections.abc import Iterable
from dataclasses import replace

from flwr.serverapp import Grid

from cloister.aggregation.screening import Rejection, printable


class Sites:
    """The names of nodes, also of those that have left since; nodes of a simulation have none."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def learn(self, grid: Grid) -> None:
        """Take the names of the nodes that are connected now."""
        self._names |= {node.node_id: printable(node.name) for node in grid.get_nodes() if node.name}

    def name_of(self, node_id: int) -> str:
        """The name of a node, or its number."""
        return self._names.get(node_id) or f"node {node_id}"

    def named(self, rejected: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """The same rejections, each with the name of its site where there is one."""
        return tuple(replace(item, site=self._names.get(item.node_id, "")) for item in rejected)
