"""What it costs not to trust the server: accuracy against ε for a whole client, with noise on the server
(`global-dp`) and with noise on the clients (`gaussian`, `laplace`), for softmax regression on digits (40 clients) and
on MNIST (100 clients, 7,850 parameters).

One relation for all: a client's contribution is zeroed or not. ε is that of all rounds together at δ = 1e-5; `laplace`
is pure, and its ε holds at δ = 0. Every client takes part in every round. For each point the best of a few clips (or
radii) and numbers of rounds is shown, chosen by the mean accuracy over the seeds: the same choice for all mechanisms.

    python experiments/local_noise.py [--tasks digits mnist] [--data FOLDER] [--seeds 3] [--results FOLDER]

A point that is there for as many seeds is not run again.
"""

import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cells import data_at, in_turn, parser, simulated
from rich.console import Console
from rich.table import Table

from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.filters import GaussianFilter, cost, minimum_multiplier

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
SECONDS = {"digits": 0.1, "mnist": 1.0}
"""Seconds of a round in the first estimate, on two cores."""


def settings_of(task: str, mechanism: str, epsilon: float, bound: float, rounds: int) -> dict[str, Any]:
    """The run configuration in which all rounds together cost ε for zeroing one client's contributions."""
    chosen = TASKS[task] | {"num-rounds": rounds, "task.test-fraction": 0.0, "tensorboard": False}
    if mechanism == "laplace":
        nu = PARAMETERS[task] * rounds / epsilon
        own = {"privacy.laplace-noise-multiplier": nu, "privacy.radius": bound}
        return chosen | {"privacy.server": "none", "privacy.client": "laplace"} | own
    budget, limit = GaussianFilter(), GaussianFilter().limit(epsilon, DELTA)
    z = minimum_multiplier(lambda z: rounds * cost(budget, Gaussian(z)), limit, f"ε = {epsilon:g}")
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
        outcome = simulated(settings, clients)
        return float(outcome.rounds[-1].central["accuracy"])


class Cell(NamedTuple):
    """A point of the figure."""

    task: str
    mechanism: str
    epsilon: float

    @property
    def rounds(self) -> int:
        """Return the number of rounds in all its runs with one seed."""
        return len(BOUNDS[self.task]) * sum(ROUNDS[self.task])

    def best(self, data: str, seeds: int) -> dict[str, Any]:
        """The best bound and number of rounds, with the accuracy of every seed."""
        tried = []
        for bound, rounds in itertools.product(BOUNDS[self.task], ROUNDS[self.task]):
            settings = settings_of(self.task, self.mechanism, self.epsilon, bound, rounds)
            settings |= {"task.data-path": data_at(data, "mnist")} if self.task == "mnist" else {}
            found = [accuracy(settings | {"seed": seed}, CLIENTS[self.task]) for seed in range(seeds)]
            tried.append({"bound": bound, "rounds": rounds, "accuracy": found})
        return {**self._asdict(), **max(tried, key=lambda each: float(np.mean(each["accuracy"])))}


def kept(place: Path) -> list[dict[str, Any]]:
    """The points in a file of results."""
    found: list[dict[str, Any]] = json.loads(place.read_text()) if place.exists() else []
    return found


def run_missing(
    place: Path, cells: Sequence[Any], seeds: int, seconds: float, run: Callable[[Any], dict[str, Any]]
) -> None:
    """Run the points that a file lacks, or has with fewer seeds, and write each down as soon as it is there.

    Args:
        place: of the file.
        cells: the points, as named tuples; their fields are in the file.
        seeds: of each point.
        seconds: that a round takes, in the first estimate.
        run: makes a point.
    """

    def is_one(point: Mapping[str, Any], cell: Any) -> bool:
        return all(point[name] == value for name, value in cell._asdict().items())

    there = [point for point in kept(place) if len(point["accuracy"]) >= seeds]
    left = [cell for cell in cells if not any(is_one(point, cell) for point in there)]
    for cell in in_turn(left, seconds, lambda cell: seeds * cell.rounds):
        others = [point for point in kept(place) if not is_one(point, cell)]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps([*others, run(cell)], indent=1) + "\n")


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
    """Run what is missing of both tasks; keep, show and draw what is there."""
    options = parser(__doc__, ["mnist"])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    arguments = options.parse_args()
    place, seeds = arguments.results / "local_noise", arguments.seeds
    best = partial(Cell.best, data=arguments.data, seeds=seeds)
    for task in arguments.tasks:
        cells = [Cell(task, mechanism, epsilon) for mechanism, each in EPSILONS.items() for epsilon in each]
        run_missing(place / f"{task}.json", cells, seeds, SECONDS[task], best)
    everything = [point for path in sorted(place.glob("*.json")) for point in kept(path)]
    show(everything)
    titles = {task: f"{task}, {count} clients" for task, count in CLIENTS.items()}
    draw(everything, place / "figure.png", EPSILONS, titles)


if __name__ == "__main__":
    main()
