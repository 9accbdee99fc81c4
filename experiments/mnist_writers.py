"""Digits by 539 real writers, about half of whom write turned by 90° (Galli et al., 2023, §5.3): accuracy of one and of
two hypotheses under Laplace noise of multiplier ν, on 297 other writers, each with the hypothesis that suits it best.

The paper's network has 1.2 million parameters; the sweep here is of softmax regression (7,850), which a laptop trains
in minutes. `--model cnn` runs the network.

    python experiments/mnist_writers.py --data FOLDER [--model softmax] [--hypotheses 1 2] [--nu 0 1 3 5] [--rounds 30]
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

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
    """Run what was asked for, a file of results a number of hypotheses; then show everything that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", choices=("softmax", "cnn"), default="softmax")
    parser.add_argument("--hypotheses", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--nu", type=float, nargs="+", default=[0.0, 1.0, 3.0, 5.0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cohort", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for k in arguments.hypotheses:
        path = RESULTS / f"{arguments.model}-k{k}-seed{arguments.seed}.json"
        found: list[dict[str, Any]] = []
        for nu in arguments.nu:
            settings = {
                "task.data-path": arguments.data,
                "task.model": arguments.model,
                "strategy.fraction-train": (arguments.cohort + 0.5) / WRITERS,
                "privacy.clusters": k,
                "privacy.client-noise-multiplier": nu,
                "num-rounds": arguments.rounds,
                "seed": arguments.seed,
            }
            found.append(trained(settings))
            path.write_text(json.dumps(found, indent=2) + "\n")
    files = sorted(RESULTS.glob(f"{arguments.model}-*.json"))
    show([run for path in files for run in json.loads(path.read_text())], arguments.model)


if __name__ == "__main__":
    main()
