"""All mechanisms beside each other: what accuracy is left, how far the strongest attack gets, and what ε is claimed.

    python experiments/comparison.py run [--tasks digits mnist alzheimer-mri] [--data FOLDER] [--seeds 3]
        [--results FOLDER]
    python experiments/comparison.py show

A cell is one task, one mechanism at one strength, and one seed: softmax regression, ten clients that are dealt examples
at random, five rounds of FedAvg. It is run, then audited: client inference and membership inference, as by `cloister
audit`. A cell's result is kept as soon as it is there, a line in comparison/TASK.jsonl of the results, and is not
computed again. All mechanisms at one strength, with all seeds, come before any at the next. How long the rest takes is
said first. `show` makes the table and the figure of what is there.

FOLDER holds `mnist/mnist.npz` and the folder `alzheimer-mri` of images, which the tasks of these names need.
"""

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cells import data_at, in_turn, parser, simulated

from cloister.audits.audit import Effort, audit
from cloister.server.reports.compare.runs import read_runs
from cloister.utils.text import at_most

ATTACKS = ("client-inference", "membership-inference")
UNITS = ("client", "example")
CLIENTS = 10
COMMON: Mapping[str, Any] = {
    "num-rounds": 5,
    "task.model": "softmax",
    "task.partition": "iid",
    "client.local-epochs": 2,
    "evaluation.federated": "off",
    "tensorboard": False,
    "report": False,
    "keep-checkpoints": 1,
}


class Benchmark(NamedTuple):
    """A task as it is used here.

    Attributes:
        settings: beside the common ones.
        shadows: runs of the attacker's own.
        seconds: of a cell, for the first estimate.
        own: what else a mechanism needs here, by its name.
    """

    settings: Mapping[str, Any]
    shadows: int
    seconds: float
    own: Mapping[str, Mapping[str, Any]] = {}


TASKS: Mapping[str, Benchmark] = {
    "digits": Benchmark({"task.name": "digits"}, 8, 10.0),
    "mnist": Benchmark(
        {
            "task.name": "mnist",
            "task.examples-per-client": 500,
            "client.batch-size": 20,
            "client.learning-rate": 0.1,
        },
        8,
        60.0,
    ),
    "alzheimer-mri": Benchmark(
        {
            "task.name": "alzheimer-mri",
            "task.image-size": 32,
            "client.local-epochs": 20,
            "client.learning-rate": 0.05,
        },
        8,
        120.0,
        # An epoch takes more than ten times as long as one without noise; the rates 0.02 and 0.1 were tried.
        {"DP-SGD": {"client.local-epochs": 4, "client.learning-rate": 0.1}},
    ),
}


class Mechanism(NamedTuple):
    """A way to protect clients or their examples.

    Attributes:
        settings: beside the common ones.
        key: of its strength.
        strengths: values of the key, the one that is run first at the beginning.
    """

    settings: Mapping[str, Any]
    key: str = ""
    strengths: Sequence[float] = (0.0,)


ON_SERVER = {"privacy.clipping-norm": 0.5}
GLOBAL_DP = ON_SERVER | {"privacy.server": "global-dp"}
METRIC = ON_SERVER | {"privacy.server": "metric"}
ON_CLIENTS = {"privacy.server": "none", "strategy.weighting": "uniform"}
LAPLACE = ON_CLIENTS | {"privacy.client": "laplace"}
Z, NU = "privacy.noise-multiplier", "privacy.laplace-noise-multiplier"
MECHANISMS: Mapping[str, Mechanism] = {
    "none": Mechanism({"privacy.server": "none"}),
    "global DP, fixed clip": Mechanism(GLOBAL_DP, Z, (1.0, 0.3, 3.0)),
    "global DP, adaptive clip": Mechanism(GLOBAL_DP | {"privacy.clipping": "adaptive"}, Z, (1.0, 0.3, 3.0)),
    "metric, as published": Mechanism(
        METRIC | {"privacy.placement": "model", "privacy.distance-release": "exact", "privacy.distance-clip": "before"},
        Z,
        (1.0, 0.3, 3.0),
    ),
    "metric, sound": Mechanism(
        METRIC
        | {
            "privacy.distance-release": "private",
            "privacy.distance-noise-multiplier": 5.0,
            "privacy.min-distance": 0.3,
        },
        Z,
        (0.7, 0.2, 2.0),
    ),
    "Laplace, as published": Mechanism(LAPLACE, NU, (3.0, 0.3, 30.0)),
    "Laplace, fixed radius": Mechanism(LAPLACE | {"privacy.radius": 0.5}, NU, (3.0, 0.3, 30.0)),
    "local Gaussian": Mechanism(
        ON_CLIENTS | {"privacy.client": "gaussian", "privacy.gaussian-clipping-norm": 0.5},
        "privacy.gaussian-noise-multiplier",
        (0.5, 0.1, 2.0),
    ),
    "DP-SGD": Mechanism(
        ON_CLIENTS
        | {
            "privacy.client": "dp-sgd",
            "client.batch-size": 32,
            "client.learning-rate": 1.0,
        },
        "privacy.dp-sgd-noise-multiplier",
        (1.5, 0.5, 5.0),
    ),
    "secure aggregation": Mechanism(
        GLOBAL_DP
        | {
            "strategy.min-nodes": CLIENTS,
            "secure-aggregation.enabled": True,
            "secure-aggregation.threshold": 7,
            "secure-aggregation.colluding": 1,
        },
        Z,
        (1.0,),
    ),
}


class Cell(NamedTuple):
    """One run and the attacks on it."""

    task: str
    mechanism: str
    strength: float
    seed: int

    def settings(self) -> dict[str, Any]:
        """The keys of its configuration, all but where things lie."""
        chosen, task = MECHANISMS[self.mechanism], TASKS[self.task]
        strength = {chosen.key: self.strength} if chosen.key else {}
        own = task.own.get(self.mechanism, {})
        return {**COMMON, **task.settings, **chosen.settings, **own, **strength, "seed": self.seed}


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Those that are asked for: of all mechanisms and seeds the first strength, then the next."""
    ranks = range(max(len(MECHANISMS[name].strengths) for name in arguments.mechanisms))
    for task, rank, seed, name in itertools.product(
        arguments.tasks, ranks, range(arguments.seeds), arguments.mechanisms
    ):
        for strength in MECHANISMS[name].strengths[rank : rank + 1]:
            yield Cell(task, name, strength, seed)


def result_of(cell: Cell, data: str) -> dict[str, Any]:
    """Run a cell, attack the run, and say what both came to.

    Args:
        cell: to run.
        data: folder of the data; empty: none is needed.
    """
    start = time.perf_counter()
    where = {} if cell.task == "digits" else {"task.data-path": data_at(f"{data}/{cell.task}", cell.task)}
    with tempfile.TemporaryDirectory() as folder:
        settings = cell.settings() | where | {"output-dir": folder}
        outcome = simulated(settings, CLIENTS)
        path = outcome.directory.path
        audited = audit(path, Effort(TASKS[cell.task].shadows, cell.seed), ATTACKS)
        cost = read_runs([path])[0].costs[-1]
    attacks = [
        {"attack": item.attack, "unit": item.unit, "auc": item.value, "interval": [item.low, item.high]}
        | {"borne-out": finding.bears_out(item)}
        for finding in audited.findings
        for item in finding.measured
        if item.quantity == "auc"
    ]
    return {
        **cell._asdict(),
        "settings": cell.settings(),
        "accuracy": outcome.rounds[-1].central["accuracy"],
        "status": cost.status,
        "epsilon": cost.epsilon,
        "unit": cost.kind.unit if cost.kind else "",
        "attacks": attacks,
        "seconds": round(time.perf_counter() - start, 1),
    }


def results(place: Path) -> dict[Cell, dict[str, Any]]:
    """The cells of a task that are there.

    Args:
        place: of the file of its results.
    """
    lines = place.read_text().splitlines() if place.exists() else []
    found = [json.loads(line) for line in lines]
    return {Cell(*(each[name] for name in Cell._fields)): each for each in found}


def run_all(arguments: argparse.Namespace) -> None:
    """Run what is missing; how long the rest takes is said before each cell."""
    files = {task: arguments.results / "comparison" / f"{task}.jsonl" for task in arguments.tasks}
    done = {task: results(place) for task, place in files.items()}
    left = [cell for cell in cells(arguments) if cell not in done[cell.task]]
    for cell in in_turn(left, 1.0, lambda cell: expected(cell.task, done[cell.task].values())):
        done[cell.task][cell] = result = result_of(cell, arguments.data)
        files[cell.task].parent.mkdir(parents=True, exist_ok=True)
        with files[cell.task].open("a") as file:
            file.write(json.dumps(result) + "\n")


def expected(task: str, done: Iterable[Mapping[str, Any]]) -> float:
    """About how many seconds a cell of a task takes.

    Args:
        task: its name.
        done: its cells that are there.
    """
    return statistics.median([each["seconds"] for each in done] or [TASKS[task].seconds])


class Success(NamedTuple):
    """How far the strongest attack gets: means over the seeds in which its controls bear it out."""

    attack: str
    auc: float
    low: float
    high: float


def strongest(runs: Sequence[Mapping[str, Any]], unit: str) -> Success | None:
    """The attack on a unit with the largest mean AUC; None if the controls of none are met in half of the seeds.

    Args:
        runs: one mechanism at one strength, with several seeds.
        unit: `client` or `example`.
    """
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for item in itertools.chain.from_iterable(each["attacks"] for each in runs):
        if item["unit"] == unit and item["borne-out"]:
            seen.setdefault(item["attack"], []).append(item)
    means = [_success(attack, items) for attack, items in seen.items() if 2 * len(items) >= len(runs)]
    return max(means, key=lambda success: success.auc, default=None)


def _success(attack: str, items: Sequence[Mapping[str, Any]]) -> Success:
    low, high = (statistics.mean(item["interval"][end] for item in items) for end in (0, 1))
    return Success(attack, statistics.mean(item["auc"] for item in items), low, high)


class Point(NamedTuple):
    """One mechanism at one strength, over its seeds.

    Attributes:
        accuracy: of each seed.
        epsilon: the largest of the seeds; None where the claim is not sound.
        unit: that ε is about.
        attacks: the strongest one on each unit.
    """

    mechanism: str
    strength: float
    accuracy: Sequence[float]
    epsilon: float | None
    unit: str
    attacks: Mapping[str, Success | None]

    @property
    def mean(self) -> float:
        """Of the accuracy."""
        return statistics.mean(self.accuracy)


def points(place: Path) -> list[Point]:
    """What is there of a task, over the seeds.

    Args:
        place: of the file of its results.
    """
    found = []
    done = results(place)
    for name, mechanism in MECHANISMS.items():
        for strength in sorted(mechanism.strengths):
            runs = [each for cell, each in done.items() if (cell.mechanism, cell.strength) == (name, strength)]
            if runs:
                sound = [each["epsilon"] for each in runs if each["status"] == "sound"]
                epsilon = max(sound) if len(sound) == len(runs) else None
                attacks = {unit: strongest(runs, unit) for unit in UNITS}
                accuracy = [each["accuracy"] for each in runs]
                found.append(Point(name, strength, accuracy, epsilon, runs[0]["unit"], attacks))
    return found


def table(task: str, found: Sequence[Point]) -> str:
    """The points of a task in Markdown.

    Args:
        task: its name.
        found: its points.
    """
    lines = [
        f"## {task}",
        "",
        "| mechanism | noise | accuracy | sound ε | AUC, one client | AUC, one example | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in found:
        noise = f"{point.strength:g}" if point.strength else "–"
        spread = f" ± {statistics.stdev(point.accuracy):.3f}" if len(point.accuracy) > 1 else ""
        epsilon = "–" if point.epsilon is None else f"{at_most(point.epsilon, 3)}, one {point.unit}"
        attacks = " | ".join(_in_words(point.attacks[unit]) for unit in UNITS)
        figures = f"{noise} | {point.mean:.3f}{spread} | {epsilon} | {attacks} | {len(point.accuracy)}"
        lines.append(f"| {point.mechanism} | {figures} |")
    return "\n".join(lines) + "\n"


def _in_words(success: Success | None) -> str:
    if success is None:
        return "none that its controls bear out"
    return f"{success.auc:.2f} ({success.low:.2f} to {success.high:.2f}), {success.attack}"


def draw(found: Mapping[str, Sequence[Point]], place: Path) -> None:
    """Accuracy against each attack's success and against sound ε, a row a task.

    Args:
        found: points by task.
        place: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2 * len(found) + 0.8), layout="constrained")
    rows = figure.subplots(len(found), len(UNITS) + 1, squeeze=False, sharey="row")
    for row, (task, own) in zip(rows, found.items(), strict=True):
        row[0].set_ylabel(f"{task}: accuracy")
        for axis, unit in zip(row, UNITS):
            axis.axvline(0.5, color="grey", linewidth=0.8, linestyle=":")
            axis.set_xlabel(f"AUC of the strongest attack on {'a client' if unit == 'client' else 'an example'}")
        row[-1].set(xscale="log", xlabel="sound ε (hollow: for one example; else for one client)")
        for number, name in enumerate(MECHANISMS):
            _draw(row, [point for point in own if point.mechanism == name], name, f"C{number}")
    handles, names = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=9)
    figure.savefig(place, dpi=80)


def _draw(row: Sequence[Any], own: Sequence[Point], name: str, color: str) -> None:
    """One mechanism in all panels of a row."""
    alone = {"none": "s", "secure aggregation": "*"}
    look: dict[str, Any] = {"color": color, "marker": alone.get(name, "o"), "markersize": 10 if name in alone else 5}
    for axis, unit in zip(row, UNITS):
        seen = [(point, success) for point in own if (success := point.attacks[unit])]
        places = [success.auc for _, success in seen]
        ends = [
            [success.auc - success.low for _, success in seen],
            [success.high - success.auc for _, success in seen],
        ]
        axis.errorbar(places, [point.mean for point, _ in seen], xerr=ends, elinewidth=0.6, label=name, **look)
    claimed = [(point.epsilon, point.mean) for point in own if point.epsilon and math.isfinite(point.epsilon)]
    if claimed:
        hollow = {"markerfacecolor": "none"} if own[0].unit == "example" else {}
        row[-1].plot(*zip(*claimed), **look, **hollow)


def show(place: Path) -> None:
    """Write the table and the figure of what is there.

    Args:
        place: folder of the results.
    """
    found = {task: own for task in TASKS if (own := points(place / f"{task}.jsonl"))}
    text = "\n".join(table(task, own) for task, own in found.items())
    print(text)
    place.mkdir(parents=True, exist_ok=True)
    (place / "table.md").write_text(text)
    if found:
        draw(found, place / "figure.png")


def main(given: Sequence[str] | None = None) -> None:
    """Run cells, or show those that are there.

    Args:
        given: arguments; None: those of the command line.
    """
    options = parser(__doc__, ["mnist", "alzheimer-mri"])
    options.add_argument("what", choices=("run", "show"))
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["digits"])
    options.add_argument("--mechanisms", nargs="+", choices=list(MECHANISMS), default=list(MECHANISMS))
    arguments = options.parse_args(given)
    if arguments.what == "run":
        run_all(arguments)
    show(arguments.results / "comparison")


if __name__ == "__main__":
    main()
