"""Sites by name: approved, given a new key, sent away, against Flower's own state of a SuperLink."""

from contextlib import nullcontext

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from operators_kit import Client
from typer.testing import CliRunner

from cloister import cli
from cloister.deploy import sites
from cloister.deploy.credentials import new_node_key
from cloister.utils.errors import ConfigError, FederationError
from cloister.utils.keys import fingerprint


@pytest.fixture
def opened():
    return sites.Control(Client())


@pytest.fixture
def key(tmp_path):
    """Makes key files by name."""

    def make(name):
        path = tmp_path / f"{name}.pub"
        path.write_bytes(new_node_key()[1])
        return path

    return make


def told(key):
    return fingerprint(load_ssh_public_key(key))


def states(opened):
    return [(node.name, node.status) for node in opened.nodes()]


def test_a_fingerprint_is_what_openssh_prints():
    """Golden, by `ssh-keygen -lf` of OpenSSH 9."""
    public = (
        "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBI7n02OHTSWtTx8pQ5M4wanNEPFl"
        "kLAbBexd2TzUmbaqiea1cCG7jJltr6+t3rlidvZOhUfivsrl+qi1v32gDf5JRFbUbRkglBQxiRCwO6LH9fldGo8FnaF2QFQ1D3AOKA=="
    )
    assert told(public.encode()) == "SHA256:1uUMVMJr492Y3IvG9ddLbvD/yx2KabMV/unMnXo2Yds"


def test_a_site_is_let_in_under_its_name(opened, key):
    path = key("berlin")
    found = sites.approve(opened, "berlin", path, told(path.read_bytes()))
    (node,) = opened.nodes()
    assert (node.name, node.status, node.fingerprint, node.since) == ("berlin", "registered", found, "")
    assert node.who == "berlin"


def test_a_key_that_came_altered_is_refused(opened, key):
    said = told(key("berlin").read_bytes())
    with pytest.raises(ConfigError, match=r"--fingerprint 'SHA256:.*' is not that of .*lyon.pub, which is SHA256:"):
        sites.approve(opened, "berlin", key("lyon"), said)
    assert opened.nodes() == []


def test_a_name_and_a_key_are_of_one_site(opened, key):
    path = key("berlin")
    sites.approve(opened, "berlin", path)
    with pytest.raises(ConfigError, match=r"site 'berlin' is registered; .*cloister site rotate"):
        sites.approve(opened, "berlin", key("other"))
    with pytest.raises(ConfigError, match=r"is that of berlin; the site has to make a new one"):
        sites.approve(opened, "lyon", path)
    assert states(opened) == [("berlin", "registered")]


def test_a_new_key_takes_the_place_of_the_old_one(opened, key):
    old, new = key("old"), key("new")
    sites.approve(opened, "berlin", old)
    sites.approve(opened, "lyon", key("lyon"))
    found = sites.rotate(opened, "berlin", new)
    assert sorted(states(opened)) == [("berlin", "registered"), ("berlin", "unregistered"), ("lyon", "registered")]
    assert [node.fingerprint for node in opened.nodes() if (node.name, node.status) == ("berlin", "registered")] == [
        found
    ]
    with pytest.raises(ConfigError, match="was sent away and never gets in again"):
        sites.rotate(opened, "berlin", old)
    with pytest.raises(ConfigError, match=r"has the key .* already"):
        sites.rotate(opened, "berlin", new)


def test_a_change_of_keys_that_broke_off_is_ended_by_the_next_call(opened, key):
    old, new = key("old"), key("new")
    sites.approve(opened, "berlin", old)
    opened.register("berlin", new.read_bytes())
    sites.rotate(opened, "berlin", new)
    (node,) = [node for node in opened.nodes() if node.status == "registered"]
    assert node.fingerprint == told(new.read_bytes())


def test_a_site_that_is_sent_away_stays_away(opened, key):
    path = key("berlin")
    sites.approve(opened, "berlin", path)
    (gone,) = sites.remove(opened, "berlin")
    assert gone.name == "berlin" and states(opened) == [("berlin", "unregistered")]
    with pytest.raises(ConfigError, match="was sent away and never gets in again"):
        sites.approve(opened, "berlin", path)
    sites.approve(opened, "lyon", key("lyon"))
    with pytest.raises(ConfigError, match=r"no site 'berlin' is registered; there are: lyon"):
        sites.remove(opened, "berlin")


def test_what_is_no_name_is_let_in_nowhere(opened, key):
    for name in ("", "../berlin", "Berlin", "a b", "berlin\n"):
        with pytest.raises(ConfigError, match="is not valid: a name has"):
            sites.approve(opened, name, key("a"))
    assert opened.nodes() == []


def test_nodes_without_a_name_are_not_sent_away_together(opened, key):
    for name in ("one", "two"):
        opened.register("", key(name).read_bytes())
    with pytest.raises(ConfigError, match="no site '' is registered"):
        sites.remove(opened, "")
    assert [node.status for node in opened.nodes()] == ["registered"] * 2


def test_a_name_of_flowers_own_command_leads_out_of_no_kit(opened, key, tmp_path, monkeypatch):
    monkeypatch.setattr(sites, "control", lambda connection: nullcontext(opened))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "kit"))
    (tmp_path / "kit" / "nodes").mkdir(parents=True)
    precious = key("precious")
    opened.register("../../precious", key("a").read_bytes())
    done = CliRunner().invoke(cli.app, ["site", "remove", "trial", "../../precious"])
    assert done.exit_code == 0 and precious.exists() and states(opened) == [("../../precious", "unregistered")]


def test_an_unknown_connection_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('[superlink.trial]\naddress = "localhost:1"\ninsecure = true\n')
    with (
        pytest.raises(FederationError, match=r"^SuperLink connection 'hospital': .*not found") as refused,
        sites.control("hospital"),
    ):
        pass
    assert "\n" not in str(refused.value) and str(refused.value).endswith("known: trial")


def test_the_commands(opened, key, tmp_path, monkeypatch):
    def run(*arguments):
        return CliRunner().invoke(cli.app, ["site", *arguments]).output

    class Opened:
        def __enter__(self):
            return opened

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(sites, "control", lambda connection: Opened())
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    kit = tmp_path / "nodes"
    kit.mkdir()
    key("berlin").rename(kit / "berlin.pub")
    assert "berlin: registered with the key SHA256:" in run("approve", "trial", "berlin")
    assert "its old key is refused" in run("rotate", "trial", "berlin", "--key", str(key("new")))
    assert "berlin  registered  never seen  SHA256:" in run("list", "trial")
    assert "berlin: refused from now on" in run("remove", "trial", "berlin")
    assert not (kit / "berlin.pub").exists() and "berlin  unregistered" in run("list", "trial")
