"""Two populations on a line each (Galli et al., 2023, §5.1): how near FedAvg, IFCA (ν = 0) and noised hypotheses
(ν = 5) come to both optima, what the noised ones leak, and where the hypotheses of every round lay (its Figure 1).

100 users of 10 examples, 7 a round, one step of rate 0.1; a run stops after 6 rounds without a smaller loss on 100
other users and keeps its best hypotheses. Two more rows have more users a round, or smaller steps and more patience.

    python experiments/linear.py [--seeds 20] [--methods FedAvg IFCA ...] [--results FOLDER]
        [--loss rmse] [--patience 50]

The paper's loss is the root of the mean squared error (`--loss rmse`), which needs the model in Keras. Results of
another loss or patience are files of their own.

What was run with as many seeds is not run again. The hours that are to come are said first.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cells import completed, in_turn, parser
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

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
SECONDS = {"mse": 2.0, "rmse": 10.0}
"""Seconds of a run in the first estimate: 1.2 and 2.6 on two cores; in Keras a guess."""


def trained(settings: dict[str, Any]) -> tuple[dict[str, Any], NDArray]:
    """One run in figures, and the path of its hypotheses, of shape (rounds + 1, k, 2)."""
    with tempfile.TemporaryDirectory() as scratch:
        everything = SETTINGS | {"output-dir": scratch} | settings | {"keep-checkpoints": 0}
        outcome = completed(everything, USERS)
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
    return figures, np.stack(path)


def _flat(arrays: Mapping[str, NDArray]) -> NDArray:
    """Hypotheses of shape (k, 2); a model in Keras has columns."""
    return np.stack([each.ravel() for each in arrays.values()])


def draw(paths: Mapping[str, NDArray], place: Path) -> None:
    """The hypotheses of every round, from a hollow mark to a full one, and the optima as crosses."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(paths), figsize=(4 * len(paths), 4), squeeze=False)
    for axis, (name, path) in zip(axes[0], paths.items(), strict=True):
        for hypothesis in path.swapaxes(0, 1):
            (line,) = axis.plot(*hypothesis.T, linewidth=0.8, marker=".", markersize=3)
            axis.plot(*hypothesis[0], marker="o", markerfacecolor="none", color=line.get_color())
            axis.plot(*hypothesis[-1], marker="o", color=line.get_color())
        axis.plot(*OPTIMA.T, "kx", markersize=9)
        axis.set_title(name)
    figure.tight_layout()
    figure.savefig(place, dpi=100)


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
    """Run the methods with every seed, a file of results a method; then show and draw all that is there."""
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
    left = [name for name in arguments.methods if runs_of(files[name]) < arguments.seeds]
    for name in in_turn(left, SECONDS[loss] * arguments.seeds):
        own = settings_of(name, loss, patience)
        results = [trained(own | {"seed": STEP * seed}) for seed in range(arguments.seeds)]
        content = {"loss": loss, "settings": SETTINGS | own, "runs": [figures for figures, _ in results]}
        content["path-of-the-first"] = np.round(results[0][1], 4).tolist()
        place.mkdir(parents=True, exist_ok=True)
        files[name].write_text(json.dumps(content) + "\n")
    found = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    show({name: content["runs"] for name, content in found.items()})
    draw(
        {name: np.array(content["path-of-the-first"]) for name, content in found.items()},
        place / f"figure{variant}.png",
    )


def _slug(name: str) -> str:
    return name.lower().replace(", ", "-").replace(" ", "-")


if __name__ == "__main__":
    main()
