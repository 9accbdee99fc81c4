"""Signing key of a site in secure aggregations, and its trusted roster of members.

The site keeps three files: its signing key, the signed roster, and the public key of the roster's signer. `peers` in
the policy may pin the fingerprints of all members, in place of the signer's key or beside it. The site makes its key at
its first start, and no other party ever has the private half.
"""

import fcntl
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cloister.client.node import NodeConfig
from cloister.client.policy import policy_of
from cloister.secure_aggregation.roster import Roster, SignedRoster, opened, public_bytes
from cloister.utils.errors import ConfigError, NodeConfigError, ProtocolError
from cloister.utils.files import atomic_path, expanded
from cloister.utils.keys import fingerprint, new_signing_key, public_half, signing_key, verifying_key


@dataclass(frozen=True)
class Identity:
    """Identity of a site in secure aggregations.

    Args:
        name: of the site on the roster.
        key: its long-term key.
        roster: of all possible members, certified by a party other than the server.
    """

    name: str
    key: Ed25519PrivateKey = field(repr=False)
    roster: Roster


def make_key(folder: Path) -> str:
    """Make the signing key of a site if it has none; write its public half.

    Args:
        folder: receives `signing.key`, which only its owner can read, and `signing.pub`. Each is written atomically.

    Returns:
        The fingerprint of the key.

    Raises:
        ConfigError: a file cannot be written, or contains no such key.
    """
    private = folder / "signing.key"
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # only one of two concurrent starts makes the key
            if not private.exists():
                _written(private, new_signing_key(), 0o600)
            key = signing_key(private.read_bytes(), f"signing-key {private}")
            _written(folder / "signing.pub", public_half(key), 0o644)
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(f"signing-key {error.filename or private}: {error.strerror}") from None
    return fingerprint(key.public_key())


def _written(path: Path, content: bytes, mode: int) -> None:
    with atomic_path(path) as partial:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(file, "wb") as opened:
            opened.write(content)


def identity(node: NodeConfig) -> Identity | None:
    """Return the identity of this site; None without a signing key.

    Raises:
        NodeConfigError: a file is unreadable or invalid; no trusted party signed the roster; the site has seen a newer
            roster; or the roster lacks the site. The text is for the operator of the node only.
        PolicyError: the policy cannot be read.
    """
    if not node.signing_key:
        return None
    try:
        key = signing_key(_content("signing-key", node.signing_key), f"signing-key {node.signing_key}")
        policy = policy_of(node.policy)
        pins = policy.peers if policy else {}
        if not (node.roster_key or pins):
            raise ConfigError(f"roster {node.roster}: name its signer by roster-key, or pin peers in the policy")
        signed = opened(_content("roster", node.roster))
        if node.roster_key:
            authority = verifying_key(_content("roster-key", node.roster_key), f"roster-key {node.roster_key}")
            _require(signed, authority, node.ledger_folder)
        roster = signed.roster.pinned(pins) if pins else signed.roster
    except ProtocolError as error:
        raise NodeConfigError(f"roster {node.roster}: {error}") from None
    except ConfigError as error:
        raise NodeConfigError(str(error)) from None
    own = public_bytes(key)
    names = [name for name, known in roster.keys.items() if known == own]
    if not names:
        raise NodeConfigError(
            f"signing-key {node.signing_key} is not on the roster {node.roster}: send its public half, "
            "signing.pub, to the roster's keeper, and put the new roster in its place"
        )
    return Identity(names[0], key, roster)


def _require(signed: SignedRoster, authority: Ed25519PublicKey, folder: Path) -> None:
    """Refuse a roster that is unsigned, or older than the newest one seen; record its number.

    Numbers are appended to the file, so that concurrent processes keep each other's entries.
    """
    path = folder / f"roster-{hashlib.sha256(authority.public_bytes_raw()).hexdigest()[:12]}.seen"
    try:
        seen = max(map(int, path.read_text().split()), default=0) if path.exists() else 0
        signed.require(authority, seen)
        if signed.serial > seen:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                # Begin a new line, since the last one may be incomplete.
                file.write(f"\n{signed.serial}\n")
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path.name} in ledger-dir {folder}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path.name} in ledger-dir {folder} must hold numbers of rosters only") from None


def _content(key: str, path: str) -> bytes:
    """Return the content of a file that a key of the node configuration names."""
    try:
        return expanded(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key} {path}: {error.strerror}") from None
