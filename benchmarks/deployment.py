"""A deployment of four idle nodes as processes: seconds a round, start-up and memory, with cold and with warm clients.

python benchmarks/deployment.py [rounds] [case]

Each way is run twice, in turns. Seconds depend on what else the machine does; processor seconds hardly do.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from common import machine, table

from cloister.client.keys import make_key
from cloister.deploy.provision.kits import provision

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtimes"))
from processes import Processes, Setting

NODES = 4
COLD, WARM, WARM_LIGHT = ("flower-supernode",), ("cloister", "warm-node"), ("cloister", "warm-node", "--no-keras")
CASES = {
    "Keras, cold": ("mlp", COLD),
    "Keras, warm": ("mlp", WARM),
    "NumPy, cold": ("softmax", COLD),
    "NumPy, warm": ("softmax", WARM_LIGHT),
    "NumPy, warm, secure aggregation": ("softmax", WARM_LIGHT),
    "Keras, warm, secure aggregation": ("mlp", WARM),
    "NumPy, cold, secure aggregation": ("softmax", COLD),
    "NumPy, warm, steps of DP-SGD": ("softmax", WARM_LIGHT),
}
SHARED = {
    "secure-aggregation.enabled": True, "secure-aggregation.threshold": 3, "secure-aggregation.colluding": 1,
}  # fmt: skip
SECURE = {
    "secure aggregation": {"privacy.server": "global-dp", "privacy.noise-multiplier": 1.0, **SHARED},
    "steps of DP-SGD": {
        "privacy.server": "none", "privacy.client": "dp-sgd", "privacy.dp-sgd-sampling-rate": 0.2, **SHARED,
    },
}  # fmt: skip
"""Settings of the cases whose names end so."""
SECONDS = 900
TICKS = os.sysconf("SC_CLK_TCK")


def measure(
    model: str, program: tuple[str, ...], rounds: int, folder: Path, secure: Mapping[str, Setting]
) -> dict[str, list[float]]:
    """Start everything, train, and look at what it took."""
    settings = {
        "task.model": model, "num-rounds": rounds, "strategy.min-nodes": NODES, "evaluation.central": False,
        "evaluation.federated": "off", "output-dir": str(folder), "run-name": "run", **secure,
    }  # fmt: skip
    with Processes(folder / "processes") as processes:
        processes.superlink()
        began = time.perf_counter()
        start_nodes(processes, folder, NODES, program, bool(secure))
        started = time.perf_counter() - began
        nodes = [processes.services[f"supernode-{number}"].pid for number in range(NODES)]
        processor = sum(map(processor_seconds, nodes))
        with watched(nodes[0]) as memory, arrivals(folder / "run" / "rounds.jsonl") as arrived:
            processes.flwr_run(settings, seconds=SECONDS)
        processor = sum(map(processor_seconds, nodes)) - processor
    # A run with secret draws writes no times down, so that this process takes them.
    seconds = [end - begin for begin, end in pairwise(arrived)]
    assert len(seconds) == rounds
    return {
        "first": seconds[:1], "later": seconds[1:], "processor": [processor / rounds], "start": [started],
        "idle": [memory[0]], "peak": [max(memory)],
    }  # fmt: skip


def start_nodes(processes: Processes, folder: Path, nodes: int, program: tuple[str, ...], secure: bool) -> None:
    """Start nodes, and wait until all of them are ready.

    Args:
        processes: with a SuperLink.
        folder: for keys and ledgers.
        nodes: how many.
        program: that each runs.
        secure: whether each has a name and a key of its own on a roster.
    """
    own = identities(folder, nodes) if secure else [{}] * nodes
    configs = [{"partition-id": number, "num-partitions": nodes, **own[number]} for number in range(nodes)]
    processes.supernodes(configs, *program)
    ready = "warm:" if program != COLD else "SuperNode ID"
    processes.wait(lambda: all(ready in processes.log(f"supernode-{n}") for n in range(nodes)), SECONDS, "nodes")


def identities(folder: Path, nodes: int) -> list[Mapping[str, Setting]]:
    """Who the nodes are in secure aggregations, and where each keeps its secrets."""
    sites = "".join(f'[[sites]]\nname = "{n}"\npartition-id = {n}\nnum-partitions = {nodes}\n' for n in range(nodes))
    description = folder / "federation.toml"
    description.write_text(f'name = "bench"\n[server]\naddresses = ["localhost"]\n{sites}')
    kits = provision(description, folder / "kits", "").folder / "sites"
    for number in range(nodes):
        (state := kits / str(number) / "state").mkdir()
        make_key(state)
        (state / "signing.pub").rename(folder / "kits" / "roster" / "keys" / f"{number}.pub")
    provision(description, folder / "kits", "")
    files = {"signing-key": "state/signing.key", "roster": "roster.signed", "roster-key": "roster.pub"}
    found = []
    for number in range(nodes):
        own: dict[str, Setting] = {key: str(kits / str(number) / name) for key, name in files.items()}
        # The folder of a benchmark is removed at its end; this one, which is empty then, is left.
        own["secure-state"] = tempfile.mkdtemp(prefix="cloister-", dir="/dev/shm")
        own["ledger-dir"] = str(folder / f"ledger-{number}")
        found.append(own)
    return found


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            children.setdefault(_stat(int(entry.name))[1], []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def _stat(pid: int) -> list[int]:
    """Numbers of /proc/PID/stat after the state: [1] is the parent, as here state counts as 0."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [0, *map(int, words[1:])]


def processor_seconds(pid: int) -> float:
    """Of a process, its descendants, and those descendants that have ended and been waited for."""
    total = 0
    for member in family(pid):
        with suppress(OSError):
            total += sum(_stat(member)[11:15])
    return total / TICKS


def shared_memory(pid: int) -> float:
    """Proportional resident MB of a process and its descendants: what they share is counted once."""
    total = 0
    for member in family(pid):
        with suppress(OSError):
            text = Path(f"/proc/{member}/smaps_rollup").read_text()
            total += int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
    return total / 1e3


@contextmanager
def watched(pid: int) -> Iterator[list[float]]:
    """The memory of a node, twice a second, the first value before anything is done."""
    seen = [shared_memory(pid)]
    with repeated(0.5, lambda: seen.append(shared_memory(pid))):
        yield seen


@contextmanager
def arrivals(lines: Path) -> Iterator[list[float]]:
    """When each line of a file came, looked at 50 times a second."""
    seen: list[float] = []

    def look() -> None:
        with suppress(OSError):
            seen.extend([time.perf_counter()] * (lines.read_bytes().count(b"\n") - len(seen)))

    with repeated(0.02, look):
        yield seen


@contextmanager
def repeated(seconds: float, look: Callable[[], None]) -> Iterator[None]:
    """Call a function on another thread, with a pause before each call, while the block runs."""
    done = threading.Event()

    def loop() -> None:
        while not done.wait(seconds):
            look()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def main() -> None:
    """Print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    cases = {name: case for name, case in CASES.items() if name in (sys.argv[2:] or CASES)}
    machine()
    results: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    for turn in range(2):
        for name, (model, program) in cases.items():
            with tempfile.TemporaryDirectory(prefix="cloister-") as folder:
                secure = next((own for end, own in SECURE.items() if name.endswith(end)), {})
                for key, values in measure(model, program, rounds, Path(folder), secure).items():
                    results[name].setdefault(key, []).extend(values)
            print(f"turn {turn}: {name} done, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    lines = []
    for name, found in results.items():
        later = found["later"]
        middle = {key: statistics.median(values) for key, values in found.items()}
        lines.append([
            name, f"{middle['start']:.0f}", f"{middle['first']:.1f}",
            f"{middle['later']:.1f} ({min(later):.1f} to {max(later):.1f})", f"{middle['processor']:.1f}",
            f"{middle['idle']:.0f}", f"{middle['peak']:.0f}",
        ])  # fmt: skip
    head = ["clients", "start, s", "first round, s", "later rounds, s", "processor s a round", "idle MB", "peak MB"]
    table(head, lines)
    print(f"{NODES} nodes; memory is one node's, proportional; processor seconds are all nodes' without the server.")


if __name__ == "__main__":
    main()
