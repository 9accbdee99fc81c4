"""A site in secure aggregations: its key, the roster, and the roster's signer."""

import errno
import hashlib
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import SOFTMAX, node_at, policy_file, request_of_kind
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import RecordDict
from secure_rounds import names_of, openssh, roster_of, signing_key
from secure_runs import settings
from support import failures

from cloister.client import keys
from cloister.client.costs import privacy_costs_of
from cloister.client.enforce import enforce_policy
from cloister.client.keys import identity, make_key
from cloister.client.node import Node, node_of
from cloister.client.policy import read_policy
from cloister.client.secure import identity_of, open_masks
from cloister.config.run import parse
from cloister.deploy.credentials import new_node_key
from cloister.flower.messages import LOCAL_RUN
from cloister.secure_aggregation.roster import Roster, sign_roster
from cloister.utils.arrays import Layout
from cloister.utils.errors import ConfigError, NodeConfigError, PolicyError, ProtocolError
from cloister.utils.keys import REMEDY, fingerprint, new_signing_key, verifying_key

NAMES = names_of(3)
AUTHORITY = signing_key("authority")
PINS = {name: fingerprint(signing_key(name).public_key()) for name in NAMES}


def private(key):
    return openssh(key)[0]


def public(key):
    return openssh(key)[1]


def signed(serial=7, names=NAMES, by=AUTHORITY):
    return sign_roster(roster_of(names), serial, by)


@pytest.fixture
def site(tmp_path):
    """Writes the files of a site, and returns the configuration of its node."""

    def configured(without=(), policy=None, ledgers="ledgers", **changed):
        files = {"signing-key": private(signing_key(NAMES[1])), "roster": signed(), "roster-key": public(AUTHORITY)}
        files |= {name.replace("_", "-"): content for name, content in changed.items()}
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        said = {name: str(tmp_path / name) for name in files if name not in without}
        if policy is not None:
            said["policy"] = str(policy_file(tmp_path, **policy))
        return node_of(said | {"ledger-dir": str(tmp_path / ledgers)})

    return configured


def test_a_site_is_known_by_its_key(site):
    found = identity(site())
    assert (found.name, found.roster) == (NAMES[1], roster_of(NAMES))
    assert found.roster.has_signed(NAMES[1], found.key.sign(b"text"), b"text")
    assert "key" not in repr(found).replace("keys", "")


def test_a_node_without_a_key_is_nobody():
    assert identity(node_of({})) is None


def test_the_folder_of_ledgers_is_made(site, tmp_path):
    assert identity(site(ledgers="site/of/ledgers")).name == NAMES[1]
    assert len(list((tmp_path / "site/of/ledgers").glob("*.seen"))) == 1


def test_fingerprints_take_the_place_of_a_signature(site):
    by_the_server = signed(by=signing_key("server"))
    node = site(without=("roster-key",), roster=by_the_server, policy={"peers": PINS})
    assert identity(node).name == NAMES[1]
    # Nobody has vouched for its number: it shuts no other one out.
    assert not list((node.ledger_folder).glob("*.seen"))


WRONG = {
    "nobody's word": ({"without": ("roster-key",)}, r"roster .*: name its signer by roster-key, or pin peers"),
    "the word of the server": (
        {"roster": signed(by=signing_key("server"))},
        "roster .*: the roster does not have the signature of the authority",
    ),
    "somebody whom nobody has compared": (
        {"policy": {"peers": {name: PINS[name] for name in NAMES[:2]}}},
        "roster .*: the key of 'site-002' on the roster is not the one whose fingerprint is pinned",
    ),
    "fingerprints without the signature": (
        {"policy": {"peers": PINS}, "roster": signed(by=signing_key("server"))},
        "does not have the signature of the authority",
    ),
    "a site that was taken off": ({"roster": signed(names=[NAMES[0]])}, "signing-key .* is not on the roster"),
    "a torn roster": ({"roster": signed()[:-1]}, "roster .*: the bytes are no signed roster"),
    "the key of a node": ({"signing_key": new_node_key()[0]}, "must be an Ed25519 key: ssh-keygen -t ed25519"),
    "a public key": ({"signing_key": public(AUTHORITY)}, "is no private key in OpenSSH format without a passphrase"),
    "the public key of a node": ({"roster_key": new_node_key()[1]}, "roster-key .* must be an Ed25519 key"),
    "no public key": ({"roster_key": b"none"}, "roster-key .* is no public key in OpenSSH format"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_site_is_nobody_with(site, case):
    changes, says = WRONG[case]
    with pytest.raises(NodeConfigError, match=says) as refused:
        identity(site(**changes))
    assert "PRIVATE" not in str(refused.value) and refused.value.__cause__ is None


@pytest.mark.parametrize("name", ["signing-key", "roster", "roster-key"])
def test_a_file_that_is_not_there_is_named(site, tmp_path, name):
    node = site()
    (tmp_path / name).unlink()
    with pytest.raises(NodeConfigError, match=f"^{name} {tmp_path / name}: No such file"):
        identity(node)


def test_the_keys_come_together():
    def check(keys):
        with pytest.raises(NodeConfigError, match=f"{keys[0]} = 'x'.*: signing-key and roster come together"):
            node_of(dict.fromkeys(keys, "x"))

    cases = [(keys,) for keys in [("signing-key",), ("roster",), ("roster-key",), ("signing-key", "roster-key")]]
    assert failures(cases, check) == []


def test_an_old_roster_brings_nobody_back(site, tmp_path):
    assert len(identity(site()).roster.keys) == 3
    assert len(identity(site(roster=signed(8, NAMES[:2]))).roster.keys) == 2
    with pytest.raises(NodeConfigError, match="serial number 7; the oldest that is taken is 8"):
        identity(site())
    assert identity(site(roster=signed(9))).name == NAMES[1]
    # Another authority has numbers of its own.
    other = signing_key("another authority")
    assert identity(site(roster=signed(1, by=other), roster_key=public(other))).name == NAMES[1]


def test_the_number_of_a_roster_is_found_again_by_every_version(site, tmp_path):
    """A file of another name would let an old roster in."""
    authority = hashlib.sha256(AUTHORITY.public_key().public_bytes_raw()).hexdigest()
    for serial in (7, 7, 8):
        identity(site(roster=signed(serial)))
    assert [path.name for path in (tmp_path / "ledgers").iterdir()] == [f"roster-{authority[:12]}.seen"]
    assert (tmp_path / "ledgers" / f"roster-{authority[:12]}.seen").read_text() == "\n7\n\n8\n"


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_the_first_number_of_all_is_kept_also_in_a_file_that_was_left_empty(site, tmp_path, content):
    identity(site())
    (path,) = (tmp_path / "ledgers").iterdir()
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert identity(site(roster=signed(1))).name == NAMES[1]
    assert path.read_text().split() == ["1"]


def test_a_torn_number_shuts_no_roster_out(site, tmp_path):
    identity(site())
    (path,) = (tmp_path / "ledgers").glob("*.seen")
    path.write_text("\n7\n1")
    assert identity(site(roster=signed(8))).name == NAMES[1]
    assert path.read_text().split() == ["7", "1", "8"]
    path.write_text("seven")
    with pytest.raises(NodeConfigError, match=r"roster-.*\.seen in ledger-dir .* must hold numbers of rosters only"):
        identity(site(roster=signed(9)))


def test_a_policy_that_cannot_be_read_is_no_policy_without_fingerprints(site):
    with pytest.raises(PolicyError, match="cannot be read"):
        identity(site(policy={"peers": {NAMES[0]: "SHA256:short"}}))


SUMS = settings("out", clients=3, threshold=2)
PART = {"partition-id": 1, "num-partitions": 3}


def identified(node, run=str(LOCAL_RUN)):
    return identity_of(request_of_kind(settings=SUMS, run=run), node_at(SUMS, node))


def test_a_simulated_site_has_keys_of_this_process():
    found, other = identified(PART), identified(PART | {"partition-id": 2})
    assert [*found.roster.keys] == ["client-00000", "client-00001", "client-00002"]
    assert (found.name, other.name, other.roster) == ("client-00001", "client-00002", found.roster)
    assert found.roster.has_signed(found.name, found.key.sign(b"text"), b"text")


def test_a_site_that_is_not_simulated_needs_files():
    def check(node, run):
        with pytest.raises(ProtocolError) as refused:
            identified(node, run)
        assert str(refused.value) == (
            "this node has no signing key and no roster in its configuration, and cannot take part"
        )

    cases = [
        ({}, "1"),
        ({"partition-id": 1}, "1"),
        ({"num-partitions": 3}, "1"),
        (PART | {"data-path": "a"}, "1"),
        (PART, "2"),
    ]
    assert failures(cases, check) == []


def test_a_model_leaves_a_node_of_a_sum_masked_alone():
    with pytest.raises(ProtocolError) as refused:
        open_masks(request_of_kind(settings=SUMS), node_at(SUMS, PART))
    assert str(refused.value) == "under secure aggregation a model leaves this node masked alone"


def test_the_first_start_makes_a_key_for_its_owner_alone_and_its_public_half(tmp_path):
    before = os.umask(0)
    try:
        told = make_key(tmp_path)
    finally:
        os.umask(before)
    key = load_ssh_private_key((tmp_path / "signing.key").read_bytes(), None)
    assert fingerprint(key.public_key()) == told
    assert verifying_key((tmp_path / "signing.pub").read_bytes(), "") == key.public_key()
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        "signing.key": 0o600,
        "signing.pub": 0o644,
    }


def test_a_key_that_is_there_stays_and_its_public_half_comes_back(tmp_path):
    told, key = make_key(tmp_path), (tmp_path / "signing.key").read_bytes()
    (tmp_path / "signing.pub").unlink()
    assert make_key(tmp_path) == told and (tmp_path / "signing.key").read_bytes() == key
    assert fingerprint(verifying_key((tmp_path / "signing.pub").read_bytes(), "")) == told


def test_two_first_starts_at_once_make_one_key(tmp_path, monkeypatch):
    def slow():
        time.sleep(0.05)  # the other one looks meanwhile, where nothing holds it up
        return new_signing_key()

    monkeypatch.setattr(keys, "new_signing_key", slow)
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(make_key, [tmp_path] * 2))) == 1


def test_a_key_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"signing-key .*: No space left on device"):
        patch.setattr(os, "fsync", full)
        make_key(tmp_path)
    assert not list(tmp_path.iterdir())


def stated(at_site):
    return sign_roster(Roster(roster_of(NAMES).keys, frozenset(at_site)), 7, AUTHORITY)


def of_sums(node, policy=None):
    """A request to train in a sum in which one client may collude, and the node that it reaches."""
    config = settings("out", clients=3, threshold=3, colluding=1, z=2.0)
    promise = parse(config).shared_release.events(Layout.of(SOFTMAX))
    return request_of_kind(settings=config, promise=promise, bound=1.0), Node(node, policy, 1, RecordDict())


@pytest.mark.parametrize("by_provisioner", range(4))
def test_a_node_charges_the_noise_that_is_there_by_who_made_the_keys_on_its_own_roster(site, by_provisioner):
    request, node = of_sums(site(roster=stated(NAMES[by_provisioner:])))
    (event,) = privacy_costs_of(request, node)[0].events
    one_share = request.config.shared_release.plan(Layout.of(SOFTMAX).size).shares.base
    as_configured = request.promise[0].honest, request.promise[0].scale
    assert (event.honest, event.scale) == ((1, one_share) if by_provisioner > 1 else as_configured)
    assert as_configured[0] == 2


def test_a_node_that_demands_more_noise_than_one_share_names_the_provisioner_and_the_remedy(site, tmp_path):
    policy = read_policy(policy_file(tmp_path, min_server_noise_multiplier=2.0))
    request, node = of_sums(site(roster=stated(NAMES)), policy)
    enforce_policy(request, node)
    request, node = of_sums(site(roster=stated([])), policy)
    with pytest.raises(PolicyError) as refused:
        enforce_policy(request, node)
    told = f"demanded: at least 2, against the provisioner, who made the signing keys of {', '.join(NAMES)}; {REMEDY}"
    assert told in str(refused.value)
