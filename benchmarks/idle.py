"""What idle nodes cost a SuperLink: processor seconds a second, for each way to look for messages.

python benchmarks/idle.py [nodes] [seconds]

The nodes live in one process, with an identity, a connection and heartbeats each, and poll by the code of
`cloister warm-node`, or as often as `flower-supernode`; the SuperLink is `cloister superlink`, with TLS and a database
on disk.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from common import machine, table
from deployment import processor_seconds

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtimes"))
from light_nodes import LightNodes, Polls, adaptive, as_flower, never, often
from open_server import open_server
from processes import SUPERLINK

CASES: dict[str, tuple[Polls, float]] = {
    "heartbeats alone": (never, 5),
    "cloister warm-node, in the long run": (adaptive, 70),  # pauses have grown to the slowest after 50 s
    "cloister warm-node, just after a message": (often, 5),
    "flower-supernode": (as_flower, 5),
}
SECONDS = 300


def idle(polls: Polls, settling: float, nodes: int, seconds: float, folder: Path) -> tuple[float, float]:
    """Looks for messages a second, of all nodes together, and processor seconds of the SuperLink a second."""
    with open_server(folder, SECONDS) as server:
        pid = server.processes.services[SUPERLINK].pid
        with LightNodes(server.address, server.let_in(nodes), server.authority, polls) as light:
            server.processes.wait(lambda: len(light.connected) == nodes, SECONDS, "nodes")
            time.sleep(settling)
            before, looks, began = processor_seconds(pid), light.looks, time.monotonic()
            time.sleep(seconds)
            took, looks, passed = processor_seconds(pid) - before, light.looks - looks, time.monotonic() - began
            assert not light.errors, light.errors
    return looks / passed, took / passed


def main() -> None:
    """Print the table."""
    nodes, seconds = [*map(int, sys.argv[1:]), *(100, 60)[len(sys.argv) - 1 :]]
    machine()
    lines = []
    for name, (polls, settling) in CASES.items():
        with tempfile.TemporaryDirectory(prefix="cloister-") as folder:
            looks, share = idle(polls, settling, nodes, seconds, Path(folder))
        lines.append([name, f"{looks:.0f}", f"{100 * share:.0f}"])
        print(f"{name} done, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    table([f"{nodes} idle nodes", "looks a second", "% of a core"], lines)


if __name__ == "__main__":
    main()
