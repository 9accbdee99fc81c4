"""`endurance.py` with the containers of the shipped compose.yaml.

python benchmarks/container_endurance.py [minutes] [seconds between faults] [seed]

The server and the four sites of docker/federation.toml, with TLS, node keys, a policy and a ledger at each site. A
site's state is on a small disk of its own, and its network is one of the engine's. A container that
is killed is started again by the engine (`restart: unless-stopped`). Needs root, `strace`, `faketime`, a container
engine, compose, and the images of compose.yaml on this machine.
"""

import random
import sys
import tempfile
from pathlib import Path

from common import machine
from container_kills import UID, Containers, call
from endurance import POLICY, SETTINGS, SITES, Endurable, by_side, mount, size, trial, unmount

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
FAKED = "/clock.so"
"""The same in a container."""


class Contained(Endurable):
    """As containers; the engine is their supervisor.

    Args:
        folder: for kits, disks and clocks.
        rng: chooses faults.
    """

    fast = ("env", f"LD_PRELOAD={FAKED}", "FAKETIME=+1h")

    def __init__(self, folder: Path, rng: random.Random) -> None:
        """Nothing is started yet."""
        super().__init__(folder, rng)
        self.containers = Containers(folder, rng, SITES, POLICY, {site: self._own(site) for site in SITES})

    def _own(self, site: str) -> dict[str, object]:
        """What a site's service has for its faults: a disk, and a clock that may be wrong from its start."""
        binds = {self.disk_of(site): "/state", self._clock(site).parent: "/clock", LIBRARY: FAKED}
        return {
            "command": ["sh", "-c", "exec $$(cat /clock/set) /kit/start.sh --no-keras"],
            "volumes": [{"type": "bind", "source": str(path), "target": target} for path, target in binds.items()],
        }

    def _clock(self, site: str) -> Path:
        return self.folder / "clocks" / site / "set"

    def start(self) -> None:
        """Make disks and clocks, and start everything."""
        for site in SITES:
            mount(self.disk_of(site), uid=UID, gid=UID)
            self._clock(site).parent.mkdir(parents=True)
            self._clock(site).touch()
        self.containers.start()
        self.runs_folder = self.containers.volume("runs") / "runs"

    def stop(self) -> None:
        """Print what they said last, remove them, and give the disks back."""
        print(self.containers.compose("logs", "--no-color", "--tail", "40"))
        self.containers.compose("down", "--volumes", "--remove-orphans")
        unmount(self.disk_of(site) for site in SITES)

    def supervise(self) -> None:
        """The engine does."""

    def memory(self) -> dict[str, float]:
        """Proportional MB of the server's side and of a site, with all that they have started."""
        return by_side({name: self.containers.stack.inspect(name)["State"]["Pid"] for name in self.containers.services})

    def disk(self) -> float:
        """Megabytes of all files that were written."""
        return size(self.folder) + sum(size(self.containers.volume(name)) for name in ("superlink", "runs"))

    def server_apps(self) -> list[int]:
        """The processes of the server's app."""
        return self.containers.server_apps()

    def kill(self, name: str) -> None:
        """Kill the container of a service."""
        self.containers.kill_service(name)

    def disk_of(self, site: str) -> Path:
        """Where a site's own disk is mounted."""
        return self.folder / "disks" / site

    def set_clock(self, site: str, *said: str) -> None:
        """Start a site again, by a command that says what its clock is."""
        self._clock(site).write_text(" ".join(said))
        self.kill(site)

    def cut(self, site: str) -> None:
        """Take a site out of its network."""
        call("docker", "network", "disconnect", *self._place(site))

    def connect(self, site: str) -> None:
        """Put a site into its network again."""
        call("docker", "network", "connect", "--alias", site, *self._place(site))

    def _place(self, site: str) -> tuple[str, str]:
        stack = self.containers.stack
        return f"{stack.environment['COMPOSE_PROJECT_NAME']}_{site}", stack.container(site)

    def _order_run(self, name: str) -> None:
        self.containers.begin(name, SETTINGS)


def main(minutes: float = 60, every: float = 120, seed: int = 0) -> None:
    """Try it with containers."""
    machine()
    with tempfile.TemporaryDirectory(prefix="cloister-endurance-") as scratch:
        trial(Contained(Path(scratch), random.Random(seed)), minutes, every)


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((float, float, int), sys.argv[1:])))
