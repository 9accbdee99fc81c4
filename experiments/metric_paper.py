"""Tables 5 to 8 of the metric-privacy paper: six strategies, with and without noise, on the brain scans.

    python experiments/metric_paper.py run --data FOLDER [--work FOLDER] [--size 128] [--strategies …] [--servers …]
    python experiments/metric_paper.py table [--size 128]

A cell is one strategy, one partition (`table-2`: alike, `table-3`: different), one mechanism and one seed, at the
paper's settings: 20 rounds of 5 epochs, C = 5, z = 0.01. `--placement published` has noise on the strategy's output and
a distance taken before the clip, as the paper; `sound` has both as a guarantee can be stated for. Clients' scores leave
without noise in all of them, as the paper's do. Every cell is a process and a file in experiments/results/metric_paper,
and a cell that is there is not run again. The hours that are to come are said first. A run directory stays below the
folder `--work` until its cell is done: a cell that was stopped is resumed at the round that it had reached.
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results" / "metric_paper"
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "fedavgm": {"strategy.momentum": 0.5, "strategy.server-learning-rate": 0.1, "strategy.pretrain-epochs": 20},
    "fedmedian": {},
    "fedprox": {"strategy.proximal-mu": 0.5},
    # The paper's class of this name only averages; a server optimizer "sgd" of rate 1 does.
    "fedopt": {"strategy.pretrain-epochs": 20},
    # The paper names no rate; what it names are the defaults of Flower's FedYogi, whose rate is 0.01.
    "fedyogi": {
        "strategy.server-learning-rate": 0.01,
        "strategy.beta-1": 0.9,
        "strategy.beta-2": 0.99,
        "strategy.tau": 1e-3,
        "strategy.pretrain-epochs": 20,
    },
}
SERVERS = ("none", "global-dp", "metric")
PARTITIONS = ("table-2", "table-3")
COMMON = {
    "task.name": "alzheimer-mri",
    "num-rounds": 20,
    "client.local-epochs": 5,
    "tensorboard": False,
    "report": False,
    "evaluation.federated": "on",
}
NOISE = {"privacy.noise-multiplier": 0.01, "privacy.clipping-norm": 5.0}
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "published": {"privacy.placement": "model"},
    "sound": {"privacy.placement": "update"},
}
METRIC: Mapping[str, Mapping[str, Any]] = {
    "published": {"privacy.distance-release": "exact", "privacy.distance-clip": "before"},
    "sound": {"privacy.distance-release": "private", "privacy.distance-clip": "after"},
}
EPOCH = {64: 11.0, 128: 43.0}
"""Seconds of an epoch of all images on two cores, for the first estimate."""
LAST = 5
"""Rounds at the end, over which the paper takes means."""
PUBLISHED = {
    # Mean and standard deviation of the accuracy on the clients' test sets over the last five rounds.
    ("table-2", "fedavg"): ((0.929, 0.008), (0.881, 0.013), (0.905, 0.007)),
    ("table-2", "fedavgm"): ((0.878, 0.013), (0.759, 0.024), (0.799, 0.022)),
    ("table-2", "fedmedian"): ((0.920, 0.005), (0.885, 0.013), (0.905, 0.018)),
    ("table-2", "fedprox"): ((0.931, 0.006), (0.879, 0.008), (0.907, 0.022)),
    ("table-2", "fedopt"): ((0.956, 0.004), (0.918, 0.014), (0.948, 0.005)),
    ("table-2", "fedyogi"): ((0.950, 0.006), (0.906, 0.008), (0.911, 0.012)),
    ("table-3", "fedavg"): ((0.933, 0.002), (0.878, 0.012), (0.927, 0.008)),
    ("table-3", "fedavgm"): ((0.909, 0.007), (0.790, 0.018), (0.840, 0.016)),
    ("table-3", "fedmedian"): ((0.926, 0.009), (0.838, 0.013), (0.905, 0.007)),
    ("table-3", "fedprox"): ((0.937, 0.014), (0.878, 0.016), (0.943, 0.003)),
    ("table-3", "fedopt"): ((0.964, 0.007), (0.925, 0.009), (0.945, 0.006)),
    ("table-3", "fedyogi"): ((0.945, 0.005), (0.912, 0.009), (0.919, 0.010)),
}
"""Its tables 5 and 7, in the order of `SERVERS`."""


class Cell(NamedTuple):
    """One run."""

    size: int
    partition: str
    strategy: str
    server: str
    placement: str
    seed: int

    @property
    def path(self) -> Path:
        """Of its result."""
        placed = f"-{self.placement}" if self.server != "none" else ""
        return RESULTS / str(self.size) / f"{self.partition}-{self.strategy}-{self.server}{placed}-seed{self.seed}.json"

    def settings(self) -> dict[str, Any]:
        """The keys of its configuration, all but where things lie."""
        found = COMMON | {"task.image-size": self.size, "task.partition": self.partition, "seed": self.seed}
        found |= {"strategy.name": self.strategy, "privacy.server": self.server, **STRATEGIES[self.strategy]}
        if self.server == "none":
            return found
        found |= NOISE | PLACEMENTS[self.placement]
        if self.placement == "sound" and self.strategy == "fedmedian":
            found["privacy.placement"] = "rule"  # a median has a sensitivity of its own
        return found | (METRIC[self.placement] if self.server == "metric" else {})


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Those that are asked for; without noise there are no two placements."""
    chosen = (arguments.partitions, arguments.strategies, arguments.servers, range(arguments.seeds))
    for partition, strategy, server, seed in itertools.product(*chosen):
        yield Cell(arguments.size, partition, strategy, server, arguments.placement, seed)


def run(cell: Cell, arguments: argparse.Namespace) -> None:
    """Run a cell in a process of its own, and write its result down."""
    directory = arguments.work / str(cell.size) / cell.path.stem
    command = [sys.executable, "-c", "from cloister.cli import app; app()", "run"]
    if directory.exists():
        command += ["--resume", str(directory)]
    else:
        place = {"task.data-path": arguments.data, "output-dir": str(directory.parent), "run-name": directory.name}
        command += ["--clients", "4"]
        for key, value in (cell.settings() | place).items():
            command += ["-c", f"{key}={json.dumps(value)}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    cell.path.write_text(json.dumps({"settings": cell.settings(), **read(directory)}, indent=2) + "\n")
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
    left = [cell for cell in cells(arguments) if not cell.path.exists()]
    epochs = COMMON["num-rounds"] * COMMON["client.local-epochs"]
    each = EPOCH.get(arguments.size, 43.0 * (arguments.size / 128) ** 2) * epochs
    for number, cell in enumerate(left):
        print(
            f"{len(left) - number} cells to go, about {each * (len(left) - number) / 3600:.1f} hours: {cell.path.stem}"
        )
        sys.stdout.flush()
        run(cell, arguments)
        each = json.loads(cell.path.read_text())["seconds"]
    print("all cells are there")


def table(arguments: argparse.Namespace) -> None:
    """Write the paper's figures beside ours; a difference is in standard deviations of the paper's last rounds."""
    lines = [f"Images of {arguments.size}×{arguments.size}, placement {arguments.placement}."]
    if arguments.size != 128:
        lines.append("The paper's are of 128×128: these are not its tables.")
    lines += [
        "",
        "| partition | strategy | mechanism | paper | ours | apart, std | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for partition, strategy, server in itertools.product(PARTITIONS, STRATEGIES, SERVERS):
        found = [
            json.loads(cell.path.read_text())["clients"][-LAST:]
            for seed in range(arguments.seeds)
            if (cell := Cell(arguments.size, partition, strategy, server, arguments.placement, seed)).path.exists()
        ]
        mean, std = PUBLISHED[partition, strategy][SERVERS.index(server)]
        ours, apart = "–", "–"
        if found:
            middle = statistics.mean(map(statistics.mean, found))
            spread = statistics.mean(map(statistics.pstdev, found))
            ours, apart = f"{middle:.3f} ± {spread:.3f}", f"{(middle - mean) / std:+.1f}"
        lines.append(
            f"| {partition} | {strategy} | {server} | {mean:.3f} ± {std:.3f} | {ours} | {apart} | {len(found)} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"table-{arguments.size}-{arguments.placement}.md").write_text(text)


def main() -> None:
    """Run cells, or make the table of those that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--data", default="", help="folder of the images")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "cloister-metric-paper")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--placement", choices=tuple(PLACEMENTS), default="published")
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument("--strategies", nargs="+", choices=tuple(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    arguments = parser.parse_args()
    {"run": run_all, "table": table}[arguments.what](arguments)


if __name__ == "__main__":
    main()
