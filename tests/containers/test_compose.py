"""The shipped compose.yaml, as a site would use it: images built without a registry, a stack, a run, the artefacts.

Needs a container engine, compose and debootstrap. Where they are missing the tests skip with the reason; with
REQUIRE_DOCKER=1 they fail instead.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from cloister.deploy.provision.kits import provision
from cloister.deploy.provision.scripts import policy_template

REPOSITORY = Path(__file__).parents[2]
RUNTIMES = REPOSITORY / "tests" / "runtimes"
BASE = "cloister-base"
SITES = ("site-1", "site-2", "site-3", "site-4")
SERVICES = ("proxy", "superlink", "superexec", *SITES)
BUILT = ("proxy", "superlink", "superexec", "site-1")
UID = os.getuid() or 1000
"""Containers run as who owns the kits; never as root."""

pytestmark = pytest.mark.docker


def call(*command: str, seconds: float = 600, **environment: str) -> str:
    """Return the output of a command.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-8000:]}"
    return done.stdout


def unavailable(reason: str) -> None:
    if os.environ.get("REQUIRE_DOCKER") == "1":
        pytest.fail(f"REQUIRE_DOCKER=1, but {reason}")
    pytest.skip(reason)


def compose_command() -> list[str]:
    """docker-compose, or the plugin of newer engines."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    return ["docker", "compose"]


@pytest.fixture(scope="module")
def images() -> None:
    """The images of compose.yaml, on a base that no registry was asked for."""
    for program in ("docker", "debootstrap"):
        if not shutil.which(program):
            unavailable(f"there is no {program} on this machine")
    for command in (["docker", "info"], [*compose_command(), "version"]):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            unavailable(f"`{' '.join(command)}` fails on this machine")
    if os.getuid() != 0:
        unavailable("debootstrap needs root")
    with ThreadPoolExecutor() as pool:  # one waits for Debian's mirror, the other for PyPI
        made = [pool.submit(call, "docker/make-base.sh", BASE), pool.submit(call, "docker/wheels.sh", sys.executable)]
        for each in made:
            each.result()
    try:
        call(*compose_command(), "build", *BUILT, CLOISTER_BASE=BASE, seconds=1800)
    finally:
        for wheel in REPOSITORY.glob("docker/wheels/*.whl"):
            wheel.unlink()


class Stack:
    """The containers of compose.yaml under a name of their own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.environment = {
            "COMPOSE_PROJECT_NAME": f"cloister-test-{os.getpid()}",
            "CLOISTER_BASE": BASE,
            "CLOISTER_KITS": str(folder / "kits"),
            "CLOISTER_DATA_FOLDER": str(folder / "data"),
            "CLOISTER_PUBLISH": f"127.0.0.1:{port}",
            "CLOISTER_UID": str(UID),
            "CLOISTER_GID": str(UID),
        }

    def provision(self) -> None:
        """The shipped federation, but that its last site has a file of its own."""
        text = (REPOSITORY / "docker" / "federation.toml").read_text()
        partition = "partition-id = 3\nnum-partitions = 4\n"
        assert partition in text
        description = self.folder / "federation.toml"
        description.write_text(text.replace(partition, 'data-path = "/data/own.npz"\npublic-size = 450\n'))
        for site in SITES:
            (self.folder / "data" / site).mkdir(parents=True)
        pixels, labels = load_digits(return_X_y=True)
        own = self.folder / "data" / SITES[-1] / "own.npz"
        np.savez(own, x=(pixels[3::4] / 16).astype(np.float32), y=labels[3::4])
        self.make_kits()

    def make_kits(self) -> None:
        provision(self.folder / "federation.toml", self.folder / "kits", policy_template())
        if os.getuid() == 0:
            for path in [self.folder / "kits", *(self.folder / "kits").rglob("*")]:
                os.chown(path, UID, UID)

    def collect(self) -> None:
        """Put the sites on the roster, with the keys that their first starts have made."""
        for site in SITES:
            public = self.inside(site, "cat /state/signing.pub").stdout
            (self.folder / "kits" / "roster" / "keys" / f"{site}.pub").write_text(public)
        self.make_kits()

    @cached_property
    def operator(self) -> str:
        """The operator's FLWR_HOME, for the port by which this stack is reached."""
        home = self.folder / "operator"
        shutil.copytree(self.folder / "kits" / "operator", home)
        for name in ("config.toml", "credentials.yaml"):
            text = (home / name).read_text()
            assert "localhost:8000" in text
            (home / name).write_text(text.replace("localhost:8000", f"localhost:{self.port}"))
        return str(home)

    def train(self, name: str, settings: str) -> Path:
        """Train digits at all sites, and return the fetched directory of the run."""
        config = f"strategy.min-nodes=4 seed=7 run-name='{name}' {settings}"
        flwr = str(Path(sys.executable).with_name("flwr"))
        environment = {"FLWR_HOME": self.operator, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        command = (flwr, "run", ".", "compose", "--stream", "--run-config", config)
        output = call(*command, seconds=900, **environment)
        print(output)
        assert "Successfully started run" in output
        fetched = self.folder / name
        call("docker", "cp", f"{self.container('superexec')}:/state/runs/{name}", str(fetched))
        return fetched

    def compose(self, *arguments: str, seconds: float = 900) -> str:
        return call(*compose_command(), *arguments, seconds=seconds, **self.environment)

    def container(self, service: str) -> str:
        """Its id. Compose would say it too, and take seconds."""
        labels = {"project": self.environment["COMPOSE_PROJECT_NAME"], "service": service}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        return call("docker", "ps", "-q", *filters).strip()

    def inspect(self, service: str) -> dict:
        return json.loads(call("docker", "inspect", self.container(service)))[0]

    def becomes_healthy(self, service: str) -> bool:
        """Return whether it does, within a few of its health checks."""
        deadline = time.monotonic() + 600
        while (status := self.inspect(service)["State"]["Health"]["Status"]) == "starting":
            assert time.monotonic() < deadline
            time.sleep(1)
        return status == "healthy"

    def inside(self, service: str, script: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "exec", self.container(service), "sh", "-c", script]
        return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def stack(images: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    sys.path.insert(0, str(RUNTIMES))
    from processes import free_ports

    up = Stack(tmp_path_factory.mktemp("stack"), free_ports(1)[0])
    up.provision()
    failed = request.session.testsfailed
    try:
        up.compose("up", "-d")
        yield up
    finally:
        if request.session.testsfailed > failed or sys.exc_info()[0]:
            print(up.compose("logs", "--no-color", "--tail", "200"))
        up.compose("down", "--volumes", "--remove-orphans")
    assert call("docker", "ps", "-aq", "--filter", f"name={up.environment['COMPOSE_PROJECT_NAME']}") == ""


NOISY = (
    "num-rounds=3 privacy.server='none' privacy.client='dp-sgd' privacy.dp-sgd-noise-multiplier=1.0 "
    "client.local-epochs=2 client.optimizer='sgd'"
)
"""Demands of the kits' policy."""
SECURE = (
    "num-rounds=2 task.model='softmax' privacy.server='global-dp' privacy.noise-multiplier=1.0 "
    "secure-aggregation.enabled=true secure-aggregation.threshold=3 secure-aggregation.colluding=1"
)
SECURE_POLICY = """\
mechanisms = ["global-dp"]
tasks = ["digits"]
min-server-noise-multiplier = 1.0
demands-secure-aggregation = true
min-threshold = 3
min-colluding = 1
"""


@pytest.fixture(scope="module")
def run(stack: Stack) -> Path:
    return stack.train("three", NOISY)


@pytest.fixture(scope="module")
def secure(run: Path, stack: Stack) -> Path:
    """After the run under the policy of the kits, since every site is given another one."""
    for site in SITES:
        (stack.folder / "kits" / "sites" / site / "policy.toml").write_text(SECURE_POLICY)
    stack.collect()
    return stack.train("secure", SECURE)


def accepted(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    return [line["measured"]["accepted"] for line in lines[1:]]


def test_all_sites_train_under_noise_and_the_artefacts_are_fetched(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    assert [(line["measured"]["accepted"], line["measured"]["rejected"]) for line in lines[1:]] == [(4, [])] * 3
    facts = json.loads((run / "privacy.json").read_text())["clients"]
    assert (facts["mechanism"], facts["status"]) == ("dp-sgd", "conditional")
    known = {premise["name"]: premise["known"] for premise in facts["premises"] if not premise["standing"]}
    assert known == {"bundle": "assumed", "apart": "enforced", "authentic": "enforced", "instructed": "enforced"}
    assert lines[-1]["central"]["accuracy"] > lines[0]["central"]["accuracy"] + 0.3
    for name in ("config.json", "privacy.json", "ledger.jsonl", "model.keras"):
        assert (run / name).stat().st_size > 0
    assert json.loads((run / "config.json").read_text())["config"]["privacy.client"] == "dp-sgd"


def test_a_site_with_a_file_of_its_own_kept_its_own_ledger(run: Path, stack: Stack) -> None:
    ledgers = stack.inside("site-4", "cat /state/ledgers/*.jsonl").stdout.splitlines()
    assert len(ledgers) >= 3


def test_the_server_sees_sums_alone_and_no_site_keeps_a_secret_of_a_round(secure: Path, stack: Stack) -> None:
    assert accepted(secure) == [4, 4]
    facts = json.loads((secure / "privacy.json").read_text())
    adversary = "the server together with one client, and any party that sees the models of the run"
    assert (facts["status"], facts["claims"][0]["adversary"]) == ("conditional", adversary)
    for site in SITES:
        kept = stack.inside(site, "find /dev/shm -type f").stdout.split()
        assert [Path(path).suffix for path in kept] == [".round"], "of the rounds stays how far they went, and no key"


@pytest.mark.parametrize("service", SERVICES)
def test_nothing_runs_as_root_or_can_change_its_container(run: Path, stack: Stack, service: str) -> None:
    tried = "for folder in / /opt /kit /etc; do touch $folder/x; done; touch /state/x /tmp/x"
    done = stack.inside(service, f"id -u; grep CapEff /proc/1/status; {tried}")
    assert done.stdout.split() == [str(UID), "CapEff:", "0" * 16] and UID
    assert done.stderr.count("Read-only file system") == 4
    assert done.returncode == 0, "it cannot write where it must"
    found = stack.inspect(service)
    assert found["HostConfig"]["ReadonlyRootfs"] and not found["HostConfig"]["Privileged"]
    assert stack.becomes_healthy(service)


def test_no_secret_is_in_an_argument_a_variable_or_a_layer(stack: Stack) -> None:
    kits = stack.folder / "kits"
    # Of each file the last long word: the lines before it begin alike in all keys.
    secrets = [re.findall(r"[\w+/=-]{32,}", path.read_text())[-1] for path in secret_files(kits)]
    assert len(set(secrets)) == len(secrets) == 6 + 2 * len(SITES)
    seen = [json.dumps(stack.inspect(service)) for service in SERVICES]
    seen += [call("docker", "history", "--no-trunc", f"cloister-{name}") for name in ("superlink", "supernode")]
    assert not [secret for secret in secrets for text in seen if secret in text]
    assert (
        stack.inside("superlink", "ls /opt/cloister/lib/python3*/site-packages | grep -ci tensorflow").stdout == "0\n"
    )


def secret_files(kits: Path) -> list[Path]:
    return [path for path in kits.rglob("*") if path.is_file() and path.stat().st_mode & 0o777 == 0o600]


def test_the_servers_app_cannot_read_the_servers_key(run: Path, stack: Stack) -> None:
    assert stack.inside("superexec", "ls /kit").stdout.split() == ["ca.crt", "start.sh", "superexec.secret"]


def test_sites_reach_the_proxy_and_the_servers_app_the_superlink_and_nothing_else(stack: Stack) -> None:
    doors = {"superlink": "8001", "proxy": "8000"}
    feet = {door: {name: f"{found['IPAddress']}:{port}" for name, found in networks(stack, door).items()}
            for door, port in doors.items()}  # fmt: skip
    own = {service: networks(stack, service) for service in ("superexec", *SITES)}
    ports = {service: f"{found['IPAddress']}:9094" for service in own for found in own[service].values()}
    assert len(ports) == len(own)
    every = [place for places in feet.values() for place in places.values()]
    tried, allowed = {}, {}
    for service, (name,) in own.items():
        internal = call("docker", "network", "inspect", "--format", "{{.Internal}}", name).strip()
        assert internal == "true", f"{service} reaches beyond its network"
        others = [other for other in own if other != service]
        tried[service] = [*every, *(ports[other] for other in others), *doors, *others]
        door = "superlink" if service == "superexec" else "proxy"
        allowed[service] = [feet[door][name], door]
    with ThreadPoolExecutor(len(own)) as pool:  # each of them waits for the resolver
        found = dict(zip(tried, pool.map(lambda service: reached(stack, service, tried[service]), tried), strict=True))
    assert found == allowed


def networks(stack: Stack, service: str) -> dict[str, dict]:
    return stack.inspect(service)["NetworkSettings"]["Networks"]


PROBE = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor

def answers(target):
    host, _, port = target.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=15) if port else socket.gethostbyname(host)
    except ConnectionRefusedError:
        pass
    except OSError:
        return False
    return True

with ThreadPoolExecutor(len(sys.argv)) as pool:
    print(*(target for target, found in zip(sys.argv[1:], pool.map(answers, sys.argv[1:])) if found))
"""


def reached(stack: Stack, service: str, targets: list[str]) -> list[str]:
    """Return the ports that answer a container, refusals included, and the names that it can resolve.

    All are tried at once, and long: a name that is not known takes the resolver twenty seconds anyway.
    """
    found = stack.inside(service, f"python3 -c '{PROBE}' {' '.join(targets)}")
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


STRANGER = """
import ssl, urllib.error, urllib.request

trusted = ssl.create_default_context(cafile="/kit/ca.crt")
for path in ("fleet/pull-messages", "runtime/pull-object"):
    try:
        urllib.request.urlopen(urllib.request.Request("https://localhost:8000/v1/" + path, b"x"), context=trusted)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


def test_the_proxy_refuses_a_stranger_and_what_is_not_for_sites(run: Path, stack: Stack) -> None:
    found = stack.inside("proxy", f"python3 -c '{STRANGER}'")
    assert found.stdout.split() == ["403", "404"], found.stderr


def test_a_superlink_that_was_killed_knows_its_nodes_again(run: Path, stack: Stack) -> None:
    call("docker", "kill", stack.container("superlink"))
    stack.compose("up", "-d")
    assert stack.compose("logs", "--no-color", "register").count(": known") >= len(SITES)


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.plain-http.yaml"]])
def test_the_compose_files_are_valid(files: list[str]) -> None:
    command = compose_command()
    if (
        not shutil.which(command[0])
        or subprocess.run([*command, "version"], capture_output=True, check=False).returncode
    ):
        unavailable("there is no compose on this machine")
    options = [option for file in files for option in ("-f", file)]
    call(*command, *options, "config")
