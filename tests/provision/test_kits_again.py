"""Making kits again: what is renewed, what is left alone, and keys and certificates of other authorities."""

import io
import ipaddress
import shutil
from base64 import b64decode
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from rich.console import Console
from secure_rounds import collect
from support import failures
from two_sites import FEDERATION, KITS, THIRD, contents, made

from cloister.deploy.credentials import check_signed, new_tls_key, self_signed, server_certificate
from cloister.deploy.provision.kits import show
from cloister.utils.errors import ConfigError


@pytest.fixture
def make(tmp_path):
    return partial(made, tmp_path)


class TestAgain:
    def test_nothing_changes(self, make):
        first = make()
        collect(first.folder, "north", "south")
        before = contents(make().folder)
        again = make()
        assert again.written == () and again.notes == () and contents(again.folder) == before

    def test_a_new_site_changes_of_others_the_roster_and_the_proxys_list(self, make):
        first = make()
        collect(first.folder, "north", "south")
        before = contents(make().folder)
        collect(make(FEDERATION + THIRD).folder, "east")
        (first.folder / "sites" / "north" / "policy.toml").write_text("# the site's own\n")
        after = contents(make(FEDERATION + THIRD).folder)
        changed = {name for name in before if after[name] != before[name]}
        rosters = {f"{kit}/{name}" for kit in KITS for name in ("roster.signed", "SHA256SUMS")} | {
            "roster/roster.signed"
        }
        lists = {"operator/nodes.conf", "server/nodes.conf", "server/SHA256SUMS"}
        assert changed == rosters | lists | {"sites/north/policy.toml", "issued.json"}
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
        assert sorted(keys) == [f"sites/east/{name}" for name in ("node.key", "superexec.secret")]
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

    def test_what_stands_in_the_place_of_something_else(self, tmp_path):
        for number, name in enumerate(("server/start.sh", "server", "sites/north/policy.toml")):
            path = tmp_path / str(number) / "kits" / name
            path.parent.mkdir(parents=True)
            path.write_text("") if name == "server" else path.mkdir()
            with pytest.raises(ConfigError, match=name):
                made(tmp_path / str(number))

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
        """Sign the request as an authority, as `openssl x509 -req -copy_extensions copy` would."""
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
    """Return the result of `check_signed` for the details of a certificate."""

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

    def test_nodes_accept(self):
        for details in ({}, {"names": ("HOST",)}, {"usage": ExtendedKeyUsageOID.SERVER_AUTH}):
            check_signed(*self.signed(**details), self.KEY, ["host"])

    def test_nodes_would_refuse(self):
        def check(details, says):
            with pytest.raises(ConfigError, match=says):
                check_signed(*self.signed(**details), self.KEY, ["host"])

        cases = [
            ({"before": 1}, "the server's certificate is not valid yet"),
            ({"before": -9, "after": -1}, "the server's certificate has expired"),
            ({"root": (-9, -1)}, "CN=the house above it has expired"),
            ({"root": (1, 9)}, "CN=the house above it is not valid yet"),
            ({"ca": False}, "was not issued by ca-certificate"),
            ({"usage": ExtendedKeyUsageOID.CLIENT_AUTH}, "lacks serverAuth"),
            ({"names": ("hosts",)}, "not made out for host"),
        ]
        assert failures(cases, check) == []


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
