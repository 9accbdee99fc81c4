"""Digits, four i.i.d. clients, FedAvg, ten rounds: no privacy, metric-aware noise, global DP with the same z and C.

python experiments/digits.py [--seeds 5] [--results FOLDER] [--output-dir runs]
"""

import json
import statistics

from cells import in_turn, parser, simulated
from rich.console import Console
from rich.table import Table

PRIVACY = ("none", "metric", "global-dp")
SECONDS = 8.0
"""Seconds of a run in the first estimate, on two cores."""


def accuracy(server: str, seed: int, output_dir: str) -> float:
    """Accuracy on the held-out part after the last round."""
    outcome = simulated({"privacy.server": server, "seed": seed, "output-dir": output_dir})
    return outcome.rounds[-1].central["accuracy"]


def main() -> None:
    """Run what is missing of every mode with every seed; print a table and write the numbers down."""
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--output-dir", default="runs")
    arguments = options.parse_args()
    place = arguments.results / "digits.json"
    found: dict[str, list[float]] = {server: [] for server in PRIVACY}
    if place.exists():
        found |= json.loads(place.read_text())
    left = [(server, seed) for server in PRIVACY for seed in range(len(found[server]), arguments.seeds)]
    for server, seed in in_turn(left, SECONDS):
        found[server] = [*found[server], accuracy(server, seed, arguments.output_dir)]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(found, indent=2) + "\n")
    table = Table("privacy.server", "mean accuracy", "least", "most", "seeds", title="digits")
    for server, values in found.items():
        figures = (f"{value:.4f}" for value in (statistics.mean(values), min(values), max(values)))
        table.add_row(server, *figures, str(len(values)))
    Console().print(table)


if __name__ == "__main__":
    main()
