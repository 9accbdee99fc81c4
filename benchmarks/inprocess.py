"""A round in one process: milliseconds a client message, aggregation included, with a client that adds 1.

Flower's own arrays on the same grid under Flower's own wrapper are the peer: what the same round costs with copies.
Page faults tell how much of a message's memory is touched for the first time; other programs do not change them.

    python benchmarks/inprocess.py
"""

import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import MLP, MRI, Shapes, count, interleaved, machine, model, quiet, stock_record, table
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from cloister.server.private_strategy import GlobalDP
from cloister.server.strategy_wrapper import NoPrivacyStrategy, StrategyWrapper
from cloister.simulation.grid import LocalGrid
from cloister.strategies.averaging import FedAvg
from cloister.utils.arrays import from_record, to_record
from cloister.utils.wire import ARRAYS, EXAMPLES, METRICS

TINY: Shapes = {"0": (990,), "1": (10,)}
CASES: dict[str, tuple[Shapes, int, float]] = {"1k": (TINY, 20, 0.3), "0.8M": (MLP, 20, 1.2), "6.5M": (MRI, 4, 22.0)}
"""Shapes, clients, and the target in milliseconds a message, DP included."""
ROUNDS = 5
"""Whose page faults and processor time are counted."""


def add_one(message: Message, context: Context) -> Message:
    """The trivial client, over Cloister's arrays."""
    arrays = from_record(message.content.array_records[ARRAYS])
    return _reply(message, to_record({name: array + np.float32(1) for name, array in arrays.items()}))


def add_one_copying(message: Message, context: Context) -> Message:
    """The trivial client, over Flower's arrays."""
    arrays = message.content.array_records[ARRAYS]
    return _reply(message, ArrayRecord({name: Array(array.numpy() + np.float32(1)) for name, array in arrays.items()}))


def _reply(message: Message, arrays: ArrayRecord) -> Message:
    return Message(RecordDict({ARRAYS: arrays, METRICS: MetricRecord({EXAMPLES: 1.0})}), reply_to=message)


def a_round(strategy: Strategy, grid: LocalGrid, arrays: ArrayRecord) -> Callable[[Any], ArrayRecord]:
    """One round, as a server runs it: ours takes replies as they come, Flower's strategies go over them twice."""

    def run(_: Any) -> ArrayRecord:
        messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
        replies = grid.send_and_receive(messages)
        aggregated, _ = strategy.aggregate_train(1, replies if isinstance(strategy, StrategyWrapper) else list(replies))
        assert aggregated is not None
        return aggregated

    return run


def contenders(shapes: Shapes, clients: int) -> dict[str, Callable[[Any], ArrayRecord]]:
    """Rounds of ours, with DP and without, and of Flower's."""
    nodes: list[dict[str, int]] = [{}] * clients
    ours = {
        "Cloister": GlobalDP(FedAvg(), noise_multiplier=1.0, clipping_norm=1.0),
        "without DP": NoPrivacyStrategy(FedAvg()),
    }
    theirs = DifferentialPrivacyServerSideFixedClipping(FlowerFedAvg(fraction_evaluate=0.0), 1.0, 1.0, clients)
    return {
        name: a_round(strategy, LocalGrid(add_one, {}, nodes), to_record(model(shapes)))
        for name, strategy in ours.items()
    } | {
        "Flower's arrays and wrapper": a_round(
            theirs, LocalGrid(add_one_copying, {}, nodes), stock_record(model(shapes))
        )
    }


def busy(action: Callable[[Any], object], clients: int) -> tuple[float, float]:
    """Milliseconds of processor time a message, and page faults."""
    action(None)
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    for _ in range(ROUNDS):
        action(None)
    taken, touched = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return 1e3 * taken / ROUNDS / clients, touched / ROUNDS / clients


def rows(size: str) -> list[list[str]]:
    """Time a message, for each."""
    shapes, clients, target = CASES[size]
    actions = contenders(shapes, clients)
    seconds = interleaved(actions, repeats=9 if size == "6.5M" else 25)
    lines = []
    for name, taken in seconds.items():
        processor, faults = busy(actions[name], clients)
        lines.append([
            f"p={count(shapes)} n={clients}", name, f"{1e3 * taken / clients:.3f}",
            f"{target}" if name == "Cloister" else "", f"{taken / seconds['Cloister']:.1f}x", f"{processor:.3f}",
            f"{faults:.0f}",
        ])  # fmt: skip
    return lines


def main() -> None:
    """Print the table."""
    machine()
    quiet()
    head = ["size", "grid", "ms a message", "target", "of Cloister", "CPU ms", "page faults"]
    table(head, [line for size in CASES for line in rows(size)])


if __name__ == "__main__":
    main()
