"""Signing keys and rosters of a federation: who is on one, who signs it, and what operators change of it."""

import fcntl
import json
import shutil
import stat
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from operators_kit import Client
from secure_rounds import collect, openssh, signing_key
from two_sites import contents
from typer.testing import CliRunner

from cloister import cli
from cloister.cli import operate
from cloister.client.keys import identity
from cloister.client.node import node_of
from cloister.deploy import sites
from cloister.deploy.provision import rosters
from cloister.deploy.provision.folder import Kits
from cloister.deploy.provision.kits import provision
from cloister.secure_aggregation.roster import Roster, opened, public_bytes, sign_roster
from cloister.utils.errors import ConfigError, NodeConfigError
from cloister.utils.keys import REMEDY, fingerprint

OWN = signing_key("made by south itself")
FEDERATION = """\
name = "hospitals"

[server]
addresses = ["fl.example.org"]

[[sites]]
name = "north"
data-path = "/data/north.npz"

[[sites]]
name = "south"
data-path = "/data/south.npz"
"""
THIRD = '\n[[sites]]\nname = "east"\ndata-path = "/data/east.npz"\n'


@pytest.fixture
def provisioned(tmp_path):
    """Makes kits; no site has started yet."""

    def provisioned(text=FEDERATION, **options):
        description = tmp_path / "federation.toml"
        description.write_text(text)
        return provision(description, tmp_path / "kits", 'mechanisms = []\ntasks = ["digits"]\n', **options)

    return provisioned


@pytest.fixture
def make(provisioned):
    """Makes kits, starts the sites whose kits are there and that have no key yet, and makes kits with their keys."""

    def made(text=FEDERATION, **options):
        first = provisioned(text, **options)
        kits = sorted(path.name for path in (first.folder / "sites").glob("*"))
        if new := [name for name in kits if any(f"site {name} is not on the roster" in note for note in first.notes)]:
            collect(first.folder, *new)
            again = provisioned(text)
            return replace(again, notes=(*first.notes, *again.notes))
        return first

    return made


def public(key):
    return openssh(key)[1]


def private(key):
    return openssh(key)[0]


def site(folder, name, ledgers=None):
    """Return the identity of a site, by the files of its kit."""
    kit = folder / "sites" / name
    own = "signing.key" if (kit / "signing.key").exists() else "state/signing.key"
    files = {"signing-key": own, "roster": "roster.signed", "roster-key": "roster.pub"}
    said = {key: str(kit / file) for key, file in files.items()}
    return identity(node_of(said | {"ledger-dir": str(ledgers or folder / "ledgers" / name)}))


def older(provisioned):
    """Kits as older versions made them: with signing keys, and a roster that does not say who made these."""
    folder = provisioned().folder
    keys = {name: signing_key(f"{name}, by the provisioner") for name in ("north", "south")}
    record = json.loads((folder / "issued.json").read_text())
    for name, key in keys.items():
        (folder / "sites" / name / "signing.key").write_bytes(private(key))
        (folder / rosters.key_file(name)).write_bytes(public(key))
        record[rosters.entry(name)] = public(key).decode()
    authority = load_ssh_private_key((folder / "roster" / "roster.key").read_bytes(), None)
    roster = Roster({name: public_bytes(key) for name, key in keys.items()})
    (folder / "roster" / "roster.signed").write_bytes(sign_roster(roster, 1, authority))
    (folder / "issued.json").write_text(json.dumps(record))
    return folder


def signs(path):
    """Return whether a file has a private key that signs in secure aggregations, or rosters."""
    try:
        return isinstance(load_ssh_private_key(path.read_bytes(), None), Ed25519PrivateKey)
    except ValueError:
        return False


def newest(folder):
    return opened((folder / "roster" / "roster.signed").read_bytes())


class TestProvision:
    def test_each_site_knows_itself_and_the_others(self, make):
        folder = make().folder
        found = {name: site(folder, name) for name in ("north", "south")}
        assert [one.name for one in found.values()] == ["north", "south"]
        assert found["north"].roster == found["south"].roster == newest(folder).roster
        keys = {name: load_ssh_public_key((folder / rosters.key_file(name)).read_bytes()) for name in found}
        assert {name: key.public_bytes_raw() for name, key in keys.items()} == found["north"].roster.keys

    def test_nothing_that_signs_rosters_is_in_a_kit(self, make):
        folder = make().folder
        key = load_ssh_private_key((folder / "roster" / "roster.key").read_bytes(), None)
        assert stat.S_IMODE((folder / "roster" / "roster.key").stat().st_mode) == 0o600
        files = contents(folder)
        secrets = (key.private_bytes_raw(), files["roster/roster.key"].split(b"-----")[2].split(b"\n")[2])
        assert [name for name, content in files.items() if any(one in content for one in secrets)] == [
            "roster/roster.key"
        ]
        assert not [name for name in files if name.startswith("server/") and "roster" in name]

    def test_a_new_site_is_on_a_new_roster(self, make):
        before = newest(make().folder)
        report = make(FEDERATION + THIRD)
        after = newest(report.folder)
        assert set(after.roster.keys) == {"north", "south", "east"} and after.serial > before.serial
        assert site(report.folder, "north").roster == after.roster
        assert "the roster has changed: give roster/roster.signed to every site and operator" in report.notes

    def test_a_site_that_left_is_on_no_new_one(self, make):
        make(FEDERATION + THIRD)
        assert set(newest(make().folder).roster.keys) == {"north", "south"}

    def test_a_key_that_the_site_made_itself(self, make, tmp_path):
        (tmp_path / "own.pub").write_bytes(public(OWN))
        own = FEDERATION.replace('name = "south"', 'name = "south"\npublic-signing-key = "own.pub"')
        report = make(own)
        assert newest(report.folder).roster.keys["south"] == public_bytes(OWN)
        assert not (report.folder / "sites" / "south" / "signing.key").exists()
        assert "site south puts its own private signing key in its kit as signing.key" in report.notes
        (tmp_path / "own.pub").write_bytes(public(signing_key("a new one")))
        assert any("roster/keys/south.pub is not the public-signing-key" in note for note in make(own).notes)
        (report.folder / "roster" / "keys" / "south.pub").unlink()
        make(own)
        assert newest(report.folder).roster.keys["south"] == public_bytes(signing_key("a new one"))

    def test_one_key_for_two_sites(self, make, tmp_path):
        (tmp_path / "own.pub").write_bytes(public(OWN))
        text = FEDERATION
        for name in ("north", "south"):
            text = text.replace(f'name = "{name}"', f'name = "{name}"\npublic-signing-key = "own.pub"')
        with pytest.raises(ConfigError, match="two sites have the same public-signing-key"):
            make(text)

    def test_a_site_whose_key_was_not_collected_is_on_no_roster(self, provisioned):
        folder = provisioned().folder
        collect(folder, "south")
        report = provisioned()
        assert set(newest(folder).roster.keys) == {"south"}
        (note,) = (note for note in report.notes if "north" in note)
        assert note == (
            "site north is not on the roster: put the signing.pub that its first start writes here as "
            "roster/keys/north.pub, and run this again"
        )

    def test_no_kit_has_a_key_with_which_a_site_signs_and_sites_make_theirs(self, provisioned):
        """As docs/deploy.md says; who made a key can sign as that site."""
        folder = provisioned().folder
        assert [name for name in contents(folder) if signs(folder / name)] == ["roster/roster.key"]
        collect(folder, "north", "south")
        provisioned()
        assert newest(folder).roster.at_site == {"north", "south"}
        assert site(folder, "north").name == "north"

    def test_a_key_of_an_older_kit_counts_as_made_by_the_provisioner(self, provisioned):
        folder = older(provisioned)
        report = provisioned()
        assert newest(folder).roster.by_provisioner == ("north", "south")
        told = "counted as working with the server: the provisioner, who made the signing keys of north, south; "
        assert told + REMEDY in report.notes

    def test_a_key_of_an_older_kit_that_was_handed_over_counts_so_too(self, provisioned):
        folder = older(provisioned)
        for name in ("north", "south"):
            (folder / "sites" / name / "signing.key").unlink()
        (folder / "issued.json").unlink()
        provisioned()
        provisioned()
        assert newest(folder).roster.by_provisioner == ("north", "south")

    def test_a_key_in_a_kit_that_is_here_counts_so_whatever_was_recorded(self, provisioned):
        folder = older(provisioned)
        (folder / "roster" / "roster.signed").unlink()
        record = json.loads((folder / "issued.json").read_text())
        left = {name: key for name, key in record.items() if name not in map(rosters.entry, ("north", "south"))}
        (folder / "issued.json").write_text(json.dumps(left))
        provisioned()
        assert newest(folder).roster.by_provisioner == ("north", "south")

    def test_also_on_the_roster_of_a_new_key_that_signs_rosters(self, provisioned):
        folder = older(provisioned)
        shutil.rmtree(folder / "roster")
        provisioned(remake=["roster"])
        assert newest(folder).roster.by_provisioner == ("north", "south")

    def test_a_new_key_from_the_site_takes_the_place_of_the_older_one(self, provisioned):
        folder = older(provisioned)
        collect(folder, "north")
        report = provisioned()
        assert newest(folder).roster.by_provisioner == ("south",) and newest(folder).roster.at_site == {"north"}
        told = fingerprint(load_ssh_public_key((folder / "roster" / "keys" / "north.pub").read_bytes()))
        assert f"site north has made the signing key {told}: compare that with what it has printed" in report.notes

    def test_a_key_that_federation_toml_names_is_the_sites_own_also_on_an_older_roster(self, provisioned, tmp_path):
        folder = older(provisioned)
        (tmp_path / "own.pub").write_bytes((folder / "roster" / "keys" / "south.pub").read_bytes())
        (folder / "sites" / "south" / "signing.key").unlink()
        provisioned(FEDERATION.replace('name = "south"', 'name = "south"\npublic-signing-key = "own.pub"'))
        assert newest(folder).roster.at_site == {"south"}

    def test_a_site_that_was_taken_off_does_not_come_back_with_a_file(self, make):
        folder = make().folder
        shutil.copy(folder / "roster" / "keys" / "north.pub", folder / "north.pub")
        with Kits(folder).locked(pytest.fail):
            rosters.strike(Kits(folder), "north")
        shutil.copy(folder / "north.pub", folder / "roster" / "keys" / "north.pub")
        make()
        assert set(newest(folder).roster.keys) == {"south"}

    def test_a_new_kit_leaves_a_site_the_key_that_it_has_made(self, make):
        folder = make().folder
        before = newest(folder)
        shutil.rmtree(folder / "sites" / "north")
        make(remake=["sites/north"])
        assert newest(folder).roster == before.roster

    def test_one_key_that_two_sites_have_sent(self, make):
        folder = make().folder
        shutil.copy(folder / "roster" / "keys" / "north.pub", folder / "roster" / "keys" / "south.pub")
        with pytest.raises(ConfigError, match="roster/keys: two names on the roster have the same key"):
            make()

    def test_a_key_of_rosters_that_is_elsewhere_is_not_made_again(self, make):
        folder = make().folder
        before = contents(folder)
        shutil.rmtree(folder / "roster")
        report = make(FEDERATION + THIRD)
        assert any("roster was made before and is not here" in note for note in report.notes)
        assert not (folder / "roster" / "roster.key").exists()
        assert contents(folder)["sites/north/roster.signed"] == before["sites/north/roster.signed"]
        shutil.copy(folder / "operator" / "nodes" / "north.pub", folder / "operator" / "nodes" / "roster.pub")
        make(FEDERATION + THIRD, remake=["roster"])
        assert (folder / "operator" / "nodes" / "roster.pub").exists()
        assert set(newest(folder).roster.keys) == {"north", "south", "east"}
        assert newest(folder).roster.keys["north"] == opened(before["roster/roster.signed"]).roster.keys["north"]
        assert site(folder, "north").name == "north"

    def test_a_roster_of_somebody_else_gets_no_new_signature(self, make):
        folder = make().folder
        invented = sign_roster(Roster({"invented": bytes(32)}), 1, signing_key("the server's operator"))
        (folder / "roster" / "roster.signed").write_bytes(invented)
        with pytest.raises(ConfigError, match=r"roster.signed: the roster does not have the signature"):
            make(FEDERATION + THIRD)
        with pytest.raises(ConfigError, match=r"roster.signed: the roster does not have the signature"):
            rosters.strike(Kits(folder), "north")


@pytest.fixture
def operator(make, monkeypatch):
    """Runs commands of `cloister site` with the operator's kit, at a SuperLink that knows nobody yet."""
    folder, opened_control = make().folder, sites.Control(Client())
    monkeypatch.setattr(sites, "control", lambda connection: nullcontext(opened_control))
    monkeypatch.setenv("FLWR_HOME", str(folder / "operator"))

    def run(*arguments):
        return CliRunner().invoke(cli.app, ["site", *arguments])

    run.folder, run.control = folder, opened_control
    return run


class TestOperators:
    def test_a_site_that_is_sent_away_is_off_the_roster_for_good(self, operator, make):
        folder = operator.folder
        assert operator("approve", "trial", "north").exit_code == 0
        before = newest(folder)
        gone = operator("remove", "trial", "north")
        assert gone.exit_code == 0 and "north: taken off the roster" in gone.output
        assert "give roster/roster.signed to every site and operator" in gone.output
        after = newest(folder)
        assert set(after.roster.keys) == {"south"} and after.serial > before.serial
        assert site(folder, "south").roster == after.roster
        with pytest.raises(NodeConfigError, match="is not on the roster"):
            site(folder, "north")
        assert any("site north was taken off the roster" in note for note in make().notes)
        assert set(newest(folder).roster.keys) == {"south"}
        shutil.rmtree(folder / "sites" / "north")
        make(remake=["sites/north"])
        assert newest(folder).roster.keys["north"] != before.roster.keys["north"]

    def test_a_removal_that_broke_off_is_ended_by_the_next_call(self, operator):
        operator("approve", "trial", "north")
        rosters.strike(Kits(operator.folder), "north")
        gone = operator("remove", "trial", "north")
        assert gone.exit_code == 0 and [node.status for node in operator.control.nodes()] == ["unregistered"]

    def test_a_new_signing_key_alone(self, operator, tmp_path):
        path, folder = tmp_path / "new.pub", operator.folder
        path.write_bytes(public(OWN))
        told = fingerprint(OWN.public_key())
        wrong = operator("rotate", "trial", "south", "--signing-key", str(path), "--signing-fingerprint", "SHA256:x")
        assert wrong.exit_code == 1 and "--signing-fingerprint 'SHA256:x' is not that of" in wrong.output
        done = operator("rotate", "trial", "south", "--signing-key", str(path), "--signing-fingerprint", told)
        assert done.exit_code == 0 and f"on the roster with the signing key {told}" in done.output
        assert newest(folder).roster.keys["south"] == public_bytes(OWN) and operator.control.nodes() == []
        assert newest(folder).roster.by_provisioner == ()
        (folder / "sites" / "south" / "signing.key").write_bytes(private(OWN))
        assert site(folder, "south").name == "south" and site(folder, "north").roster == newest(folder).roster
        assert operator("rotate", "trial", "south", "--signing-key", str(path)).exit_code == 0
        taken = operator("rotate", "trial", "north", "--signing-key", str(path))
        assert taken.exit_code == 1 and "is that of south" in taken.output
        unknown = operator("rotate", "trial", "west", "--signing-key", str(path))
        assert unknown.exit_code == 1 and "no site 'west' is on the roster; there are: north, south" in unknown.output

    def test_where_the_key_of_rosters_is_not_the_operator_is_told(self, operator, tmp_path):
        operator("approve", "trial", "north")
        shutil.move(operator.folder / "roster", tmp_path / "elsewhere")
        (tmp_path / "new.pub").write_bytes(public(OWN))
        refused = operator("rotate", "trial", "south", "--signing-key", str(tmp_path / "new.pub"))
        assert refused.exit_code == 1 and "run this where they are" in refused.output
        gone = operator("remove", "trial", "north")
        assert gone.exit_code == 0 and "north: on the roster still; have its signer run" in gone.output

    def test_the_status_has_who_is_on_the_roster(self, operator):
        kit = operator.folder / "operator"
        assert [item["name"] for item in rosters.on_roster()] == ["north", "south"]
        assert rosters.on_roster()[0]["fingerprint"].startswith("SHA256:")
        assert rosters.on_roster()[0]["made-by"] == "the site"
        (kit / "roster.pub").write_bytes(public(OWN))
        with pytest.raises(ConfigError, match="does not have the signature of the authority"):
            rosters.on_roster()
        (kit / "roster.signed").unlink()
        assert rosters.on_roster() == []


class TestTwoOperators:
    def at_once(self, operator, monkeypatch, first, second):
        """Return why two commands were refused; the second begins when the first has looked and not changed yet."""
        refused, waiting, look = {}, threading.Event(), operator.control.nodes

        def try_to(which, command):
            try:
                command()
            except ConfigError as error:
                refused[which] = str(error)

        other = threading.Thread(target=try_to, args=("second", second))

        def said(text="", **_):
            if "waiting for another operator" in str(text):
                waiting.set()

        def looked():
            found = look()
            if not other.ident:
                other.start()
                # Without a lock the other command ends here; with one it says that it waits.
                while other.is_alive() and not waiting.wait(0.01):
                    pass
            return found

        monkeypatch.setattr(operate.typer, "echo", said)
        monkeypatch.setattr(operator.control, "nodes", looked)
        try_to("first", first)
        other.join()
        return refused

    def test_a_name_is_given_once(self, operator, monkeypatch):
        keys = [operator.folder / "operator" / "nodes" / f"{name}.pub" for name in ("north", "south")]
        both = [partial(operate.approve, "trial", "new", key) for key in keys]
        refused = self.at_once(operator, monkeypatch, *both)
        assert list(refused) == ["second"] and "site 'new' is registered" in refused["second"]
        assert [node.name for node in operator.control.nodes()] == ["new"]

    def test_two_removals_are_both_on_the_roster(self, operator, monkeypatch):
        """Each signs the roster that it has read, without its own site."""
        for name in ("north", "south"):
            operator("approve", "trial", name)
        read = rosters._newest

        def slow(kits):
            found = read(kits)
            operator.control.nodes()
            return found

        both = [partial(operate.remove, "trial", name) for name in ("north", "south")]
        with monkeypatch.context() as patch:
            patch.setattr(rosters, "_newest", slow)
            assert self.at_once(operator, monkeypatch, *both) == {}
        assert newest(operator.folder).roster.keys == {}

    def test_whoever_makes_kits_waits_too(self, make, tmp_path, monkeypatch):
        waiting, reports, flock = threading.Event(), [], fcntl.flock

        def watched(handle, how):
            if not how & fcntl.LOCK_NB:
                waiting.set()
            return flock(handle, how)

        monkeypatch.setattr(fcntl, "flock", watched)
        other = threading.Thread(target=lambda: reports.append(make()))
        with Kits(tmp_path / "kits").locked(pytest.fail):
            other.start()
            assert waiting.wait(60)
            assert list((tmp_path / "kits").iterdir()) == []
        other.join()
        assert "another process was changing the kits, and had to end first" in reports[0].notes

    def test_a_lock_ends_with_its_block(self, tmp_path):
        kits = Kits(tmp_path)
        with pytest.raises(ZeroDivisionError), kits.locked(pytest.fail):
            1 / 0  # noqa: B018 - raises
        with kits.locked(pytest.fail):
            pass
