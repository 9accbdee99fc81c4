"""A deployment whose processes are killed at random: what comes back, how soon, and whether anything is lost.

python benchmarks/kills.py [kills of each kind] [minutes] [seed]

Processes on this machine, each as `start.sh` starts it; a node that was killed is kept out for a minute. This script is
their supervisor: it starts again what it killed, after a second, and what ended by itself, and does nothing else.
Runs without noise (only the server's processes are killed) have to end with the model of a run without a kill,
and runs with noise (everything is killed) with every release in the ledgers. It ends with an error where one does not.
"""

import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from common import machine, table

from cloister.privacy.accounting.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtimes"))
from open_server import CONNECTION, OpenServer, open_server
from processes import SUPERLINK, Setting, flower_line, free_ports

NODES = 2
ROUNDS = 12
PATIENCE = 240
"""Seconds within which a run has to go on after a kill."""
PLAIN: dict[str, Setting] = {
    "task.name": "digits", "task.model": "softmax", "strategy.name": "fedadam", "strategy.min-nodes": NODES,
    "strategy.fraction-evaluate": 0.0, "privacy.server": "none", "num-rounds": ROUNDS, "seed": 1, "tensorboard": False,
    "report": False, "round-timeout": 60.0, "node-timeout": 300.0,
}  # fmt: skip
PRIVATE: dict[str, Setting] = PLAIN | {
    "privacy.server": "global-dp", "privacy.noise-multiplier": 4.0, "round-timeout": 20.0, "late-timeout": 10.0,
}  # fmt: skip
SERVERS = ("server app", "superexec", "SuperLink")
"""What can be killed without the loss of a reply."""
KINDS = (*SERVERS, "node", "client app")


class Federation:
    """The processes, and how to kill each kind of them.

    Args:
        server: which runs.
        folder: for everything that nodes write.
        rng: chooses what is killed, and when.
    """

    def __init__(self, server: OpenServer, folder: Path, rng: random.Random) -> None:
        """No node is started yet."""
        self.server, self.folder, self.rng = server, folder, rng
        self.processes = server.processes
        self.revived: list[str] = []

    def begin(self, name: str, settings: dict[str, Setting]) -> Path:
        """Have a run begin, and tell its directory."""
        self.server.begin(settings | {"output-dir": str(self.folder), "run-name": name}, PATIENCE)
        return self.folder / name

    def trains(self) -> bool:
        """Whether there is a process of a server app."""
        return bool(self.processes.pids("serverapp.py"))

    def start(self) -> None:
        """Start the nodes."""
        link = ["--superlink", self.server.address, "--root-certificates", self.server.authority]
        for number, (port, key) in enumerate(zip(free_ports(NODES), self.server.let_in(NODES), strict=True)):
            config = ["--port", str(port), "--node-config", flower_line(self._node(number))]
            config += ["--auth-supernode-private-key", str(key)]
            self.processes.start(f"supernode-{number}", "cloister", "warm-node", "--no-keras", *link, *config)

    def kill(self, kind: str) -> bool:
        """Kill one process, and start again what has no supervisor; False if there was none at this moment."""
        if kind == "server app":
            return self._killed(self.processes.pids("serverapp.py"))
        node = f"supernode-{self.rng.randrange(NODES)}"
        if kind == "client app":
            return self._killed(self._clients(self.processes.services[node].pid))
        name = {"superexec": "superexec", "SuperLink": SUPERLINK, "node": node}[kind]
        service = self.processes.services.pop(name)
        if kind == "node":
            os.killpg(service.pid, signal.SIGKILL)  # with its clients
        else:
            service.kill()
        service.wait()
        time.sleep(1)
        self.processes.restart(name)
        return True

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait, and start again meanwhile what has ended by itself, as a supervisor does.

        Args:
            done: is asked again and again.
            seconds: that it may take.
            what: is waited for.

        Raises:
            AssertionError: it took longer.
        """
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"no {what} after {seconds:.0f} s"
            for name, service in list(self.processes.services.items()):
                if service.poll() is not None:
                    self.revived.append(name)
                    self.processes.restart(name)
            time.sleep(0.1)

    def _node(self, number: int) -> dict[str, Setting]:
        return {"partition-id": number, "num-partitions": NODES, "ledger-dir": str(self.ledgers(number))}

    def ledgers(self, number: int) -> Path:
        """Where a node keeps its ledger."""
        return self.folder / f"node-{number}"

    @staticmethod
    def _killed(pids: list[int]) -> bool:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return bool(pids)

    @staticmethod
    def _clients(node: int) -> list[int]:
        """The processes that work on a message of a node: its children but for the SuperNode."""
        found = []
        for status in Path("/proc").glob("[0-9]*/status"):
            with suppress(OSError):
                command = (status.parent / "cmdline").read_text()
                if f"\nPPid:\t{node}\n" in status.read_text() and "warm.supernode" not in command:
                    found.append(int(status.parent.name))
        return found


def finished(directory: Path) -> list[dict[str, Any]]:
    """The finished rounds, without the one before the first."""
    path = directory / "rounds.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in whole][1:]


def ended(directory: Path) -> str:
    """How a run ended; empty while it goes on."""
    with suppress(OSError, ValueError):
        return str(json.loads((directory / "privacy.json").read_text()).get("ended", {}).get("how", ""))
    return ""


class Killable(Protocol):
    """A federation, as far as it is known to who kills parts of it."""

    rng: random.Random
    revived: list[str]

    def begin(self, name: str, settings: dict[str, Setting]) -> Path:
        """Have a run begin, and tell its directory."""

    def trains(self) -> bool:
        """Whether there is a process of a server app."""

    def kill(self, kind: str) -> bool:
        """Kill one of a kind; False if there was none at this moment."""

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait; an AssertionError says what for, if it took longer."""

    def ledgers(self, number: int) -> Path:
        """Where a node keeps its ledger."""


class Harassed:
    """One run, and what was killed in it.

    Args:
        federation: that runs it.
        name: of the run.
        wanted: kinds, with how many kills are missing of each; counted down.
    """

    def __init__(self, federation: Killable, name: str, wanted: dict[str, int]) -> None:
        """Nothing is begun yet."""
        self.federation, self.name, self.wanted = federation, name, wanted
        self.seconds: dict[str, list[float]] = {}

    def run(self, settings: dict[str, Setting], until: float) -> None:
        """Begin the run, kill until it has ended, or until the time is over, and wait for its end."""
        self.directory = self.federation.begin(self.name, settings)
        self.federation.wait((self.directory / "config.json").exists, PATIENCE, "beginning of the run")
        while not ended(self.directory) and len(finished(self.directory)) < ROUNDS and time.monotonic() < until:
            # The median: a round in which something was killed took long, and the next one will not.
            usual = statistics.median([1.0, *(line["seconds"]["train"] for line in finished(self.directory))])
            time.sleep(self.federation.rng.uniform(0, max(1.0, usual)))
            self._kill()
        self.federation.wait(lambda: bool(ended(self.directory)), ROUNDS * PATIENCE, "end of the run")
        self.federation.wait(lambda: not self.federation.trains(), PATIENCE, "end of its process")

    def _kill(self) -> None:
        kinds = [kind for kind, missing in self.wanted.items() if missing]
        if not kinds:
            return
        kind = max(kinds, key=lambda kind: (self.wanted[kind], self.federation.rng.random()))
        before, began = len(finished(self.directory)), time.monotonic()
        if ended(self.directory) or not self._within(kind):
            return
        goal = before + 1
        self.federation.wait(lambda: self._is_at(goal), PATIENCE, f"round after {kind} was killed")
        self.wanted[kind] -= 1
        self.seconds.setdefault(kind, []).append(time.monotonic() - began)
        print(f"{self.name}, round {goal}: {kind}, {self.seconds[kind][-1]:.1f} s", flush=True)

    def _is_at(self, goal: int) -> bool:
        return len(finished(self.directory)) >= goal or bool(ended(self.directory))

    def _within(self, kind: str) -> bool:
        """Kill as soon as there is such a process: a client lives for a second only."""
        deadline = time.monotonic() + 30
        while not (done := self.federation.kill(kind)) and time.monotonic() < deadline and not ended(self.directory):
            time.sleep(0.02)
        return done


def complete(directory: Path, whole: Path | None) -> str:
    """Check a run without noise.

    Args:
        directory: of the run.
        whole: of one without a kill; None: this is that one.

    Returns:
        `equal`, or why the models cannot be compared.

    Raises:
        AssertionError: it did not end as it was asked to, or its model is another one.
    """
    lines = finished(directory)
    assert ended(directory) == "as-asked", f"{directory.name} ended: {ended(directory)}"
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1)), "a round is missing or twice"
    if whole is None or any(line["measured"]["accepted"] < NODES for line in lines):
        return "a reply was lost"
    with np.load(directory / "model.npz") as one, np.load(whole / "model.npz") as other:
        assert all(np.array_equal(one[name], other[name]) for name in other), f"{directory.name}: another model"
    return "equal"


def recorded(federation: Killable, directory: Path, seen: set[str]) -> int:
    """Check the ledgers after a run with noise.

    Args:
        federation: that ran it.
        directory: of the run.
        seen: releases of runs before, in the nodes' ledgers; those of this one are added.

    Returns:
        How many releases of the run the server's ledger holds.

    Raises:
        AssertionError: a release is missing.
    """
    complete(directory, None)
    kept = Ledger(directory / "ledger.jsonl").entries  # those of earlier runs are among them
    releases = [entry.round for entry in kept if entry.run == directory.name]
    missing = set(range(1, ROUNDS + 1)) - set(releases)
    assert not missing, f"releases of rounds {sorted(missing)} are missing in the server's ledger"
    entries = [
        entry
        for number in range(NODES)
        for path in federation.ledgers(number).glob("*.jsonl")
        for entry in Ledger(path).entries
        if entry.release not in seen
    ]
    seen.update(entry.release for entry in entries)
    for line in finished(directory):
        charged = sum(entry.round == line["round"] for entry in entries)
        assert charged >= line["measured"]["accepted"], f"round {line['round']} is missing in a node's ledger"
    return len(releases)


class Trial:
    """Runs of one federation, in which everything is killed so many times.

    Args:
        federation: that runs.
        kinds: of what is killed.
        kills: of each kind.
        minutes: after which nothing more is killed.
    """

    def __init__(self, federation: Killable, kinds: Sequence[str], kills: int, minutes: float) -> None:
        """Nothing is begun yet."""
        self.federation, self.until = federation, time.monotonic() + 60 * minutes
        self.wanted = dict.fromkeys(kinds, kills)
        self.seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        self.models: list[str] = []
        self.private = self.releases = 0
        self.seen: set[str] = set()

    def run(self) -> None:
        """A run that nobody disturbs, and then one after the other, every third without noise."""
        whole = Harassed(self.federation, "whole", {})
        whole.run(PLAIN, 0)
        assert complete(whole.directory, None)
        for number in itertools.count():
            if not any(self.wanted.values()) or time.monotonic() >= self.until:
                return
            plain = number % 3 == 0 and any(self.wanted.get(kind) for kind in SERVERS)
            self._one(f"run-{number}", whole.directory if plain else None)
            self.show()

    def _one(self, name: str, whole: Path | None) -> None:
        """A run without noise, to be compared, or one with noise."""
        ours = {kind: missing for kind, missing in self.wanted.items() if whole is None or kind in SERVERS}
        run = Harassed(self.federation, name, ours)
        run.run(PLAIN if whole else PRIVATE, self.until)
        self.wanted |= ours
        for kind, times in run.seconds.items():
            self.seconds[kind] += times
        if whole:
            self.models.append(complete(run.directory, whole))
        else:
            self.private += 1
            self.releases += recorded(self.federation, run.directory, self.seen)

    def show(self) -> None:
        """Print what was found so far."""
        head = ["killed", "kills", "until the next round was done, s: median", "longest"]
        times = {kind: times for kind, times in self.seconds.items() if times}
        table(head, [[kind, len(t), f"{statistics.median(t):.1f}", f"{max(t):.1f}"] for kind, t in times.items()])
        equal = self.models.count("equal")
        print(
            f"{len(self.models)} runs without noise: {equal} with the model of the undisturbed run,"
            f" {len(self.models) - equal} not compared, for a reply was lost\n"
            f"{self.private} runs with noise of {ROUNDS} rounds: {self.releases} releases, all in the ledgers\n"
            f"ended by themselves and started again: {self.federation.revived or 'none'}",
            flush=True,
        )


@contextmanager
def kept_if_it_fails() -> Iterator[Path]:
    """A new folder, which is removed after the block; where the block fails it is kept, for the logs in it."""
    folder = Path(tempfile.mkdtemp(prefix="cloister-kills-"))
    try:
        yield folder
    except BaseException:
        print(f"the logs are kept in {folder}", flush=True)
        raise
    shutil.rmtree(folder)


def main(kills: int = 50, minutes: float = 600, seed: int = 0) -> None:
    """Kill until there are enough kills, or the time is over."""
    machine()
    with (
        kept_if_it_fails() as folder,
        open_server(folder, PATIENCE, "--resume", "1000", "--tasks", str(folder / "tasks")) as server,
    ):
        federation = Federation(server, folder, random.Random(seed))
        federation.start()
        Trial(federation, KINDS, kills, minutes).run()
        told = server.processes.told("flwr", "list", CONNECTION, "--format", "json")["runs"]
        assert {found["status"] for found in told} == {"finished:completed"}, "Flower counts a run as failed"


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((int, float, int), sys.argv[1:])))
