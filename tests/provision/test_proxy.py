"""The proxy's configuration and its list of keys, as `cloister provision` and `cloister site` write them."""

import os
import re
from base64 import b64encode
from contextlib import contextmanager

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from operators_kit import Client
from secure_rounds import collect
from two_sites import FEDERATION, THIRD, made
from typer.testing import CliRunner

from cloister import cli
from cloister.deploy import sites
from cloister.deploy.credentials import new_node_key
from cloister.deploy.provision import scripts
from cloister.deploy.provision.federation import Federation

ENTRY = re.compile(r'"([A-Za-z0-9+/=]+)" 1; # (\S+)')


def shown(public):
    """A key as a SuperNode puts it in a header."""
    return b64encode(public_key_to_bytes(load_ssh_public_key(public))).decode()


def listed(path):
    """The names on a list by the keys."""
    return dict(ENTRY.fullmatch(line).groups() for line in path.read_text().splitlines())


def keys_of(folder):
    return {shown(path.read_bytes()): path.stem for path in (folder / "operator" / "nodes").glob("*.pub")}


def test_the_list_has_the_keys_of_all_sites_as_they_show_them(tmp_path):
    folder = made(tmp_path).folder
    assert listed(folder / "server" / "nodes.conf") == listed(folder / "operator" / "nodes.conf") == keys_of(folder)
    assert sorted(keys_of(folder).values()) == ["north", "south"]


def test_the_list_follows_a_new_site_and_how_it_is_read_is_said_in_one_line(tmp_path):
    assert not [note for note in made(tmp_path).notes if "nodes.conf" in note]
    report = made(tmp_path, FEDERATION + THIRD)
    (note,) = [note for note in report.notes if "nodes.conf" in note]
    assert "nginx -s reload" in note and "\n" not in note
    assert sorted(listed(report.folder / "server" / "nodes.conf").values()) == ["east", "north", "south"]


def test_a_server_that_is_reached_at_its_own_port_has_no_proxy(tmp_path):
    folder = made(tmp_path, FEDERATION.replace("port = 8443", 'port = 8443\nsuperlink = "0.0.0.0:8443"')).folder
    assert not list(folder.rglob("n*.conf"))
    assert "parts='superlink superexec'" in (folder / "server" / "start.sh").read_text()


def test_the_configuration_has_the_addresses_of_the_federation():
    site = {"name": "north", "data-path": "/data/north.npz"}
    cases = [
        (["fl.example.org"], "127.0.0.1:8001", ["listen 8000 ssl", "server 127.0.0.1:8001", "ssl_name localhost"]),
        (["2001:db8::1"], "127.0.0.1:8001", ["listen [::]:8000 ssl"]),
        (["fl.example.org", "superlink"], "superlink:8001", ["server superlink:8001", "ssl_name superlink"]),
    ]
    for addresses, superlink, wanted in cases:
        server = {"addresses": addresses, "superlink": superlink}
        text = scripts.configuration(Federation.model_validate({"name": "x", "server": server, "sites": [site]}))
        assert not re.search("@[A-Z]+@", text)
        assert all(line in text for line in wanted)


@pytest.fixture
def ordered(tmp_path, monkeypatch):
    """Kits, and what `cloister site` does with them at a SuperLink in this process."""
    collect(made(tmp_path).folder, "north", "south")
    folder, opened = made(tmp_path).folder, sites.Control(Client())
    monkeypatch.setattr(sites, "control", contextmanager(lambda _: iter([opened])))
    monkeypatch.setenv("FLWR_HOME", str(folder / "operator"))

    def order(*words):
        done = CliRunner().invoke(cli.app, ["site", words[0], "hospitals", *words[1:]])
        assert done.exit_code == 0, done.output
        return done.output

    return folder, order


def test_a_site_that_is_sent_away_is_taken_off_the_list(ordered):
    folder, order = ordered
    order("approve", "north")
    assert "nodes.conf has changed" in order("remove", "north")
    for member in ("operator", "server"):
        assert list(listed(folder / member / "nodes.conf").values()) == ["south"]
        assert os.path.exists(folder / member / "SHA256SUMS")


def test_a_new_key_takes_the_place_of_the_old_one_on_the_list(ordered, tmp_path):
    folder, order = ordered
    order("approve", "north")
    new = tmp_path / "new.pub"
    new.write_bytes(new_node_key()[1])
    order("rotate", "north", "--key", str(new))
    found = listed(folder / "server" / "nodes.conf")
    assert found[shown(new.read_bytes())] == "north" and sorted(found.values()) == ["north", "south"]


def test_an_operators_kit_by_itself_has_a_list_too(ordered, monkeypatch, tmp_path):
    folder, order = ordered
    alone = (folder / "operator").rename(tmp_path / "alone")
    monkeypatch.setenv("FLWR_HOME", str(alone))
    order("approve", "south")
    order("remove", "south")
    assert list(listed(alone / "nodes.conf").values()) == ["north"]
