"""Sampling of the nodes of a round, and averaging strategies: FedAvg and FedProx."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import INFO
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from numpy.typing import NDArray

from cloister.flower import log
from cloister.utils import check
from cloister.utils.arrays import Layout, State, from_record, joined, part, to_record
from cloister.utils.cohort import Cohort, scratch_for, weighted_sum
from cloister.utils.errors import FederationError, TooFewNodes
from cloister.utils.registry import MEAN, Aggregated, Capabilities, Draw, Messages
from cloister.utils.text import counted
from cloister.utils.threads import Span, for_each_span, spans
from cloister.utils.wire import ARRAYS, CONFIG, EXAMPLES, PROXIMAL_MU, ROUND, number

POLL_SECONDS = 0.1
MERSENNE_TWISTER = 3
"""Version of the state of `random.Random`."""


class HeldOut:
    """Nodes that never train. They evaluate models that do not depend on their data.

    A node's role is drawn when the server first sees it, and stays.

    Args:
        fraction: of the nodes, at least 0 and below 1.
        rng: draws the roles.

    Attributes:
        newcomers: number of nodes that got a role after the first round's roles were drawn. One of them may be a node
            that had the other role and returned under a new id.
    """

    def __init__(self, fraction: float = 0.0, rng: random.Random | None = None) -> None:
        self.fraction = fraction
        self._rng = rng or random.SystemRandom()
        self._known: set[int] = set()
        self._held: set[int] = set()
        self.newcomers = 0

    @property
    def holds_some(self) -> bool:
        """Return True if any node, connected or not, is held out."""
        return bool(self._held)

    def split(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Return the nodes that train, and the nodes that are held out."""
        strangers = sorted(set(nodes) - self._known)
        self.newcomers += len(strangers) if self._known else 0
        self._rng.shuffle(strangers)
        for node in strangers:
            self._known.add(node)
            if len(self._held) + 1 <= self.fraction * len(self._known) + 1e-9:
                self._held.add(node)
        return [node for node in nodes if node not in self._held], [node for node in nodes if node in self._held]

    def state_dict(self) -> State:
        """Return the roles and the state of a seeded generator."""
        numbers = {"known": self._known, "held": self._held}
        roles = {name: np.array(sorted(nodes), np.uint64) for name, nodes in numbers.items()}
        return {**roles, "newcomers": np.array(self.newcomers), **_rng_state(self._rng)}

    def load_state_dict(self, state: State) -> None:
        """Restore the roles and the state of a seeded generator."""
        self._known, self._held = set(state["known"].tolist()), set(state["held"].tolist())
        self.newcomers = int(state["newcomers"])
        _restore_rng(self._rng, state)


@dataclass
class Sampling:
    """Sampling of nodes for a round.

    Args:
        fraction: of the connected nodes, above 0 and at most 1.
        min_nodes: smallest cohort that `fixed` draws, if enough nodes are connected.
        kind: `fixed` draws a cohort of one size without replacement; `poisson` draws each node independently with
            probability `fraction`, so that a cohort may be of any size, or empty.
        timeout: seconds to wait for nodes.
        rng: source of the draws; by default the operating system's entropy.
        population: number of registered nodes; every round must find exactly these nodes. 0: no registration.
        held_out: nodes that never train, shared by training and evaluation; None: there are none.
        from_held_out: draw from the held-out nodes only; otherwise from the training nodes only.
        quorum: number of nodes that must be connected for a draw; 0: none; None: `min_nodes`.
    """

    fraction: float = 1.0
    min_nodes: int = 2
    kind: Literal["fixed", "poisson"] = "fixed"
    timeout: float = 120.0
    rng: random.Random = field(default_factory=random.SystemRandom)
    population: int = 0
    held_out: HeldOut | None = None
    from_held_out: bool = False
    quorum: int | None = None
    _registered: list[int] = field(default_factory=list, init=False)

    def draw(self, grid: Grid) -> Draw:
        """Draw the nodes for a round, after enough nodes are connected.

        Raises:
            TooFewNodes: too few nodes are connected after `timeout`, or all of them are held out from training.
            FederationError: the nodes are not the registered ones, or no node is held out.
        """
        wanted = self.min_nodes if self.quorum is None else self.quorum
        own = "strategy.min-nodes" if self.quorum is None else "strategy.quorum"
        key = own if self.population <= wanted else "privacy.population"
        minimum = max(wanted, self.population)
        nodes = connected_nodes(
            grid, minimum, self.timeout, key, lambda found: log(INFO, "waiting for nodes: %d of %d", found, minimum)
        )
        if self.population:
            self._registered = self._registered or nodes
            if nodes != self._registered or len(nodes) != self.population:
                raise FederationError(
                    f"privacy.population = {self.population} registers the nodes of the first round, and "
                    f"{len(nodes)} other ones are connected now; amplification by sampling cannot be claimed"
                )
        if self.held_out is not None:
            training, held_out = self.held_out.split(nodes)
            if not self.held_out.holds_some:
                raise FederationError(
                    f"evaluation.held-out-clients = {self.held_out.fraction} holds none of {len(nodes)} nodes out; "
                    "raise it, or start more nodes"
                )
            if not training and not self.from_held_out:
                raise TooFewNodes(f"of {len(nodes)} connected nodes none trains: all are held out")
            nodes = held_out if self.from_held_out else training
        expected = self.expected(len(nodes))
        if self.kind == "poisson":
            drawn = [node for node in nodes if self.rng.random() < self.fraction]
        else:
            drawn = self.rng.sample(nodes, int(expected))
        return Draw(drawn, expected, self.kind, self.fraction, self.population, self._is_secret)

    def expected(self, nodes: int) -> float:
        """Return the expected cohort size for this number of nodes, a public number."""
        return self.fraction * nodes if self.kind == "poisson" else min(self._size(nodes), nodes)

    def plan(self) -> Draw:
        """Return the planned draw, without nodes."""
        expected = self._size(self.population) if self.kind == "fixed" else self.fraction * self.population
        return Draw([], expected, self.kind, self.fraction, self.population, self._is_secret)

    def state_dict(self) -> State:
        """Return the registered nodes and the state of a seeded generator.

        A secret generator has no state.
        """
        registered = {"registered": np.array(self._registered, np.uint64)} if self._registered else {}
        return {**registered, **_rng_state(self.rng)}

    def load_state_dict(self, state: State) -> None:
        """Restore the registered nodes and the state of a seeded generator."""
        self._registered = state["registered"].tolist() if "registered" in state else []
        _restore_rng(self.rng, state)

    @property
    def _is_secret(self) -> bool:
        return isinstance(self.rng, random.SystemRandom)

    def _size(self, nodes: int) -> int:
        """Return the size of a cohort that `fixed` draws from this number of nodes."""
        return max(int(self.fraction * nodes + 1e-9), self.min_nodes)


def _rng_state(rng: random.Random) -> State:
    """Return the state of a seeded generator; empty for the operating system's entropy."""
    return {} if isinstance(rng, random.SystemRandom) else {"rng": np.array(rng.getstate()[1], np.uint32)}


def _restore_rng(rng: random.Random, state: State) -> None:
    if not isinstance(rng, random.SystemRandom):
        rng.setstate((MERSENNE_TWISTER, tuple(state["rng"].tolist()), None))


def connected_nodes(
    grid: Grid, minimum: int, timeout: float, key: str = "strategy.min-nodes", told: Callable[[int], None] | None = None
) -> list[int]:
    """Wait for enough connected nodes, and return their ids in a fixed order.

    Args:
        grid: connects to the nodes.
        minimum: number of nodes to wait for.
        timeout: seconds to wait.
        key: configuration key that demands this number.
        told: is called with the number of nodes, first if there are too few and then on every change.

    Raises:
        TooFewNodes: fewer nodes are connected after the timeout.
    """
    deadline = time.monotonic() + timeout
    last = -1
    while len(nodes := sorted(grid.get_node_ids())) < minimum:
        if time.monotonic() > deadline:
            raise TooFewNodes(
                f"{are_connected(len(nodes))} after {timeout:g} s, {key} = {minimum}; "
                f"start more nodes, lower {key}, or raise node-timeout"
            )
        if len(nodes) != last and told is not None:
            told(len(nodes))
        last = len(nodes)
        time.sleep(POLL_SECONDS)
    return nodes


def are_connected(nodes: int) -> str:
    """Format the number of connected nodes as a clause.

    Args:
        nodes: number of nodes.
    """
    return f"{counted(nodes, 'node')} {'is' if nodes == 1 else 'are'} connected"


class Sampled(flower.FedAvg):
    """Flower's FedAvg with `Sampling`: the base class of every strategy here.

    Args:
        train: sampling of nodes for training rounds.
        evaluate: sampling of nodes for federated evaluation; None switches it off.

    Attributes:
        last_draw: nodes of the last training round, with their sampling; before the first round, the planned draw.
    """

    def __init__(self, train: Sampling | None = None, evaluate: Sampling | None = None) -> None:
        super().__init__()
        self.train_sampling = Sampling() if train is None else train
        self.evaluate_sampling = evaluate
        self.last_draw: Draw = self.train_sampling.plan()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Draw the nodes of this round and address the model to them."""
        self.last_draw = draw = self.train_sampling.draw(grid)
        return _addressed(draw, MessageType.TRAIN, server_round, arrays, config)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Draw the nodes that evaluate this round's model, if evaluation is on."""
        if self.evaluate_sampling is None:
            return []
        return _addressed(self.evaluate_sampling.draw(grid), MessageType.EVALUATE, server_round, arrays, config)

    def state_dict(self) -> State:
        """Return the state of the draws. A subclass with further state between rounds adds it."""
        evaluate = self.evaluate_sampling
        return joined(
            {"train": self.train_sampling.state_dict(), "evaluate": evaluate.state_dict() if evaluate else {}}
        )

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""
        self.train_sampling.load_state_dict(part(state, "train"))
        if self.evaluate_sampling:
            self.evaluate_sampling.load_state_dict(part(state, "evaluate"))

    def summary(self) -> None:
        """Log the sampling of nodes."""
        how = self.train_sampling
        log(INFO, "%s: %s sampling of %g of the nodes", type(self).__name__, how.kind, how.fraction)


def _addressed(draw: Draw, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord) -> list[Message]:
    config[ROUND] = server_round
    record = RecordDict({ARRAYS: arrays, CONFIG: config})
    return [Message(record, node, kind) for node in draw.nodes]


class FedAvg(Sampled):
    """Federated averaging: the mean of the clients' models, weighted by their example counts.

    Source: McMahan et al. (2017), arXiv:1602.05629.
    """

    capabilities: Capabilities = MEAN

    def aggregate_train(self, server_round: int, replies: Messages) -> Aggregated:
        """Return the weighted mean, Σ w_i·θ_i / Σ w_i. A single reply is passed on unchanged, without a copy.

        The sum is computed block by block, as the first model plus the mean of the differences from it.
        """
        contents = [message.content for message in replies if not message.has_error()]
        if not contents:
            return None, None
        metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        if len(contents) == 1:
            return contents[0].array_records[ARRAYS], metrics
        models = [from_record(content.array_records[ARRAYS]) for content in contents]
        records = [tuple(content.metric_records.values()) for content in contents]
        weights = np.array([number(record, EXAMPLES) for (record,) in records])
        weights /= weights.sum()
        layout = Layout.of(models[0])
        rows = tuple(layout.rows(model) for model in models)
        cohort = Cohort(layout, rows[0], rows, np.zeros(len(rows)), weights)
        mean = tuple(np.empty(piece.size, layout.dtype) for piece in rows[0])

        def average(span: Span, scratch: NDArray) -> None:
            total = weighted_sum(cohort, span, weights.astype(scratch.dtype), scratch, span.of(mean))
            total += span.of(rows[0])

        for_each_span(spans(layout.sizes), average, lambda: scratch_for(layout), cost=len(rows))
        return to_record(layout.named(mean)), metrics


class FedProx(FedAvg):
    """FedAvg whose clients add μ/2·‖w - w_global‖² to their loss.

    Args:
        proximal_mu: μ ≥ 0. 0.5 in Sáinz-Pardo Díaz et al. (2026).
        sampling: as in `Sampled`.

    Source: Li et al. (2020), arXiv:1812.06127.
    """

    def __init__(self, *, proximal_mu: float = 0.5, **sampling: Sampling | None) -> None:
        super().__init__(**sampling)
        check.non_negative(**{"strategy.proximal-mu": proximal_mu})
        self.proximal_mu = proximal_mu

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Configure the messages of FedAvg, and send μ to the clients."""
        config[PROXIMAL_MU] = self.proximal_mu
        return super().configure_train(server_round, arrays, config, grid)
