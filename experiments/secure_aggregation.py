"""What it costs not to trust the server, with and without secure aggregation: accuracy against ε for a whole client,
for softmax regression on digits (20 clients) and on MNIST (100 clients, 7,850 parameters).

`global-dp` holds against everybody but the server. With secure aggregation it holds against the server too, together
with a few clients. With `gaussian` each client adds all the noise that it needs by itself. ε is that of all rounds
together at δ = 1e-5, for a client's contribution that is zeroed or not. Every client takes part in every round. The
seeds choose data and first model, the same ones for every mechanism, and differences are taken seed by seed.

    python experiments/secure_aggregation.py [--tasks digits mnist] [--data FOLDER] [--seeds 5] [--results FOLDER]

A point that is there for as many seeds is not run again.
With `--processes N` it makes the runs of `PROCESSES` of the first N seeds again, each client a process of its own.
"""

import itertools
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cells import data_at, parser
from local_noise import accuracy, draw, kept, run_missing, settings_of
from rich.console import Console
from rich.table import Table

BOUND, ROUNDS = 0.5, 5
CLIENTS = {"digits": 20, "mnist": 100}
EPSILONS = {"digits": (1.0, 2.0, 4.0, 8.0, 16.0), "mnist": (4.0,)}
SECURE: Mapping[str, dict[str, Any]] = {
    "digits": {"secure-aggregation.threshold": 13, "secure-aggregation.colluding": 2},
    "mnist": {"secure-aggregation.threshold": 60, "secure-aggregation.colluding": 5},
}
MECHANISMS = ("global-dp", "secure aggregation", "gaussian")
PROCESSES = ("digits", "secure aggregation", 8.0)
"""Task, mechanism and ε of the runs with clients as processes."""
TIMEOUT = 900
"""Seconds for a run with clients as processes."""
SECONDS = {"digits": 0.5, "mnist": 3.0}
"""Seconds of a round in the first estimate, on two cores."""
PROCESS_SECONDS = 20.0
"""Seconds of a round with clients as processes; a guess."""


def configured(task: str, mechanism: str, epsilon: float, data: str) -> dict[str, Any]:
    """The run configuration in which all rounds together cost ε."""
    secure = mechanism == "secure aggregation"
    settings = settings_of(task, "global-dp" if secure else mechanism, epsilon, BOUND, ROUNDS)
    settings |= {"strategy.min-nodes": CLIENTS[task]}
    settings |= {"secure-aggregation.enabled": True, **SECURE[task]} if secure else {}
    return settings | ({"task.data-path": data_at(data, "mnist")} if task == "mnist" else {})


class Cell(NamedTuple):
    """A mechanism at one ε."""

    task: str
    mechanism: str
    epsilon: float
    rounds: int = ROUNDS

    def point(self, data: str, seeds: int) -> dict[str, Any]:
        """The accuracy of every seed."""
        settings = configured(self.task, self.mechanism, self.epsilon, data)
        found = [accuracy(settings | {"seed": seed}, CLIENTS[self.task]) for seed in range(seeds)]
        return {**self._asdict(), "accuracy": found}


def in_processes(cell: Cell, seeds: int) -> dict[str, Any]:
    """The accuracy of every seed, with warm nodes that keep their keys and their secrets apart from each other."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from deployment import WARM_LIGHT, Processes, start_nodes

    settings, found = configured(cell.task, cell.mechanism, cell.epsilon, ""), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings |= {"output-dir": str(folder / "runs"), "keep-checkpoints": 1}
        with Processes(folder / "processes") as processes:
            processes.superlink()
            start_nodes(processes, folder, CLIENTS[cell.task], WARM_LIGHT, secure=True)
            for seed in range(seeds):
                processes.flwr_run(settings | {"seed": seed, "run-name": f"seed-{seed}"}, seconds=TIMEOUT)
                lines = (folder / "runs" / f"seed-{seed}" / "rounds.jsonl").read_text().splitlines()
                found.append(json.loads(lines[-1])["central"]["accuracy"])
    return {**cell._asdict(), "accuracy": found}


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Of their mean."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def show(found: list[dict[str, Any]]) -> None:
    """A row a point, with the difference to `global-dp` at the same ε in standard errors of the difference."""
    central = {(p["task"], p["epsilon"]): np.array(p["accuracy"]) for p in found if p["mechanism"] == MECHANISMS[0]}
    table = Table("task", "mechanism", "ε", "accuracy", "minus global-dp", "in standard errors")
    for point in found:
        own = np.array(point["accuracy"])
        apart = own - central[point["task"], point["epsilon"]]
        cells = [point["task"], point["mechanism"], f"{point['epsilon']:g}", f"{own.mean():.3f} ± {own.std():.3f}"]
        if np.any(apart):
            cells += [f"{apart.mean():+.4f}", f"{apart.mean() / standard_error(apart):+.1f}"]
        table.add_row(*cells)
    Console(width=120).print(table)


def main() -> None:
    """Run what is missing of the tasks; keep, show and draw what is there."""
    options = parser(__doc__, ["mnist"])
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--processes", type=int, default=0, help="seeds to run with clients as processes, alone")
    options.add_argument("--tasks", nargs="*", choices=list(CLIENTS), default=list(CLIENTS))
    arguments = options.parse_args()
    place, seeds = arguments.results / "secure_aggregation", arguments.seeds
    if arguments.processes:
        where, seeds = place / "processes.json", arguments.processes
        run_missing(where, [Cell(*PROCESSES)], seeds, PROCESS_SECONDS, lambda cell: in_processes(cell, seeds))
        print(kept(where))
        return
    point = partial(Cell.point, data=arguments.data, seeds=seeds)
    for task in arguments.tasks:
        cells = [Cell(task, mechanism, epsilon) for epsilon, mechanism in itertools.product(EPSILONS[task], MECHANISMS)]
        run_missing(place / f"{task}.json", cells, seeds, SECONDS[task], point)
    everything = [point for task in CLIENTS for point in kept(place / f"{task}.json")]
    show(everything)
    titles = {task: f"{task}, {count} clients, {ROUNDS} rounds" for task, count in CLIENTS.items()}
    draw(everything, place / "figure.png", MECHANISMS, titles, standard_error)


if __name__ == "__main__":
    main()
