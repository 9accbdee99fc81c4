"""Waiting before a round until enough nodes are connected. Only connections count, which are public."""

from collections.abc import Callable
from dataclasses import dataclass

from flwr.serverapp import Grid

from cloister.config.run import RunConfig
from cloister.strategies.sampling import are_connected, connected_nodes


@dataclass(frozen=True)
class Quorum:
    """Numbers of nodes that must be connected.

    Attributes:
        first: before round 1.
        later: before every later round.
        timeout: seconds to wait for them.
        population: number of registered nodes, all of which must be connected in every round; 0: none are registered.
    """

    first: int = 1
    later: int = 1
    timeout: float = 0.0
    population: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> "Quorum":
        """Return the quorum of a configuration."""
        return cls(
            config.strategy.min_nodes, later_quorum(config), config.node_timeout, config.privacy.server.population
        )

    def wait(self, grid: Grid, number: int, told: Callable[[str], None]) -> None:
        """Wait until enough nodes are connected for a round.

        Args:
            grid: with the nodes.
            number: of the round.
            told: receives a message when the run pauses, when the number of nodes changes, and when the run continues.

        Raises:
            TooFewNodes: the timeout has passed.
        """
        wanted = self.first if number == 1 else self.later
        key = "strategy.min-nodes" if number == 1 else "strategy.quorum"
        if self.population > wanted:
            wanted, key = self.population, "privacy.population"
        paused = False

        def pause(connected: int) -> None:
            nonlocal paused
            paused = True
            told(f"paused before round {number}: {are_connected(connected)}, {key} = {wanted}")

        connected_nodes(grid, wanted, self.timeout, key, pause)
        if paused:
            told(f"enough nodes are connected: round {number} begins")


def later_quorum(config: RunConfig) -> int:
    """Return the number of nodes that must be connected after round 1."""
    return config.strategy.min_nodes if config.strategy.quorum == "auto" else config.strategy.quorum
