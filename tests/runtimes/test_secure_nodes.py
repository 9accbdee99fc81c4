"""Secure aggregation by four nodes of a provisioned federation: a process for each message, and one that is killed."""

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import REPOSITORY, WARM_NODE, Processes, flower_line, free_ports
from secure_rounds import collect

from cloister.client.ledgers import ledger_of
from cloister.client.node import node_of
from cloister.deploy.provision.kits import provision
from cloister.privacy.accounting.events import from_json

pytestmark = pytest.mark.runtimes(minutes=1)

SITES = ("east", "north", "south", "west")
KILLED = "west"
ROUNDS, SECONDS = 2, 240
POLICY = """\
mechanisms = ["global-dp"]
tasks = ["digits"]
min-server-noise-multiplier = 1.0
demands-secure-aggregation = true
min-threshold = 3
min-colluding = 1
max-epsilon = 90.0
"""
SETTINGS = {
    "run-name": "run",
    "num-rounds": ROUNDS,
    "task.model": "softmax",
    "strategy.min-nodes": 3,
    "round-timeout": 120.0,  # a killed node is missed long before
    "late-timeout": 15.0,
    "evaluation.federated": "off",
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 1.0,
    "secure-aggregation.enabled": True,
    "secure-aggregation.threshold": 3,
    "secure-aggregation.colluding": 1,
}


class Federation:
    """A SuperLink with TLS and four warm nodes, from their kits."""

    def __init__(self, folder: Path, processes: Processes, secrets: Path) -> None:
        self.processes, self.secrets = processes, secrets
        self.port, *self.node_ports = free_ports(len(SITES) + 1)
        tables = [f'[[sites]]\nname = "{s}"\npartition-id = {i}\nnum-partitions = 4\n' for i, s in enumerate(SITES)]
        description = folder / "federation.toml"
        server = f'name = "trial"\n[server]\naddresses = ["localhost"]\nport = {self.port}\n'
        server += f'superlink = "localhost:{self.port}"\n'
        description.write_text(server + "".join(tables))
        collect(provision(description, folder / "kits", POLICY).folder, *SITES)
        self.kits = provision(description, folder / "kits", POLICY).folder
        self.run = self.kits / "server" / "state" / "runs" / "run"

    def start(self) -> None:
        self.processes.start("superlink", str(self.kits / "server" / "start.sh"))
        self.processes.wait(self.answers, SECONDS, "answer of the SuperLink")
        self.processes.run("register", str(self.kits / "operator" / "register.sh"), seconds=SECONDS)
        for name, port in zip(SITES, self.node_ports, strict=True):
            self.processes.start(name, str(self.kits / "sites" / name / "start.sh"), "--port", str(port))
        self.processes.wait(lambda: all(map(self.is_ready, SITES)), SECONDS, "warm nodes")

    def is_ready(self, name: str) -> bool:
        return all(said in self.processes.log(name) for said in ("SuperNode ID", "warm:"))

    def answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("localhost", self.port), timeout=2):
            return True
        return False

    def begin(self) -> None:
        home = self.processes.folder / "homes" / "operator"
        home.mkdir(parents=True)
        for name in ("credentials.yaml", "config.toml"):
            shutil.copy(self.kits / "operator" / name, home)
        arguments = ["run", str(REPOSITORY), "trial", "--run-config", flower_line(SETTINGS)]
        self.processes.run("operator", "flwr", *arguments, seconds=SECONDS)

    def folder(self, name: str) -> Path:
        """Where a node keeps secrets: the folder of its start."""
        (found,) = self.secrets.glob(f"*.{self.processes.services[name].pid}")
        return found

    def supernode(self, name: str) -> list[int]:
        """The process ids of a node's SuperNode."""
        pids = self.processes.pids("cloister.deploy.warm.supernode")
        return [pid for pid in pids if f"sites/{name}/" in Path(f"/proc/{pid}/cmdline").read_text()]

    def cut_power(self, name: str, supernode: list[int]) -> None:
        """End a node's processes such that none can take its leave."""
        for pid in supernode:
            os.kill(pid, signal.SIGKILL)
        self.processes.kill(name)

    def rounds(self) -> list[dict[str, Any]]:
        """Return the measurements in the finished rounds, after the initial model."""
        path = self.run / "rounds.jsonl"
        whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [json.loads(line)["measured"] for line in whole[1:]]


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Federation]:
    monkeypatch.setenv("CLOISTER_NODE", " ".join(WARM_NODE))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as secrets,
        Processes(tmp_path / "processes", shortened=True) as processes,
    ):
        monkeypatch.setenv("CLOISTER_SECRETS", secrets)
        federation = Federation(tmp_path, processes, Path(secrets))
        federation.start()
        yield federation


def test_a_run_goes_on_without_a_node_that_is_killed_in_mid_round(federation: Federation) -> None:
    processes = federation.processes
    federation.begin()
    # Known beforehand: once the next round has begun, the node must be dead before it can send its vector.
    lost, supernode = federation.folder(KILLED), federation.supernode(KILLED)
    processes.wait(lambda: 4 in accepted(federation), SECONDS, "round of four nodes")
    processes.wait(lambda: bool(list(lost.glob("*.attempt"))), SECONDS, "round that the node takes part in")
    federation.cut_power(KILLED, supernode)
    processes.wait(lambda: record_of(federation).get("rounds") == ROUNDS, SECONDS, "end of the round without it")

    assert accepted(federation) == [4, 3]
    record = record_of(federation)
    known = {premise["name"]: premise["known"] for premise in record["premises"] if not premise["standing"]}
    by_gate = dict.fromkeys(("apart", "authentic", "instructed"), "enforced")
    assert known == by_gate | {"bundle": "assumed", "roster": "assumed", "keys": "attested"}
    assert record["status"] == "conditional"
    assert record["claims"][0]["adversary"].startswith("the server together with one client")
    check_ledgers(federation)
    for name in SITES:
        if name != KILLED:
            left = {path.suffix for path in federation.folder(name).iterdir()}
            assert left == {".round"}, "nothing is kept of a round that was finished"


def record_of(federation: Federation) -> dict[str, Any]:
    """Return the claim for the rounds so far; the file is replaced, never changed."""
    found: dict[str, Any] = json.loads((federation.run / "privacy.json").read_text())
    return found


def accepted(federation: Federation) -> list[int]:
    return [measured["accepted"] for measured in federation.rounds()]


def check_ledgers(federation: Federation) -> None:
    """Each node has counted the rounds that it sent a masked vector in, at what the server counts for them."""
    lines = map(json.loads, (federation.run / "ledger.jsonl").read_text().splitlines())
    (event, *others) = [from_json(line["event"]) for line in lines if "event" in line]
    assert [event] * (ROUNDS - 1) == others
    for number, name in enumerate(SITES):
        own = {"ledger-dir": str(federation.kits / "sites" / name / "state" / "ledgers")}
        own |= {"policy": str(federation.kits / "sites" / name / "policy.toml")}
        entries = ledger_of(node_of({"partition-id": number, "num-partitions": 4, **own}), "digits").entries
        counted = [one.event for one in entries if one.unit == "client"]
        assert set(counted) == {event}
        assert len(counted) in ((1, 2) if name == KILLED else (ROUNDS,))
