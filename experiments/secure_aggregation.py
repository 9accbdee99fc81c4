"""What it costs not to trust the server, with and without secure aggregation: accuracy against ε for a whole client,
for softmax regression on digits (20 clients) and on MNIST (100 clients, 7,850 parameters).

`global-dp` holds against everybody but the server. With secure aggregation it holds against the server too, together
with a few clients. With `gaussian` each client adds all the noise that it needs by itself. ε is that of all rounds
together at δ = 1e-5, for a client's contribution that is zeroed or not. Every client takes part in every round. The
seeds choose data and first model, the same ones for every mechanism, and differences are taken seed by seed.

    python experiments/secure_aggregation.py --data FOLDER/mnist/mnist.npz [--tasks digits mnist] [--seeds 5]

With `--processes N` it makes the runs of `PROCESSES` of the first N seeds again, each client a process of its own.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from local_noise import accuracy, draw, settings_of
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
RESULTS = Path(__file__).parent / "results" / "secure_aggregation"
PROCESSES = ("digits", "secure aggregation", 8.0)
"""Task, mechanism and ε of the runs with clients as processes."""
SECONDS = 900


def configured(task: str, mechanism: str, epsilon: float, data: str) -> dict[str, Any]:
    """The run configuration in which all rounds together cost ε."""
    secure = mechanism == "secure aggregation"
    settings = settings_of(task, "global-dp" if secure else mechanism, epsilon, BOUND, ROUNDS)
    settings |= {"strategy.min-nodes": CLIENTS[task]}
    settings |= {"secure-aggregation.enabled": True, **SECURE[task]} if secure else {}
    return settings | ({"task.data-path": data} if task == "mnist" else {})


def points(task: str, data: str, seeds: int) -> Iterator[dict[str, Any]]:
    """The accuracy of every seed, for each mechanism and ε."""
    for epsilon in EPSILONS[task]:
        for mechanism in MECHANISMS:
            settings = configured(task, mechanism, epsilon, data)
            found = [accuracy(settings | {"seed": seed}, CLIENTS[task]) for seed in range(seeds)]
            yield {"task": task, "mechanism": mechanism, "epsilon": epsilon, "rounds": ROUNDS, "accuracy": found}


def in_processes(seeds: int) -> dict[str, Any]:
    """The accuracy of every seed, with warm nodes that keep their keys and their secrets apart from each other."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from deployment import WARM_LIGHT, Processes, start_nodes

    task, mechanism, epsilon = PROCESSES
    settings, found = configured(task, mechanism, epsilon, ""), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings |= {"output-dir": str(folder / "runs"), "keep-checkpoints": 1}
        with Processes(folder / "processes") as processes:
            processes.superlink()
            start_nodes(processes, folder, CLIENTS[task], WARM_LIGHT, secure=True)
            for seed in range(seeds):
                processes.flwr_run(settings | {"seed": seed, "run-name": f"seed-{seed}"}, seconds=SECONDS)
                lines = (folder / "runs" / f"seed-{seed}" / "rounds.jsonl").read_text().splitlines()
                found.append(json.loads(lines[-1])["central"]["accuracy"])
    return {"task": task, "mechanism": mechanism, "epsilon": epsilon, "rounds": ROUNDS, "accuracy": found}


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
    """Run the tasks; keep, show and draw what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="path of mnist.npz, which the task mnist needs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--processes", type=int, default=0, help="seeds to run with clients as processes, and no others"
    )
    parser.add_argument("--tasks", nargs="*", choices=list(CLIENTS), default=list(CLIENTS))
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if arguments.processes:
        point = in_processes(arguments.processes)
        (RESULTS / "processes.json").write_text(json.dumps(point, indent=1) + "\n")
        print(point)
        return
    for task in arguments.tasks:
        found = list(points(task, arguments.data, arguments.seeds))
        (RESULTS / f"{task}.json").write_text(json.dumps(found, indent=1) + "\n")
    everything = [point for task in CLIENTS for point in _read(RESULTS / f"{task}.json")]
    show(everything)
    titles = {task: f"{task}, {count} clients, {ROUNDS} rounds" for task, count in CLIENTS.items()}
    draw(everything, RESULTS / "figure.png", MECHANISMS, titles, standard_error)


def _read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


if __name__ == "__main__":
    main()
