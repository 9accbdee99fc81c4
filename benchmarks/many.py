"""One round of very many clients in this process, global DP included: seconds, processor seconds, extra memory.

The client adds 1 to every parameter. Replies are added up as they come, so that memory does not grow with them.

    python benchmarks/many.py              # 10,000 clients of 0.8 M parameters, 100,000 of 8 k
    python benchmarks/many.py 500 1000     # other numbers of clients
"""

import sys
import time

from common import MLP, Shapes, count, extra_peak, in_subprocess, machine, model, quiet, table
from flwr.app import ConfigRecord, Message
from inprocess import add_one

from cloister.server.private_strategy import GlobalDP
from cloister.simulation.grid import LocalGrid
from cloister.strategies.averaging import FedAvg
from cloister.utils.arrays import to_record

SMALL: Shapes = {"0": (784, 10), "1": (10,)}
"""7,850 parameters."""
CASES: dict[str, tuple[Shapes, int, float]] = {"0.8M": (MLP, 10_000, 40), "8k": (SMALL, 100_000, 60)}
"""Shapes, clients, and the target in seconds."""
A_ROUND = "import json, sys, many; print(json.dumps(many.a_round(sys.argv[1], int(sys.argv[2]))))"


def a_round(size: str, clients: int) -> tuple[float, float, int, int]:
    """What one round takes: seconds, processor seconds, bytes of its messages, and bytes on top of those."""
    quiet()
    if clients > 4:
        a_round(size, 4)  # what is imported and made on first use is no cost of a round
    strategy = GlobalDP(FedAvg(), noise_multiplier=1.0, clipping_norm=1.0)
    grid, sent = LocalGrid(add_one, {}, [{}] * clients), to_record(model(CASES[size][0]))
    messages: list[Message] = []
    asked = extra_peak(lambda: messages.extend(strategy.configure_train(1, sent, ConfigRecord(), grid)))
    taken: list[float] = []

    def run() -> None:
        start, busy = time.perf_counter(), time.process_time()
        strategy.aggregate_train(1, grid.send_and_receive(messages))
        taken.extend((time.perf_counter() - start, time.process_time() - busy))

    extra = extra_peak(run)
    assert strategy.measured is not None and strategy.measured.accepted == clients
    return taken[0], taken[1], asked, extra


def main() -> None:
    """Print the table: each row is measured in a process of its own."""
    machine()
    asked, lines = list(map(int, sys.argv[1:])), []
    for number, (size, (shapes, usual, target)) in enumerate(CASES.items()):
        clients = asked[number] if number < len(asked) else usual
        seconds, busy, messages, extra = in_subprocess(A_ROUND, size, str(clients))
        lines.append([
            f"n={clients} p={count(shapes)}", f"{seconds:.1f}", f"{target:.0f}" if clients == usual else "",
            f"{busy:.1f}", f"{1e3 * busy / clients:.2f}", f"{extra / 1e6:.1f}", f"{extra / 4 / count(shapes):.1f}x",
            f"{messages / 1e6:.1f}",
        ])  # fmt: skip
    head = ["size", "s", "target", "CPU s", "CPU ms a client", "extra MB", "of the model", "MB of messages"]
    table(head, lines)


if __name__ == "__main__":
    main()
