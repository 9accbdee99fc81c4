"""A provisioned federation as real processes: its members train together, and nobody else gets in."""

import json
import os
import shutil
import signal
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from processes import REPOSITORY, WARM_NODE, Processes, flower_line, free_ports

from cloister.deploy.credentials import new_node_key
from cloister.deploy.provision.kits import provision
from cloister.utils.keys import fingerprint

MEMBERS = ("north", "south")
STRANGER = "stranger"
PATIENCE = 240
POLICY = 'mechanisms = ["dp-sgd"]\nmin-dp-sgd-noise-multiplier = 0.5\ntasks = ["digits"]\n'
ONE_TRY = ("--max-retries", "0")
SETTINGS = {
    "num-rounds": 2,
    "strategy.min-nodes": 2,
    "task.model": "softmax",
    "evaluation.federated": "off",
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
}


class Secured:
    """A SuperLink with TLS and node authentication from provisioned kits, with its two registered nodes."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes
        self.port, *self.node_ports = free_ports(len(MEMBERS) + 1)
        self.kits = self.provisioned("kits", "trial", (*MEMBERS, STRANGER))
        (self.kits / "operator" / "nodes" / f"{STRANGER}.pub").unlink()  # provisioned, and never registered
        self.tries = 0

    def provisioned(self, output: str, name: str, sites: tuple[str, ...]) -> Path:
        tables = [f'[[sites]]\nname = "{s}"\npartition-id = {i}\nnum-partitions = 3\n' for i, s in enumerate(sites)]
        description = self.folder / f"{output}.toml"
        server = f'name = "{name}"\n[server]\naddresses = ["localhost"]\nport = {self.port}\n'
        server += f'superlink = "localhost:{self.port}"\n'
        description.write_text(server + "".join(tables))
        return provision(description, self.folder / output, POLICY).folder

    def start(self) -> None:
        self.processes.start("superlink", str(self.kits / "server" / "start.sh"))
        self.processes.wait(self.answers, PATIENCE, "answer of the SuperLink")
        self.processes.run("register", str(self.kits / "operator" / "register.sh"), seconds=PATIENCE)
        for name, port in zip(MEMBERS, self.node_ports):
            self.processes.start(name, str(self.kits / "sites" / name / "start.sh"), "--port", str(port))
        self.processes.wait(lambda: all("SuperNode ID" in self.log(name) for name in MEMBERS), PATIENCE, "members")

    def answers(self) -> bool:
        try:
            return self.ask("health", None) == 200
        except OSError:
            return False

    def ask(self, path: str, body: bytes | None) -> int:
        """The status that the SuperLink answers with to somebody who has the authority's certificate and no more."""
        context = ssl.create_default_context(cafile=str(self.kits / "server" / "ca.crt"))
        kind = {"Content-Type": "application/protobuf"}
        request = urllib.request.Request(f"https://localhost:{self.port}/{path}", body, kind)
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    def home(self, *files: Path, config: str = "") -> str:
        """A FLWR_HOME with these files; its name is also that of the process that will use it."""
        self.tries += 1
        name = f"operator-{self.tries}"
        home = self.processes.folder / "homes" / name
        home.mkdir(parents=True)
        for file in files:
            shutil.copy(file, home)
        (home / "config.toml").write_text(config or (self.kits / "operator" / "config.toml").read_text())
        return name

    def refused(self, name: str, program: str, *arguments: str) -> str:
        """A process that must fail; what it wrote."""
        with pytest.raises(AssertionError, match=f"{name} ended with"):
            self.processes.run(name, program, *arguments, seconds=PATIENCE)
        return self.log(name)

    def log(self, name: str) -> str:
        return (self.processes.folder / f"{name}.log").read_text()

    def cut_power(self, name: str) -> None:
        """End a member's processes such that none can take its leave."""
        for pid in self.processes.pids("cloister.deploy.warm.supernode"):
            if f"sites/{name}/" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        self.processes.kill(name)

    def trains(self, name: str) -> None:
        """The members, all of them and nobody else, train the model. The app's token is in no argument meanwhile."""
        processes, settings = self.processes, flower_line(SETTINGS | {"run-name": name})
        home = self.home(self.kits / "operator" / "credentials.yaml")
        processes.run(home, "flwr", "run", str(REPOSITORY), "trial", "--run-config", settings, seconds=PATIENCE)
        processes.wait(lambda: bool(processes.pids("serverapp.py")), PATIENCE, "server app")
        (app,) = processes.pids("serverapp.py")
        arguments = processes.command_lines()
        assert app in arguments and not [line for line in arguments.values() if "--token" in line]
        processes.wait(lambda: app not in processes.pids("serverapp.py"), PATIENCE, "end of the server app")
        lines = (self.kits / "server" / "state" / "runs" / name / "rounds.jsonl").read_text().splitlines()
        first, *_, last = (json.loads(line) for line in lines)
        assert (last["round"], last["measured"]["accepted"], last["measured"]["rejected"]) == (2, len(MEMBERS), [])
        assert last["central"]["accuracy"] > first["central"]["accuracy"] + 0.2


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A federation that trains after all tests of this module.

    So it refused others because of what they were, and a member that lost its power is in again.
    """
    folder = tmp_path_factory.mktemp("secured")
    with Processes(folder / "processes", shortened=True) as processes:
        federation = Secured(folder, processes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CLOISTER_NODE", " ".join(WARM_NODE))
            federation.start()
        yield federation
        federation.trains("after")


pytestmark = pytest.mark.runtimes(minutes=2)


class TestNodes:
    @pytest.fixture(autouse=True)
    def without_warming(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A node that is refused needs no Keras."""
        monkeypatch.setenv("CLOISTER_NODE", "flower-supernode")

    def test_with_a_key_that_is_not_registered(self, secured: Secured) -> None:
        script = secured.kits / "sites" / STRANGER / "start.sh"
        log = secured.refused("unregistered", str(script), "--port", str(free_ports(1)[0]), *ONE_TRY)
        assert "Failed to activate SuperNode" in log

    def test_with_the_certificate_of_another_authority(self, secured: Secured) -> None:
        kit = secured.folder / "deceived"
        shutil.copytree(secured.kits / "sites" / STRANGER, kit)
        shutil.copy(secured.provisioned("others", "others", ("x",)) / "server" / "ca.crt", kit / "ca.crt")
        log = secured.refused("wrong-authority", str(kit / "start.sh"), "--port", str(free_ports(1)[0]), *ONE_TRY)
        assert "CERTIFICATE_VERIFY_FAILED" in log

    def test_without_encryption(self, secured: Secured) -> None:
        link = ["--insecure", "--superlink", f"localhost:{secured.port}", "--port", str(free_ports(1)[0])]
        log = secured.refused("plain-http", "flower-supernode", *link, *ONE_TRY)
        assert "Failed to initialize the connection" in log

    def test_that_register_themselves(self, secured: Secured) -> None:
        """Without a key of its own a node makes one and asks to be let in."""
        link = ["--superlink", f"localhost:{secured.port}", "--port", str(free_ports(1)[0])]
        authority = str(secured.kits / "server" / "ca.crt")
        log = secured.refused("self-made", "flower-supernode", *link, "--root-certificates", authority, *ONE_TRY)
        assert "Failed to initialize the connection" in log


class TestOrders:
    def test_without_credentials(self, secured: Secured) -> None:
        assert "Authentication failed" in self.refused(secured, secured.home())

    def test_with_a_token_of_another_federation(self, secured: Secured) -> None:
        others = secured.provisioned("strangers", "trial", ("x",)) / "operator" / "credentials.yaml"
        self.refused(secured, secured.home(others))

    def test_with_the_wrong_authority(self, secured: Secured) -> None:
        others = secured.provisioned("third", "trial", ("x",)) / "operator"
        home = secured.home(secured.kits / "operator" / "credentials.yaml", config=(others / "config.toml").read_text())
        self.refused(secured, home)

    def test_without_encryption(self, secured: Secured) -> None:
        config = f'[superlink.trial]\naddress = "localhost:{secured.port}"\ninsecure = true\n'
        self.refused(secured, secured.home(secured.kits / "operator" / "credentials.yaml", config=config))

    def test_every_order_asks_who_gives_it(self, secured: Secured) -> None:
        orders = ("start-run", "list-runs", "register-node", "list-nodes", "stop-run")
        assert {order: secured.ask(f"v1/control/{order}", b"") for order in orders} == dict.fromkeys(orders, 401)

    def test_the_servers_work_is_for_its_own_executor(self, secured: Secured) -> None:
        assert secured.ask("v1/runtime/acquire-task", b"") == 401

    def refused(self, secured: Secured, home: str) -> str:
        runs = secured.log("superlink").count('/v1/control/start-run HTTP/1.1" 200')
        arguments = ["run", str(REPOSITORY), "trial", "--stream", "--run-config", flower_line(SETTINGS)]
        log = secured.refused(home, "flwr", *arguments)
        assert "Successfully started run" not in log
        assert secured.log("superlink").count('/v1/control/start-run HTTP/1.1" 200') == runs
        return log


def test_a_member_that_lost_its_power_gets_in_again(secured: Secured) -> None:
    """The key is in use until the SuperLink takes the node for offline: it is started again until it gets in."""
    secured.cut_power("north")
    activated = secured.log("north").count("SuperNode ID")
    deadline = time.monotonic() + PATIENCE
    while secured.log("north").count("SuperNode ID") == activated:
        assert time.monotonic() < deadline
        running = secured.processes.services.get("north")
        if running is None or running.poll() is not None:
            secured.processes.restart("north")
        time.sleep(0.5)


def test_a_site_is_let_in_gets_a_new_key_and_is_sent_away_by_its_name(secured: Secured) -> None:
    """Its own operator's kit, and a node that is connected while its site is sent away."""
    processes, kit = secured.processes, secured.folder / "operator-of-one"
    shutil.copytree(secured.kits / "operator", kit)
    for key in (kit / "nodes").iterdir():
        key.unlink()
    guest = secured.provisioned("guests", "trial", ("guest",))
    shutil.copy(secured.kits / "server" / "ca.crt", guest / "sites" / "guest" / "ca.crt")
    home = secured.home(secured.kits / "operator" / "credentials.yaml")

    def site(*arguments: str) -> str:
        processes.run(home, "cloister", "site", *arguments, seconds=PATIENCE)
        return secured.log(home)

    old, new = (kit / "nodes" / f"{name}.pub" for name in ("guest", "new"))
    old.write_bytes((guest / "operator" / "nodes" / "guest.pub").read_bytes())
    new.write_bytes(new_node_key()[1])
    told = fingerprint(load_ssh_public_key(old.read_bytes()))
    site("approve", "trial", "guest", "--key", str(old), "--fingerprint", told)
    processes.start(
        "guest", str(guest / "sites" / "guest" / "start.sh"), "--port", str(free_ports(1)[0]), "--max-retries", "3"
    )
    processes.wait(lambda: "guest  online" in site("list", "trial"), PATIENCE, "guest")
    said = site("rotate", "trial", "guest", "--key", str(new))
    assert "its old key is refused" in said
    node = processes.services.pop("guest")
    processes.wait(lambda: node.poll() is not None, PATIENCE, "end of the node with the old key")
    assert "guest: refused from now on" in site("remove", "trial", "guest")
    log = secured.refused("register-guest", str(kit / "register.sh"))
    assert "guest: revoked" in log and "new: revoked" in log and "known" not in log
