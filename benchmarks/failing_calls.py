"""Processes of `cloister run` whose disk fails: every nth write, fsync or rename of theirs returns an error.

python benchmarks/failing_calls.py

The errors are the kernel's own, injected by strace. A process that fails is resumed, at most so often under faults and
then without. What is checked is what the kills of `tests/faults/test_killed_processes.py` check. Needs `strace`.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import machine, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))
from killed_processes import PLAIN, PRIVATE, arguments
from test_killed_processes import assert_recorded, model

from cloister.server.reports.html.data import Facts
from cloister.server.reports.status import run_state

CALLS = {
    "write,pwrite64,writev": (5, 17, 53, 151, 401),
    "fsync,fdatasync": (2, 3, 7, 19, 41),
    "rename,renameat,renameat2": (2, 3, 5, 9, 17),
}
"""Which calls fail, and every which of them."""
ERRORS = ("EIO", "ENOSPC")
ENDS = ("as-asked", "budget")
"""How a run may end: lost releases are spent."""
LIVES = 4
"""Processes of a run whose calls fail."""


def process(folder: Path, settings: dict, *faults: str) -> int:
    """One process of a run, under what strace is told; its exit status."""
    program = [sys.executable, "-c", "from cloister.cli import app; app()", *arguments(folder, settings)]
    told = [part for fault in faults for part in ("-e", fault)]
    tracer = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", os.devnull, *told] if told else []
    return subprocess.run([*tracer, *program], capture_output=True, check=False, timeout=300).returncode


def is_over(folder: Path) -> bool:
    """Whether the run has ended in order."""
    path = folder / "r" / "privacy.json"
    return path.exists() and json.loads(path.read_text()).get("ended", {}).get("how") in ENDS


def played(folder: Path, settings: dict, calls: str, every: int, error: str) -> tuple[int, int]:
    """Let a run happen, and check it: how many processes it took, and how many of them failed."""
    folder.mkdir()
    fault = f"trace={calls}", f"inject={calls}:error={error}:when={every}+{every}"
    codes: list[int] = []
    while not is_over(folder):  # a process may fail after that, as it prints what it did
        assert len(codes) < LIVES + 3, f"{folder} does not come to its end"
        codes.append(process(folder, settings, *(fault if len(codes) < LIVES else ())))
    state = run_state(folder / "r")
    Facts.read(folder / "r")
    if settings is PRIVATE and state.how == "as-asked":
        assert_recorded(folder)
    if settings is PLAIN:
        whole = model(folder.parent / "whole")
        assert all((model(folder)[name] == array).all() for name, array in whole.items()), folder
    return len(codes), sum(code != 0 for code in codes)


def main() -> None:
    """Play all of them, and say what happened."""
    machine()
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(2) as pool:
        root = Path(place)
        (root / "whole").mkdir()
        assert process(root / "whole", PLAIN) == 0
        faults = [(calls, every) for calls, numbers in CALLS.items() for every in numbers]
        kinds = list(itertools.product(faults, (PLAIN, PRIVATE), ERRORS))
        done = pool.map(lambda it: played(root / str(it[0]), it[1][1], *it[1][0], it[1][2]), enumerate(kinds))
        rows = [
            [calls, every, error, "noise" if settings is PRIVATE else "no noise", *counts]
            for (((calls, every), settings, error), counts) in zip(kinds, done)
        ]
    table(["calls", "every", "error", "run", "processes", "failed"], rows)


if __name__ == "__main__":
    main()
