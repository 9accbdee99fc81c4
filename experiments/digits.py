"""Digits, four i.i.d. clients, FedAvg, ten rounds: no privacy, metric-aware noise, global DP with the same z and C.

python experiments/digits.py [--seeds 5] [--output-dir runs]
"""

import argparse
import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate

PRIVACY = ("none", "metric", "global-dp")
RESULTS = Path(__file__).parent / "results"


def accuracy(server: str, seed: int, output_dir: str) -> float:
    """Accuracy on the held-out part after the last round."""
    silent = ConsoleReporter(10, Console(quiet=True))
    outcome = simulate({"privacy.server": server, "seed": seed, "output-dir": output_dir}, narrator=silent)
    return outcome.rounds[-1].central["accuracy"]


def main() -> None:
    """Run every mode with every seed; print a table and write the numbers down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output-dir", default="runs")
    arguments = parser.parse_args()
    found = {server: [accuracy(server, s, arguments.output_dir) for s in range(arguments.seeds)] for server in PRIVACY}
    table = Table("privacy.server", "mean accuracy", "least", "most", title=f"digits, {arguments.seeds} seeds")
    for server, values in found.items():
        table.add_row(server, *(f"{value:.4f}" for value in (statistics.mean(values), min(values), max(values))))
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "digits.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
