"""Tables 5 to 8, A.14 and B.15 of the metric-privacy paper: six strategies, with and without noise, on the brain scans.

    python experiments/metric_paper.py run --data FOLDER [--work FOLDER] [--size 128] [--strategies …] [--servers …]
        [--results FOLDER]
    python experiments/metric_paper.py table [--size 128] [--seeds 5] [--multiplier 0.003]
    python experiments/metric_paper.py curves [--size 128]

A cell is one strategy, one partition (`table-2`: alike, `table-3`: different), one mechanism and one seed, at the
paper's settings: 20 rounds of 5 epochs, C = 5, z = 0.01 (`--multiplier`). `--placement published` has noise on the
strategy's output and a distance taken before the clip, as the paper; `sound` has both as a guarantee can be stated for.
Clients' scores leave without noise in all of them, as the paper's do. Every cell is a process and a file in
metric_paper of the results, and a cell that is there is not run again. The hours that are to come are said first.
A run directory stays below the folder `--work` until its cell is done: a cell that was stopped is resumed at the round
that it had reached. `curves` draws the accuracy of each round (figures D.4 and D.5), and the last models' AUC and ROC
curves (C.2 and C.3; results from before Cloister kept curves have the AUC alone).
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cells import data_at, in_turn, parser
from metric_cells import COMMON, MULTIPLIER, PARTITIONS, PLACEMENTS, SERVERS, STRATEGIES, Cell, seconds_of_an_epoch
from metric_tables import curves, table


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Those that are asked for; without noise there are no two placements."""
    chosen = (arguments.partitions, arguments.strategies, arguments.servers, range(arguments.seeds))
    for partition, strategy, server, seed in itertools.product(*chosen):
        yield Cell(arguments.size, partition, strategy, server, arguments.placement, seed, arguments.multiplier)


def run(cell: Cell, arguments: argparse.Namespace, data: str) -> None:
    """Run a cell in a process of its own, and write its result down."""
    directory, result = arguments.work / str(cell.size) / cell.path.stem, arguments.results / cell.path
    command = [sys.executable, "-c", "from cloister.cli import app; app()", "run"]
    if directory.exists():
        command += ["--resume", str(directory)]
    else:
        place = {"task.data-path": data, "output-dir": str(directory.parent), "run-name": directory.name}
        command += ["--clients", "4"]
        for key, value in (cell.settings() | place).items():
            command += ["-c", f"{key}={json.dumps(value)}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps({"settings": cell.settings(), **read(directory)}, indent=2) + "\n")
    shutil.rmtree(directory)


def read(directory: Path) -> dict[str, Any]:
    """Curves on the clients' and on the server's examples, and the last model class by class."""
    rounds = [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        "clients": [done["federated"]["accuracy"] for done in rounds if done.get("federated")],
        "server": [done["central"]["accuracy"] for done in rounds if done.get("central")],
        "noise-std": [done["measured"]["noise_std"] for done in rounds[1:]],
        "seconds": round(sum(done["seconds"]["total"] for done in rounds[1:])),
    }
    detail = directory / "evaluation.json"
    return found | ({"last": json.loads(detail.read_text())} if detail.exists() else {})


def run_all(arguments: argparse.Namespace) -> None:
    """Run what is missing, and say how long the rest takes before each cell."""
    left = [cell for cell in cells(arguments) if not (arguments.results / cell.path).exists()]
    data = data_at(arguments.data, "alzheimer-mri") if left else ""
    epochs = COMMON["num-rounds"] * COMMON["client.local-epochs"]
    for cell in in_turn(left, seconds_of_an_epoch(arguments.size) * epochs):
        run(cell, arguments, data)


def main() -> None:
    """Run cells, or show those that are there."""
    options = parser(__doc__, ["alzheimer-mri"])
    options.add_argument("what", choices=("run", "table", "curves"))
    options.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "cloister-metric-paper")
    options.add_argument("--size", type=int, default=128)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--multiplier", type=float, default=MULTIPLIER)
    options.add_argument("--placement", choices=tuple(PLACEMENTS), default="published")
    options.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    options.add_argument("--strategies", nargs="+", choices=tuple(STRATEGIES), default=list(STRATEGIES))
    options.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    arguments = options.parse_args()
    arguments.results /= "metric_paper"
    {"run": run_all, "table": table, "curves": curves}[arguments.what](arguments)


if __name__ == "__main__":
    main()
