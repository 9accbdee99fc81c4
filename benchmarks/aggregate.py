"""Clip, mean and noise on the server: Cloister against Flower's own wrapper and against plain averaging.

All get the same replies: Flower's arrays, serialised, as they come off the network. The time is that of
`aggregate_train`, and of the new model's bytes, which Flower makes there. Cloister makes them when the model is sent:
its row without them is what a round in one process takes.

    python benchmarks/aggregate.py            # n = 4, 100, 1000 (10 GB, a few minutes)
    python benchmarks/aggregate.py --small    # without n = 1000
"""

import sys
from collections.abc import Callable
from typing import Any

from common import MLP, MRI, Federation, count, extra_peak, in_subprocess, interleaved, machine, table
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from cloister.server.private_strategy import GlobalDP
from cloister.strategies.averaging import FedAvg

CASES = {"4": (MRI, 4), "100": (MLP, 100), "1000": (MLP, 1000)}
TARGETS = {"4": 1.4, "100": 0.7, "1000": 0.65}
"""Of Flower's plain FedAvg, bytes included."""
CLIP, MULTIPLIER = 1.0, 1.0
WITH, WITHOUT = "Cloister DP", "Cloister DP, without bytes"
Aggregate = Callable[[Any], ArrayRecord]


def strategies(federation: Federation) -> dict[str, Aggregate]:
    """`aggregate_train` of each contender, configured for the round."""
    clients = len(federation.records)
    contenders = {
        "Flower DP": DifferentialPrivacyServerSideFixedClipping(FlowerFedAvg(), MULTIPLIER, CLIP, clients),
        "Flower FedAvg": FlowerFedAvg(),
        WITHOUT: GlobalDP(FedAvg(), noise_multiplier=MULTIPLIER, clipping_norm=CLIP),
    }
    for strategy in contenders.values():
        list(strategy.configure_train(1, federation.sent, ConfigRecord(), federation.grid))
    actions: dict[str, Aggregate] = {
        name: lambda replies, strategy=strategy: _arrays(strategy.aggregate_train(1, replies))
        for name, strategy in contenders.items()
    }
    without = actions.pop(WITHOUT)
    return actions | {WITH: lambda replies: _serialised(without(replies)), WITHOUT: without}


def _arrays(aggregated: tuple[ArrayRecord | None, object]) -> ArrayRecord:
    assert aggregated[0] is not None
    return aggregated[0]


def _serialised(record: ArrayRecord) -> ArrayRecord:
    assert sum(len(array.data) for array in record.values())
    return record


def peak(case: str, name: str) -> int:
    """Extra resident memory of one aggregation, in this process."""
    shapes, clients = CASES[case]
    small = Federation(MLP, 8)
    strategies(small)[name](small.fresh())  # what is imported and made on first use is no cost of a round
    federation = Federation(shapes, clients)
    action, replies = strategies(federation)[name], federation.fresh()
    federation.records.clear()  # nobody else holds the bytes of a reply
    return extra_peak(lambda: action(replies))


PEAK = "import json, sys, aggregate; print(json.dumps(aggregate.peak(*sys.argv[1:])))"


def row(case: str) -> list[list[str]]:
    """Time and memory of every contender at one size."""
    shapes, clients = CASES[case]
    memory = {name: in_subprocess(PEAK, case, name) for name in strategies(Federation(MLP, 2))}
    federation = Federation(shapes, clients)
    seconds = interleaved(strategies(federation), federation.fresh, repeats=9 if clients < 1000 else 5)
    return [
        [
            f"n={clients} p={count(shapes) / 1e6:.1f}M",
            name,
            f"{1e3 * taken:.1f}",
            f"{seconds['Flower DP'] / taken:.2f}x",
            f"{taken / seconds['Flower FedAvg']:.2f}x",
            f"{TARGETS[case]}x" if name == WITH else "",
            f"{memory[name] / 1e6:.1f}",
            f"{memory[name] / (4 * count(shapes)):.2f}x",
        ]
        for name, taken in seconds.items()
    ]


def main() -> None:
    """Print the table."""
    machine()
    cases = [case for case in CASES if case != "1000" or "--small" not in sys.argv]
    head = ["size", "strategy", "ms", "faster than Flower DP", "of Flower FedAvg", "target", "extra MB", "of the model"]
    table(head, [line for case in cases for line in row(case)])


if __name__ == "__main__":
    main()
