"""The frontier: what accuracy is left at which sound ε, by who is protected against whom.

    python experiments/frontier.py run [--tasks digits heart-disease mnist alzheimer-mri] [--data FOLDER] [--seeds 3]
        [--mechanisms ...] [--budgets 1 2 4 8] [--results FOLDER]
    python experiments/frontier.py validate --data FOLDER [--results FOLDER]
    python experiments/frontier.py show

`none`: FedAvg without privacy. `central DP-SGD`: one site that has all data. `distributed DP-SGD`: the same steps, on
secure sums of all sites with noise in shares. `local DP-SGD`: FedAvg of sites that each noise their own steps. `global
DP`: noise of a trusted server; its ε is for a whole site, the others' for one example.

The noise is the least with which a run keeps the budget (`auto`); the table has the ε that is claimed. MNIST's batch,
rate and epochs are the first of the best `CANDIDATES` on a sixth of its training data (`validate`, one seed). These
come from earlier trials that also saw the test set. The others follow from public numbers by the rules of
`cloister plan --suggest`. A result is kept as soon as it is there, a line in
frontier/TASK.jsonl of the results, and is not computed again. How long the rest takes is said first. `show` makes the
table and the figure of what is there, with what is not.

FOLDER holds the folders `mnist`, `heart-disease` and `alzheimer-mri`, which the tasks of these names need.

**Distributed DP-SGD without masks.** Masks cancel in a secure sum. So `in_shares` computes the sum of all sites without
them: the clipped sum over one secret draw from the data of all sites, and the noise of as many shares. A draw from all
data is a draw at each site. The sum of independent discrete Gaussians is within 2^-700 of one with their total variance
(`accounting.distributed`). One rounding of the sum stands for one at each site. Engine, plan of the noise, step and
account are those of a run. A test compares the models of both at q = 1 and σ = 0. Another checks the deviation of the
noise alone.
"""

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cells import NONE, data_at, in_turn, parser, simulated, write_table

from cloister.client.data import benchmark_of, handing_out, task_of
from cloister.client.request import NamedArrays
from cloister.client.trainers import SumsGradients, model_and_trainer_of
from cloister.config.calibration import calibrated
from cloister.config.run import RunConfig, parse
from cloister.estimate.suggest import Pace, suggest
from cloister.privacy.accounting.account import Account, by_accountant
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian
from cloister.privacy.mechanisms.distributed.shared import SharedSum
from cloister.privacy.mechanisms.distributed.steps import encode_clipped_sum
from cloister.server.build import build
from cloister.server.reports.compare.runs import read_runs
from cloister.server.secure_steps import SecureSteps
from cloister.tasks.base import Examples
from cloister.tasks.recipe import recipe_of
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import Layout, Row, from_record
from cloister.utils.text import at_most

BUDGETS = (1.0, 2.0, 4.0, 8.0)
COMMON: Mapping[str, Any] = {
    "task.partition": "iid",
    "evaluation.federated": "off",
    "tensorboard": False,
    "report": False,
    "keep-checkpoints": 1,
}
DP_SGD: Mapping[str, Any] = {"privacy.server": "none", "privacy.client": "dp-sgd"}
AUTO = "privacy.dp-sgd-noise-multiplier"
GLOBAL_DP: Mapping[str, Any] = {
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": "auto",
    "privacy.clipping-norm": 0.5,
    "strategy.weighting": "uniform",
    "num-rounds": 5,
}
MECHANISMS = ("none", "central DP-SGD", "distributed DP-SGD", "local DP-SGD", "global DP")
MINUTES, SECONDS_PER_EXAMPLE = 1.0, 1e-4
"""Time of a site, and of an example in a private step: what suggestions follow from beside sizes."""
EPOCHS = 10
"""Local epochs in a round of `local DP-SGD`; averaging rarely costs less."""


class Benchmark(NamedTuple):
    """A task as it is used here.

    Attributes:
        settings: beside the common ones.
        clients: number of sites.
        threshold, colluding: of secure sums.
        plain: settings without privacy, and of `global DP` beside its own.
        parameters: of the model.
        seconds: of a cell, for the first estimate.
        momentum: of DP-SGD.
        tried: batch, rate and epochs up to a budget, in place of suggested ones.
        seeds: largest number of seeds of a cell.
    """

    settings: Mapping[str, Any]
    clients: int
    threshold: int
    colluding: int
    plain: Mapping[str, Any]
    parameters: int
    seconds: float
    momentum: float = 0.0
    tried: Mapping[float, tuple[int, float, int]] = {}
    seeds: int = 3


FEATURES: Mapping[str, Any] = {"task.features": "scattering", "task.model": "keras"}
ADAM: Mapping[str, Any] = {"client.optimizer": "adam", "client.learning-rate": 0.001, "client.batch-size": 100}
TASKS: Mapping[str, Benchmark] = {
    "digits": Benchmark({"task.model": "softmax"}, 10, 8, 2, {"num-rounds": 20}, 650, 10.0),
    "heart-disease": Benchmark({"task.partition": "natural"}, 4, 3, 1, {"num-rounds": 20}, 80, 10.0),
    "mnist": Benchmark(
        FEATURES,
        10,
        8,
        2,
        ADAM | {"num-rounds": 10, "client.local-epochs": 1},
        39_700,
        200.0,
        0.9,
        {1.0: (1024, 1.0, 25), math.inf: (4096, 2.0, 60)},
    ),
    "alzheimer-mri": Benchmark(
        FEATURES | {"task.image-size": 64},
        4,
        3,
        1,
        ADAM | {"num-rounds": 10, "client.local-epochs": 2},
        82_948,
        600.0,
        0.9,
        seeds=1,
    ),
}


CANDIDATES: Mapping[float, Sequence[tuple[int, float, int]]] = {
    2.93: ((4096, 2.0, 60), (4096, 4.0, 60), (1024, 1.0, 25)),
    1.0: ((1024, 1.0, 25), (4096, 4.0, 60), (1024, 0.5, 25)),
}
"""Batch, rate and epochs that `validate` compares on MNIST, by budget."""


class Cell(NamedTuple):
    """One run. Without privacy its budget is 0."""

    task: str
    mechanism: str
    budget: float
    seed: int


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Return the cells that are asked for: all mechanisms and budgets with one seed, then with the next."""
    for task in arguments.tasks:
        for seed, name in itertools.product(range(min(arguments.seeds, TASKS[task].seeds)), arguments.mechanisms):
            for budget in arguments.budgets if name != "none" else (0.0,):
                yield Cell(task, name, budget, seed)


def task_settings(task: str, data: str) -> dict[str, Any]:
    """The keys of a task, with its data."""
    where = {} if task == "digits" else {"task.data-path": data_at(f"{data}/{task}", task)}
    return {**COMMON, "task.name": task, **TASKS[task].settings, **where}


def steps_of(cell: Cell, units: int, clients: int, candidate: tuple[int, float, int] | None = None) -> dict[str, Any]:
    """Settings of DP-SGD at each of some sites.

    Args:
        cell: with the budget.
        units: public number of examples of all sites.
        clients: number of sites that noise their own steps.
        candidate: batch, rate and epochs, in place of those of the task.
    """
    task = TASKS[cell.task]
    if task.tried:
        batch, rate, epochs = candidate or next(found for most, found in task.tried.items() if cell.budget <= most)
        found: dict[str, Any] = {
            "privacy.dp-sgd-clipping-norm": 0.1,
            "client.batch-size": batch // clients,
            "client.learning-rate": rate,
            "client.optimizer-options": f"momentum={task.momentum}",
        }
    else:
        pace = Pace(SECONDS_PER_EXAMPLE, task.parameters, bool(task.momentum))
        given = {**COMMON, "task.name": cell.task, **task.settings}
        found = suggest(given, units // clients, cell.budget, MINUTES, clients, pace).settings
        epochs = max(found["num-rounds"], found["client.local-epochs"])
    local = epochs if clients == 1 else min(epochs, EPOCHS)
    own = {"privacy.client-max-epsilon": cell.budget, AUTO: "auto", "strategy.min-nodes": clients}
    return {**DP_SGD, **found, **own, "client.local-epochs": local, "num-rounds": math.ceil(epochs / local)}


def settings_of(cell: Cell, units: int) -> dict[str, Any]:
    """The keys of a cell, all but its data and its folder.

    Args:
        cell: to run.
        units: examples that train at all sites together.
    """
    task = TASKS[cell.task]
    if cell.mechanism == "none":
        return {"privacy.server": "none", **task.plain}
    if cell.mechanism == "global DP":
        return {**task.plain, **GLOBAL_DP, "privacy.max-epsilon": cell.budget}
    if cell.mechanism == "local DP-SGD":
        return steps_of(cell, units, task.clients)
    central = steps_of(cell, units, 1)
    if cell.mechanism == "central DP-SGD":
        return central
    batch, epochs = central.pop("client.batch-size"), central.pop("client.local-epochs")
    for key in ("client.optimizer", "client.optimizer-options"):  # the strategy has the momentum
        central.pop(key, None)
    return central | {
        "num-rounds": epochs * math.ceil(units / batch),
        "privacy.dp-sgd-sampling-rate": batch / units,
        "secure-aggregation.enabled": True,
        "secure-aggregation.threshold": task.threshold,
        "secure-aggregation.colluding": task.colluding,
        "strategy.min-nodes": task.clients,
        **({"strategy.name": "fedavgm", "strategy.server-learning-rate": 1.0} if task.momentum else {}),
        **({"strategy.momentum": task.momentum} if task.momentum else {}),
    }


class Result(NamedTuple):
    """Accuracy on the test data, claimed ε, and its unit."""

    accuracy: float
    epsilon: float | None
    unit: str


def in_process(settings: Mapping[str, Any], clients: int, pooled: Examples | None) -> Result:
    """The result of `cloister run`.

    Args:
        settings: of the run.
        clients: number of sites.
        pooled: examples of the one site; None: each site has its part.
    """
    with tempfile.TemporaryDirectory() as folder, handing_out([pooled]) if pooled else nullcontext():
        given = {**settings, "evaluation.every": settings["num-rounds"], "output-dir": folder}
        outcome = simulated(given, clients)
        cost = read_runs([outcome.directory.path])[0].costs[-1]
    return Result(outcome.rounds[-1].central["accuracy"], cost.epsilon, cost.kind.unit if cost.kind else "")


def trained_in_shares(config: RunConfig, strategy: SecureSteps, members: int) -> NamedArrays:
    """The model after the steps of `distributed DP-SGD`, without masks; all sites reply in all rounds.

    Args:
        config: of the run. The step has the momentum of `fedavgm` with rate 1, or none.
        strategy: of this configuration.
        members: number of sites.
    """
    task, train = task_of(config.task), benchmark_of(config.task).train
    bench = model_and_trainer_of(config.for_clients)
    trainer, units = bench.trainer, len(train)
    assert isinstance(trainer, SumsGradients)
    bench.model.initialise(config.seed)
    layout = Layout.of(bench.model.arrays())
    model: Row = tuple(layout.rows(bench.model.arrays()))
    velocity: Row = tuple(np.zeros_like(piece) for piece in model)
    momentum = float(config.flat()["strategy.momentum"]) if config.strategy.name == "fedavgm" else 0.0
    recipe = recipe_of(task, config.client, config.privacy)
    step = config.privacy.dp_sgd.steps(units, recipe.batch_size, 1)
    for number in range(1, config.num_rounds + 1):
        bench.model.assign(layout.named(model))
        own = TrainingPlan.of(recipe, (config.seed, number), round=number, public_size=units)
        sums = trainer.summed(train, replace(own, batch_size=step.batch_size, epochs=step.epochs))
        noise = strategy.mechanism.dp_sgd.plan(layout.size, number, members)
        total = encode_clipped_sum(layout.rows(sums), noise)
        if variance := members * noise.shares.left(members):
            DiscreteGaussian(math.isqrt(variance)).add(total)
        released = strategy.mechanism.released(SharedSum(total, members, members, units), model, layout, number)
        (stepped,) = released.models
        velocity = tuple(momentum * v + (new - old) for v, new, old in zip(velocity, stepped, model, strict=True))
        model = tuple(old + v for old, v in zip(model, velocity, strict=True))
    return layout.named(model)


def in_shares(settings: Mapping[str, Any], members: int) -> Result:
    """The result of a run of `distributed DP-SGD` without masks.

    Args:
        settings: of the run.
        members: number of sites.
    """
    config = calibrated(parse(dict(settings)))
    strategy, bench = build(config).strategy, model_and_trainer_of(config.for_clients)
    assert isinstance(strategy, SecureSteps)
    bench.model.assign(trained_in_shares(config, strategy, members))
    events = [strategy.event(Layout.of(bench.model.arrays()))] * config.num_rounds
    spent = by_accountant(Account(events), config.privacy.target_delta)
    test = benchmark_of(config.task).test
    scores = task_of(config.task).metrics(test.y, bench.model.predict(test.x))
    return Result(scores["accuracy"], min(spent.values()), strategy.mechanism.dp_sgd.unit)


def result_of(cell: Cell, data: str) -> dict[str, Any]:
    """Run a cell, and say what it came to.

    Args:
        cell: to run.
        data: folder of the data; empty: none is needed.
    """
    start = time.perf_counter()
    where = task_settings(cell.task, data)
    train, clients = benchmark_of(parse(where).task).train, TASKS[cell.task].clients
    settings = settings_of(cell, len(train))
    run = {**where, **settings, "seed": cell.seed}
    if cell.mechanism == "distributed DP-SGD":
        found = in_shares(run, clients)
    elif cell.mechanism == "central DP-SGD":
        found = in_process(run, 1, train)
    else:
        found = in_process(run, clients, None)
    seconds = round(time.perf_counter() - start, 1)
    return {**cell._asdict(), **found._asdict(), "settings": settings, "seconds": seconds}


def results(place: Path) -> dict[Cell, dict[str, Any]]:
    """The cells of a task that are there.

    Args:
        place: of the file of its results.
    """
    found = map(json.loads, place.read_text().splitlines()) if place.exists() else ()
    return {Cell(*(each[name] for name in Cell._fields)): each for each in found}


def expected(cell: Cell, done: Mapping[Cell, Mapping[str, Any]]) -> float:
    """About how many seconds a cell takes.

    Args:
        cell: to run.
        done: the cells of its task that are there.
    """
    same = [each["seconds"] for other, each in done.items() if other.mechanism == cell.mechanism]
    return statistics.median(same or [TASKS[cell.task].seconds])


def run_all(arguments: argparse.Namespace) -> None:
    """Run what is missing; how long the rest takes is said before each cell."""
    files = {task: arguments.results / "frontier" / f"{task}.jsonl" for task in arguments.tasks}
    done = {task: results(place) for task, place in files.items()}
    left = [cell for cell in cells(arguments) if cell not in done[cell.task]]
    for cell in in_turn(left, 1.0, lambda cell: expected(cell, done[cell.task])):
        done[cell.task][cell] = result = result_of(cell, arguments.data)
        files[cell.task].parent.mkdir(parents=True, exist_ok=True)
        with files[cell.task].open("a") as file:
            file.write(json.dumps(result) + "\n")


def validate(arguments: argparse.Namespace) -> None:
    """Score each candidate of MNIST that has no result, trained by central DP-SGD on 5/6 of the training data.

    A result is a line in frontier/mnist-validation.jsonl: the accuracy on the other sixth, and the settings.
    """
    where, place = task_settings("mnist", arguments.data), arguments.results / "frontier" / "mnist-validation.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
    train = benchmark_of(parse(where).task).train
    held, rest = np.split(np.arange(len(train)), [len(train) // 6])
    for budget, candidate in ((budget, each) for budget, found in CANDIDATES.items() for each in found):
        if any((each["budget"], tuple(each["candidate"])) == (budget, candidate) for each in done):
            continue
        cell = Cell("mnist", "central DP-SGD", budget, 0)
        settings = {**where, **steps_of(cell, len(rest), 1, candidate), "evaluation.every": 2}
        with tempfile.TemporaryDirectory() as folder, handing_out([train.take(rest)]):
            arrays = simulated({**settings, "output-dir": folder}, 1).arrays
        config = parse(settings)
        model = model_and_trainer_of(config.for_clients).model
        model.assign(from_record(arrays))
        scores = task_of(config.task).metrics(train.y[held], model.predict(train.x[held]))
        with place.open("a") as file:
            file.write(json.dumps({"budget": budget, "candidate": candidate, "accuracy": scores["accuracy"]}) + "\n")


class Point(NamedTuple):
    """One mechanism at one budget, over its seeds.

    Attributes:
        accuracy: of each seed.
        epsilon: the largest of the seeds; None without a claim.
        unit: that ε is about.
    """

    mechanism: str
    budget: float
    accuracy: Sequence[float]
    epsilon: float | None
    unit: str

    @property
    def mean(self) -> float:
        """Return the mean accuracy."""
        return statistics.mean(self.accuracy)

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the accuracy; 0 with one seed."""
        return statistics.stdev(self.accuracy) if len(self.accuracy) > 1 else 0.0


def points(done: Mapping[Cell, Mapping[str, Any]]) -> list[Point]:
    """Return what is there of a task, over the seeds.

    Args:
        done: its cells.
    """
    found = []
    for name in MECHANISMS:
        for budget in sorted({cell.budget for cell in done if cell.mechanism == name}):
            runs = [each for cell, each in done.items() if (cell.mechanism, cell.budget) == (name, budget)]
            claimed = [each["epsilon"] for each in runs if each["epsilon"] is not None]
            accuracy = [each["accuracy"] for each in runs]
            found.append(Point(name, budget, accuracy, max(claimed, default=None), runs[0]["unit"]))
    return found


def row(task: str, point: Point) -> list[str]:
    """A row of the table."""
    spread = f" ± {point.deviation:.4f}" if point.deviation else ""
    epsilon = NONE if point.epsilon is None else f"{at_most(point.epsilon, 3)}, one {point.unit}"
    budget = f"{point.budget:g}" if point.budget else NONE
    return [task, point.mechanism, budget, epsilon, f"{point.mean:.4f}{spread}", f"{len(point.accuracy)}"]


def draw(found: Mapping[str, Sequence[Point]], place: Path) -> None:
    """Accuracy against claimed ε, a panel a task.

    Args:
        found: points by task.
        place: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found), 4.6), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (task, own) in zip(panels, found.items(), strict=True):
        axis.set(
            title=f"{task}, {TASKS[task].clients} sites", xlabel="claimed ε (δ = 1e-5)", xscale="log", xlim=(0.5, 10)
        )
        axis.minorticks_off()
        axis.set_xticks(BUDGETS, [f"{budget:g}" for budget in BUDGETS])
        for number, name in enumerate(MECHANISMS):
            seen = [point for point in own if point.mechanism == name]
            if not seen:
                continue
            if name == "none":
                axis.axhline(seen[0].mean, color="grey", linestyle=":", label="no privacy")
                continue
            places = [point.epsilon for point in seen]
            errors = [point.deviation for point in seen]
            label = f"{name} (one {'site' if name == 'global DP' else 'example'})"
            axis.errorbar(places, [point.mean for point in seen], errors, marker="o", color=f"C{number}", label=label)
    panels[0].set_ylabel("accuracy on test data")
    shown = {name: handle for axis in panels for handle, name in zip(*axis.get_legend_handles_labels())}
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(place, dpi=80)


def show(place: Path, arguments: argparse.Namespace) -> None:
    """Write the table and the figure of what is there, and the hours of what is not.

    Args:
        place: folder of the results.
        arguments: of the command line; its seeds are those that should be there.
    """
    done = {task: results(place / f"{task}.jsonl") for task in TASKS}
    found = {task: points(own) for task, own in done.items() if own}
    everything = argparse.Namespace(tasks=TASKS, mechanisms=MECHANISMS, budgets=BUDGETS, seeds=arguments.seeds)
    hours = dict.fromkeys(TASKS, 0.0)
    for cell in cells(everything):
        hours[cell.task] += 0.0 if cell in done[cell.task] else expected(cell, done[cell.task]) / 3600
    left = ", ".join(f"{task} {spent:.1f}" for task, spent in hours.items() if spent)
    about = f"Mean and standard deviation over seeds. Not run, about so many hours: {left or 'nothing'}."
    rows = [row(task, point) for task, own in found.items() for point in own]
    write_table(place / "table.md", about, ["task", "mechanism", "budget", "claimed ε", "test accuracy", "seeds"], rows)
    if found:
        draw(found, place / "figure.png")


def main(given: Sequence[str] | None = None) -> None:
    """Run cells, or show those that are there.

    Args:
        given: arguments; None: those of the command line.
    """
    options = parser(__doc__, ["heart-disease", "mnist", "alzheimer-mri"])
    options.add_argument("what", choices=("run", "validate", "show"))
    options.add_argument("--seeds", type=int, default=3, help="of a cell; the scans have one")
    options.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["digits"])
    options.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=MECHANISMS)
    options.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    arguments = options.parse_args(given)
    if arguments.what == "run":
        run_all(arguments)
    elif arguments.what == "validate":
        validate(arguments)
    show(arguments.results / "frontier", arguments)


if __name__ == "__main__":
    main()
