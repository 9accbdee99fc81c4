"""A disk that is full in mid-provisioning: one line that holds no secret, and nothing that only looks whole."""

import errno
import hashlib
import os
import subprocess
import sys
from base64 import b64decode
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cloister.cli import app
from cloister.deploy.provision.kits import provision
from cloister.utils.errors import ConfigError

FEDERATION = """\
name = "hospitals"
server.addresses = ["localhost"]
[[sites]]
name = "north"
data-path = "/data/north.npz"
"""
KITS = ("server", "operator", "sites/north")


@pytest.fixture
def description(tmp_path):
    path = tmp_path / "federation.toml"
    path.write_text(FEDERATION)
    return path


@contextmanager
def room_for(monkeypatch, files):
    """A disk on which so many files find room, and then none."""
    left = [files]
    real = os.fsync

    def fsync(handle):
        if not os.path.isdir(f"/proc/self/fd/{handle}"):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sums_hold(kit):
    return not subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=kit).returncode


@pytest.mark.slow
def test_wherever_the_disk_fills_up_running_again_completes_the_kits(description, tmp_path, monkeypatch):
    complete = set(contents(provision(description, tmp_path / "kits", "").folder))
    for room in range(len(complete)):
        kits = tmp_path / f"kits-{room}"
        with room_for(monkeypatch, room), pytest.raises(ConfigError, match="No space left on device; the kits are not"):
            provision(description, kits, "")
        left = contents(kits) if kits.exists() else {}
        assert len(left) == room and set(left) <= complete, "a part of a file was left"
        for kit in KITS:
            assert not (kits / kit / "SHA256SUMS").exists() or sums_hold(kits / kit)
        provision(description, kits, "")
        whole = contents(kits)
        assert set(whole) == complete, f"after room for {room} files"
        assert all(whole[name] == content for name, content in left.items()), "what was there is kept"
        assert all(sums_hold(kits / kit) for kit in KITS)
        stored = yaml.safe_load(whole["operator/credentials.yaml"])
        token = b64decode(stored["flower.account-auth.localhost:8000.oidc-access-token"])
        assert whole["server/operators.sha256"].split()[0].decode() == hashlib.sha256(token).hexdigest()


def test_a_kit_that_was_whole_is_not_while_it_changes(description, tmp_path, monkeypatch):
    kits = provision(description, tmp_path / "kits", "").folder
    with room_for(monkeypatch, 1), pytest.raises(ConfigError):
        provision(description, kits, "", renew=True)  # room for server.crt, not for its checksum
    assert not (kits / "server" / "SHA256SUMS").exists() and sums_hold(kits / "operator")
    provision(description, kits, "")
    assert sums_hold(kits / "server")


def test_the_command_says_it_in_one_line(description, tmp_path, monkeypatch):
    with room_for(monkeypatch, 9):
        result = CliRunner().invoke(app, ["provision", str(description), "--output", str(tmp_path / "kits")])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert "No space left on device" in line and str(tmp_path / "kits") in line


@pytest.mark.skipif(os.getuid() != 0 or not sys.platform.startswith("linux"), reason="mounting a disk needs root")
def test_on_a_disk_that_is_really_full(description, tmp_path):
    """No secret of the kits is on the screen, whatever was being written."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "none", str(small)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        command = [str(Path(sys.executable).with_name("cloister")), "provision", str(description), "--output"]
        done = subprocess.run([*command, str(small / "kits")], capture_output=True, text=True, timeout=120)
        written = contents(small)
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert done.returncode == 1 and "No space left on device" in done.stderr and "Traceback" not in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) == 1 and written
