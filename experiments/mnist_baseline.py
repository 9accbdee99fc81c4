"""The thesis' federated baseline on MNIST without privacy: MLP, 100 i.i.d. clients of 600, 10 a round, 10 epochs of
batches of 10 at rate 0.03. Its 600 rounds end at 98.30 %; this runs 20 and writes the accuracy curve down.

    python experiments/mnist_baseline.py --data FOLDER_OF_MNIST_NPZ [--rounds 20] [--output-dir runs]
"""

import argparse
import json
from pathlib import Path

from cloister.local.simulation import simulate

CLIENTS = 100
SETTINGS = {
    "task.name": "mnist",
    "task.model": "mlp",
    "task.partition": "iid",
    "task.test-fraction": 0.0,
    "strategy.fraction-train": 0.1,
    "client.local-epochs": 10,
    "client.batch-size": 10,
    "client.learning-rate": 0.03,
    "privacy.server": "none",
    "seed": 1,
}
RESULT = Path(__file__).parent / "results" / "mnist_baseline.json"


def main() -> None:
    """Run the baseline; print its rounds and write the curve down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output-dir", default="runs")
    arguments = parser.parse_args()
    given = {"task.data-path": arguments.data, "num-rounds": arguments.rounds, "output-dir": arguments.output_dir}
    outcome = simulate(SETTINGS | given, CLIENTS)
    curve = [{"round": done.number, **done.central} for done in outcome.rounds]
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"clients": CLIENTS, "settings": SETTINGS, "curve": curve}, indent=2) + "\n")


if __name__ == "__main__":
    main()
