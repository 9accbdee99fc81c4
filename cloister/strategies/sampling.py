"""Which nodes take part in a round."""

import random
import time
from dataclasses import dataclass, field
from logging import INFO
from typing import Literal

from flwr.serverapp import Grid
from flwr.supercore import log

from cloister.core.errors import FederationError

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Draw:
    """The nodes of a round, and how many were expected: a public number, unlike the number drawn by `poisson`."""

    nodes: list[int]
    expected: float


@dataclass
class Sampling:
    """How nodes are drawn.

    Args:
        fraction: of the connected nodes, above 0 and at most 1.
        min_nodes: how many must be connected before a round starts, and the least number `fixed` draws.
        kind: `fixed` draws a cohort of one size without replacement; `poisson` draws each node by itself with
            probability `fraction`, so that a cohort may be of any size, or empty.
        timeout: seconds to wait for `min_nodes`.
        rng: where the choice comes from; by default the operating system's entropy.
    """

    fraction: float = 1.0
    min_nodes: int = 2
    kind: Literal["fixed", "poisson"] = "fixed"
    timeout: float = 120.0
    rng: random.Random = field(default_factory=random.SystemRandom)

    def draw(self, grid: Grid) -> Draw:
        """Choose nodes for a round, waiting for enough to connect.

        Raises:
            FederationError: too few nodes are connected when the time is up.
        """
        nodes = self._wait(grid)
        if self.kind == "poisson":
            return Draw([node for node in nodes if self.rng.random() < self.fraction], self.fraction * len(nodes))
        count = max(int(self.fraction * len(nodes) + 1e-9), self.min_nodes)
        return Draw(self.rng.sample(nodes, count), count)

    def _wait(self, grid: Grid) -> list[int]:
        """The connected nodes in a fixed order, as soon as there are enough."""
        deadline = time.monotonic() + self.timeout
        told = -1
        while len(nodes := sorted(grid.get_node_ids())) < self.min_nodes:
            if time.monotonic() > deadline:
                raise FederationError(
                    f"{len(nodes)} nodes are connected after {self.timeout:g} s, strategy.min-nodes = "
                    f"{self.min_nodes}; "
                    "start more nodes, lower strategy.min-nodes, or raise node-timeout"
                )
            if len(nodes) != told:
                told = len(nodes)
                log(INFO, "waiting for nodes: %d of %d", told, self.min_nodes)
            time.sleep(POLL_SECONDS)
        return nodes
