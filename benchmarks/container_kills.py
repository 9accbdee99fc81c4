"""Containers of the shipped compose.yaml that are killed at random: what comes back, and whether anything is lost.

python benchmarks/container_kills.py [kills of each kind] [minutes] [seed]

The server and two sites of docker/federation.toml, with TLS, node keys, a policy and a ledger at each site. A container
is killed as the kernel would do it for want of memory: SIGKILL to its first process, and so to all of them. The
container engine starts it again (`restart: unless-stopped`); nothing is done by hand. What is checked is what
`kills.py` checks. Needs root, a container engine, compose, and the images of compose.yaml on this machine.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import machine
from kills import NODES, Trial

from cloister.deploy.provision.kits import provision

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtimes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "containers"))
from processes import PROGRAMS, REPOSITORY, Setting, flower_line, free_ports
from test_compose import UID, Stack, call

SITES = [f"site-{number}" for number in range(1, NODES + 1)]
KINDS = ("superexec", "SuperLink", "node")
POLICY = 'mechanisms = []\ntasks = ["digits"]\n'


class Containers:
    """The containers, and how to kill each kind of them.

    Args:
        folder: for kits and the operator's files.
        rng: chooses what is killed, and when.
        sites: that take part.
        policy: of each.
        own: what a site's service has that compose.yaml does not say.
    """

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        sites: Sequence[str] = SITES,
        policy: str = POLICY,
        own: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Nothing is started yet."""
        self.folder, self.rng, self.sites, self.policy, self.own = folder, rng, sites, policy, own or {}
        self.services = ("superlink", "superexec", *sites)
        self.stack = Stack(folder, free_ports(1)[0])
        self.stack.environment["CLOISTER_RESUME"] = "1000"
        self.revived: list[str] = []

    def start(self) -> None:
        """Provision, start and register everything."""
        provision(REPOSITORY / "docker" / "federation.toml", self.folder / "kits", self.policy)
        for site in self.sites:
            (self.folder / "data" / site).mkdir(parents=True)
        self.folder.chmod(0o755)
        for path in [self.folder / "kits", *(self.folder / "kits").rglob("*")]:
            os.chown(path, UID, UID)
        self.override = self.folder / "override.json"
        light = {
            site: {"command": ["/kit/start.sh", "--no-keras"]} | dict(self.own.get(site, {})) for site in self.sites
        }
        self.override.write_text(json.dumps({"services": light}))
        print(self.compose("up", "-d", "--no-build", *self.services, "register"), flush=True)
        self.home = self.stack.operator

    def compose(self, *arguments: str) -> str:
        """What a command to compose says."""
        files = ["-f", "compose.yaml", "-f", str(self.override), "--project-directory", str(REPOSITORY)]
        return self.stack.compose(*files, *arguments)

    def begin(self, name: str, settings: dict[str, Setting]) -> Path:
        """Have the operator begin a run, and tell its directory."""
        line = flower_line(settings | {"run-name": name})
        environment = {"FLWR_HOME": self.home, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        call(str(PROGRAMS / "flwr"), "run", ".", "compose", "--run-config", line, **environment)
        return self.volume("runs") / "runs" / name

    def trains(self) -> bool:
        """Whether there is a process of a server app."""
        return bool(self.server_apps())

    def server_apps(self) -> list[int]:
        """The processes of the server's app, by their numbers on the host."""
        command = ["docker", "top", self.stack.container("superexec"), "-eo", "pid,args"]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        return [int(line.split()[0]) for line in lines if "serverapp.py" in line]

    def kill(self, kind: str) -> bool:
        """Kill a container that runs; False if it did not."""
        return self.kill_service(self.rng.choice(self.sites) if kind == "node" else kind.lower())

    def kill_service(self, name: str) -> bool:
        """Kill the container of a service; False if it did not run."""
        pid = self.stack.inspect(name)["State"]["Pid"]  # 0 while the engine waits before it starts it again
        if pid:
            os.kill(pid, signal.SIGKILL)
        return bool(pid)

    @staticmethod
    def wait(done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait; the engine is the supervisor.

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
            time.sleep(0.2)

    def ledgers(self, number: int) -> Path:
        """Where a node keeps its ledger."""
        return self.volume(self.sites[number]) / "ledgers"

    def volume(self, name: str) -> Path:
        """Where the engine keeps a volume."""
        project = self.stack.environment["COMPOSE_PROJECT_NAME"]
        return Path(json.loads(call("docker", "volume", "inspect", f"{project}_{name}"))[0]["Mountpoint"])


def main(kills: int = 5, minutes: float = 60, seed: int = 0) -> None:
    """Kill until there are enough kills, or the time is over."""
    machine()
    with tempfile.TemporaryDirectory(prefix="cloister-containers-") as scratch:
        containers = Containers(Path(scratch), random.Random(seed))
        try:
            containers.start()
            Trial(containers, KINDS, kills, minutes).run()
            print(
                "started again:", {name: containers.stack.inspect(name)["RestartCount"] for name in containers.services}
            )
        except BaseException:
            print(containers.compose("logs", "--no-color", "--tail", "200"))
            raise
        finally:
            containers.compose("down", "--volumes", "--remove-orphans")


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((int, float, int), sys.argv[1:])))
