"""Fifty nodes on one SuperLink, whose state is one SQLite database, all of them fetching and sending at once."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from light_nodes import LightNodes
from processes import REPOSITORY, Processes, flower_line, free_ports

from cloister.deploy.kits import provision

pytestmark = pytest.mark.slow

NODES, ROUNDS = 50, 2
SECONDS = 600
"""For what takes half a minute on two idle cores."""
SETTINGS = {
    "task.name": "digits",
    "task.model": "softmax",
    "num-rounds": ROUNDS,
    "round-timeout": 300.0,
    "node-timeout": 300.0,
    "strategy.min-nodes": NODES,
    "evaluation.federated": "off",
    "privacy.server": "none",
    "run-name": "run",
}


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[tuple[Processes, str, str]]:
    """Our SuperLink with its executor; its address and its authority. Nodes need no registration here."""
    (port,) = free_ports(1)
    description = tmp_path / "federation.toml"
    description.write_text(
        f'name = "many"\n[server]\naddresses = ["localhost"]\nport = {port}\n'
        '[[sites]]\nname = "x"\npartition-id = 0\nnum-partitions = 1\n'
    )
    kits = provision(description, tmp_path / "kits", "").folder
    server, address = kits / "server", f"localhost:{port}"
    secret = ["--superexec-auth-secret-file", str(server / "superexec.secret")]
    tls = {name: str(server / file) for name, file in [("ca-", "ca.crt"), ("", "server.crt")]}
    with Processes(tmp_path / "processes") as processes:
        home = processes.folder / "homes" / "flwr"
        shutil.copytree(kits / "operator", home)
        processes.start(
            "superlink", "cloister", "superlink", "--operators", str(server / "operators.sha256"),
            "--ssl-ca-certfile", tls["ca-"], "--ssl-certfile", tls[""], "--ssl-keyfile", str(server / "server.key"),
            "--database", str(tmp_path / "state.db"), "--isolation", "process", *secret,
            "--host", "127.0.0.1", "--port", str(port),
        )  # fmt: skip
        link = ["--runtime-api-address", address, "--root-certificates", tls["ca-"]]
        processes.start("superexec", "cloister", "superexec", *link, *secret)
        yield processes, address, tls["ca-"]


def test_no_locked_database_ends_anything(federation: tuple[Processes, str, str], tmp_path: Path) -> None:
    processes, address, authority = federation
    processes.wait(lambda: "Uvicorn running" in processes.log("superlink"), SECONDS, "SuperLink")
    with LightNodes(address, NODES, authority) as nodes:
        processes.wait(lambda: len(nodes.connected) == NODES or bool(nodes.errors), SECONDS, "nodes")
        assert not nodes.errors
        line = flower_line(SETTINGS | {"output-dir": str(tmp_path)})
        processes.run("flwr", "flwr", "run", str(REPOSITORY), "many", "--stream", "--run-config", line, seconds=SECONDS)
    assert not nodes.errors
    assert list(nodes.answered.values()) == [ROUNDS] * NODES
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()][1:]
    assert [done["measured"]["accepted"] for done in rounds] == [NODES] * ROUNDS
    assert "Internal Server Error" not in processes.log("superlink")
