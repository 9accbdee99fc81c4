"""Start-up kits: what is in them, who may read it, and what running again leaves alone."""

import hashlib
import io
import ipaddress
import os
import re
import shutil
import subprocess
import time
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from flwr.common.config import parse_config_args
from rich.console import Console

from cloister.core.errors import ConfigError
from cloister.deploy.certificates import addresses_of, check_signed, new_tls_key, self_signed, server_certificate
from cloister.deploy.federation import read_federation
from cloister.deploy.kits import provision
from cloister.deploy.report import show
from cloister.deploy.revoked import REVOKED

POLICY = 'mechanisms = ["metric"]\n'
FEDERATION = """\
name = "hospitals"

[server]
addresses = ["fl.example.org", "10.1.2.3", "2001:db8::1"]
port = 8443
days = 90

[[sites]]
name = "north"
data-path = "/data/north's file.npz"

[[sites]]
name = "south"
partition-id = 1
num-partitions = 2
"""
THIRD = '\n[[sites]]\nname = "east"\ndata-path = "/data/east.npz"\n'
SECRETS = {
    "authority/ca.key",
    "server/server.key",
    "server/superexec.secret",
    "server/operators.sha256",
    "operator/credentials.yaml",
    "roster/roster.key",
    *(
        f"sites/{site}/{name}"
        for site in ("north", "south")
        for name in ("node.key", "signing.key", "superexec.secret")
    ),
}
KITS = ("operator", "sites/north", "sites/south")
ROSTER = ("roster.pub", "roster.signed")


@pytest.fixture
def make(tmp_path):
    def provisioned(text=FEDERATION, **options):
        description = tmp_path / "federation.toml"
        description.write_text(text)
        return provision(description, tmp_path / "kits", POLICY, **options)

    return provisioned


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestFirstRun:
    def test_every_member_has_a_kit(self, make):
        files = set(contents(make().folder))
        assert files == SECRETS | {
            ".gitignore",
            "issued.json",
            "authority/ca.crt",
            *(f"server/{name}" for name in ("ca.crt", "server.crt", "start.sh", "SHA256SUMS")),
            *(f"operator/{name}" for name in ("ca.crt", "config.toml", "register.sh", "SHA256SUMS")),
            *(f"operator/nodes/{name}.pub" for name in ("north", "south")),
            *(f"sites/north/{name}" for name in ("ca.crt", "policy.toml", "start.sh", "SHA256SUMS")),
            *(f"sites/south/{name}" for name in ("ca.crt", "policy.toml", "start.sh", "SHA256SUMS")),
            *(f"{kit}/{name}" for kit in ("roster", *KITS) for name in ROSTER),
            *(f"roster/keys/{name}.pub" for name in ("north", "south")),
        }

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
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

    def test_a_private_key_is_in_one_kit_only(self, make):
        files = contents(make().folder)
        owners = [("sites/north/", "node.key"), ("sites/south/", "node.key"), ("server/", "server.key")]
        for owner, name in [*owners, ("sites/north/", "signing.key"), ("roster/", "roster.key")]:
            secret = files[owner + name].split(b"-----")[2].split(b"\n")[2]
            assert [other for other, content in files.items() if secret in content] == [owner + name]

    def test_the_operators_token_is_not_on_the_server(self, make):
        files = contents(make().folder)
        stored = {
            key.split(".")[-1]: value for key, value in yaml.safe_load(files["operator/credentials.yaml"]).items()
        }
        token = b64decode(stored["oidc-access-token"])
        assert b64decode(stored["authn-type"]) == b"oidc"
        assert files["server/operators.sha256"].split()[0].decode() == hashlib.sha256(token).hexdigest()
        assert not [name for name, content in files.items() if token in content]

    def test_node_keys_are_what_flower_reads_and_belong_together(self, make):
        files = contents(make().folder)
        private = load_ssh_private_key(files["sites/north/node.key"], None)
        assert isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name == "secp384r1"
        public = load_ssh_public_key(files["operator/nodes/north.pub"])
        assert private.public_key() == public != load_ssh_public_key(files["operator/nodes/south.pub"])

    def test_the_server_certificate(self, make):
        files = contents(make().folder)
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

    def test_the_checksums_are_those_of_the_kit(self, make):
        folder = make().folder
        for kit in (folder / "server", folder / "operator", folder / "sites" / "north"):
            subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=kit, check=True)
            listed = {line.split("  ")[1] for line in (kit / "SHA256SUMS").read_text().splitlines()}
            assert listed == set(contents(kit)) - {"SHA256SUMS"}

    def test_the_policy_is_the_template(self, make):
        assert contents(make().folder)["sites/south/policy.toml"].decode() == POLICY

    def test_no_kit_gets_into_version_control(self, make):
        assert (make().folder / ".gitignore").read_text() == "*\n"


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
        arguments = self.lines_of(kit / "start.sh", self.printing(tmp_path))
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert options["--superlink"] == "fl.example.org:8443"
        assert options["--auth-supernode-private-key"] == f"{kit}/node.key"
        assert options["--root-certificates"] == f"{kit}/ca.crt"
        own = {"policy": f"{kit}/policy.toml", "ledger-dir": f"{kit}/state/ledgers"}
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

    @staticmethod
    def printing(folder):
        """What makes the script of a site print the arguments of the node, with a folder for secrets."""
        return {"PATH": "/usr/bin:/bin", "CLOISTER_NODE": "printf %s\\n", "CLOISTER_SECRETS": str(folder)}

    def test_a_site_keeps_secrets_in_a_folder_of_each_start_and_removes_those_of_starts_that_are_gone(
        self, make, tmp_path
    ):
        kit, secrets = make().folder / "sites" / "north", tmp_path / "secrets"
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
        arguments = self.lines_of(kit / "start.sh", self.printing(tmp_path / "absent"))
        assert "secure-state" not in arguments[arguments.index("--node-config") + 1]

    @pytest.mark.parametrize(
        ("gone", "keys"),
        [("signing.key", set()), ("roster.pub", {"signing-key", "roster", "secure-state"})],
        ids=["no key", "pins"],
    )
    def test_a_site_says_of_itself_what_it_has_files_for(self, make, gone, keys, tmp_path):
        kit = make().folder / "sites" / "north"
        (kit / gone).unlink()
        arguments = self.lines_of(kit / "start.sh", self.printing(tmp_path))
        said = set(parse_config_args([arguments[arguments.index("--node-config") + 1]]))
        assert said == {"policy", "ledger-dir", "data-path"} | keys

    def test_a_site_may_insist_on_signed_code(self, make, tmp_path):
        kit = make().folder / "sites" / "north"
        (kit / "trusted-entities.yaml").write_text("# of the review board\nfpk_1: ssh-ed25519 AAAA\n")
        arguments = self.lines_of(kit / "start.sh", self.printing(tmp_path))
        assert arguments[-2:] == ["--trusted-entities", f"{kit}/trusted-entities.yaml"]

    @pytest.mark.parametrize("content", ["", "\n", "# fpk_1: ssh-ed25519 AAAA\n", "{}\n"])
    def test_a_list_of_nobody_is_no_list(self, make, content, tmp_path):
        """Flower would take it for none and let every bundle run."""
        kit = make().folder / "sites" / "north"
        (kit / "trusted-entities.yaml").write_text(content)
        done = subprocess.run(
            [str(kit / "start.sh")], env=self.printing(tmp_path), capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and "names nobody" in done.stderr and not done.stdout

    @pytest.mark.parametrize("part", ["superexec", "both"])
    def test_the_servers_app_ends_in_order_before_its_executor(self, make, part, tmp_path):
        done = self.stopped(make().folder / "server", part, tmp_path)
        order = (tmp_path / "order").read_text().split()
        assert order == ["app-asked", "app-ended", "superexec-ended"] + ["superlink-ended"] * (part == "both")
        assert done == 0

    @pytest.mark.parametrize("part", ["superexec", "superlink"])
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
            f"trap '{said.format('app-asked')}; sleep 1; {said.format('app-ended')}; exit 0' TERM\n"
            f'touch "$ORDER"\n{loop}',
        }
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

    @pytest.mark.parametrize(
        ("answer", "said", "status"),
        [
            ("", "registered", 0),
            ("[code: 103] Public key already in use.", "known", 0),
            (f"[code: 103] Public key already in use. {REVOKED}", "revoked. It gets in again with a new key only", 1),
            ("[code: 7] no", "[code: 7] no", 1),
        ],
    )
    def test_a_site_is_known_only_as_long_as_it_was_not_sent_away(self, make, tmp_path, answer, said, status):
        program = tmp_path / "bin" / "flwr"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n[ -z '{answer}' ] || {{ echo 'Error: {answer}' >&2; exit 1; }}\n")
        program.chmod(0o755)
        script, environment = make().folder / "operator" / "register.sh", {"PATH": f"{program.parent}:/usr/bin:/bin"}
        done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status
        lines = (done.stdout + done.stderr).splitlines()
        assert len(lines) == 2 and all(said in line for line in lines), lines

    def test_a_node_without_its_key_does_not_start(self, make):
        kit = make().folder / "sites" / "north"
        (kit / "node.key").unlink()
        done = subprocess.run([str(kit / "start.sh")], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "node.key is missing" in done.stderr

    def lines_of(self, script, environment):
        return subprocess.run(
            ["sh", str(script)], env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()


class TestAgain:
    def test_nothing_changes(self, make):
        before = contents(make().folder)
        again = make()
        assert again.written == () and again.notes == () and contents(again.folder) == before

    def test_a_new_site_changes_of_others_the_roster_alone(self, make):
        first = make()
        before = contents(first.folder)
        (first.folder / "sites" / "north" / "policy.toml").write_text("# the site's own\n")
        after = contents(make(FEDERATION + THIRD).folder)
        changed = {name for name in before if after[name] != before[name]}
        rosters = {f"{kit}/{name}" for kit in KITS for name in ("roster.signed", "SHA256SUMS")} | {
            "roster/roster.signed"
        }
        assert changed == rosters | {"sites/north/policy.toml", "issued.json"}
        assert after["sites/north/policy.toml"] == b"# the site's own\n"
        new = set(after) - set(before)
        assert {name for name in new if not name.startswith("sites/east/")} == {
            "operator/nodes/east.pub",
            "roster/keys/east.pub",
        }
        assert "sites/east/node.key" in new

    def test_a_kit_that_was_handed_over_is_not_made_again(self, make):
        folder = make().folder
        shutil.rmtree(folder / "sites" / "north")
        again = make(FEDERATION + THIRD)
        assert not (folder / "sites" / "north").exists() and (folder / "sites" / "east").is_dir()
        assert "sites/north" not in " ".join(again.written)

    def test_a_lost_public_key_is_taken_from_the_private_one_that_is_there(self, make):
        before = contents(make().folder)
        shutil.rmtree(make().folder / "operator" / "nodes")
        after = contents(make().folder)
        assert after["sites/north/node.key"] == before["sites/north/node.key"]
        assert after["operator/nodes/north.pub"] == before["operator/nodes/north.pub"]

    @pytest.mark.parametrize("with_record", [True, False])
    def test_kits_that_were_all_handed_over_are_not_made_again(self, make, with_record):
        folder = make().folder
        before = contents(folder)
        if not with_record:  # kits of before there was one
            (folder / "issued.json").unlink()
            make()
        for name in ("operator", "server", "sites"):
            shutil.rmtree(folder / name)
        again = make(FEDERATION + THIRD)
        made = (*again.written, *make(FEDERATION + THIRD).written)
        keys = [name for name in made if name.endswith((".key", ".secret", ".yaml", ".sha256", "server.crt"))]
        assert sorted(keys) == [f"sites/east/{name}" for name in ("node.key", "signing.key", "superexec.secret")]
        assert contents(folder)["operator/nodes/north.pub"] == before["operator/nodes/north.pub"]
        assert any("server was made before and is not here" in note for note in again.notes)
        with pytest.raises(ConfigError, match="put it back"):
            make(renew=True)

    def test_unless_that_is_asked_for(self, make):
        folder = make().folder
        before = contents(folder)
        with pytest.raises(ConfigError, match="move it away first"):
            make(remake=["sites/north"])
        shutil.rmtree(folder / "sites" / "north")
        shutil.rmtree(folder / "operator")
        make(remake=["sites/north", "operator"])
        after = contents(folder)
        for name in ("sites/north/node.key", "operator/nodes/north.pub", "operator/credentials.yaml"):
            assert after[name] != before[name]
        assert after["operator/nodes/south.pub"] == before["operator/nodes/south.pub"]
        token = b64decode(yaml.safe_load(after["operator/credentials.yaml"]).popitem()[1])
        assert token and after["server/operators.sha256"] != before["server/operators.sha256"]
        with pytest.raises(ConfigError, match="'west' is none of server, operator, sites/north"):
            make(remake=["west"])

    def test_a_record_that_is_none(self, make):
        (make().folder / "issued.json").write_text("[]")
        with pytest.raises(ConfigError, match="no record of issued kits"):
            make()

    @pytest.mark.parametrize("name", ["server/start.sh", "server", "sites/north/policy.toml"])
    def test_what_stands_in_the_place_of_something_else(self, make, tmp_path, name):
        path = tmp_path / "kits" / name
        path.parent.mkdir(parents=True)
        path.write_text("") if name == "server" else path.mkdir()
        with pytest.raises(ConfigError, match=name):
            make()

    def test_a_folder_that_was_there_is_closed_to_others(self, make, tmp_path):
        (tmp_path / "kits" / "server").mkdir(parents=True)
        for folder in (tmp_path / "kits", tmp_path / "kits" / "server"):
            folder.chmod(0o755)
        make()
        assert (tmp_path / "kits").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "kits" / "server").stat().st_mode & 0o777 == 0o700

    def test_what_no_longer_fits_is_told_and_kept(self, make):
        before = contents(make().folder)
        again = make(FEDERATION.replace('"fl.example.org", ', '"new.example.org", '))
        assert contents(again.folder) == before
        notes = "\n".join(again.notes)
        assert "not made out for new.example.org; use --renew" in notes
        assert "sites/north/start.sh differs" in notes and "operator/register.sh differs" in notes

    def test_a_site_that_left_is_told(self, make):
        make(FEDERATION + THIRD)
        assert any("site east is not in federation.toml" in note for note in make().notes)


class TestRenewal:
    def test_a_new_server_certificate_and_nothing_else(self, make):
        before = contents(make().folder)
        after = contents(make(renew=True).folder)
        assert {name for name in after if after[name] != before.get(name)} == {"server/server.crt", "server/SHA256SUMS"}

    def test_nodes_with_the_old_authority_trust_what_the_renewed_one_signs(self, make):
        before = contents(make().folder)
        after = contents(make(renew_authority=True).folder)
        assert after["authority/ca.crt"] != before["authority/ca.crt"]
        assert after["sites/north/ca.crt"] == after["authority/ca.crt"]
        assert after["sites/north/node.key"] == before["sites/north/node.key"]
        renewed = x509.load_pem_x509_certificate(after["server/server.crt"])
        for authority in (before["authority/ca.crt"], after["authority/ca.crt"]):
            renewed.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))

    def test_a_certificate_does_not_outlive_its_authority(self):
        key = new_tls_key()
        authority = self_signed(key, "short", 10)
        certificate = server_certificate(new_tls_key(), ["host"], 365, authority, key)
        ends = [x509.load_pem_x509_certificate(pem).not_valid_after_utc for pem in (authority, certificate)]
        assert ends[0] == ends[1]

    def test_the_expiry_is_shown_and_red_when_near(self, make):
        def screen(report):
            text = io.StringIO()
            show(report, Console(file=text, width=120, force_terminal=True, color_system="standard"))
            return text.getvalue()

        long, short = screen(make()), screen(make(FEDERATION.replace("days = 90", "days = 20"), renew=True))
        end = (datetime.now(UTC) + timedelta(days=20)).date()
        assert "server/server.crt" in short and str(end) in short
        assert "\x1b[31m" in short and "\x1b[31m" not in long

    def test_an_authority_that_is_not_here_signs_nothing(self, make):
        folder = make().folder
        (folder / "authority" / "ca.key").unlink()
        assert make(FEDERATION + THIRD).folder == folder  # a new site needs no signature
        with pytest.raises(ConfigError, match=r"authority/ca\.key is not in"):
            make(renew=True)


class TestExternalAuthority:
    @pytest.fixture
    def authority(self):
        key = new_tls_key()
        return self_signed(key, "the hospital's", 1000), key

    def signed(self, folder, authority, addresses=None):
        """What an authority makes of the request, as `openssl x509 -req -copy_extensions copy` would."""
        request = x509.load_pem_x509_csr((folder / "server" / "server.csr").read_bytes())
        assert request.is_signature_valid
        certificate, key = authority
        issuer, private = x509.load_pem_x509_certificate(certificate), load_pem_private_key(key, None)
        builder = x509.CertificateBuilder(issuer.subject, request.subject, request.public_key(), 7)
        builder = builder.not_valid_before(datetime.now(UTC)).not_valid_after(datetime.now(UTC) + timedelta(days=9))
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        builder = builder.add_extension(addresses or names, critical=False)
        return builder.sign(private, hashes.SHA256()).public_bytes(Encoding.PEM)

    def described(self, tmp_path, certificate, authority):
        (tmp_path / "signed.crt").write_bytes(certificate)
        (tmp_path / "theirs.crt").write_bytes(authority)
        keys = 'kind = "external"\ncertificate = "signed.crt"\nca-certificate = "theirs.crt"\n'
        return FEDERATION + "[authority]\n" + keys

    def test_a_request_first_then_what_was_signed(self, make, tmp_path, authority):
        first = make(FEDERATION + '[authority]\nkind = "external"\n')
        assert any("have server/server.csr signed" in note for note in first.notes)
        assert not list(first.folder.rglob("*.crt")) and not (first.folder / "authority").exists()
        before = contents(first.folder)
        second = make(self.described(tmp_path, self.signed(first.folder, authority), authority[0]))
        after = contents(second.folder)
        assert after["sites/north/ca.crt"] == after["server/ca.crt"] == authority[0]
        assert all(after[name] == before[name] for name in before if not name.endswith("SHA256SUMS"))
        assert make(self.described(tmp_path, after["server/server.crt"], authority[0])).written == ()

    def test_a_house_that_changes_its_authority(self, make, tmp_path, authority):
        folder = make(FEDERATION + '[authority]\nkind = "external"\n').folder
        make(self.described(tmp_path, self.signed(folder, authority), authority[0]))
        key = new_tls_key()
        other = self_signed(key, "the hospital's new", 1000), key
        make(self.described(tmp_path, self.signed(folder, other), other[0]))
        assert (folder / "sites" / "north" / "ca.crt").read_bytes() == other[0]

    def test_a_certificate_that_nodes_would_refuse(self, make, tmp_path, authority):
        folder = make(FEDERATION + '[authority]\nkind = "external"\n').folder
        few = x509.SubjectAlternativeName([x509.DNSName("fl.example.org"), x509.DNSName("localhost")])
        with pytest.raises(ConfigError, match=r"not made out for 10\.1\.2\.3, 127\.0\.0\.1, 2001:db8::1"):
            make(self.described(tmp_path, self.signed(folder, authority, few), authority[0]))
        stranger = self_signed(new_tls_key(), "the hospital's", 1000)
        with pytest.raises(ConfigError, match="was not issued by ca-certificate"):
            make(self.described(tmp_path, self.signed(folder, authority), stranger))
        other = server_certificate(new_tls_key(), ["fl.example.org"], 9, *authority)
        with pytest.raises(ConfigError, match="not for the key of this server kit"):
            make(self.described(tmp_path, other, authority[0]))
        assert not (folder / "server" / "server.crt").exists()


class TestSignedElsewhere:
    """What `check_signed` makes of the details of a certificate."""

    KEY = new_tls_key()

    def signed(self, names=("host",), before=-1, after=9, usage=None, ca=True, root=(-9, 9)):
        authority_key = load_pem_private_key(new_tls_key(), None)
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the house")])
        authority = self.built(issuer, issuer, authority_key.public_key(), *root)
        authority = authority.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "host")])
        leaf = self.built(subject, issuer, load_pem_private_key(self.KEY, None).public_key(), before, after)
        alternatives = [x509.DNSName(name) for name in (*names, "localhost")]
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        leaf = leaf.add_extension(x509.SubjectAlternativeName([*alternatives, loopback]), critical=False)
        if usage:
            leaf = leaf.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return [one.sign(authority_key, hashes.SHA256()).public_bytes(Encoding.PEM) for one in (leaf, authority)]

    def built(self, subject, issuer, key, before, after):
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        return builder.not_valid_before(now + timedelta(days=before)).not_valid_after(now + timedelta(days=after))

    @pytest.mark.parametrize(
        "details", [{}, {"names": ("HOST",)}, {"usage": ExtendedKeyUsageOID.SERVER_AUTH}], ids=["plain", "case", "use"]
    )
    def test_nodes_accept(self, details):
        check_signed(*self.signed(**details), self.KEY, ["host"])

    @pytest.mark.parametrize(
        ("details", "says"),
        [
            ({"before": 1}, "the server's certificate is not valid yet"),
            ({"before": -9, "after": -1}, "the server's certificate has expired"),
            ({"root": (-9, -1)}, "CN=the house above it has expired"),
            ({"root": (1, 9)}, "CN=the house above it is not valid yet"),
            ({"ca": False}, "was not issued by ca-certificate"),
            ({"usage": ExtendedKeyUsageOID.CLIENT_AUTH}, "lacks serverAuth"),
            ({"names": ("hosts",)}, "not made out for host"),
        ],
    )
    def test_nodes_would_refuse(self, details, says):
        with pytest.raises(ConfigError, match=says):
            check_signed(*self.signed(**details), self.KEY, ["host"])


class TestOwnKey:
    def write(self, path, key):
        path.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
        return FEDERATION.replace('name = "south"', f'name = "south"\npublic-key = "{path.name}"')

    def test_a_key_the_site_made_is_registered_and_its_private_half_never_seen(self, make, tmp_path):
        key = ec.generate_private_key(ec.SECP384R1())
        report = make(self.write(tmp_path / "south.pub", key))
        assert (
            load_ssh_public_key((report.folder / "operator" / "nodes" / "south.pub").read_bytes()) == key.public_key()
        )
        assert not (report.folder / "sites" / "south" / "node.key").exists()
        assert any("site south puts its own private key" in note for note in report.notes)

    def test_a_key_of_another_kind(self, make, tmp_path):
        text = self.write(tmp_path / "south.pub", ed25519.Ed25519PrivateKey.generate())
        with pytest.raises(ConfigError, match="must be an EC key"):
            make(text)

    def test_one_key_for_two_sites(self, make, tmp_path):
        text = self.write(tmp_path / "south.pub", ec.generate_private_key(ec.SECP384R1()))
        with pytest.raises(ConfigError, match="two sites have the same public-key"):
            make(text.replace('name = "north"', 'name = "north"\npublic-key = "south.pub"'))


BAD = {
    "an unknown key": ("port = 8443", "prot = 8443", "unknown key 'server.prot'; valid keys: addresses, port, days"),
    "an unknown section": ("[server]", "[autority]\n[server]", "unknown key 'autority'"),
    "a mistyped key": ("port = 8443", 'port = "8443"', "server.port = '8443' is not valid"),
    "a port that is none": ("port = 8443", "port = 70000", "server.port = 70000 is not valid"),
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


@pytest.mark.parametrize("case", BAD)
def test_a_bad_description_is_refused_with_the_key_and_nothing_is_written(case, tmp_path):
    old, new, message = BAD[case]
    assert old in FEDERATION
    description = tmp_path / "federation.toml"
    description.write_text(FEDERATION.replace(old, new))
    with pytest.raises(ConfigError) as error:
        provision(description, tmp_path / "kits", POLICY)
    assert message in str(error.value)
    assert not (tmp_path / "kits").exists()


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
