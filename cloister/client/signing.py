"""What a site signs with in secure aggregations, and whom it takes for a member of them.

Three files of the site say so: its signing key, the signed roster, and the public key of whoever signs rosters. The
policy may pin the fingerprints of all members in `peers` instead, or as well. The site makes its key when it first
starts, and nothing else ever has the private half.
"""

import fcntl
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cloister.client.node import NodeConfig
from cloister.client.policy import policy_of
from cloister.core.errors import ConfigError, NodeConfigError, ProtocolError
from cloister.core.files import atomic_path, expanded
from cloister.core.keys import fingerprint, new_signing_key, public_half, signing_key, verifying_key
from cloister.secure_aggregation.roster import Roster, SignedRoster, opened, public_bytes


@dataclass(frozen=True)
class Identity:
    """Who a site is in secure aggregations.

    Args:
        name: of the site on the roster.
        key: its long-term key.
        roster: of all who may take part, as somebody other than the server vouches for it.
    """

    name: str
    key: Ed25519PrivateKey = field(repr=False)
    roster: Roster


def make_key(folder: Path) -> str:
    """Make the key that a site signs with, unless the folder has one, and write its public half beside it.

    Args:
        folder: gets `signing.key`, for its owner alone, and `signing.pub`. Each is whole or absent.

    Returns:
        The fingerprint of the key.

    Raises:
        ConfigError: a file cannot be written, or is no such key.
    """
    private = folder / "signing.key"
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # of two starts at the same time one makes the key
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
    """Who this site is in secure aggregations; None if its configuration names no signing key.

    Raises:
        NodeConfigError: a file cannot be read or holds something else; nobody whom the site trusts vouches for the
            roster, or it is older than one that was seen before; or the site is not on it. For the operator of the
            node alone.
        PolicyError: the policy cannot be read.
    """
    if not node.signing_key:
        return None
    try:
        key = signing_key(_content("signing-key", node.signing_key), f"signing-key {node.signing_key}")
        roster = _trusted_roster(node)
    except ProtocolError as error:
        raise NodeConfigError(f"roster {node.roster}: {error}") from None
    except ConfigError as error:
        raise NodeConfigError(str(error)) from None
    own = public_bytes(key)
    names = [name for name, known in roster.keys.items() if known == own]
    if not names:
        raise NodeConfigError(
            f"signing-key {node.signing_key} is the key of nobody on the roster {node.roster}: send its public half, "
            "signing.pub, to the roster's keeper, and put the new roster in its place"
        )
    return Identity(names[0], key, roster)


def _trusted_roster(node: NodeConfig) -> Roster:
    """The roster, of which the signature, the fingerprints or both were checked, as the site has it."""
    policy = policy_of(node.policy)
    pins = policy.peers if policy else {}
    if not (node.roster_key or pins):
        raise ConfigError(f"roster {node.roster}: name whoever signs it by roster-key, or pin peers in the policy")
    signed = opened(_content("roster", node.roster))
    if node.roster_key:
        authority = verifying_key(_content("roster-key", node.roster_key), f"roster-key {node.roster_key}")
        _require(signed, authority, node.ledger_folder)
    return signed.roster.pinned(pins) if pins else signed.roster


def _require(signed: SignedRoster, authority: Ed25519PublicKey, folder: Path) -> None:
    """Refuse a roster that the authority did not sign, or that is older than one that was seen; remember its number.

    Numbers are added to the file at its end: of processes that do so at the same time none undoes what another did.
    """
    path = folder / f"roster-{hashlib.sha256(authority.public_bytes_raw()).hexdigest()[:12]}.seen"
    try:
        seen = max(map(int, path.read_text().split()), default=0) if path.exists() else 0
        signed.require(authority, seen)
        if signed.serial > seen:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                # The line begins anew: the last one may have been torn.
                file.write(f"\n{signed.serial}\n")
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path.name} in ledger-dir {folder}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path.name} in ledger-dir {folder} must hold numbers of rosters only") from None


def _content(key: str, path: str) -> bytes:
    """What is in a file that a key of the node configuration names."""
    try:
        return expanded(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key} {path}: {error.strerror}") from None
