"""The metric distance of a round against a loop over pairs: time, error and memory.

python benchmarks/distance.py           # 100 clients
python benchmarks/distance.py --full    # 1000 clients as well: 7 GB, a few minutes
"""

import sys
import time
from itertools import combinations

import numpy as np
from common import MLP, count, extra_peak, in_subprocess, machine, model, table, trained

from cloister.privacy.mechanisms.metric import largest_distance, mean_layer_frobenius
from cloister.utils.arrays import Layout
from cloister.utils.cohort import Cohort

PAIRS = 60
"""Pairs of a thousand clients that the loop is run on: all of them would take it seven minutes."""


def cohort_of(clients: int) -> Cohort:
    """Clients that trained the MLP in float64."""
    sent = model(MLP, dtype=np.float64)
    layout = Layout.of(sent)
    rows = tuple(layout.rows(arrays) for arrays in trained(sent, clients))
    return Cohort.of(layout, layout.rows(sent), rows)


def of_pair(cohort: Cohort, i: int, j: int) -> float:
    """The distance as it is defined, of one pair."""
    layers = [np.linalg.norm(a - b) for a, b in zip(cohort.rows[i], cohort.rows[j], strict=True)]
    return float(sum(layers) / len(layers))


def pairs_of(clients: int, every: bool) -> list[tuple[int, int]]:
    """All pairs, or a sample of them."""
    pairs = list(combinations(range(clients), 2))
    return pairs if every else [pairs[k] for k in np.random.default_rng(0).permutation(len(pairs))[:PAIRS]]


def measure(clients: int) -> list[str]:
    """One row of the table."""
    cohort = cohort_of(clients)
    pairs = pairs_of(clients, clients <= 100)
    times = []
    for _ in range(5 if clients <= 100 else 1):
        start = time.perf_counter()
        largest = largest_distance(cohort, mean_layer_frobenius)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    exact = [of_pair(cohort, i, j) for i, j in pairs]
    theirs = (time.perf_counter() - start) * clients * (clients - 1) / 2 / len(pairs)
    matrix = mean_layer_frobenius(cohort)
    entries = np.array([matrix[i, j] for i, j in pairs])
    winner = np.unravel_index(np.argmax(matrix), matrix.shape)
    best = of_pair(cohort, int(winner[0]), int(winner[1]))
    ours = float(np.median(times))
    memory = in_subprocess(PEAK, str(clients))
    allowed = 64e6 + clients**2 * len(cohort.layout.names) * 8
    return [
        f"n={clients} p={count(MLP) / 1e6:.1f}M",
        f"{ours:.2f}",
        f"{theirs:.1f}" + ("" if clients <= 100 else " (from a sample)"),
        f"{theirs / ours:.1f}x",
        f"{abs(largest / best - 1):.1e}",
        f"{np.max(np.abs(entries / np.array(exact) - 1)):.1e}",
        f"{memory / 1e6:.0f} of {allowed / 1e6:.0f}",
    ]


PEAK = "import json, sys, distance; print(json.dumps(distance.peak(int(sys.argv[1]))))"


def peak(clients: int) -> int:
    """Extra resident memory of one measurement, in this process."""
    largest_distance(cohort_of(3), mean_layer_frobenius)
    cohort = cohort_of(clients)
    return extra_peak(lambda: largest_distance(cohort, mean_layer_frobenius))


def main() -> None:
    """Print the table."""
    machine()
    sizes = [100, 1000] if "--full" in sys.argv else [100]
    head = ["size", "s", "pair loop s", "faster", "error of d", "error of any pair", "extra MB of allowed"]
    table(head, [measure(clients) for clients in sizes])


if __name__ == "__main__":
    main()
