"""What it costs not to trust the server: accuracy against ε for a whole client, with noise on the server
(`global-dp`) and with noise on the clients (`gaussian`, `laplace`), for softmax regression on digits (40 clients) and
on MNIST (100 clients, 7,850 parameters).

One relation for all: a client's contribution is zeroed or not. ε is that of all rounds together at δ = 1e-5; `laplace`
is pure, and its ε holds at δ = 0. Every client takes part in every round. For each point the best of a few clips (or
radii) and numbers of rounds is shown, chosen by the mean accuracy over the seeds: the same choice for all mechanisms.

    python experiments/local_noise.py --data FOLDER/mnist/mnist.npz [--tasks digits mnist] [--seeds 3]
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cloister.privacy.accounting.filters import noise_multiplier_for
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate

DELTA = 1e-5
EPSILONS = {
    "global-dp": (0.5, 1.0, 2.0, 4.0, 8.0),
    "gaussian": (2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
    "laplace": (64.0, 256.0, 1024.0, 4096.0, 16384.0),
}
BOUNDS = {"digits": (0.1, 0.5), "mnist": (0.5,)}
"""Clips or radii, in units of the weights."""
ROUNDS = {"digits": (3, 10), "mnist": (10,)}
TASKS: Mapping[str, dict[str, Any]] = {
    "digits": {"task.name": "digits", "task.model": "softmax"},
    "mnist": {"task.name": "mnist", "task.model": "softmax", "client.local-epochs": 1, "client.batch-size": 50},
}
CLIENTS = {"digits": 40, "mnist": 100}
PARAMETERS = {"digits": 650, "mnist": 7850}
RESULTS = Path(__file__).parent / "results" / "local_noise"


def settings_of(task: str, mechanism: str, epsilon: float, bound: float, rounds: int) -> dict[str, Any]:
    """The run configuration in which all rounds together cost ε for zeroing one client's contributions."""
    chosen = TASKS[task] | {"num-rounds": rounds, "task.test-fraction": 0.0, "tensorboard": False}
    if mechanism == "laplace":
        nu = PARAMETERS[task] * rounds / epsilon
        own = {"privacy.laplace-noise-multiplier": nu, "privacy.radius": bound}
        return chosen | {"privacy.server": "none", "privacy.client": "laplace"} | own
    z = noise_multiplier_for(epsilon, DELTA, rounds)
    if mechanism == "gaussian":
        own = {"privacy.gaussian-noise-multiplier": z, "privacy.gaussian-clipping-norm": bound}
        return chosen | {"privacy.server": "none", "privacy.client": "gaussian"} | own
    return chosen | {
        "privacy.server": "global-dp",
        "privacy.noise-multiplier": z,
        "privacy.clipping-norm": bound,
    }


def accuracy(settings: dict[str, Any], clients: int) -> float:
    """Of the last model, on the server's test examples."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = settings | {"output-dir": scratch, "keep-checkpoints": 1}
        outcome = simulate(settings, clients, ConsoleReporter(1, Console(quiet=True)))
        return float(outcome.rounds[-1].central["accuracy"])


def points(task: str, data: str, seeds: int) -> Iterator[dict[str, Any]]:
    """The best bound and number of rounds for each mechanism and ε, with the accuracy of every seed."""
    for mechanism, epsilons in EPSILONS.items():
        for epsilon in epsilons:
            tried = []
            for bound, rounds in itertools.product(BOUNDS[task], ROUNDS[task]):
                settings = settings_of(task, mechanism, epsilon, bound, rounds)
                settings |= {"task.data-path": data} if task == "mnist" else {}
                found = [accuracy(settings | {"seed": seed}, CLIENTS[task]) for seed in range(seeds)]
                tried.append({"bound": bound, "rounds": rounds, "accuracy": found})
            best = max(tried, key=lambda each: float(np.mean(each["accuracy"])))
            yield {"task": task, "mechanism": mechanism, "epsilon": epsilon, **best}


def show(found: list[dict[str, Any]]) -> None:
    """A row a point."""
    table = Table("task", "mechanism", "ε", "bound", "rounds", "accuracy", title="local noise")
    for point in found:
        mean, spread = np.mean(point["accuracy"]), np.std(point["accuracy"])
        cells = (point["task"], point["mechanism"], f"{point['epsilon']:g}", f"{point['bound']:g}")
        table.add_row(*cells, str(point["rounds"]), f"{mean:.3f} ± {spread:.3f}")
    Console().print(table)


def draw(
    found: list[dict[str, Any]],
    place: Path,
    mechanisms: Iterable[str],
    titles: Mapping[str, str],
    spread: Callable[[Any], Any] = np.std,
) -> None:
    """Accuracy against ε, a panel a task.

    Args:
        found: the points.
        place: of the picture.
        mechanisms: a line each, in this order.
        titles: of the panels, by task.
        spread: of the accuracies of all seeds, which a bar shows.
    """
    import matplotlib.pyplot as plt

    tasks = [task for task in titles if any(point["task"] == task for point in found)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.5 * len(tasks), 4), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for mechanism in mechanisms:
            own = [point for point in found if (point["task"], point["mechanism"]) == (task, mechanism)]
            if own:
                means = [np.mean(point["accuracy"]) for point in own]
                spreads = [spread(point["accuracy"]) for point in own]
                axis.errorbar([point["epsilon"] for point in own], means, spreads, marker="o", label=mechanism)
        axis.axhline(0.1, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xscale("log")
        axis.set_xlabel("ε of all rounds for one client, zeroed or not")
        axis.set_ylabel("accuracy")
        axis.set_title(titles[task])
        axis.legend()
    figure.tight_layout()
    figure.savefig(place, dpi=100)


def main() -> None:
    """Run both tasks, MNIST where its file is given; keep, show and draw what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="path of mnist.npz, which the task mnist needs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for task in arguments.tasks:
        found = list(points(task, arguments.data, arguments.seeds))
        (RESULTS / f"{task}.json").write_text(json.dumps(found, indent=1) + "\n")
    everything = [point for path in sorted(RESULTS.glob("*.json")) for point in json.loads(path.read_text())]
    show(everything)
    titles = {task: f"{task}, {count} clients" for task, count in CLIENTS.items()}
    draw(everything, RESULTS / "figure.png", EPSILONS, titles)


if __name__ == "__main__":
    main()
