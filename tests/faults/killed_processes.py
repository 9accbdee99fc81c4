"""Runs in processes that are killed at random: `python killed_processes.py FOLDER KILLS SEED`.

Imports are paid for once: each process of a run is a child that was forked, does what `cloister run` does, and gets
SIGKILL from its parent at a random moment. What it left is resumed by the next one.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import cloister.privacy.accounting.accountants  # noqa: F401  once, before the children are forked
from cloister.cli import app as command
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian
from cloister.simulation.simulate import simulate

LONGEST = 0.5
"""Seconds that a process may live at most: a whole run takes about as long."""
PLAIN = {
    "task.name": "linear",
    "task.test-fraction": 0.0,
    "strategy.name": "fedadam",
    "privacy.server": "none",
    "num-rounds": 12,
    "tensorboard": False,
    "seed": 1,
}
PRIVATE = PLAIN | {
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 20.0,
    "privacy.max-epsilon": 8.0,
    "privacy.data-identity": "d",
}


def arguments(folder: Path, settings: dict) -> list[str]:
    """Of `cloister run`: to resume what there is, or to begin in the place of what had not even said what it is."""
    if (folder / "r" / "config.json").exists():
        return ["run", "--resume", str(folder / "r")]
    shutil.rmtree(folder / "r", ignore_errors=True)
    given = settings | {"output-dir": str(folder), "run-name": "r"}
    return ["run", *(part for key, value in given.items() for part in ("-c", f"{key}={json.dumps(value)}"))]


def child(folder: Path, settings: dict) -> int:
    """Start a process of the run."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            command(arguments(folder, settings), standalone_mode=False)
            status = 0
        finally:
            os._exit(status)
    return pid


def ended(folder: Path) -> bool:
    path = folder / "r" / "privacy.json"
    return path.exists() and json.loads(path.read_text()).get("ended", {}).get("how") == "as-asked"


def killed(folder: Path, settings: dict, kills: int, rng: random.Random) -> int:
    """Run to the end, and kill on the way, at most so many times.

    Returns:
        How many processes were killed.
    """
    folder.mkdir()
    done = 0
    while not ended(folder):
        pid = child(folder, settings)
        if done < kills:
            time.sleep(rng.random() * LONGEST)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) and status:
            raise SystemExit(f"a process in {folder} failed")
        done += os.WIFSIGNALED(status)
    return done


def main(folder: Path, kills: int, seed: int) -> None:
    rng, done, number = random.Random(seed), 0, 0
    DiscreteGaussian().integers(1)  # its tables and its kernel: once, like imports
    simulate(PLAIN | {"output-dir": str(folder / "whole"), "run-name": "r"})
    while done < kills:
        settings = PRIVATE if number % 2 else PLAIN
        done += killed(folder / str(number), settings, min(8, kills - done), rng)
        number += 1
    print(done)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
