"""Names of nodes, as an operator has registered them at the SuperLink."""

from collections.abc import Iterable
from dataclasses import replace

from flwr.serverapp import Grid

from cloister.aggregation.screening import Rejection, printable


class Sites:
    """Names of present and former nodes; simulated nodes have none."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def learn(self, grid: Grid) -> None:
        """Store the names of the connected nodes."""
        self._names |= {node.node_id: printable(node.name) for node in grid.get_nodes() if node.name}

    def name_of(self, node_id: int) -> str:
        """Return the name of a node, or its number."""
        return self._names.get(node_id) or f"node {node_id}"

    def named(self, rejected: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """Return the rejections with the names of their sites, where there are any."""
        return tuple(replace(item, site=self._names.get(item.node_id, "")) for item in rejected)
