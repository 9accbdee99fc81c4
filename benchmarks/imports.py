"""What starting costs: seconds and resident memory of an import, and of a whole run of one round, in fresh processes.

python benchmarks/imports.py
"""

import statistics
import tempfile

from common import in_subprocess, machine, table

IMPORT = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
peak = 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
loaded = sorted({{"tensorflow", "keras", "torch", "ray", "scipy"}} & set(sys.modules))
print()
print(json.dumps([seconds, peak, loaded]))
"""
RUN = """
from cloister.simulation.simulate import simulate
simulate({{"num-rounds": 1, "task.model": "softmax", "tensorboard": True, "output-dir": {folder!r}}})
"""
CASES = {
    "numpy": "import numpy",
    "flwr.serverapp + flwr.clientapp": "import flwr.serverapp, flwr.clientapp",
    "cloister.server.app": "import cloister.server.app",
    "cloister.client.app": "import cloister.client.app",
    "server and client": "import cloister.server.app, cloister.client.app, cloister.server.run",
    "simulate(), 1 round of digits": "",
}
REPEATS = 5


def measure(statements: dict[str, str]) -> dict[str, list[list]]:
    """Seconds, peak resident bytes and heavy modules of each statement, run in turns."""
    results: dict[str, list[list]] = {name: [] for name in statements}
    for turn in range(REPEATS + 1):
        for name, statement in statements.items():
            result = in_subprocess(IMPORT.format(statement=statement))
            if turn:
                results[name].append(result)
    return results


def main() -> None:
    """Print the table."""
    machine()
    with tempfile.TemporaryDirectory() as folder:
        run = RUN.format(folder=folder)
        results = measure({name: statement or run for name, statement in CASES.items()})
    flower = statistics.median(result[0] for result in results["flwr.serverapp + flwr.clientapp"])
    lines = []
    for name, measured in results.items():
        seconds = statistics.median(result[0] for result in measured)
        memory = statistics.median(result[1] for result in measured)
        heavy = sorted({module for result in measured for module in result[2]})
        lines.append(
            [name, f"{seconds:.2f}", f"{seconds / flower:.2f}x", f"{memory / 1e6:.0f}", ", ".join(heavy) or "none"]
        )
    table(["imported or run", "s", "of Flower's", "peak RSS MB", "heavy modules"], lines)


if __name__ == "__main__":
    main()
