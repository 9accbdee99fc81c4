"""Hospital charges (Galli et al., 2023, §5.2): RMSE for k hypotheses under Laplace noise of multiplier ν, and what the
releases leak in all.

Seven tenths of the hospitals are clients, 100 of them a round; the others are what a run is judged on: it stops after
30 rounds without a smaller loss on them, and keeps its best model. `rmse` lets each of those hospitals choose the
hypothesis of least loss on the rows that are scored, as the paper does; that choice alone makes the error smaller as k
grows. `rmse-of-other-rows` does not: the hypothesis for a row is chosen on the hospital's other rows.

    python experiments/hospital_charges.py --data FOLDER [--seeds 0 100 200] [--rounds 60] [--output-dir runs]
        [--results FOLDER] [--split-round 50] [--hypotheses 1 3 5 7] [--multipliers 0 5 1 3 0.1 2]
        [--loss rmse] [--patience 30]

The paper's loss is the root of the mean squared error (`--loss rmse`), which needs the model in Keras. Results of
another loss or patience lie in a folder of their own.

What was run for as many rounds is not run again. The hours that are to come are said first. Beside the results, for
runs of at most N rounds, `table-N.md` has the paper's figures and ours, `figure-N.png` the errors (its figure 3), and
`leakage-N.png` a histogram of the clients' leakage for ν = 3 and k = 5 (its figure 4), of the first such run with one.

Hypotheses begin at random, or as one model, which is told apart in a round (`privacy.clusters-split-round`): results of
each such round lie in a folder of its own.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cells import NONE, data_at, in_turn, parser, simulated, write_table
from numpy.typing import NDArray

from cloister.client.data import task_of
from cloister.server.run import Outcome
from cloister.tasks.datasets.regressions import HospitalCharges
from cloister.tasks.targets import Target
from cloister.utils.arrays import from_record, unstacked

HYPOTHESES = (1, 3, 5, 7)
MULTIPLIERS = (0.0, 0.1, 1.0, 2.0, 3.0, 5.0)
ORDER = (0.0, 5.0, 1.0, 3.0, 0.1, 2.0)
"""In which they are run: the ends first, so that an unfinished run says something."""
LEAKAGE = {
    # Median and maximum over the clients, for k = 7, 5, 3, 1.
    0.1: ((517.0, 1551.0), (418.0, 1342.0), (473.0, 1386.0), (528.0, 1540.0)),
    1.0: ((36.3, 126.5), (40.7, 127.6), (44.0, 138.6), (49.5, 147.4)),
    2.0: ((15.4, 57.8), (14.3, 54.5), (22.0, 69.3), (21.5, 66.6)),
    3.0: ((7.7, 32.3), (8.4, 36.7), (12.5, 40.0), (12.1, 40.0)),
    5.0: ((5.7, 21.3), (5.9, 22.0), (5.5, 21.6), (5.3, 20.9)),
}
"""The paper's table 1, means over ten seeds. It has no table of errors: its figure shows them without numbers."""
LEAKING = (5, 3.0)
"""k and ν of the paper's figure 4."""
ERRORS = ("rmse", "rmse-of-other-rows")
HEAD = ("ν", "k", "RMSE", "RMSE, other rows", "leakage: paper", "ours", "seeds")
SECONDS = {"mse": 0.35, "rmse": 3.0}
"""Seconds of a round in the first estimate: a run of 60 rounds took some 20 s on two cores; in Keras a guess."""
PATIENCE = 30
CLIENTS = 2206
COHORT = 100
SETTINGS = {
    "task.name": "hospital-charges",
    "task.test-fraction": 0.0,
    "strategy.fraction-train": (COHORT + 0.5) / CLIENTS,
    "privacy.server": "laplace-clustering",
    "privacy.client": "laplace",
    "privacy.choice": "exact",
    "tensorboard": False,
    "keep-checkpoints": 1,
}


def trained(hypotheses: int, multiplier: float, seed: int, given: dict[str, Any]) -> dict[str, Any]:
    """One run, in figures."""
    settings = SETTINGS | given | {"privacy.clusters": hypotheses, "privacy.laplace-noise-multiplier": multiplier}
    outcome = simulated(settings | {"seed": seed}, CLIENTS)
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
        "leakage-histogram": leakage.get("histogram"),
    }


def rmse_of_other_rows(outcome: Outcome) -> float:
    """Each held-out row is predicted by the hypothesis that suits its hospital's other rows best, or by the first."""
    task = task_of(outcome.plan.config.task)
    data, model = task.load(), task.build()
    losses = []
    for arrays in unstacked(from_record(outcome.arrays)):
        model.assign(arrays)
        losses.append(task.losses(data.test.y, model.predict(data.test.x)))
    assert data.test_owners is not None
    return float(np.sqrt(_chosen_on_others(np.array(losses), data.test_owners).mean()))


def _chosen_on_others(losses: NDArray, owners: NDArray) -> NDArray:
    sums = np.array([np.bincount(owners, each) for each in losses])
    chosen = np.argmin(sums[:, owners] - losses, axis=0)
    return losses[chosen, np.arange(losses.shape[1])]


def rows(found: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Of the table: errors both ways, mean ± standard deviation over seeds, and leakages, means over seeds."""
    for nu, k in itertools.product(MULTIPLIERS, HYPOTHESES):
        runs = [run for run in found if (run["k"], run["nu"]) == (k, nu)]
        paper = LEAKAGE[nu][HYPOTHESES[::-1].index(k)] if nu in LEAKAGE else None
        yield f"{nu:g}", str(k), *(_spread(runs, name) for name in ERRORS), _told(paper), _leaked(runs), str(len(runs))


def _spread(runs: list[dict[str, Any]], figure: str) -> str:
    values = [run[figure] for run in runs]
    return f"{statistics.mean(values):.2f} ± {statistics.pstdev(values):.2f}" if values else NONE


def _leaked(runs: list[dict[str, Any]]) -> str:
    figures = [[run[name] for run in runs] for name in ("leakage-median", "leakage-maximum")]
    return NONE if not runs or None in figures[0] else _told([statistics.mean(values) for values in figures])


def _told(leakage: Sequence[float] | None) -> str:
    return NONE if leakage is None else ", ".join(f"{value:.1f}" for value in leakage)


def draw(found: list[dict[str, Any]], place: Path) -> None:
    """Draw both errors by ν, a line a k, with their standard deviations over seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, error, title in zip(axes, ERRORS, ("chosen on the scored rows", "chosen on other rows"), strict=True):
        for shift, k in enumerate(HYPOTHESES):
            of_k = {nu: [run[error] for run in found if (run["k"], run["nu"]) == (k, nu)] for nu in MULTIPLIERS}
            points = [(MULTIPLIERS.index(nu) + 0.06 * shift, values) for nu, values in of_k.items() if values]
            if points:
                places, values = zip(*points, strict=True)
                means, spreads = map(statistics.mean, values), map(statistics.pstdev, values)
                axis.errorbar(places, list(means), list(spreads), marker="o", capsize=3, label=f"k = {k}")
        axis.set(title=f"hypotheses {title}", xlabel="ν")
        axis.set_xticks(range(len(MULTIPLIERS)), [f"{nu:g}" for nu in MULTIPLIERS])
    axes[0].set_ylabel("RMSE on held-out hospitals,\nthousands of dollars")
    axes[0].set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(place, dpi=80)
    plt.close(figure)


def draw_leakage(run: dict[str, Any], place: Path) -> None:
    """Draw how many clients have which leakage."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    axis.stairs(run["leakage-histogram"]["counts"], run["leakage-histogram"]["edges"], fill=True)
    axis.set_title(f"k = {run['k']}, ν = {run['nu']:g}, seed {run['seed']}, {run['rounds']} rounds")
    axis.set(xlabel="leakage of a client, 11/ν a release", ylabel="clients")
    figure.savefig(place, dpi=80)
    plt.close(figure)


class Cell(NamedTuple):
    """A run of the tables, and the file that it is kept in."""

    path: Path
    seed: int
    nu: float
    k: int
    rounds: int

    def __str__(self) -> str:
        """What it is, for a person."""
        return f"seed {self.seed}, k = {self.k}, ν = {self.nu:g}"

    def kept(self) -> list[dict[str, Any]]:
        """What the file holds already."""
        return json.loads(self.path.read_text()) if self.path.exists() else []

    def is_there(self) -> bool:
        """Whether it has been run."""
        own = (self.k, self.nu, self.rounds)
        return any((run["k"], run["nu"], run["asked-rounds"]) == own for run in self.kept())


def run_all(arguments: argparse.Namespace, place: Path) -> None:
    """Run what has not been run yet, a file of results a seed.

    Args:
        arguments: of the command line.
        place: folder of the results.
    """
    asked = itertools.product(arguments.seeds, arguments.multipliers, arguments.hypotheses)
    cells = [Cell(place / f"seed-{seed}.json", seed, nu, k, arguments.rounds) for seed, nu, k in asked]
    left = [cell for cell in cells if not cell.is_there()]
    data = data_at(arguments.data, "hospital-charges") if left else ""
    for cell in in_turn(left, SECONDS[arguments.loss], lambda cell: cell.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            given = {"task.data-path": data, "output-dir": arguments.output_dir or scratch}
            given |= {"evaluation.patience": arguments.patience}
            if arguments.loss == "rmse":
                given["task.model"] = "keras"
            if cell.k > 1:  # one hypothesis cannot be split
                given["privacy.clusters-split-round"] = arguments.split_round
            found = trained(cell.k, cell.nu, cell.seed, given | {"num-rounds": cell.rounds})
        cell.path.parent.mkdir(parents=True, exist_ok=True)
        cell.path.write_text(json.dumps([*cell.kept(), found | {"asked-rounds": cell.rounds}], indent=2) + "\n")


def main() -> None:
    """Run what is asked for, then show everything that is there of that split and that many rounds."""
    options = parser(__doc__, ["hospital-charges"])
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 100, 200])
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--output-dir", default="")
    options.add_argument("--split-round", type=int, default=0)
    options.add_argument("--hypotheses", type=int, nargs="+", default=HYPOTHESES)
    options.add_argument("--multipliers", type=float, nargs="+", default=ORDER)
    options.add_argument("--loss", choices=tuple(SECONDS), default="mse")
    options.add_argument("--patience", type=int, default=PATIENCE, help="rounds without a smaller loss")
    arguments = options.parse_args()
    HospitalCharges.target = Target(arguments.loss)  # of this process, where all clients are simulated
    place = arguments.results / "hospital_charges"
    place = place / "rmse" if arguments.loss == "rmse" else place
    place = place / f"patience-{arguments.patience}" if arguments.patience != PATIENCE else place
    place = place / f"split-{arguments.split_round}" if arguments.split_round else place
    run_all(arguments, place)
    found = [run for path in sorted(place.glob("seed-*.json")) for run in json.loads(path.read_text())]
    asked = [run for run in found if run["asked-rounds"] == arguments.rounds]
    about = (
        f"Hospital charges, {arguments.rounds} rounds at most. RMSE in thousands of dollars, with hypotheses chosen on "
        "the rows that are scored and on a hospital's others; leakage over the clients, median and maximum (table 1)."
    )
    write_table(place / f"table-{arguments.rounds}.md", about, HEAD, rows(asked))
    draw(asked, place / f"figure-{arguments.rounds}.png")
    for run in [run for run in asked if (run["k"], run["nu"]) == LEAKING and run.get("leakage-histogram")][:1]:
        draw_leakage(run, place / f"leakage-{arguments.rounds}.png")


if __name__ == "__main__":
    main()
