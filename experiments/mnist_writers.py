"""Digits by 539 real writers, about half of whom write turned by 90° (Galli et al., 2023, §5.3): accuracy of one and of
two hypotheses under Laplace noise of multiplier ν, on 297 other writers, each with the hypothesis that suits it best.

The paper's network has 1.2 million parameters (`--model cnn`); softmax regression has 7,850, which a laptop trains in
minutes. What has run with as many rounds is not run again. How long the rest takes is said first, by one round.

    python experiments/mnist_writers.py --data FOLDER [--model softmax] [--hypotheses 1 2] [--nu 0 1 3 5] [--rounds 30]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from cloister.local.simulation import simulate
from cloister.server.reports.console import Narrator

WRITERS = 539
SETTINGS = {
    "task.name": "mnist-writers",
    "task.rotated-fraction": 0.5,
    "task.test-fraction": 0.0,
    "privacy.server": "laplace-clustering",
    "privacy.client": "laplace",
    "privacy.choice": "exact",
    "evaluation.every": 5,
    "evaluation.patience": 10,
    "tensorboard": False,
    "keep-checkpoints": 1,
}
RESULTS = Path(__file__).parent / "results" / "mnist_writers"


def trained(settings: dict[str, Any]) -> dict[str, Any]:
    """One run, in figures."""
    with tempfile.TemporaryDirectory() as scratch:
        everything = SETTINGS | {"output-dir": scratch} | settings
        outcome = simulate(everything, WRITERS, Narrator(1, Console(quiet=True)))
        leakage = json.loads((outcome.directory.path / "leakage.json").read_text())
    best = min((done for done in outcome.rounds if done.central), key=lambda done: done.central["loss"])
    last = outcome.rounds[-1].measured
    return {
        "k": settings["privacy.clusters"],
        "nu": settings["privacy.client-noise-multiplier"],
        "seed": settings["seed"],
        "rounds": len(outcome.rounds) - 1,
        "best-round": best.number,
        "accuracy": best.central["accuracy"],
        "cluster-sizes": last.cluster_sizes if last else (),
        "leakage-median": leakage.get("median"),
        "leakage-maximum": leakage.get("maximum"),
    }


class Cell(NamedTuple):
    """One run."""

    model: str
    k: int
    nu: float
    seed: int
    rounds: int

    @property
    def path(self) -> Path:
        """Of the results of all noise multipliers."""
        return RESULTS / f"{self.model}-k{self.k}-seed{self.seed}.json"

    def others(self) -> list[dict[str, Any]]:
        """What the file holds of other noise multipliers, or of this one after another number of rounds."""
        found = json.loads(self.path.read_text()) if self.path.exists() else []
        return [run for run in found if (run["nu"], run["rounds"]) != (self.nu, self.rounds)]

    def is_there(self) -> bool:
        """Whether it has run."""
        return self.path.exists() and len(self.others()) < len(json.loads(self.path.read_text()))

    def settings(self, data: str, cohort: int) -> dict[str, Any]:
        """The keys of its configuration that differ from `SETTINGS`."""
        return {
            "task.data-path": data,
            "task.model": self.model,
            "strategy.fraction-train": (cohort + 0.5) / WRITERS,
            "privacy.clusters": self.k,
            "privacy.client-noise-multiplier": self.nu,
            "num-rounds": self.rounds,
            "seed": self.seed,
        }


def run(left: list[Cell], data: str, cohort: int) -> None:
    """Run cells, and say before each how long the rest takes."""
    start = time.perf_counter()
    if left:
        trained(left[0].settings(data, cohort) | {"num-rounds": 1})
    seconds = time.perf_counter() - start
    for number, cell in enumerate(left):
        hours = seconds * sum(each.rounds for each in left[number:]) / 3600
        print(f"{len(left) - number} cells to go, about {hours:.1f} hours: k = {cell.k}, ν = {cell.nu:g}", flush=True)
        start = time.perf_counter()
        found = [*cell.others(), trained(cell.settings(data, cohort))]
        seconds = (time.perf_counter() - start) / cell.rounds
        RESULTS.mkdir(parents=True, exist_ok=True)
        cell.path.write_text(json.dumps(sorted(found, key=lambda one: one["nu"]), indent=2) + "\n")


def show(found: list[dict[str, Any]], model: str) -> None:
    """Accuracy by ν and k."""
    numbers = sorted({run["k"] for run in found})
    table = Table("ν", *(f"k = {k}" for k in numbers), "largest leakage", title=f"mnist-writers, {model}")
    for nu in sorted({run["nu"] for run in found}):
        runs = [run for run in found if run["nu"] == nu]
        cells = [", ".join(f"{run['accuracy']:.4f}" for run in runs if run["k"] == k) or "-" for k in numbers]
        leakage = [run["leakage-maximum"] for run in runs if run["leakage-maximum"]]
        table.add_row(f"{nu:g}", *cells, f"{max(leakage):.4g}" if leakage else "-")
    Console().print(table)


def main() -> None:
    """Run what is missing of what was asked for; then show everything that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", choices=("softmax", "cnn"), default="softmax")
    parser.add_argument("--hypotheses", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--nu", type=float, nargs="+", default=[0.0, 1.0, 3.0, 5.0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cohort", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cells = [
        Cell(arguments.model, k, nu, arguments.seed, arguments.rounds)
        for nu in arguments.nu
        for k in arguments.hypotheses
    ]
    run([cell for cell in cells if not cell.is_there()], arguments.data, arguments.cohort)
    files = sorted(RESULTS.glob(f"{arguments.model}-*.json"))
    show([run for path in files for run in json.loads(path.read_text())], arguments.model)


if __name__ == "__main__":
    main()
