"""Hospital charges (Galli et al., 2023, §5.2): RMSE for k hypotheses under Laplace noise of multiplier ν, and what the
releases leak in all.

Seven tenths of the hospitals are clients, 100 of them a round; the others are what a run is judged on: it stops after
30 rounds without a smaller loss on them, and keeps its best model. `rmse` lets each of those hospitals choose the
hypothesis of least loss on the rows that are scored, as the paper does; that choice alone makes the error smaller as k
grows. `rmse-of-other-rows` does not: the hypothesis for a row is chosen on the hospital's other rows.

    python experiments/hospital_charges.py --data FOLDER [--seeds 0 100 200] [--rounds 60] [--output-dir runs]
        [--split-round 50] [--hypotheses 1 3 5 7] [--multipliers 0 5 1 3 0.1 2]

What was run is not run again. How long the rest takes is said first, by one round.

Hypotheses begin at random, or as one model, which is told apart in a round (`privacy.clusters-split-round`): results of
each such round lie in a folder of its own.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cloister.client.data import task_of
from cloister.core.arrays import from_record
from cloister.core.hypotheses import unstacked
from cloister.local.simulation import simulate
from cloister.server.reports.console import Narrator
from cloister.server.run import Outcome

HYPOTHESES = (1, 3, 5, 7)
MULTIPLIERS = (0.0, 0.1, 1.0, 2.0, 3.0, 5.0)
ORDER = (0.0, 5.0, 1.0, 3.0, 0.1, 2.0)
"""In which they are run: the ends first, so that an unfinished run says something."""
CLIENTS = 2206
COHORT = 100
SETTINGS = {
    "task.name": "hospital-charges",
    "task.test-fraction": 0.0,
    "strategy.fraction-train": (COHORT + 0.5) / CLIENTS,
    "privacy.server": "laplace-clustering",
    "privacy.client": "laplace",
    "privacy.choice": "exact",
    "evaluation.patience": 30,
    "tensorboard": False,
    "keep-checkpoints": 1,
}
RESULTS = Path(__file__).parent / "results" / "hospital_charges"


def trained(hypotheses: int, multiplier: float, seed: int, given: dict[str, Any]) -> dict[str, Any]:
    """One run, in figures."""
    settings = SETTINGS | given | {"privacy.clusters": hypotheses, "privacy.client-noise-multiplier": multiplier}
    outcome = simulate(settings | {"seed": seed}, CLIENTS, Narrator(1, Console(quiet=True)))
    leakage = json.loads((outcome.directory.path / "leakage.json").read_text())
    return {
        "k": hypotheses,
        "nu": multiplier,
        "seed": seed,
        "rounds": len(outcome.rounds) - 1,
        "rmse": min(done.central["rmse"] for done in outcome.rounds[1:]),
        "rmse-of-other-rows": rmse_of_other_rows(outcome),
        "leakage-median": leakage.get("median"),
        "leakage-maximum": leakage.get("maximum"),
    }


def rmse_of_other_rows(outcome: Outcome) -> float:
    """Each held-out row is predicted by the hypothesis that suits its hospital's other rows best, or by the first."""
    task = task_of(outcome.plan.config.task)
    data, model = task.load(), task.build()
    losses = []
    for arrays in unstacked(from_record(outcome.arrays)):
        model.assign(arrays)
        losses.append(task.losses(data.test.y, model.predict(data.test.x)))
    assert data.test_groups is not None
    return float(np.sqrt(_chosen_on_others(np.array(losses), data.test_groups).mean()))


def _chosen_on_others(losses: NDArray, owners: NDArray) -> NDArray:
    sums = np.array([np.bincount(owners, each) for each in losses])
    chosen = np.argmin(sums[:, owners] - losses, axis=0)
    return losses[chosen, np.arange(losses.shape[1])]


def show(found: list[dict[str, Any]]) -> None:
    """Tables of means over seeds: RMSE both ways, and the largest leakage (median over clients in brackets)."""
    for figure in ("rmse", "rmse-of-other-rows", "leakage-maximum"):
        table = Table("ν", *(f"k = {k}" for k in HYPOTHESES), title=figure)
        for nu in MULTIPLIERS:
            table.add_row(
                f"{nu:g}",
                *(_cell([run for run in found if (run["k"], run["nu"]) == (k, nu)], figure) for k in HYPOTHESES),
            )
        Console().print(table)


def _cell(runs: list[dict[str, Any]], figure: str) -> str:
    values = [run[figure] for run in runs if run[figure] is not None]
    if not values:
        return "-"
    if figure == "leakage-maximum":
        return f"{max(values):.5g} ({statistics.median(run['leakage-median'] for run in runs):.4g})"
    return f"{statistics.mean(values):.4f} ± {statistics.pstdev(values):.4f}"


class Cell(NamedTuple):
    """A run of the tables, and the file that it is kept in."""

    path: Path
    seed: int
    nu: float
    k: int

    def others(self) -> list[dict[str, Any]]:
        """What the file holds already."""
        return json.loads(self.path.read_text()) if self.path.exists() else []

    def is_there(self) -> bool:
        """Whether it has been run."""
        return any((run["k"], run["nu"]) == (self.k, self.nu) for run in self.others())


def run_all(arguments: argparse.Namespace, place: Path) -> None:
    """Run what has not been run yet, a file of results a seed, and say before each how long the rest takes.

    Args:
        arguments: of the command line.
        place: folder of the results.
    """
    asked = itertools.product(arguments.seeds, arguments.multipliers, arguments.hypotheses)
    cells = [Cell(place / f"seed-{seed}.json", seed, nu, k) for seed, nu, k in asked]
    left = [cell for cell in cells if not cell.is_there()]
    seconds = arguments.rounds * timed(left[0], arguments, 1)[1] if left else 0.0
    for number, cell in enumerate(left):
        hours, name = seconds * (len(left) - number) / 3600, f"seed {cell.seed}, k = {cell.k}, ν = {cell.nu:g}"
        print(f"{len(left) - number} cells to go, about {hours:.1f} hours: {name}", flush=True)
        found, seconds = timed(cell, arguments, arguments.rounds)
        cell.path.write_text(json.dumps([*cell.others(), found], indent=2) + "\n")


def timed(cell: Cell, arguments: argparse.Namespace, rounds: int) -> tuple[dict[str, Any], float]:
    """A run of so many rounds at most, in figures, and its seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        given = {"task.data-path": arguments.data, "num-rounds": rounds}
        given["output-dir"] = arguments.output_dir or scratch
        found = trained(cell.k, cell.nu, cell.seed, given | {"privacy.clusters-split-round": arguments.split_round})
    return found, time.perf_counter() - start


def main() -> None:
    """Run what is asked for, then show everything that is there of that round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 100, 200])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output-dir", default="")
    parser.add_argument("--split-round", type=int, default=0)
    parser.add_argument("--hypotheses", type=int, nargs="+", default=HYPOTHESES)
    parser.add_argument("--multipliers", type=float, nargs="+", default=ORDER)
    arguments = parser.parse_args()
    place = RESULTS / f"split-{arguments.split_round}" if arguments.split_round else RESULTS
    place.mkdir(parents=True, exist_ok=True)
    run_all(arguments, place)
    show([run for path in sorted(place.glob("seed-*.json")) for run in json.loads(path.read_text())])


if __name__ == "__main__":
    main()
