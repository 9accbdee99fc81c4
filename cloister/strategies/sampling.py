"""Which nodes take part in a round."""

import random
import time
from dataclasses import dataclass, field
from logging import INFO
from typing import Literal

from flwr.serverapp import Grid
from flwr.supercore import log

from cloister.core.draw import Draw
from cloister.core.errors import FederationError

POLL_SECONDS = 0.1


class HeldOut:
    """Nodes that never train: their part in scoring is to know nothing of the model.

    A node's role is settled when it is first seen, and stays.

    Args:
        fraction: of the nodes, at least 0 and below 1.
        rng: decides who.
    """

    def __init__(self, fraction: float = 0.0, rng: random.Random | None = None) -> None:
        self.fraction = fraction
        self._rng = rng or random.SystemRandom()
        self._known: set[int] = set()
        self._held: set[int] = set()

    def split(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Those who train, and those who are held out."""
        strangers = sorted(set(nodes) - self._known)
        self._rng.shuffle(strangers)
        for node in strangers:
            self._known.add(node)
            if len(self._held) + 1 <= self.fraction * len(self._known) + 1e-9:
                self._held.add(node)
        return [node for node in nodes if node not in self._held], [node for node in nodes if node in self._held]


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
        population: register the nodes: there must be this many, and in every round the same. 0: whoever is connected.
        held_out: the nodes that never train, shared by training and evaluation; None: there are none.
        from_held_out: draw from those, and not from the others.
    """

    fraction: float = 1.0
    min_nodes: int = 2
    kind: Literal["fixed", "poisson"] = "fixed"
    timeout: float = 120.0
    rng: random.Random = field(default_factory=random.SystemRandom)
    population: int = 0
    held_out: HeldOut | None = None
    from_held_out: bool = False
    _registered: list[int] = field(default_factory=list, init=False)

    def draw(self, grid: Grid) -> Draw:
        """Choose nodes for a round, waiting for enough to connect.

        Raises:
            FederationError: too few nodes are connected when the time is up, or not the registered ones.
        """
        nodes = self._eligible(self._wait(grid))
        expected: float
        if self.kind == "poisson":
            drawn = [node for node in nodes if self.rng.random() < self.fraction]
            expected = self.fraction * len(nodes)
        else:
            expected = min(self._size(len(nodes)), len(nodes))
            drawn = self.rng.sample(nodes, expected)
        return Draw(drawn, expected, self.kind, self.fraction, self.population, self._is_secret)

    def _eligible(self, nodes: list[int]) -> list[int]:
        if self.held_out is None:
            return nodes
        training, held_out = self.held_out.split(nodes)
        if not held_out:
            raise FederationError(
                f"evaluation.held-out-clients = {self.held_out.fraction} holds none of {len(nodes)} nodes out; "
                "raise it, or start more nodes"
            )
        return held_out if self.from_held_out else training

    def plan(self) -> Draw:
        """A draw as it is going to be, nobody in it yet."""
        expected = self._size(self.population) if self.kind == "fixed" else self.fraction * self.population
        return Draw([], expected, self.kind, self.fraction, self.population, self._is_secret)

    @property
    def _is_secret(self) -> bool:
        return isinstance(self.rng, random.SystemRandom)

    def _size(self, nodes: int) -> int:
        """How many `fixed` draws from so many nodes."""
        return max(int(self.fraction * nodes + 1e-9), self.min_nodes)

    def _wait(self, grid: Grid) -> list[int]:
        """The connected nodes in a fixed order, as soon as there are enough; the registered ones where there are."""
        nodes = self._connected(grid, max(self.min_nodes, self.population))
        if self.population:
            self._registered = self._registered or nodes
            if nodes != self._registered or len(nodes) != self.population:
                raise FederationError(
                    f"privacy.population = {self.population} registers the nodes of the first round, and "
                    f"{len(nodes)} other ones are connected now; amplification by sampling cannot be claimed"
                )
        return nodes

    def _connected(self, grid: Grid, least: int) -> list[int]:
        deadline = time.monotonic() + self.timeout
        told = -1
        while len(nodes := sorted(grid.get_node_ids())) < least:
            if time.monotonic() > deadline:
                raise FederationError(
                    f"{len(nodes)} nodes are connected after {self.timeout:g} s, strategy.min-nodes = {least}; "
                    "start more nodes, lower strategy.min-nodes, or raise node-timeout"
                )
            if len(nodes) != told:
                told = len(nodes)
                log(INFO, "waiting for nodes: %d of %d", told, least)
            time.sleep(POLL_SECONDS)
        return nodes
