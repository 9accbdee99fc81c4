"""Flower's processes on loopback, for tests: started, watched and stopped by their own process ids."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
DEADLINES = Path(__file__).parent / "deadlines"
CONNECTION = "loopback"
SUPERLINK = "superlink"
MARK = "CLOISTER_TEST_PROCESSES"
LOG_TAIL = 10_000
"""Characters of each log that a failed test shows."""
PORTS = range(20_000, 32_000, 500)
"""Where blocks of ports begin: below those that the kernel gives to connections."""
WARM_NODE = ("cloister", "warm-node", "--no-keras")
"""A SuperNode whose clients start at once, for models that need no Keras."""

Setting = str | int | float | bool


class Processes:
    """Starts processes; on leaving the `with` block stops them and what they started, and shows their logs on failure.

    Flower starts its executors in sessions of their own, and Ray its workers, so a process group does not hold them
    all. Every process inherits an environment variable that only this object sets: that finds the others.

    Args:
        folder: for logs and for Flower's homes; made if absent.
        shortened: have some waits of Flower be as short as `deadlines/sitecustomize.py` says.
    """

    def __init__(self, folder: Path, shortened: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shortened = folder, shortened
        self.mark = uuid4().hex
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.commands: dict[str, tuple[str, ...]] = {}
        # Ray keeps sockets here, whose paths may have 107 characters: pytest's own folder can be too deep.
        self.ray = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._stop()
        finally:
            self.ray.cleanup()
            if kind is not None:
                self._show_logs()

    def superlink(self, *options: str) -> None:
        """Start a SuperLink, wait until it answers, and name it in the configuration that `flwr run` reads."""
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self.start(SUPERLINK, "flower-superlink", "--insecure", "--port", str(port), *options)
        self.wait_for_superlink()
        connection = f'[superlink.{CONNECTION}]\naddress = "{self.address}"\ninsecure = true\n'
        for name in ("flwr", "told"):
            self._home(name).joinpath("config.toml").write_text(connection)

    def wait_for_superlink(self) -> None:
        """Wait until the SuperLink answers."""
        self.wait(lambda: _answers(f"http://{self.address}/health"), 240, "answer of the SuperLink")

    def supernodes(self, configs: Sequence[Mapping[str, Setting]], *program: str, first: int = 0) -> None:
        """Start one SuperNode for each node configuration. Whether they are connected, the run finds out.

        `program` is one that takes the options of `flower-supernode`. `first` is the number of the first SuperNode.
        """
        for number, (config, port) in enumerate(zip(configs, free_ports(len(configs)), strict=True), first):
            link = ["--insecure", "--superlink", self.address, "--port", str(port)]
            command = [*(program or ["flower-supernode"]), *link, "--node-config", flower_line(config)]
            self.start(f"supernode-{number}", *command)

    def flwr_run(self, settings: Mapping[str, Setting], *options: str, seconds: float) -> None:
        """Run the app of this repository, and wait for its end."""
        command = ["run", str(REPOSITORY), CONNECTION, "--stream", "--run-config", flower_line(settings), *options]
        self.run("flwr", "flwr", *command, seconds=seconds)

    def flwr_begin(self, settings: Mapping[str, Setting], seconds: float) -> None:
        """Have a run begin; it goes on by itself."""
        command = ["run", str(REPOSITORY), CONNECTION, "--run-config", flower_line(settings)]
        self.run("flwr", "flwr", *command, seconds=seconds)

    def told(self, program: str, *arguments: str, seconds: float = 240) -> Any:
        """Return a program's JSON output."""
        self.folder.joinpath("told.log").unlink(missing_ok=True)
        self.run("told", program, *arguments, seconds=seconds)
        text = self.log("told")
        return json.loads(text[text.index("{") :])

    def start(self, name: str, program: str, *arguments: str) -> None:
        """Start a process that runs until the end of the `with` block, or until it is killed."""
        self.commands[name] = (program, *arguments)
        self.services[name] = self._popen(name, program, arguments)

    def kill(self, name: str) -> None:
        """End a process as a power cut would."""
        process = self.services.pop(name)
        process.kill()
        process.wait()

    def restart(self, name: str) -> None:
        """Start a killed process again, with the same options."""
        self.start(name, *self.commands[name])

    def log(self, name: str) -> str:
        """Return a process's output so far, before and after a restart."""
        return self.folder.joinpath(f"{name}.log").read_text(errors="replace")

    def pids(self, program: str) -> list[int]:
        """The living processes of this object whose command line names a program."""
        return [pid for pid, line in self.command_lines().items() if any(Path(word).name == program for word in line)]

    def command_lines(self) -> dict[int, list[str]]:
        """Return the arguments of each living process of this object, as every user of the machine sees them."""
        found = {}
        for pid in _marked(self.mark):
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return found

    def run(self, name: str, program: str, *arguments: str, seconds: float) -> None:
        """Run a process to its end.

        Raises:
            AssertionError: it failed or took too long, or a service ended meanwhile.
        """
        process = self._popen(name, program, arguments)
        try:
            self.wait(lambda: process.poll() is not None, seconds, f"end of {name}")
        finally:
            _end([process])
        assert process.returncode == 0, f"{name} ended with {process.returncode}"

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Ask again and again until it is done.

        Raises:
            AssertionError: it took too long, or a service ended meanwhile.
        """
        deadline = time.monotonic() + seconds
        while not done():
            ended = {name: process.returncode for name, process in self.services.items() if process.poll() is not None}
            assert not ended, f"ended early: {ended}"
            assert time.monotonic() < deadline, f"no {what} after {seconds:.0f} s"
            time.sleep(0.1)

    def _popen(self, name: str, program: str, arguments: tuple[str, ...]) -> "subprocess.Popen[bytes]":
        with self.folder.joinpath(f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(PROGRAMS / program), *arguments],
                cwd=self.folder,
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, name: str) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "FLWR_HOME": str(self._home(name)),
            "CLOISTER_BIND": "127.0.0.1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            # Ray hides the GPU from clients that did not ask for one: without this they would compute elsewhere.
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_TMPDIR": self.ray.name,
            MARK: self.mark,
            **(_short_waits() if self.shortened else {}),
        }

    def _home(self, name: str) -> Path:
        """A FLWR_HOME for each process, as on machines of their own: unpacking an app in a shared one is a race."""
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _stop(self) -> None:
        """End the nodes before their server, so that they can take their leave; then whatever is left."""
        _end([process for name, process in self.services.items() if name != SUPERLINK])
        _end([process for name, process in self.services.items() if name == SUPERLINK])
        hard = time.monotonic() + 10
        deadline = hard + 50
        while left := _marked(self.mark):
            assert time.monotonic() < deadline, f"processes {left} cannot be stopped"
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if time.monotonic() < hard else signal.SIGKILL)
            time.sleep(0.2)

    def _show_logs(self) -> None:
        for log in sorted(self.folder.glob("*.log")):
            print(f"\n===== {log.name}\n{log.read_text(errors='replace')[-LOG_TAIL:]}")


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens, and which no other process of tests is given."""
    ports = _own_ports()
    return [next(ports) for _ in range(count)]


@cache
def _own_ports() -> Iterator[int]:
    return _ports_of_a_block()


def _ports_of_a_block() -> Iterator[int]:
    """Give the ports of one block again and again, but for those in use.

    The block belongs to this process as long as it listens on the first port.
    """
    for first in PORTS:
        with suppress(OSError):
            holder = socket.create_server(("127.0.0.1", first))
            break
    else:
        raise OSError("other processes of tests have all ports")
    with holder:
        for port in cycle(range(first + 1, first + PORTS.step)):
            with suppress(OSError):
                socket.create_server(("127.0.0.1", port)).close()
                yield port


def _short_waits() -> dict[str, str]:
    """Flower's one setting of a wait, and the file that changes others."""
    paths = [str(DEADLINES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"}


def flower_line(settings: Mapping[str, Setting]) -> str:
    """Settings as Flower's command lines take them: TOML values, of which JSON's scalars are a part."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
        return bool(response.status == 200)
    return False


def _end(processes: list["subprocess.Popen[bytes]"]) -> None:
    """Ask processes to end, as a service manager would; after a while make their groups end."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _marked(mark: str) -> list[int]:
    """The living processes that carry the mark; a dead one has no environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found
