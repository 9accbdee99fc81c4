"""Two populations on a line each (Galli et al., 2023, §5.1): how near FedAvg, IFCA (ν = 0) and noised hypotheses
(ν = 5) come to both optima, where the hypotheses of every round lay, with the loss (its Figure 1), and what the noised
ones leak (its Figure 2). Both are drawn of the first seed.

100 users of 10 examples, 7 a round, one step of rate 0.1; a run stops after 6 rounds without a smaller loss on 100
other users and keeps its best hypotheses. Two more rows have more users a round, or smaller steps and more patience.

    python experiments/linear.py [--seeds 20] [--methods FedAvg IFCA ...] [--results FOLDER]
        [--loss rmse] [--patience 50]

The paper's loss is the root of the mean squared error (`--loss rmse`), which needs the model in Keras. Results of
another loss or patience are files of their own.

A seed of a method that is there is not run again. The hours that are to come are said first.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from cells import in_turn, parser, simulated
from flwr.serverapp import Grid
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cloister.server.reports.console import ConsoleReporter
from cloister.server.round import Round
from cloister.simulation.grid import LocalGrid
from cloister.tasks.datasets.regressions import OPTIMA, USERS, Linear
from cloister.tasks.targets import Target
from cloister.utils.arrays import from_record

PERSONAL = {"privacy.server": "laplace-clustering", "privacy.clusters": 2}
PUBLISHED = {"privacy.client": "laplace", "privacy.choice": "exact"}
NOISED = PERSONAL | PUBLISHED | {"privacy.laplace-noise-multiplier": 5.0}
METHODS: Mapping[str, dict[str, Any]] = {
    "FedAvg": {"privacy.server": "none"},
    "IFCA": PERSONAL,
    "noised": NOISED,
    "noised, 20 users": NOISED | {"strategy.fraction-train": 0.2, "evaluation.patience": 20},
    "noised, rate 0.02": NOISED | {"client.learning-rate": 0.02, "evaluation.patience": 50},
}
SETTINGS = {
    "task.name": "linear",
    "task.test-fraction": 0.0,
    "strategy.fraction-train": 0.07,
    "evaluation.patience": 6,
    "num-rounds": 200,
    "tensorboard": False,
}
FOUND = 1.0
"""Distance below which an optimum counts as found; the optima are 10.5 apart."""
STEP = 100
"""From one seed to the next: hypothesis j of a run begins from its seed plus j."""
SECONDS = {"mse": 2.0, "rmse": 20.0}
"""Seconds of a run in the first estimate: 1.2 and 2.6 on two cores; in Keras some 24 with patience 50, on one."""


class Watcher(ConsoleReporter):
    """Writes down, after each round, the largest leakage among the users of each population.

    Attributes:
        largest: pairs, from round 0 on.
    """

    def __init__(self) -> None:
        """Begin without a round."""
        super().__init__(1, Console(quiet=True))
        self.grid: LocalGrid | None = None
        self.largest: list[list[float]] = []

    def live(self, grid: Grid, *told: Any) -> AbstractContextManager[None]:
        """Take note of the clients."""
        assert isinstance(grid, LocalGrid)
        self.grid = grid
        return super().live(grid, *told)

    def __call__(self, done: Round, arrays: object) -> None:
        """Ask the clients; user i is of population i modulo 2."""
        super().__call__(done, arrays)
        leakages = self.grid.leakages() if self.grid is not None else [0.0] * USERS
        self.largest.append([max(leakages[first :: len(OPTIMA)]) for first in range(len(OPTIMA))])


def trained(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One run in figures, and its course by rounds: hypotheses of shape (rounds + 1, k, 2), losses and leakages."""
    watcher = Watcher()
    with tempfile.TemporaryDirectory() as scratch:
        everything = SETTINGS | {"output-dir": scratch} | settings | {"keep-checkpoints": 0}
        outcome = simulated(everything, USERS, watcher)
        path = [_flat(np.load(file)) for file in sorted(outcome.directory.checkpoints.iterdir())]
        told = outcome.directory.path / "leakage.json"
        leakage = json.loads(told.read_text()) if told.exists() else {}
    hypotheses = _flat(from_record(outcome.arrays))
    distances = np.linalg.norm(OPTIMA[:, None] - hypotheses[None], axis=2).min(axis=1)
    figures = {
        "seed": settings["seed"],
        "rounds": len(outcome.rounds) - 1,
        "hypotheses": hypotheses.tolist(),
        "distances": distances.tolist(),
        "found-both": bool((distances < FOUND).all()),
        "leakage-median": leakage.get("median"),
        "leakage-maximum": leakage.get("maximum"),
    }
    course = {
        "path-of-the-first": np.round(path, 4).tolist(),
        "rmse-of-the-first": [round(done.central["rmse"], 4) for done in outcome.rounds],
    }
    if leakage:
        course["largest-leakage-of-the-first"] = np.round(watcher.largest, 4).tolist()
    return figures, course


def _flat(arrays: Mapping[str, NDArray]) -> NDArray:
    """Hypotheses of shape (k, 2); a model in Keras has columns."""
    return np.stack([each.ravel() for each in arrays.values()])


def draw(found: Mapping[str, Mapping[str, Any]], place: Path) -> None:
    """Draw the hypotheses of every round, from a hollow mark to a full one, optima as crosses; below, the loss."""
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(2, len(found), figsize=(3.2 * len(found), 5.6), squeeze=False, layout="constrained")
    for (above, below), (name, content) in zip(rows.T, found.items(), strict=True):
        for hypothesis in np.array(content["path-of-the-first"]).swapaxes(0, 1):
            (line,) = above.plot(*hypothesis.T, linewidth=0.8, marker=".", markersize=3)
            above.plot(*hypothesis[0], marker="o", markerfacecolor="none", color=line.get_color())
            above.plot(*hypothesis[-1], marker="o", color=line.get_color())
        above.plot(*OPTIMA.T, "kx", markersize=9)
        above.set(title=name, xlabel="first parameter")
        below.plot(content.get("rmse-of-the-first", []))
        below.set(xlabel="round", ylim=(0, None))
    rows[0, 0].set_ylabel("second parameter")
    rows[1, 0].set_ylabel("RMSE on other users")
    figure.savefig(place, dpi=80)
    plt.close(figure)


def draw_leakages(found: Mapping[str, Mapping[str, Any]], place: Path) -> None:
    """Draw the largest leakage of a user of each population by round."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for name, content in found.items():
        for optimum, leakages in zip(OPTIMA, np.transpose(content["largest-leakage-of-the-first"]), strict=True):
            axis.step(range(len(leakages)), leakages, where="post", label=f"{name}: users of {tuple(optimum.tolist())}")
    axis.set(xlabel="round", ylabel="largest leakage, p/ν = 0.4 a release", ylim=(0, None))
    axis.legend()
    figure.savefig(place, dpi=80)
    plt.close(figure)


def show(found: Mapping[str, list[dict[str, Any]]]) -> None:
    """Distances to the optima, how often both were found, and the largest leakage."""
    head = ("", "found both", "mean distance to (5, 6)", "to (4, -4.5)", "largest", "rounds", "largest leakage")
    table = Table(*head, title="linear")
    for name, runs in found.items():
        far = np.array([run["distances"] for run in runs])
        leakage = [run["leakage-maximum"] for run in runs if run["leakage-maximum"]]
        table.add_row(
            name,
            f"{sum(run['found-both'] for run in runs)} of {len(runs)}",
            *(f"{mean:.2f}" for mean in far.mean(axis=0)),
            f"{far.max():.2f}",
            f"{statistics.median(run['rounds'] for run in runs):g}",
            f"{max(leakage):.3g}" if leakage else "-",
        )
    Console().print(table)


def runs_of(place: Path) -> int:
    """How many seeds of a method have been run."""
    return len(json.loads(place.read_text())["runs"]) if place.exists() else 0


def settings_of(name: str, loss: str, patience: int | None) -> dict[str, Any]:
    """The keys of a method's configuration that differ from `SETTINGS`."""
    stops = {} if patience is None else {"evaluation.patience": patience}
    return METHODS[name] | stops | ({"task.model": "keras"} if loss == "rmse" else {})


def main() -> None:
    """Run what is missing of the seeds, a file of results a method; then show and draw all that is there."""
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    options.add_argument("--loss", choices=tuple(SECONDS), default="mse")
    options.add_argument("--patience", type=int, help="rounds without a smaller loss; by default that of the method")
    arguments = options.parse_args()
    place, loss, patience = arguments.results / "linear", arguments.loss, arguments.patience
    Linear.target = Target(loss)  # of this process, where all clients are simulated
    variant = ("-rmse" if loss == "rmse" else "") + ("" if patience is None else f"-patience-{patience}")
    files = {name: place / f"{_slug(name)}{variant}.json" for name in METHODS}
    cells = [(name, seed) for name in arguments.methods for seed in range(runs_of(files[name]), arguments.seeds)]
    for name, seed in in_turn(cells, SECONDS[loss]):
        own, file = settings_of(name, loss, patience), files[name]
        figures, course = trained(own | {"seed": STEP * seed})
        begun = {"loss": loss, "settings": SETTINGS | own, "runs": []} | course
        content = json.loads(file.read_text()) if file.exists() else begun
        content["runs"].append(figures)
        place.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content) + "\n")
    found = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    show({name: content["runs"] for name, content in found.items()})
    draw(found, place / f"figure{variant}.png")
    if leaking := {name: each for name, each in found.items() if "largest-leakage-of-the-first" in each}:
        draw_leakages(leaking, place / f"leakage{variant}.png")


def _slug(name: str) -> str:
    return name.lower().replace(", ", "-").replace(" ", "-")


if __name__ == "__main__":
    main()
