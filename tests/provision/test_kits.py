"""Start-up kits: what is in them, and who may read it."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.common.config import parse_config_args
from support import failures
from two_sites import FEDERATION, KITS, POLICY, SECRETS, contents, made

from cloister.client.policy import read_policy
from cloister.deploy.credentials import addresses_of
from cloister.deploy.provision.federation import read_federation
from cloister.deploy.provision.kits import provision
from cloister.deploy.provision.scripts import policy_for
from cloister.deploy.superlink.gate import REVOKED
from cloister.utils.errors import ConfigError


@pytest.fixture
def make(tmp_path):
    return partial(made, tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Kits that no test changes."""
    return made(tmp_path_factory.mktemp("federation")).folder


class TestAStatedSize:
    @pytest.mark.parametrize("size", [0, 7, 300])
    def test_is_the_same_in_the_policy_and_in_the_script(self, tmp_path, size):
        description = tmp_path / "federation.toml"
        description.write_text(FEDERATION.replace('file.npz"', f'file.npz"\npublic-size = {size}'))
        kit = provision(description, tmp_path / "kits", policy_for).folder / "sites" / "north"
        assert read_policy(kit / "policy.toml").public_size == size
        script = (kit / "start.sh").read_text()
        assert f"public-size={size} " in f"{script} ".replace("'", " ") if size else "public-size" not in script

    def test_that_was_changed_since_is_told(self, tmp_path):
        description = tmp_path / "federation.toml"
        for size, told in ((300, 0), (300, 0), (400, 1)):
            description.write_text(FEDERATION.replace('file.npz"', f'file.npz"\npublic-size = {size}'))
            notes = provision(description, tmp_path / "kits", policy_for).notes
            differ = [note for note in notes if "policy.toml has public-size = 300, which counts" in note]
            assert len(differ) == told

    @pytest.mark.parametrize("line", ["public-size = 1_000", "public-size = +1000", "'public-size' = 1000"])
    def test_is_read_as_toml(self, tmp_path, line):
        description = tmp_path / "federation.toml"
        description.write_text(FEDERATION.replace('file.npz"', 'file.npz"\npublic-size = 1000'))
        policy = provision(description, tmp_path / "kits", policy_for).folder / "sites" / "north" / "policy.toml"
        policy.write_text(policy.read_text().replace("public-size = 1000", line))
        assert read_policy(policy).public_size == 1000
        notes = provision(description, tmp_path / "kits", policy_for).notes
        assert not [note for note in notes if "public-size" in note]

    def test_in_a_file_that_is_no_toml_is_refused_by_the_files_name(self, tmp_path):
        description = tmp_path / "federation.toml"
        description.write_text(FEDERATION)
        policy = provision(description, tmp_path / "kits", policy_for).folder / "sites" / "north" / "policy.toml"
        policy.write_text(policy.read_text() + "public-size =\n")
        with pytest.raises(ConfigError, match=r"sites/north/policy.toml is no TOML file"):
            provision(description, tmp_path / "kits", policy_for)

    def test_that_only_the_policy_has_is_the_sites_own(self, tmp_path):
        description = tmp_path / "federation.toml"
        description.write_text(FEDERATION)
        policy = provision(description, tmp_path / "kits", policy_for).folder / "sites" / "north" / "policy.toml"
        policy.write_text(policy.read_text().replace("public-size = 0", "public-size = 50"))
        notes = provision(description, tmp_path / "kits", policy_for).notes
        assert not [note for note in notes if "public-size" in note]


class TestFirstRun:
    def test_every_member_has_a_kit(self, folder):
        files = set(contents(folder))
        assert files == SECRETS | {
            ".gitignore",
            "issued.json",
            "authority/ca.crt",
            *(f"server/{name}" for name in ("ca.crt", "server.crt", "start.sh", "SHA256SUMS")),
            *(f"server/{name}" for name in ("nginx.conf", "nodes.conf")),
            *(f"operator/{name}" for name in ("ca.crt", "config.toml", "nodes.conf", "register.sh", "SHA256SUMS")),
            *(f"operator/nodes/{name}.pub" for name in ("north", "south")),
            *(f"sites/north/{name}" for name in ("ca.crt", "policy.toml", "start.sh", "SHA256SUMS")),
            *(f"sites/south/{name}" for name in ("ca.crt", "policy.toml", "start.sh", "SHA256SUMS")),
            *(f"{kit}/roster.pub" for kit in ("roster", *KITS)),
        }

    @pytest.mark.parametrize("umask", [0o000, 0o077])
    def test_secrets_are_for_their_owner_only(self, make, umask):
        before = os.umask(umask)
        try:
            folder = make().folder
        finally:
            os.umask(before)
        modes = {path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777 for path in folder.rglob("*")}
        assert {name for name, mode in modes.items() if mode == 0o600} == SECRETS
        assert all(modes[path.relative_to(folder).as_posix()] == 0o700 for path in folder.rglob("*") if path.is_dir())
        assert folder.stat().st_mode & 0o777 == 0o700
        assert not [name for name, mode in modes.items() if mode & 0o022], "somebody else may write"

    def test_a_private_key_is_in_one_kit_only(self, folder):
        files = contents(folder)
        owners = [("sites/north/", "node.key"), ("sites/south/", "node.key"), ("server/", "server.key")]
        for owner, name in [*owners, ("roster/", "roster.key")]:
            secret = files[owner + name].split(b"-----")[2].split(b"\n")[2]
            assert [other for other, content in files.items() if secret in content] == [owner + name]

    def test_the_operators_token_is_not_on_the_server(self, folder):
        files = contents(folder)
        stored = {
            key.split(".")[-1]: value for key, value in yaml.safe_load(files["operator/credentials.yaml"]).items()
        }
        token = b64decode(stored["oidc-access-token"])
        assert b64decode(stored["authn-type"]) == b"oidc"
        assert files["server/operators.sha256"].split()[0].decode() == hashlib.sha256(token).hexdigest()
        assert not [name for name, content in files.items() if token in content]

    def test_node_keys_are_what_flower_reads_and_belong_together(self, folder):
        files = contents(folder)
        private = load_ssh_private_key(files["sites/north/node.key"], None)
        assert isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name == "secp384r1"
        public = load_ssh_public_key(files["operator/nodes/north.pub"])
        assert private.public_key() == public != load_ssh_public_key(files["operator/nodes/south.pub"])

    def test_the_server_certificate(self, folder):
        files = contents(folder)
        authority = x509.load_pem_x509_certificate(files["authority/ca.crt"])
        certificate = x509.load_pem_x509_certificate(files["server/server.crt"])
        certificate.verify_directly_issued_by(authority)
        assert certificate.public_key() == load_pem_private_key(files["server/server.key"], None).public_key()
        wanted = {"fl.example.org", "10.1.2.3", "2001:db8::1", "localhost", "127.0.0.1"}
        assert addresses_of(files["server/server.crt"]) == wanted
        assert timedelta(days=89) < certificate.not_valid_after_utc - datetime.now(UTC) < timedelta(days=90)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        assert not constraints.ca
        assert files["server/ca.crt"] == files["sites/north/ca.crt"] == files["operator/ca.crt"]

    def test_the_checksums_are_those_of_the_kit(self, folder):
        for kit in (folder / "server", folder / "operator", folder / "sites" / "north"):
            subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=kit, check=True)
            listed = {line.split("  ")[1] for line in (kit / "SHA256SUMS").read_text().splitlines()}
            assert listed == set(contents(kit)) - {"SHA256SUMS"}

    def test_the_policy_is_the_template(self, folder):
        assert contents(folder)["sites/south/policy.toml"].decode() == POLICY

    def test_no_kit_gets_into_version_control(self, folder):
        assert (folder / ".gitignore").read_text() == "*\n"


class TestScripts:
    def test_the_shell_understands_them(self, make):
        for script in make().folder.rglob("*.sh"):
            subprocess.run(["sh", "-n", str(script)], check=True)
            assert all(line.isprintable() for line in script.read_text().split("\n")), "a byte that is no text"
            assert script.stat().st_mode & 0o100

    @pytest.mark.parametrize(
        ("site", "data"),
        [("north", {"data-path": "/data/north's file.npz"}), ("south", {"partition-id": 1, "num-partitions": 2})],
    )
    def test_a_site_starts_its_node_with_its_own_configuration(self, make, site, data, tmp_path):
        """The script calls whatever CLOISTER_NODE names: here a program that prints its arguments, a line each."""
        kit = tmp_path / "a kit that moved"
        shutil.copytree(make().folder / "sites" / site, kit)
        (kit / "signing.key").write_text("that the site has put there")
        arguments = self.lines_of(kit / "start.sh", self.printing(tmp_path))
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert options["--superlink"] == "fl.example.org:8443"
        assert options["--auth-supernode-private-key"] == f"{kit}/node.key"
        assert options["--root-certificates"] == f"{kit}/ca.crt"
        own = {"policy": f"{kit}/policy.toml", "ledger-dir": f"{kit}/state/ledgers", "node-key": f"{kit}/node.key"}
        own |= {
            "signing-key": f"{kit}/signing.key",
            "roster": f"{kit}/roster.signed",
            "roster-key": f"{kit}/roster.pub",
        }
        said = parse_config_args([options["--node-config"]])
        folder = Path(said.pop("secure-state"))
        assert said == own | data
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700 and not list(folder.iterdir())
        assert "--insecure" not in arguments

    def test_two_sites_of_one_machine_have_different_ports_where_the_guide_is_followed(self, make, tmp_path):
        ports, kits = {}, make().folder / "sites"
        guide = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
        (told,) = set(re.findall(r"CLOISTER_PORT=(\d+) \./start\.sh", guide))
        for site, chosen in (("north", {}), ("south", {"CLOISTER_PORT": told})):
            (kits / site / "signing.key").touch()
            (kits / site / "node.key").touch()
            arguments = self.lines_of(kits / site / "start.sh", self.printing(tmp_path) | chosen)
            ports[site] = arguments[arguments.index("--port") + 1]
        assert ports == {"north": "9094", "south": told} and told != "9094"

    @staticmethod
    def printing(folder):
        """Return the environment in which a site's script prints the node's arguments, with a folder for secrets."""
        return {"PATH": "/usr/bin:/bin", "CLOISTER_NODE": "printf %s\\n", "CLOISTER_SECRETS": str(folder)}

    def test_a_site_keeps_secrets_in_a_folder_of_each_start_and_removes_those_of_starts_that_are_gone(
        self, make, tmp_path
    ):
        kit, secrets = make().folder / "sites" / "north", tmp_path / "secrets"
        (kit / "signing.key").touch()
        secrets.mkdir()
        self.lines_of(kit / "start.sh", self.printing(secrets))
        (first,) = secrets.iterdir()
        (first / "1.attempt").write_text("secret")
        running = first.with_suffix(f".{os.getpid()}")
        running.mkdir()
        self.lines_of(kit / "start.sh", self.printing(secrets))
        (second,) = set(secrets.iterdir()) - {running}
        assert second != first and not list(second.iterdir())

    def test_a_site_without_such_a_folder_has_a_node_all_the_same(self, make, tmp_path):
        kit = make().folder / "sites" / "north"
        (kit / "signing.key").touch()
        arguments = self.lines_of(kit / "start.sh", self.printing(tmp_path / "absent"))
        assert "secure-state" not in arguments[arguments.index("--node-config") + 1]

    def test_a_site_that_pins_fingerprints_names_nobody_who_signs_rosters(self, make, tmp_path):
        kit = make().folder / "sites" / "north"
        (kit / "signing.key").touch()
        (kit / "roster.pub").unlink()
        said = self.configuration(kit, self.printing(tmp_path))
        assert set(said) == {"policy", "ledger-dir", "node-key", "data-path", "signing-key", "roster", "secure-state"}

    def test_the_first_start_of_a_site_makes_the_key_that_it_signs_with_and_a_later_one_keeps_it(self, make, tmp_path):
        kit = make().folder / "sites" / "north"
        programs = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        said = self.configuration(kit, {**os.environ, **self.printing(tmp_path), "PATH": programs})
        assert said["signing-key"] == f"{kit}/state/signing.key"
        key = (kit / "state" / "signing.key").read_bytes()
        assert self.configuration(kit, self.printing(tmp_path))["signing-key"] == f"{kit}/state/signing.key"
        assert (kit / "state" / "signing.key").read_bytes() == key
        assert (
            load_ssh_public_key((kit / "state" / "signing.pub").read_bytes())
            == load_ssh_private_key(key, None).public_key()
        )

    def configuration(self, kit, environment):
        arguments = self.lines_of(kit / "start.sh", environment)
        return parse_config_args([arguments[arguments.index("--node-config") + 1]])

    def test_a_site_may_insist_on_signed_code(self, make, tmp_path):
        kit = make().folder / "sites" / "north"
        (kit / "signing.key").touch()
        (kit / "trusted-entities.yaml").write_text("# of the review board\nfpk_1: ssh-ed25519 AAAA\n")
        arguments = self.lines_of(kit / "start.sh", self.printing(tmp_path))
        assert arguments[-2:] == ["--trusted-entities", f"{kit}/trusted-entities.yaml"]

    def test_a_list_of_nobody_is_no_list(self, make, tmp_path):
        """Flower would take it for none and let every bundle run."""
        kit = make().folder / "sites" / "north"
        (kit / "signing.key").touch()

        def check(content):
            (kit / "trusted-entities.yaml").write_text(content)
            done = subprocess.run([str(kit / "start.sh")], env=self.printing(tmp_path), capture_output=True, text=True)
            assert done.returncode == 2 and "names nobody" in done.stderr and not done.stdout

        assert failures(["", "\n", "# fpk_1: ssh-ed25519 AAAA\n", "{}\n"], check) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("part", ["superexec", "all"])
    def test_the_servers_app_ends_in_order_before_its_executor(self, make, part, tmp_path):
        done = self.stopped(make().folder / "server", part, tmp_path)
        order = (tmp_path / "order").read_text().split()
        assert order == ["app-asked", "app-ended", "superexec-ended"] + ["superlink-ended"] * (part == "all")
        assert done == 0

    @pytest.mark.parametrize("part", ["superexec", pytest.param("superlink", marks=pytest.mark.slow)])
    def test_a_server_that_lost_a_part_has_failed(self, make, part, tmp_path):
        self.programs(tmp_path)
        program = tmp_path / "bin" / "cloister"
        program.write_text(program.read_text().replace("\n", f"\n[ $1 != {part} ] || exit 0\n", 1))
        done = subprocess.run(
            [str(make().folder / "server" / "start.sh")], env=self.environment(tmp_path), timeout=60, check=False
        )
        assert done.returncode == 1

    def test_apps_that_are_to_be_resumed_are_not_asked_to_end_when_the_superlink_dies(self, make, tmp_path):
        """The executor ends with the script, as Flower's does, and its app with it."""
        self.programs(tmp_path)
        (tmp_path / "bin" / "cloister").write_text(
            '#!/bin/sh\nif [ $1 = superlink ]; then while [ ! -e "$ORDER" ]; do sleep 0.05; done; exit 1; fi\n'
            "script=$(echo \"$*\" | sed 's/.*--parent-pid \\([0-9]*\\).*/\\1/')\n"
            "serverapp.py & while kill -0 $script 2>/dev/null; do sleep 0.05; done\n"
            'kill -9 $! && echo ended-with-the-script >>"$ORDER"\n'
        )
        script, environment = make().folder / "server" / "start.sh", self.environment(tmp_path)
        done = subprocess.run([str(script)], env=environment | {"CLOISTER_RESUME": "3"}, timeout=60, check=False)
        deadline = time.monotonic() + 60
        while not (order := (tmp_path / "order").read_text().split()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (done.returncode, order) == (1, ["ended-with-the-script"])

    def environment(self, tmp_path):
        return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "ORDER": str(tmp_path / "order")}

    def programs(self, tmp_path):
        """A SuperLink, and an executor with one app that takes a while to end, and one that is dead and not buried."""
        loop = "while :; do sleep 0.05; done\n"
        said = 'echo {} >>"$ORDER"'
        programs = {
            "cloister": f"#!/bin/sh\ntrap '{said.format('$1-ended')}; exit 0' TERM\n"
            f"[ $1 != superexec ] || {{ serverapp.py dead & serverapp.py & }}\n{loop}",
            "serverapp.py": '#!/bin/sh\n[ "$1" != dead ] || exit 0\n'
            f"trap '{said.format('app-asked')}; sleep 0.3; {said.format('app-ended')}; exit 0' TERM\n"
            f'touch "$ORDER"\n{loop}',
        }
        programs["nginx"] = f"#!/bin/sh\ntrap 'exit 0' TERM\n{loop}"
        (tmp_path / "bin").mkdir()
        for name, text in programs.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)

    def stopped(self, kit, part, tmp_path):
        """The exit status of a part of the server that is asked to end while an app is running."""
        self.programs(tmp_path)
        script = subprocess.Popen([str(kit / "start.sh"), part], env=self.environment(tmp_path))
        deadline = time.monotonic() + 60
        while not (tmp_path / "order").exists():
            assert time.monotonic() < deadline and script.poll() is None
            time.sleep(0.05)
        script.terminate()
        return script.wait(60)

    def test_a_site_is_known_only_as_long_as_it_was_not_sent_away(self, folder, tmp_path):
        program = tmp_path / "bin" / "flwr"
        program.parent.mkdir()
        script, environment = folder / "operator" / "register.sh", {"PATH": f"{program.parent}:/usr/bin:/bin"}

        def check(answer, said, status):
            program.write_text(f"#!/bin/sh\n[ -z '{answer}' ] || {{ echo 'Error: {answer}' >&2; exit 1; }}\n")
            program.chmod(0o755)
            done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == status
            lines = (done.stdout + done.stderr).splitlines()
            assert len(lines) == 2 and all(said in line for line in lines), lines

        taken = "[code: 103] Public key already in use."
        cases = [
            ("", "registered", 0),
            (taken, "known", 0),
            (f"{taken} {REVOKED}", "revoked. It gets in again with a new key only", 1),
            ("[code: 7] no", "[code: 7] no", 1),
        ]
        assert failures(cases, check) == []

    def test_a_node_without_its_key_does_not_start(self, make):
        kit = make().folder / "sites" / "north"
        (kit / "node.key").unlink()
        done = subprocess.run([str(kit / "start.sh")], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "node.key is missing" in done.stderr

    def lines_of(self, script, environment):
        return subprocess.run(
            ["sh", str(script)], env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()


BAD = {
    "an unknown key": (
        "port = 8443",
        "prot = 8443",
        "unknown key 'server.prot'; did you mean 'port'?; valid keys: addresses, port, superlink",
    ),
    "an unknown section": ("[server]", "[autority]\n[server]", "unknown key 'autority'"),
    "a mistyped key": ("port = 8443", 'port = "8443"', "server.port = '8443' is not valid"),
    "a port that is none": ("port = 8443", "port = 70000", "server.port = 70000 is not valid"),
    "a superlink without a port": ("port = 8443", 'superlink = "localhost"', "server.superlink = 'localhost' is not"),
    "a superlink of another name": ("port = 8443", 'superlink = "x:1"', "its host must be 127.0.0.1, or a name in"),
    "no address": ('["fl.example.org", "10.1.2.3", "2001:db8::1"]', "[]", "server.addresses = [] is not valid"),
    "an address with a port": ("10.1.2.3", "10.1.2.3:80", "'10.1.2.3:80' is neither a host name nor an IP"),
    "an address with a scheme": ("fl.example.org", "https://fl.org", "neither a host name nor an IP address"),
    "a broken IP address": ("10.1.2.3", "10.1.2.333", "'10.1.2.333' is neither a host name nor an IP"),
    "every interface": ("10.1.2.3", "0.0.0.0", "'0.0.0.0' means every interface"),
    "a site twice": ('"south"', '"north"', "site names must be unique; twice: north"),
    "a name that is a path": ('"north"', '"../north"', "sites.0.name = '../north' is not valid"),
    "half a partition": ("num-partitions = 2", "", "site 'south' needs data-path, or partition-id and num-partitions"),
    "a partition too many": ("partition-id = 1", "partition-id = 2", "partition-id must be below num-partitions"),
    "two kinds of data": ("partition-id = 1", 'data-path = "x"\npartition-id = 1', "site 'south' needs data-path, or"),
    "a path of two lines": ("north's file", "north\\nfile", "it must be one line"),
    "no name": ('name = "hospitals"', "", "name is missing"),
    "no TOML": ("[server]", "[server", "is no TOML"),
}


def test_a_bad_description_is_refused_with_the_key_and_nothing_is_written(tmp_path):
    def check(case):
        old, new, message = BAD[case]
        assert old in FEDERATION
        description = tmp_path / "federation.toml"
        description.write_text(FEDERATION.replace(old, new))
        with pytest.raises(ConfigError) as error:
            provision(description, tmp_path / "kits", POLICY)
        assert message in str(error.value)
        assert not (tmp_path / "kits").exists()

    assert failures(BAD, check) == []


def test_a_description_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_federation(tmp_path / "federation.toml")


def test_the_guides_example_is_a_federation_and_compose_has_its_sites(tmp_path):
    root = Path(__file__).parents[2]
    example, *_ = re.findall(r"```toml\n(name = .*?)```", (root / "docs" / "deploy.md").read_text(), re.DOTALL)
    (tmp_path / "federation.toml").write_text(example)
    federation = read_federation(tmp_path / "federation.toml")
    assert federation.address == "fl.example.org:8000"
    shipped = read_federation(root / "docker" / "federation.toml")
    services = yaml.safe_load((root / "compose.yaml").read_text())["services"]
    assert {site.name for site in shipped.sites} <= set(services) and shipped.server.port == 8000
    assert "superlink" in shipped.server.addresses
