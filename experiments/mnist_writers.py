"""Characters by real writers, about half of whom write turned by 90° (Galli et al., 2023, §5.3): accuracy of one and of
two hypotheses under Laplace noise of multiplier ν, on other writers, each with the hypothesis that suits it best.

`mnist-writers` has digits of 539 and 297 writers; `femnist`, the paper's data, has characters of 62 classes.

The paper's network has 1.2 million parameters (`--model cnn`); softmax regression has 7,850, which a laptop trains in
minutes. The paper's second loss is the root of the mean squared error of the classes' probabilities (`--loss rmse`),
which needs `--model cnn`. What was run for as many rounds is not run again. Results of another loss or number of
writers a round lie in a folder of their own. The hours that are to come are said first. A table beside the results has
the paper's figures and ours.

    python experiments/mnist_writers.py --data FOLDER [--task femnist] [--model softmax] [--hypotheses 1 2]
        [--nu 0 1 3 5] [--rounds 30] [--cohort 40] [--loss rmse] [--results FOLDER]
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cells import NONE, apart, data_at, in_turn, parser, simulated, write_table

from cloister.client.data import benchmark_of
from cloister.config.run import parse
from cloister.tasks.base import Dataset, Examples, Model, Task
from cloister.tasks.datasets import characters
from cloister.tasks.targets import Target

COHORT = 40
"""Writers in a round; the paper does not name its number."""
TASKS = {"mnist-writers": characters.MnistWriters, "femnist": characters.Femnist}
ROTATED = {"task.rotated-fraction": 0.5}
SETTINGS = ROTATED | {
    "task.test-fraction": 0.0,
    "privacy.server": "laplace-clustering",
    "privacy.client": "laplace",
    "privacy.choice": "exact",
    "evaluation.every": 5,
    "evaluation.patience": 10,
    "tensorboard": False,
    "keep-checkpoints": 1,
}
PUBLISHED: Mapping[str, Mapping[float, tuple[float, float]]] = {
    "cross-entropy": {
        0.0: (0.832, 0.012),
        0.001: (0.843, 0.006),
        0.01: (0.832, 0.017),
        0.1: (0.834, 0.026),
        1.0: (0.834, 0.014),
        3.0: (0.835, 0.017),
        5.0: (0.812, 0.016),
        10.0: (0.692, 0.002),
        15.0: (0.561, 0.005),
    },
    "rmse": {
        0.0: (0.801, 0.001),
        0.001: (0.813, 0.014),
        0.01: (0.805, 0.008),
        0.1: (0.808, 0.019),
        1.0: (0.814, 0.012),
        3.0: (0.825, 0.010),
        5.0: (0.787, 0.003),
        10.0: (0.687, 0.014),
        15.0: (0.622, 0.003),
    },
}
"""The paper's table 2, by loss: accuracy and its standard deviation over three runs, on FEMNIST. It does not say for
how many hypotheses."""
RMSE_RATE = 0.3
"""Learning rate with `--loss rmse`, whose gradients are small. The paper names none. In 330 steps on MNIST the rates
0.03, 0.3, 1 and 3 reached accuracies of 45, 82, 85 and 10 % on 1,500 test images, which are scored here too."""
HEAD = ("ν", "k = 1", "k = 2", "paper", "k = 2 apart, std", "largest leakage", "seeds")
SECONDS = {"softmax": 2.0, "cnn": 15.0}
"""Seconds of a round in the first estimate: 30 rounds of the CNN took 4 to 15 minutes; the other is a guess."""


def with_rows(kind: type[Task]) -> type[Task]:
    """Return the task with a row of 0 and 1 for each label, and the root of the mean squared error as loss."""

    def rows_of(examples: Examples) -> Examples:
        return replace(examples, y=np.eye(kind.classes, dtype=np.float32)[examples.y])

    class Rows(kind):
        """The task, for networks of Keras."""

        classes = 0
        target = Target("rmse", shape=(kind.classes,))
        recipe = replace(kind.recipe, learning_rate=RMSE_RATE)

        def load(self) -> Dataset:
            """Return the same data, with rows as targets."""
            data = kind(self.config).load()
            return replace(data, train=rows_of(data.train), test=rows_of(data.test))

        def build(self) -> Model:
            """Return the same network."""
            return kind(self.config).build()

        def metrics(self, y: np.ndarray, scores: np.ndarray) -> dict[str, float]:
            """Return the loss and the accuracy."""
            return super().metrics(y, scores) | {"accuracy": float(np.mean(y.argmax(1) == scores.argmax(1)))}

    return Rows


def writers_of(task: str, data: str) -> int:
    """How many writers train."""
    owners = benchmark_of(parse({"task.name": task, "task.data-path": data, **ROTATED}).task).owners
    assert owners is not None
    return int(owners.max()) + 1


def trained(settings: dict[str, Any], writers: int) -> dict[str, Any]:
    """One run, in figures."""
    with tempfile.TemporaryDirectory() as scratch:
        everything = SETTINGS | {"output-dir": scratch} | settings
        outcome = simulated(everything, writers)
        leakage = json.loads((outcome.directory.path / "leakage.json").read_text())
    best = min((done for done in outcome.rounds if done.central), key=lambda done: done.central["loss"])
    last = outcome.rounds[-1].measured
    return {
        "k": settings["privacy.clusters"],
        "nu": settings["privacy.laplace-noise-multiplier"],
        "seed": settings["seed"],
        "rounds": len(outcome.rounds) - 1,
        "best-round": best.number,
        "accuracy": best.central["accuracy"],
        "cluster-sizes": last.cluster_sizes if last else (),
        "leakage-median": leakage.get("median"),
        "leakage-maximum": leakage.get("maximum"),
    }


class Cell(NamedTuple):
    """One run, and the folder of its results."""

    place: Path
    task: str
    model: str
    k: int
    nu: float
    seed: int
    rounds: int

    @property
    def path(self) -> Path:
        """Of the results of all noise multipliers."""
        return self.place / f"{self.model}-k{self.k}-seed{self.seed}.json"

    def __str__(self) -> str:
        """What it is, for a person."""
        return f"k = {self.k}, ν = {self.nu:g}"

    def kept(self) -> list[dict[str, Any]]:
        """What the file holds already."""
        return json.loads(self.path.read_text()) if self.path.exists() else []

    def is_there(self) -> bool:
        """Whether it has run."""
        return any((run["nu"], run["asked-rounds"]) == (self.nu, self.rounds) for run in self.kept())

    def settings(self, data: str, share: float) -> dict[str, Any]:
        """The keys of its configuration that differ from `SETTINGS`."""
        return {
            "task.name": self.task,
            "task.data-path": data,
            "task.model": self.model,
            "strategy.fraction-train": share,
            "privacy.clusters": self.k,
            "privacy.laplace-noise-multiplier": self.nu,
            "num-rounds": self.rounds,
            "seed": self.seed,
        }


def run_all(cells: list[Cell], data: str, cohort: int) -> None:
    """Run what has not been run yet, a file of results a model, k and seed."""
    left = [cell for cell in cells if not cell.is_there()]
    if not left:
        return
    where = data_at(data, cells[0].task)
    writers = writers_of(cells[0].task, where)
    share = min(1.0, (cohort + 0.5) / writers)
    for cell in in_turn(left, SECONDS[cells[0].model], lambda cell: cell.rounds):
        found = trained(cell.settings(where, share), writers) | {"asked-rounds": cell.rounds}
        cell.place.mkdir(parents=True, exist_ok=True)
        kept = sorted([*cell.kept(), found], key=lambda one: one["nu"])
        cell.path.write_text(json.dumps(kept, indent=2) + "\n")


def rows(found: list[dict[str, Any]], published: Mapping[float, tuple[float, float]]) -> Iterator[tuple[str, ...]]:
    """Of the table: means over the seeds that are there, and the paper's figures beside two hypotheses."""
    for nu in sorted({run["nu"] for run in found}):
        runs = [[run for run in found if (run["nu"], run["k"]) == (nu, k)] for k in (1, 2)]
        ours = [statistics.mean(run["accuracy"] for run in each) if each else None for each in runs]
        paper, deviation = published.get(nu, (None, 1.0))
        leakage = [run["leakage-maximum"] for each in runs for run in each if run["leakage-maximum"]]
        yield (
            f"{nu:g}",
            *map(_percent, ours),
            _percent(paper),
            apart(ours[1], paper, deviation),
            f"{max(leakage):.4g}" if leakage else NONE,
            ", ".join(str(len(each)) for each in runs),
        )


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


def main() -> None:
    """Run what is missing of what was asked for; then show everything that is there of so many rounds."""
    options = parser(__doc__, list(TASKS))
    options.add_argument("--task", choices=tuple(TASKS), default="mnist-writers")
    options.add_argument("--model", choices=("softmax", "cnn"), default="softmax")
    options.add_argument("--hypotheses", type=int, nargs="+", default=[1, 2])
    options.add_argument("--nu", type=float, nargs="+", default=[0.0, 1.0, 3.0, 5.0])
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--cohort", type=int, default=COHORT, help="writers in a round")
    options.add_argument("--loss", choices=tuple(PUBLISHED), default="cross-entropy")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    place = arguments.results / arguments.task.replace("-", "_")
    if arguments.loss == "rmse":
        if arguments.model != "cnn":
            options.error("--loss rmse needs --model cnn")
        place /= "rmse"
        kind = TASKS[arguments.task]
        setattr(characters, kind.__name__, with_rows(kind))  # of this process, where all clients are simulated
    place = place if arguments.cohort == COHORT else place / f"cohort-{arguments.cohort}"
    cells = [
        Cell(place, arguments.task, arguments.model, k, nu, arguments.seed, arguments.rounds)
        for nu in arguments.nu
        for k in arguments.hypotheses
    ]
    run_all(cells, arguments.data, arguments.cohort)
    files = sorted(place.glob(f"{arguments.model}-*.json"))
    found = [run for path in files for run in json.loads(path.read_text())]
    asked = [run for run in found if run["asked-rounds"] == arguments.rounds]
    about = (
        f"{arguments.task}, {arguments.model}, loss {arguments.loss}, {arguments.cohort} writers a round, "
        f"{arguments.rounds} rounds at most. "
        "Accuracy on other writers. "
        "The paper's figures are of FEMNIST after up to 500 rounds."
    )
    write_table(place / f"table-{arguments.model}.md", about, HEAD, rows(asked, PUBLISHED[arguments.loss]))


if __name__ == "__main__":
    main()
