"""A federation of four sites that has to go on by itself while a random fault befalls it every two minutes.

python benchmarks/endurance.py [minutes] [seconds between faults] [seed]

From provisioned kits, by their own `start.sh`: TLS, node keys, a policy and a ledger at every site. All are processes
of this machine, under a supervisor that starts again what has ended, after five seconds. Nothing else is done by hand,
but that a new run is begun if one has ended. Faults: something is killed; a site's disk is full; its clock is an hour
fast; its network is cut; the disk of the server's app is slow. All but the first last 30 s. Needs root (for a disk of
each site's own), `faketime` and `strace`.
"""

import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from common import machine, table
from deployment import shared_memory
from kills import ended, finished

from cloister.deploy.provision.kits import provision
from cloister.privacy.accounting.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtimes"))
from processes import REPOSITORY, Processes, Setting, flower_line, free_ports

SITES = ("site-1", "site-2", "site-3", "site-4")
HELD = 30
"""Seconds for which a fault lasts."""
AGAIN = 5
"""Seconds after which the supervisor starts again what has ended."""
PATIENCE = 600
"""Seconds within which all sites take part again after a fault."""
WAY = 0.02
"""Seconds that bytes are on their way between a site and the server."""
DISK = 64
"""Megabytes of a site's disk."""
POLICY = 'mechanisms = ["global-dp"]\nmin-server-noise-multiplier = 1.0\ntasks = ["digits"]\n'
SETTINGS: dict[str, Setting] = {
    "task.name": "digits", "task.model": "softmax", "strategy.min-nodes": len(SITES), "strategy.quorum": 2,
    "strategy.fraction-evaluate": 0.0, "privacy.server": "global-dp", "privacy.noise-multiplier": 20.0,
    "num-rounds": 100_000, "round-timeout": 60.0, "late-timeout": 40.0, "node-timeout": 600.0, "tensorboard": False,
    "keep-checkpoints": 3, "report": False,
}  # fmt: skip


class Line:
    """A site's line to the SuperLink, which can be cut: nothing gets through, and what was open is closed.

    Args:
        port: of the SuperLink.
    """

    def __init__(self, port: int) -> None:
        """It is open."""
        self.port, self.is_cut = port, False
        self.open: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"localhost:{self.listener.getsockname()[1]}"
        Thread(target=self._listen, daemon=True).start()

    def cut(self) -> None:
        """Close what is open, and answer nobody from now on."""
        self.is_cut = True
        for end in self.open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.open = []

    def _listen(self) -> None:
        while True:
            near, _ = self.listener.accept()
            try:
                if self.is_cut:
                    raise OSError("cut")
                far = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                near.close()
                continue
            self.open = [end for end in self.open if end.fileno() >= 0] + [near, far]
            for source, sink in ((near, far), (far, near)):
                Thread(target=self._carry, args=(source, sink), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                time.sleep(WAY)
                sink.sendall(part)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Endurable(ABC):
    """A federation of four sites that goes on by itself, and what can befall it.

    Args:
        folder: for kits and state.
        rng: chooses faults.

    Attributes:
        runs_folder: of the server's app.
        fast: begins a command whose clock is an hour fast.
    """

    runs_folder: Path
    fast: tuple[str, ...]

    def __init__(self, folder: Path, rng: random.Random) -> None:
        """Nothing is started yet."""
        self.folder, self.rng, self.runs = folder, rng, 0

    @abstractmethod
    def start(self) -> None:
        """Provision, start and register everything."""

    @abstractmethod
    def stop(self) -> None:
        """Give back what is not a process of this one."""

    @abstractmethod
    def supervise(self) -> None:
        """Start what is to run and does not."""

    @abstractmethod
    def memory(self) -> dict[str, float]:
        """Proportional MB of the server's side and of a site, with all that they have started."""

    @abstractmethod
    def disk(self) -> float:
        """Megabytes of all files that were written."""

    @abstractmethod
    def server_apps(self) -> list[int]:
        """The processes of the server's app."""

    @abstractmethod
    def kill(self, name: str) -> None:
        """End the processes of a service as a power cut would."""

    @abstractmethod
    def disk_of(self, site: str) -> Path:
        """Where a site's own disk is mounted."""

    @abstractmethod
    def set_clock(self, site: str, *said: str) -> None:
        """Start a site again, by a command that says what its clock is; without one the clock is right.

        A site keeps no such command when its clock is right again: processes that it forks may stand still in it.
        """

    @abstractmethod
    def cut(self, site: str) -> None:
        """Cut a site's network."""

    @abstractmethod
    def connect(self, site: str) -> None:
        """Give a site its network back."""

    @abstractmethod
    def _order_run(self, name: str) -> None:
        """Have the operator begin a run."""

    def wait(self, done: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Supervise until it is done.

        Args:
            done: is asked again and again.
            what: is waited for.
            seconds: that it may take.

        Raises:
            AssertionError: it took longer.
        """
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"no {what} after {seconds:.0f} s"
            self.supervise()
            time.sleep(0.5)

    def rest(self, seconds: float) -> None:
        """Supervise for some time, and begin a new run where there is none."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.supervise()
            if self.runs and ended(self.run()):
                self.begin()
            time.sleep(0.5)

    def run(self) -> Path:
        """The directory of the newest run."""
        return self.runs_folder / f"run-{self.runs}"

    def begin(self) -> None:
        """Have the operator begin a run, and wait for its first round."""
        self.runs += 1
        self._order_run(f"run-{self.runs}")
        self.wait(lambda: bool(finished(self.run())), "first round")

    def rounds(self) -> list[int]:
        """How many replies counted, for every round of every run."""
        runs = [self.runs_folder / f"run-{number}" for number in range(1, self.runs + 1)]
        return [line["measured"]["accepted"] for run in runs for line in finished(run)]

    @contextmanager
    def fault(self, kind: str) -> Iterator[str]:
        """Something that is wrong inside of the block; tells what exactly."""
        site = self.rng.choice(SITES)
        with {"kill": self._killed, "full disk": self._full, "clock": self._fast, "network": self._cut,
              "slow disk": self._slow}[kind](site) as what:  # fmt: skip
            yield what

    @contextmanager
    def _killed(self, site: str) -> Iterator[str]:
        name = self.rng.choice(("superlink", "superexec", "server app", site))
        if name == "server app":
            for pid in self.server_apps():
                os.kill(pid, signal.SIGKILL)
        else:
            self.kill(name)
        yield "a site" if name == site else name

    @contextmanager
    def _full(self, site: str) -> Iterator[str]:
        ballast = self.disk_of(site) / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        yield "a site"
        ballast.unlink()

    @contextmanager
    def _fast(self, site: str) -> Iterator[str]:
        self.set_clock(site, *self.fast)
        yield "a site"
        self.set_clock(site)

    @contextmanager
    def _cut(self, site: str) -> Iterator[str]:
        self.cut(site)
        yield "a site"
        self.connect(site)

    @contextmanager
    def _slow(self, _: str) -> Iterator[str]:
        calls = "fsync,fdatasync"
        pids = [option for pid in self.server_apps() for option in ("-p", str(pid))]
        injected = ["-e", f"trace={calls}", "-e", f"inject={calls}:delay_enter=300ms"]
        tracer = subprocess.Popen(["strace", "-f", "-o", os.devnull, *injected, *pids], stderr=subprocess.DEVNULL)
        yield "the server's app"
        tracer.send_signal(signal.SIGINT)
        tracer.wait()


class Sites(Endurable):
    """As processes: a server, four sites, and whoever supervises them.

    Args:
        folder: for kits and state.
        processes: runs them.
        rng: chooses faults.
    """

    fast = ("faketime", "-f", "+1h")

    def __init__(self, folder: Path, processes: Processes, rng: random.Random) -> None:
        """Nothing is started yet."""
        super().__init__(folder, rng)
        self.processes = processes
        self.commands: dict[str, list[str]] = {}
        self.begun: dict[str, float] = {}
        self.lines: dict[str, Line] = {}

    def start(self) -> None:
        """Provision, start and register everything."""
        self.port, *ports = free_ports(1 + len(SITES))
        tables = [
            f'[[sites]]\nname = "{name}"\npartition-id = {number}\nnum-partitions = {len(SITES)}\n'
            for number, name in enumerate(SITES)
        ]
        description = self.folder / "federation.toml"
        server = f'name = "trial"\n[server]\naddresses = ["localhost"]\nport = {self.port}\n'
        server += f'superlink = "localhost:{self.port}"\n'
        description.write_text(server + "".join(tables))
        self.kits = provision(description, self.folder / "kits", POLICY).folder
        self.runs_folder = self.kits / "server" / "state" / "runs"
        for part in ("superlink", "superexec"):
            given = ["CLOISTER_RESUME=100000", "CLOISTER_BIND=127.0.0.1"]
            self.commands[part] = ["env", *given, str(self.kits / "server" / "start.sh"), part]
        for name, port in zip(SITES, ports, strict=True):
            self.lines[name] = Line(self.port)
            mount(state := self.disk_of(name))
            link = f"CLOISTER_SUPERLINK={self.lines[name].address}"
            given = [link, f"CLOISTER_STATE={state}", f"CLOISTER_PORT={port}"]
            self.commands[name] = ["env", *given, str(self.kits / "sites" / name / "start.sh"), "--no-keras"]
        self.supervise()
        self.wait(self._answers, "SuperLink")
        self._order("register", str(self.kits / "operator" / "register.sh"))

    def stop(self) -> None:
        """Give the sites' disks back."""
        unmount(self.disk_of(name) for name in SITES)

    def _order(self, name: str, program: str, *arguments: str) -> None:
        """Run a command to its end, whatever becomes of the services meanwhile."""
        self.processes.start(name, program, *arguments)
        command = self.processes.services.pop(name)
        self.wait(lambda: command.poll() is not None, f"end of {name}")
        assert command.returncode == 0, self.processes.log(name)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=2):
            return True
        return False

    def supervise(self) -> None:
        """Start what is to run and does not."""
        for name, command in self.commands.items():
            service = self.processes.services.get(name)
            ran = service is not None and service.poll() is None
            if not ran and time.monotonic() - self.begun.get(name, -AGAIN) >= AGAIN:
                self.begun[name] = time.monotonic()
                self.processes.start(name, f"/usr/bin/{command[0]}", *command[1:])
            elif ran:
                self.begun[name] = time.monotonic()

    def _order_run(self, name: str) -> None:
        """Have the operator begin a run."""
        home = self.processes.folder / "homes" / "operator"
        shutil.copytree(self.kits / "operator", home, dirs_exist_ok=True)
        settings = flower_line(SETTINGS | {"run-name": name})
        self._order("operator", "flwr", "run", str(REPOSITORY), "trial", "--run-config", settings)

    def server_apps(self) -> list[int]:
        """The processes of the server's app."""
        return self.processes.pids("serverapp.py")

    def kill(self, name: str) -> None:
        """End the processes of a service as a power cut would."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes.services[name].pid, signal.SIGKILL)
        self.processes.services.pop(name).wait()
        self.begun[name] = time.monotonic()

    def disk_of(self, site: str) -> Path:
        """Where a site's own disk is mounted."""
        return self.folder / "disks" / site

    def set_clock(self, site: str, *said: str) -> None:
        """Start a site again, by a command that says what its clock is."""
        start = self.commands[site][self.commands[site].index("env") :]
        self.commands[site] = [*said, *start]
        if site in self.processes.services:
            self.kill(site)

    def cut(self, site: str) -> None:
        """Cut a site's network."""
        self.lines[site].cut()

    def connect(self, site: str) -> None:
        """Give a site its network back."""
        self.lines[site].is_cut = False

    def memory(self) -> dict[str, float]:
        """Proportional MB of the server's side and of a site, with all that they have started."""
        return by_side({name: service.pid for name, service in self.processes.services.items()})

    def disk(self) -> float:
        """Megabytes of all files that were written."""
        return size(self.folder)


KINDS = ("kill", "full disk", "clock", "network", "slow disk")


def mount(folder: Path, **options: int) -> None:
    """Make a small disk, of an owner if options name one."""
    folder.mkdir(parents=True)
    said = ",".join([f"size={DISK}m", *(f"{key}={value}" for key, value in options.items())])
    subprocess.run(["mount", "-t", "tmpfs", "-o", said, "tmpfs", str(folder)], check=True)


def unmount(folders: Iterable[Path]) -> None:
    """Give disks back."""
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def size(folder: Path) -> float:
    """Megabytes of the files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_blocks * 512 if path.is_file() and not path.is_symlink() else 0
    return total / 1e6


def by_side(pids: Mapping[str, int]) -> dict[str, float]:
    """Proportional MB of the server's side and of a site, from the process of each service."""
    found = {name: shared_memory(pid) for name, pid in pids.items()}
    of_sites = [found.pop(name) for name in SITES if name in found]
    return {"server": sum(found.values()), "a site": statistics.mean(of_sites) if of_sites else 0.0}


def endure(sites: Endurable, seconds: float, every: float) -> list[tuple[str, str, float]]:
    """Cause faults, and see how long each one is felt.

    Args:
        sites: that run.
        seconds: for which.
        every: seconds between the beginnings of two faults.

    Returns:
        For each fault its kind, what it befell, and the seconds from its end to a round in which all sites took part.
    """
    until, felt, kinds = time.monotonic() + seconds, [], list(KINDS)
    while (began := time.monotonic()) + every <= until:
        kind = kinds.pop(0)
        kinds = kinds or sites.rng.sample(KINDS, len(KINDS))
        with sites.fault(kind) as what:
            sites.rest(0 if kind == "kill" else HELD)
        felt.append((kind, what, recovery(sites)))
        print(f"{kind} of {what}: {felt[-1][2]:.0f} s", flush=True)
        sites.rest(max(0.0, began + every - time.monotonic()))
    return felt


def recovery(sites: Endurable) -> float:
    """Seconds from now to the end of a round in which all sites take part.

    Args:
        sites: that go on.

    Raises:
        AssertionError: there was none in time.
    """
    began, before = time.monotonic(), len(sites.rounds())
    while len(SITES) not in sites.rounds()[before:]:
        assert time.monotonic() < began + PATIENCE, f"no round with all sites after {PATIENCE} s"
        sites.rest(0.5)
    return time.monotonic() - began


def unrecorded(sites: Endurable) -> int:
    """How many rounds of all runs are not in the server's ledger."""
    missing = 0
    for path in (sites.runs_folder / f"run-{number}" for number in range(1, sites.runs + 1)):
        name = Path(json.loads((path / "ledger.json").read_text())["path"]).name
        ledger = Ledger(sites.runs_folder / "ledgers" / name)
        recorded = {entry.round for entry in ledger.entries if entry.run == path.name}
        missing += len({line["round"] for line in finished(path)} - recorded)
    return missing


def trial(sites: Endurable, minutes: float, every: float) -> None:
    """Print what was felt, and what it took.

    Args:
        sites: not yet started; they are stopped in the end.
        minutes: for which faults are caused.
        every: seconds between the beginnings of two faults.
    """
    try:
        sites.start()
        sites.begin()
        sites.wait(lambda: len(SITES) in sites.rounds(), "round with all sites")
        sites.rest(20)
        before, first, began = sites.memory(), sites.disk(), time.monotonic()
        felt = endure(sites, 60 * minutes, every)
        took, after, last = time.monotonic() - began, sites.memory(), sites.disk()
        rounds, missing, runs = sites.rounds(), unrecorded(sites), sites.runs
    finally:
        sites.stop()
    rows = []
    for kind, what in sorted({(kind, what) for kind, what, _ in felt}):
        times = [seconds for *found, seconds in felt if found == [kind, what]]
        rows.append([f"{kind}: {what}", len(times), f"{statistics.median(times):.0f}", f"{max(times):.0f}"])
    table(["fault", "times", "s from its end to a round with all sites: median", "longest"], rows)
    short = sum(count < len(SITES) for count in rounds)
    print(f"{took / 60:.0f} minutes; {runs} runs; {len(rounds)} rounds, {short} of them without some site's reply")
    print(f"rounds that are not in the ledger: {missing}")
    for part, megabytes in before.items():
        print(f"memory of {part}: {megabytes:.0f} MB at the start, {after[part]:.0f} MB at the end")
    print(f"all files: {first:.0f} MB at the start, {last:.0f} MB at the end")


def main(minutes: float = 60, every: float = 120, seed: int = 0) -> None:
    """Try it with processes."""
    machine()
    with (
        tempfile.TemporaryDirectory(prefix="cloister-endurance-") as scratch,
        Processes(Path(scratch) / "processes") as processes,
    ):
        trial(Sites(Path(scratch), processes, random.Random(seed)), minutes, every)


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((float, float, int), sys.argv[1:])))
