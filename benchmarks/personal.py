"""A round of 100 clients with 11 parameters each in the in-process grid: k hypotheses, Laplace noise, k-means.

The data is made up in the form of the task `hospital-charges`: 100 hospitals of four rows, five epochs each.

    python benchmarks/personal.py
"""

import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import numpy as np
from common import machine, quiet, table
from flwr.app import ArrayRecord

from cloister.client import data
from cloister.client.app import app
from cloister.config.run import RunConfig, parse
from cloister.server.build import build
from cloister.server.clustering import clustered
from cloister.server.round import RoundLoop
from cloister.simulation.grid import LocalGrid
from cloister.tasks.base import Dataset, Examples
from cloister.tasks.datasets.regressions import HospitalCharges
from cloister.utils.arrays import Layout, stacked, to_record

CLIENTS, ROWS, ROUNDS = 100, 4, 8
TARGET = 0.5
"""Seconds."""


def hospitals(_: HospitalCharges) -> Dataset:
    """As many hospitals as take part, with four rows each."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 3, (CLIENTS * ROWS, 3)).astype(np.float32)
    examples = Examples(x, (5 + x.sum(axis=1)).astype(np.float32))
    owners = np.repeat(np.arange(CLIENTS), ROWS)
    return Dataset(examples, examples, owners, owners)


def settings(hypotheses: int, folder: str) -> RunConfig:
    """Of a run in which every client takes part."""
    chosen: dict[str, Any] = {
        "task.name": "hospital-charges",
        "task.test-fraction": 0.0,
        "privacy.server": "laplace-clustering",
        "privacy.client": "laplace",
        "privacy.choice": "exact",
        "privacy.clusters": hypotheses,
        "output-dir": folder,
        "seed": 1,
    }
    return parse(chosen)


def rounds(hypotheses: int) -> list[tuple[float, float]]:
    """Seconds, and seconds of processor time, of each round, from drawing clients to the new hypotheses.

    The first one warms up and is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = settings(hypotheses, folder)
        plan = build(config)
        model = plan.task.build()
        models = []
        for number in range(hypotheses):
            model.initialise(number)
            models.append(model.arrays())
        laps: list[tuple[float, float]] = []

        def lap(done: object, arrays: ArrayRecord) -> None:
            laps.append((time.perf_counter(), time.process_time()))

        grid = LocalGrid.simulated(app, config.flat(), CLIENTS)
        RoundLoop(grid, plan.strategy, None, [lap], {"seed": 1}, 60.0).run(to_record(stacked(models)), ROUNDS)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(laps[1:])]


def clustering(parameters: int, hypotheses: int) -> float:
    """Seconds of k-means on 100 models."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal(parameters, np.float32)
    models = [{"0": base + rng.standard_normal(parameters, np.float32)} for _ in range(CLIENTS + hypotheses)]
    layout = Layout.of(models[0])
    rows = [layout.rows(model) for model in models]
    start = time.perf_counter()
    clustered(layout, rows[:CLIENTS], rows[CLIENTS:])
    return time.perf_counter() - start


def main() -> None:
    """Print both tables."""
    machine()
    quiet()
    data.benchmark_of.cache_clear()
    HospitalCharges.load = hospitals  # type: ignore[method-assign]
    lines = []
    for hypotheses in (1, 3, 7):
        wall, cpu = zip(*rounds(hypotheses), strict=True)
        lines.append(
            [hypotheses, *(f"{figure:.3f}" for figure in (statistics.median(wall), min(wall), statistics.median(cpu)))]
        )
    table(["k", f"s a round, median (target {TARGET})", "least", "processor time, median"], lines)
    sizes = [(11, 3), (7850, 2), (1_000_000, 3)]
    table(["parameters", "k", "s to cluster 100 models"], [[p, k, f"{clustering(p, k):.4f}"] for p, k in sizes])


if __name__ == "__main__":
    main()
