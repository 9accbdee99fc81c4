"""Rounds of many light nodes on one SuperLink: seconds, processor seconds of each side, requests, and the database.

python benchmarks/light.py [nodes] [rounds] [arrays]

The nodes train softmax regression on their parts of digits, in a model of so many arrays (2 to 65; by default 2). They
run the client app of a deployment and live in one process, this one (see `idle.py`). The SuperLink and its executor are
Cloister's, with TLS and a database on disk.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from common import machine, table
from deployment import processor_seconds
from many_arrays import ARRAYS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtimes"))
from light_nodes import LightNodes
from open_server import OpenServer, open_server
from processes import SUPERLINK, Setting

SECONDS = 1800


def settings(nodes: int, rounds: int, folder: Path) -> dict[str, Setting]:
    """Of a run in which every node trains in every round."""
    return {
        "task.name": "many-arrays", "task.model": "softmax", "task.partition": "iid", "num-rounds": rounds,
        "strategy.min-nodes": nodes, "evaluation.federated": "off", "privacy.server": "none", "tensorboard": False,
        "round-timeout": float(SECONDS), "node-timeout": float(SECONDS), "output-dir": str(folder), "run-name": "run",
    }  # fmt: skip


def measure(nodes: int, rounds: int, folder: Path) -> list[str]:
    """Start everything, train, and look at what it took: a line of the table."""
    with (
        open_server(folder, SECONDS) as server,
        LightNodes(server.address, server.let_in(nodes), server.authority) as light,
    ):
        server.processes.wait(lambda: len(light.connected) == nodes or bool(light.errors), SECONDS, "nodes")
        before = busy(server)
        server.train(settings(nodes, rounds, folder), SECONDS)
        took = [now - then for now, then in zip(busy(server), before, strict=True)]
        assert not light.errors, light.errors
        size = server.database.stat().st_size / 1e6
    lines = [json.loads(line) for line in (folder / "run" / "rounds.jsonl").read_text().splitlines()][1:]
    assert [line["measured"]["accepted"] for line in lines] == [nodes] * rounds
    seconds = [line["seconds"]["train"] for line in lines]
    later = seconds[1:] or seconds
    spread = f"{statistics.median(later):.1f} ({min(later):.1f} to {max(later):.1f})"
    each = [f"{spent / rounds:.1f}" for spent in took]
    return [str(nodes), f"{seconds[0]:.1f}", spread, *each, f"{size:.0f}"]


def busy(server: OpenServer) -> list[float]:
    """Processor seconds so far of the SuperLink, of the executor with the server's app, and of the nodes."""
    services = server.processes.services
    own = os.times()
    return [*(processor_seconds(services[name].pid) for name in (SUPERLINK, "superexec")), own.user + own.system]


def announce(folder: Path, arrays: int) -> None:
    """Have this process and those that it starts find the task with so many arrays, as a package that is installed."""
    package = folder / "many_arrays-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: many-arrays\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[cloister.tasks]\nmany-arrays = many_arrays:ManyArrays\n")
    places = [str(folder), str(Path(__file__).parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
    os.environ[ARRAYS] = str(arrays)
    sys.path.insert(0, str(folder))


def main() -> None:
    """Print the table."""
    nodes, rounds, arrays = [*map(int, sys.argv[1:]), *(100, 4, 2)[len(sys.argv) - 1 :]]
    machine()
    with tempfile.TemporaryDirectory(prefix="cloister-") as folder:
        announce(Path(folder), arrays)
        line = measure(nodes, rounds, Path(folder))
    head = ["nodes", "first round, s", "later rounds, s"]
    table([*head, "SuperLink, CPU s a round", "server app, CPU s", "all nodes, CPU s", "database, MB"], [line])
    print(f"load at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
