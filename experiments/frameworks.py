"""Keras beside PyTorch: accuracy of one architecture on the same examples, plain and with DP-SGD at ε = 4.

Both start from Glorot's uniform weights, each framework with its own random numbers. Clients, batches and noise
multipliers are the same.

    python experiments/frameworks.py [--seeds 5] [--tasks digits mnist] [--privacy plain dp-sgd] [--results FOLDER]

A cell's result is a line in frameworks/TASK.jsonl of the results, and is not run again. The hours that are to come are
printed first. MNIST is read at `--data`.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cells import NONE, data_at, in_turn, simulated, write_table
from cells import parser as with_results

from cloister.tasks.datasets.characters import Digits, Mnist

if TYPE_CHECKING:
    from torch import nn

FRAMEWORKS = ("keras", "torch")
CLIENTS = 4
HIDDEN: Mapping[str, tuple[int, int]] = {"digits": (64, 64), "mnist": (784, 1000)}
"""Inputs and hidden units of the task's network `mlp`."""
PLAIN = {"privacy.server": "none"}
PRIVATE = PLAIN | {
    "privacy.client": "dp-sgd",
    "privacy.client-max-epsilon": 4.0,
    "privacy.dp-sgd-noise-multiplier": "auto",
    "client.local-epochs": 1,
    "client.batch-size": 64,
    "client.learning-rate": 0.5,
}
PRIVACY: Mapping[str, dict[str, Any]] = {"plain": PLAIN, "dp-sgd": PRIVATE}
SETTINGS: Mapping[str, dict[str, Any]] = {
    "digits": {"num-rounds": 10},
    "mnist": {"num-rounds": 3, "client.local-epochs": 1, "client.batch-size": 32},
}
COMMON = {"task.model": "mlp", "evaluation.federated": "off", "tensorboard": False, "report": False}
SECONDS = 10.0
"""Seconds of a run in the first estimate."""


class Cell(NamedTuple):
    """One run."""

    task: str
    privacy: str
    framework: str
    seed: int


def mlp(task: str) -> "nn.Module":
    """Return a network with one hidden layer, which starts as that of Keras does."""
    from torch import nn

    inputs, hidden = HIDDEN[task]
    found = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    for layer in (found[1], found[3]):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return found


class TorchDigits(Digits):
    """Digits with its network `mlp` in PyTorch."""

    models = ("mlp",)

    def build(self) -> Any:
        """Return the network."""
        return mlp("digits")


class TorchMnist(Mnist):
    """MNIST with its network `mlp` in PyTorch."""

    models = ("mlp",)

    def build(self) -> Any:
        """Return the network."""
        return mlp("mnist")


def name_tasks(folder: Path) -> None:
    """Make this script's tasks known by entry points, as an installed package does.

    Args:
        folder: for the package's metadata, in which Python looks for entry points until this process ends.
    """
    facts = folder / "frameworks-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: frameworks\nVersion: 0\n")
    points = [
        f"{name}-torch = {__name__}:{kind.__name__}" for name, kind in (("digits", TorchDigits), ("mnist", TorchMnist))
    ]
    (facts / "entry_points.txt").write_text("\n".join(["[cloister.tasks]", *points]) + "\n")
    sys.path.append(str(folder))


def accuracy(cell: Cell, data: str) -> float:
    """Train by the settings of a cell, and return the accuracy on the held-out part after the last round."""
    task, privacy, framework, seed = cell
    settings = PRIVACY[privacy] | SETTINGS[task] if privacy == "plain" else SETTINGS[task] | PRIVACY[privacy]
    name = f"{task}-torch" if framework == "torch" else task
    place = {"task.data-path": data_at(data, "mnist")} if task == "mnist" else {}
    with tempfile.TemporaryDirectory() as scratch:
        given = COMMON | settings | place | {"task.name": name, "seed": seed, "output-dir": scratch}
        outcome = simulated(given, CLIENTS)
    return float(outcome.rounds[-1].central["accuracy"])


def results(place: Path) -> dict[Cell, float]:
    """Return the accuracies of the cells in a file; none if there is no file."""
    lines = map(json.loads, place.read_text().splitlines()) if place.exists() else ()
    return {Cell(*(each[name] for name in Cell._fields)): each["accuracy"] for each in lines}


def row(task: str, privacy: str, found: Callable[[str], list[float]]) -> list[str]:
    """Return the cells of a table's row.

    Args:
        task, privacy: of the row.
        found: returns the accuracies of a framework, one for each seed.
    """
    pair = [found(framework) for framework in FRAMEWORKS]
    if min(map(len, pair)) < 2:
        return [task, privacy, str(min(map(len, pair))), NONE, NONE, NONE, NONE]
    means, errors = ([f(each) for each in pair] for f in (statistics.mean, error_of))
    apart = means[1] - means[0]
    both = (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    shown = [f"{mean:.4f} ± {error:.4f}" for mean, error in zip(means, errors, strict=True)]
    return [task, privacy, str(min(map(len, pair))), *shown, f"{apart:+.4f}", f"{both:.4f}"]


def error_of(values: list[float]) -> float:
    """Return the standard error of a mean."""
    return statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    """Run the cells that are left; then write the table of all that is there."""
    parser = with_results(__doc__, ["mnist"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--privacy", nargs="*", choices=list(PRIVACY), default=list(PRIVACY))
    arguments = parser.parse_args()
    folder = arguments.results / "frameworks"
    folder.mkdir(parents=True, exist_ok=True)
    done = {cell: own for task in SETTINGS for cell, own in results(folder / f"{task}.jsonl").items()}
    # A framework after the other: each is imported once, and PyTorch before TensorFlow.
    cells = map(Cell._make, product(arguments.tasks, arguments.privacy, FRAMEWORKS[::-1], range(arguments.seeds)))
    left = sorted((cell for cell in cells if cell not in done), key=lambda cell: FRAMEWORKS[::-1].index(cell.framework))
    with tempfile.TemporaryDirectory() as names:
        name_tasks(Path(names))
        for cell in in_turn(left, SECONDS):
            done[cell] = accuracy(cell, arguments.data)
            with (folder / f"{cell.task}.jsonl").open("a") as file:
                file.write(json.dumps({**cell._asdict(), "accuracy": done[cell]}) + "\n")

    def found(task: str, privacy: str, framework: str) -> list[float]:
        wanted = (Cell(task, privacy, framework, seed) for seed in range(arguments.seeds))
        return [done[cell] for cell in wanted if cell in done]

    write_table(
        folder / "table.md",
        "Accuracy on the held-out part, mean over seeds and its standard error; `apart` is PyTorch's minus Keras'.",
        ("task", "privacy", "seeds", "Keras", "PyTorch", "apart", "standard error of it"),
        [row(task, privacy, lambda f, t=task, p=privacy: found(t, p, f)) for task in SETTINGS for privacy in PRIVACY],
    )


if __name__ == "__main__":
    main()
