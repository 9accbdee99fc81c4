"""nginx, as a kit configures it, in front of `cloister superlink`: who gets through, and how far."""

import socket
import ssl
import time
from base64 import b64encode
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from processes import Processes, free_ports
from proxied import on_loopback, require_nginx

from cloister.deploy.provision.kits import provision

pytestmark = pytest.mark.runtimes(minutes=1)

SECONDS = 240
BODY = 10 * 2**20
SITE = '[[sites]]\nname = "{}"\npartition-id = {}\nnum-partitions = 2\n'


class Proxied:
    """A SuperLink behind its proxy, from a kit, with one registered node; requests are written by hand."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes
        self.port, inner = free_ports(2)
        self.text = f'name = "trial"\n[server]\naddresses = ["localhost"]\nport = {self.port}\n'
        self.text += f'superlink = "127.0.0.1:{inner}"\n'
        self.kits = self.provisioned("north")
        on_loopback(self.kits / "server")
        self.key = self.key_of("north")

    def provisioned(self, *sites: str) -> Path:
        description = self.folder / "federation.toml"
        description.write_text(self.text + "".join(SITE.format(name, number) for number, name in enumerate(sites)))
        return provision(description, self.folder / "kits", "").folder

    def key_of(self, site: str) -> tuple:
        private = load_ssh_private_key((self.kits / "sites" / site / "node.key").read_bytes(), None)
        return private, private.public_key()

    def start(self) -> None:
        script = str(self.kits / "server" / "start.sh")
        for part in ("superlink", "proxy"):
            self.processes.start(part, script, part)
        self.processes.wait(self.answers, SECONDS, "answer through the proxy")
        self.processes.run("register", str(self.kits / "operator" / "register.sh"), seconds=SECONDS)

    def answers(self) -> bool:
        try:
            return self.ask("/v1/fleet/activate-node", b"", key=self.key)[0] == 401  # not registered yet
        except OSError:
            return False

    def connect(self, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.kits / "server" / "ca.crt"))
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        return context.wrap_socket(plain, server_hostname="localhost")

    def head(self, path: str, size: int, key: tuple | None = None, **more: str) -> bytes:
        """The head of a request of `size` bytes, signed by a node's key if one is given."""
        headers = {"host": "localhost", "content-type": "application/protobuf", "content-length": str(size)} | more
        if key:
            now = datetime.now(UTC).isoformat()
            headers["flwr-public-key"] = b64encode(public_key_to_bytes(key[1])).decode()
            headers["flwr-timestamp"] = now
            headers["flwr-signature"] = b64encode(sign_message(key[0], now.encode())).decode()
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode()

    def ask(self, path: str, body: bytes, key: tuple | None = None) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        with self.connect() as connection:
            connection.sendall(self.head(path, len(body), key, connection="close") + body)
            head, _, content = b"".join(iter(lambda: connection.recv(2**16), b"")).partition(b"\r\n\r\n")
        return int(head.split()[1]), content

    def refused(self, path: str, size: int = BODY, key: tuple | None = None, **more: str) -> int:
        """The status of the answer to the head of a request, of whose body nothing is sent."""
        with self.connect() as connection:
            connection.sendall(self.head(path, size, key, **more))
            return int(connection.recv(2**16).split()[1])


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory):
    require_nginx()
    folder = tmp_path_factory.mktemp("proxied")
    with Processes(folder / "processes", shortened=True) as processes:
        found = Proxied(folder, processes)
        found.start()
        yield found


def test_a_registered_node_and_an_operator_get_through(proxied: Proxied) -> None:
    asked = ActivateNodeRequest(public_key=public_key_to_bytes(proxied.key[1]), heartbeat_interval=30)
    status, answer = proxied.ask("/v1/fleet/activate-node", asked.SerializeToString(), proxied.key)
    assert status == 200 and ActivateNodeResponse.FromString(answer).node_id
    assert "north: registered" in proxied.processes.log("register")


def test_a_key_that_is_not_registered_is_refused_before_its_body_is_read(proxied: Proxied) -> None:
    paths = [f"/v1/fleet/{name}" for name in ("push-object", "pull-messages", "register-node")]
    stranger = generate_key_pairs()
    found = {path: (proxied.refused(path, 2**19, stranger), proxied.refused(path, 2**19)) for path in paths}
    assert found == dict.fromkeys(paths, (403, 403))


def test_an_order_without_an_operators_token_is_refused_before_its_body_is_read(proxied: Proxied) -> None:
    paths = ["/v1/control/start-run", "/v1/control/list-nodes"]
    found = {path: (proxied.refused(path), proxied.refused(path, authorization="Bearer guessed")) for path in paths}
    assert found == dict.fromkeys(paths, (401, 401))


def test_nothing_else_is_exposed(proxied: Proxied) -> None:
    paths = ["/v1/runtime/pull-object", "/docs", "/openapi.json", "/health", "/operator", "/"]
    assert {path: proxied.refused(path, 1, proxied.key) for path in paths} == dict.fromkeys(paths, 404)


def test_bodies_and_headers_have_limits(proxied: Proxied) -> None:
    assert proxied.refused("/v1/fleet/pull-messages", 2**19 + 1, proxied.key) == 413
    assert proxied.refused("/v1/fleet/push-object", 2**25 + 1, proxied.key) == 413
    assert proxied.refused("/v1/fleet/pull-messages", 1, proxied.key, more="x" * 2**11) == 400


def test_one_address_has_a_limited_number_of_requests(proxied: Proxied) -> None:
    head = proxied.head("/v1/fleet/pull-messages", 10, proxied.key)
    with ExitStack() as stack:
        waiting = [stack.enter_context(proxied.connect()) for _ in range(128)]
        for connection in waiting:
            connection.sendall(head)
        deadline = time.monotonic() + SECONDS
        while (status := proxied.ask("/v1/fleet/pull-messages", b"", proxied.key)[0]) != 503:
            assert time.monotonic() < deadline, status


def test_only_new_versions_of_tls_are_spoken(proxied: Proxied) -> None:
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        proxied.connect(version).close()
    with pytest.warns(DeprecationWarning), pytest.raises(ssl.SSLError):
        proxied.connect(ssl.TLSVersion.TLSv1_1)


def test_the_log_names_what_was_refused_and_has_no_signature(proxied: Proxied) -> None:
    secret = proxied.head("/v1/fleet/push-object", 2**19, generate_key_pairs())
    with proxied.connect() as connection:
        connection.sendall(secret)
        assert connection.recv(2**16).split()[1] == b"403"
    values = [line.split(": ")[1] for line in secret.decode().split("\r\n") if line.startswith("flwr-")]
    folder = proxied.kits / "server" / "state" / "proxy"
    # nginx writes the line when it has let go of the connection.
    line = '403 POST "/v1/fleet/push-object"'
    proxied.processes.wait(lambda: line in (folder / "refused.log").read_text(), SECONDS, "line in the log")
    log = (folder / "refused.log").read_text() + proxied.processes.log("proxy")
    assert len(values) == 3
    assert not [value for value in values if value in log]


def test_a_new_site_is_let_in_without_a_restart(proxied: Proxied) -> None:
    proxied.kits = proxied.provisioned("north", "south")
    south = proxied.key_of("south")
    proxied.processes.wait(
        lambda: proxied.ask("/v1/fleet/activate-node", b"", south)[0] == 401, SECONDS, "answer of the SuperLink"
    )
