"""`cloister superlink` and its executor on loopback, as provisioned, without a proxy; nodes are let in by number."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import REPOSITORY, SUPERLINK, Processes, Setting, flower_line, free_ports

from cloister.deploy.credentials import new_node_key
from cloister.deploy.provision.kits import provision

CONNECTION = "many"


@dataclass(frozen=True)
class OpenServer:
    """A server that runs.

    Args:
        processes: its processes, the operator's among them.
        address: of the SuperLink, host:port.
        authority: path of the certificate that vouches for it.
        database: path of its state.
    """

    processes: Processes
    address: str
    authority: str
    database: Path

    def let_in(self, count: int) -> list[Path]:
        """Register so many nodes, and give the files of their private keys."""
        folder = self.processes.folder / "keys"
        folder.mkdir()
        for number in range(count):
            private, public = new_node_key()
            (folder / f"{number}.key").write_bytes(private)
            (folder / f"{number}.pub").write_bytes(public)
        script = str(Path(__file__).with_name("registering.py"))
        self.processes.run("told", "python", script, CONNECTION, str(folder), seconds=300)
        return sorted(folder.glob("*.key"))

    def train(self, settings: dict[str, Setting], seconds: float) -> None:
        """Run the app of this repository, and wait for its end."""
        self._run(settings, "--stream", seconds=seconds)

    def begin(self, settings: dict[str, Setting], seconds: float) -> None:
        """Have a run of this app begin; it goes on by itself."""
        self._run(settings, seconds=seconds)

    def _run(self, settings: dict[str, Setting], *options: str, seconds: float) -> None:
        command = ["run", str(REPOSITORY), CONNECTION, "--run-config", flower_line(settings), *options]
        self.processes.run("flwr", "flwr", *command, seconds=seconds)


@contextmanager
def open_server(folder: Path, seconds: float, *executor: str) -> Iterator[OpenServer]:
    """A server for the time of the block.

    Args:
        folder: for its kit, its state and its logs.
        seconds: how long it may take until it answers.
        executor: options of the executor.
    """
    (port,) = free_ports(1)
    description = folder / "federation.toml"
    description.write_text(
        f'name = "{CONNECTION}"\n[server]\naddresses = ["localhost"]\nport = {port}\nsuperlink = "localhost:{port}"\n'
        '[[sites]]\nname = "x"\npartition-id = 0\nnum-partitions = 1\n'
    )
    kits = provision(description, folder / "kits", "").folder
    server, address, database = kits / "server", f"localhost:{port}", folder / "state.db"
    secret = ["--superexec-auth-secret-file", str(server / "superexec.secret")]
    authority = str(server / "ca.crt")
    with Processes(folder / "processes") as processes:
        for name in ("flwr", "told"):
            shutil.copytree(kits / "operator", processes.folder / "homes" / name)
        processes.start(
            SUPERLINK, "cloister", "superlink", "--operators", str(server / "operators.sha256"),
            "--ssl-ca-certfile", authority, "--ssl-certfile", str(server / "server.crt"),
            "--ssl-keyfile", str(server / "server.key"), "--database", str(database), "--isolation", "process",
            "--enable-supernode-auth", *secret, "--host", "127.0.0.1", "--port", str(port),
        )  # fmt: skip
        link = ["--runtime-api-address", address, "--root-certificates", authority]
        processes.start("superexec", "cloister", "superexec", *link, *secret, *executor)
        processes.wait(lambda: "Uvicorn running" in processes.log(SUPERLINK), seconds, "SuperLink")
        yield OpenServer(processes, address, authority, database)
