"""Anchored ledgers: what a ledger can no longer take back once somebody else has its head."""

import json
import shutil
from dataclasses import asdict

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from forged_ledgers import EVENTS, chained, lines_of, rewrite, write
from typer.testing import CliRunner

from cloister.cli import app
from cloister.deploy.credentials import new_node_key, new_tls_key
from cloister.privacy.accounting import anchors as anchoring
from cloister.privacy.accounting.anchors import anchored, hand_over, read_anchors, verify_anchors
from cloister.privacy.accounting.ledger import Ledger
from cloister.utils.errors import ConfigError, FederationError, LedgerError
from cloister.utils.keys import fingerprint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def key(tmp_path):
    private, public = new_node_key()
    (tmp_path / "node.key").write_bytes(private)
    (tmp_path / "node.pub").write_bytes(public)
    return tmp_path / "node.key"


def verified(path, anchors, key):
    return verify_anchors(Ledger(path), anchors, key.with_suffix(".pub"))


def test_a_ledger_that_grew_has_every_head_it_was_anchored_at(path, key):
    anchors = [anchored(Ledger(path), key)]
    for event in EVENTS[:3]:
        write(path, [event])
        anchors.append(anchored(Ledger(path), key))
    write(path, EVENTS[3:])
    assert verified(path, anchors, key) == 4
    assert {anchor.key for anchor in anchors} == {
        fingerprint(load_ssh_private_key(key.read_bytes(), None).public_key())
    }


@pytest.mark.parametrize("left", [0, 1, 3, 7])
def test_cut_off_lines_are_found(path, key, left):
    write(path)
    anchor = anchored(Ledger(path), key)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:left]))
    assert Ledger(path).head != anchor.head, "unbroken without the anchor"
    with pytest.raises(LedgerError, match="that was anchored: lines were cut off or written anew"):
        verified(path, [anchor], key)


def test_an_old_copy_that_went_on_is_found(path, key, tmp_path):
    write(path, EVENTS[:1])
    backup = tmp_path / "backup"
    shutil.copy(path, backup)
    write(path, EVENTS[1:2])
    anchor = anchored(Ledger(path), key)
    shutil.copy(backup, path)
    write(path, EVENTS[1:])
    with pytest.raises(LedgerError, match="an old copy was put in its place"):
        verified(path, [anchor], key)


def test_a_ledger_that_was_written_anew_is_found(path, key):
    write(path)
    anchor = anchored(Ledger(path), key)
    lines = lines_of(path)
    lines[0]["round"] = 99
    rewrite(path, chained(lines))
    Ledger(path)  # unbroken
    with pytest.raises(LedgerError, match=anchor.head):
        verified(path, [anchor], key)


def test_a_line_that_is_still_being_written_is_no_head(path, key):
    write(path)
    with path.open("ab") as file:
        file.write(b'{"torn":')
    assert verified(path, [anchored(Ledger(path), key)], key) == 1


@pytest.mark.parametrize("change", [{"head": "0" * 64}, {"day": 0.0}, {"signature": "AAAA"}, {"signature": "?"}])
def test_an_anchor_that_was_not_signed_is_refused(path, key, change):
    write(path)
    line = json.loads(anchored(Ledger(path), key).line) | change
    path.with_name("a").write_text(json.dumps(line) + "\n")
    with pytest.raises(LedgerError, match="was not signed by"):
        verified(path, read_anchors(path.with_name("a")), key)


def test_anchors_of_others_are_left_out(path, key, tmp_path):
    write(path)
    (tmp_path / "other.key").write_bytes(new_tls_key())
    other = anchored(Ledger(path), tmp_path / "other.key")
    assert verify_anchors(Ledger(path), [other], key) == 0
    assert verify_anchors(Ledger(path), [other], tmp_path / "other.key") == 1


def test_an_anchor_tells_neither_how_much_nor_when(path, key):
    write(path)
    content = json.loads(anchored(Ledger(path), key).line)
    assert set(content) == {"head", "day", "key", "signature"} and content["day"] % 86400 == 0


HOSTILE = json.dumps({"head": "\x1b[2J", "day": 0, "key": "", "signature": ""})
ENDLESS = json.dumps({"head": "0" * 64, "day": 10**400, "key": "", "signature": ""})


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"head": 1}', "7", "[" * 100_000, HOSTILE, ENDLESS])
def test_a_file_that_holds_no_anchors(tmp_path, text):
    (tmp_path / "a").write_text(text)
    with pytest.raises(ConfigError, match=r"a, line 1: it is no anchor"):
        read_anchors(tmp_path / "a")


def test_a_file_of_anchors_that_is_no_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"a: it is no text"):
        read_anchors(tmp_path / "a")


def test_empty_lines_between_anchors_are_none(path, key, tmp_path):
    write(path)
    (tmp_path / "a").write_text(f"\n{anchored(Ledger(path), key).line}\n\n")
    assert verified(path, read_anchors(tmp_path / "a"), key) == 1


def test_a_key_that_is_not_there(path, tmp_path):
    with pytest.raises(ConfigError, match=r"--key .*k: No such file or directory"):
        anchored(Ledger(path), tmp_path / "k")


@pytest.mark.parametrize("content", [b"", b"-----BEGIN OPENSSH PRIVATE KEY-----", b"ssh-ed25519 AAAA"])
def test_a_file_that_holds_no_key(path, tmp_path, content):
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(ConfigError, match=r"--key .*k is no private EC key"):
        anchored(Ledger(path), tmp_path / "k")
    with pytest.raises(ConfigError, match=r"--key .*k is no "):
        verify_anchors(Ledger(path), [], tmp_path / "k")


class TestHandingOver:
    def test_an_anchor_is_handed_over_as_it_is(self, path, key, tmp_path, monkeypatch):
        posted, kept, url = [], tmp_path / "kept", "https://keeper.example/anchors"
        monkeypatch.setattr(anchoring, "post", lambda *given: posted.append(given))
        anchor = anchored(write(path), key)
        hand_over(anchor, kept, url)
        hand_over(anchor, kept, "")
        hand_over(anchor, None, url)
        assert kept.read_text() == 2 * f"{anchor.line}\n" and posted == 2 * [(url, asdict(anchor))]

    def test_who_does_not_take_it_is_named(self, path, key, tmp_path, monkeypatch):
        def refuse(*_):
            raise FederationError("keeper.example answered 500")

        monkeypatch.setattr(anchoring, "post", refuse)
        anchor, kept = anchored(Ledger(path), key), tmp_path / "no-such-folder" / "kept"
        with pytest.raises(ConfigError) as refused:
            hand_over(anchor, kept, "")
        assert str(refused.value) == f"--to {kept}: No such file or directory"
        with pytest.raises(ConfigError) as refused:
            hand_over(anchor, None, "https://keeper.example/anchors")
        assert str(refused.value) == "--post: keeper.example answered 500"


class TestTheCommand:
    def invoke(self, *arguments):
        return CliRunner().invoke(app, ["ledger", *map(str, arguments)])

    def test_anchors_are_kept_and_checked(self, path, key, tmp_path):
        write(path)
        kept = tmp_path / "kept.jsonl"
        for _ in range(2):
            done = self.invoke("anchor", path, "--key", key, "--to", kept)
            assert done.exit_code == 0 and json.loads(done.output)["head"] == Ledger(path).head
        done = self.invoke("verify", path, "--anchors", kept, "--key", key.with_suffix(".pub"))
        assert done.exit_code == 0 and "2 anchors by" in done.output and "cannot show" not in done.output
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
        done = self.invoke("verify", path, "--anchors", kept, "--key", key.with_suffix(".pub"))
        assert done.exit_code == 1 and "LedgerError" in done.output

    def test_what_is_missing_is_named(self, path, key, tmp_path):
        write(path)
        assert "--key has no effect without --anchors" in self.invoke("verify", path, "--key", key).output
        assert "--anchors needs --key" in self.invoke("verify", path, "--anchors", tmp_path / "a").output
        done = self.invoke("verify", path, "--anchors", tmp_path / "a", "--key", key)
        assert "a: No such file" in done.output and done.exit_code == 1
        (tmp_path / "a").write_text("")
        done = self.invoke("verify", path, "--anchors", tmp_path / "a", "--key", key)
        assert "none of its 0 anchors is by" in done.output and done.exit_code == 1
        done = self.invoke("anchor", path, "--key", key, "--post", "http://127.0.0.1:1/secret")
        assert done.exit_code == 1 and "ConnectError" in done.output and "secret" not in done.output
