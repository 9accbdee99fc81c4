"""Anchored ledgers: heads, signed and handed to others, that a ledger cannot take back.

A ledger is chained by hashes, so that a change within it shows. It cannot show by itself that its last lines were cut
off, that it was written anew from some line on, or that an old copy was put in its place: all of these are unbroken
ledgers. Whoever has an earlier head can tell. An anchor is such a head, with the day, signed by the key of the ledger's
owner, so that neither can deny it later: the owner that the ledger had this head, and the keeper that this is the one
that the owner gave.

An anchor has no number of lines and no time finer than the day: both would tell how often somebody was drawn. Two
anchors tell whether anything was recorded between them, and nothing more.
"""

import base64
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from cloister.core.errors import ConfigError, FederationError, LedgerError
from cloister.core.keys import fingerprint
from cloister.core.posting import post
from cloister.privacy.accounting.ledger import Ledger, today

PURPOSE = b"cloister ledger head\0"
"""Signed with the head: the key signs other things too, and none of them is an anchor."""
SIGNED = ec.ECDSA(hashes.SHA384())
HEAD = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Anchor:
    """A head that a ledger had.

    Attributes:
        head: SHA-256 of its last line, 64 hexadecimal digits.
        day: on which it was signed, in seconds since 1970.
        key: fingerprint of the public key, as `ssh-keygen -l` prints it.
        signature: ECDSA over the head and the day, base64.
    """

    head: str
    day: float
    key: str
    signature: str

    @property
    def line(self) -> str:
        """As JSON, in one line."""
        return json.dumps(asdict(self), sort_keys=True)


def anchored(ledger: Ledger, key: Path) -> Anchor:
    """The head of a ledger, signed.

    Args:
        ledger: to be anchored.
        key: file of a private EC key: the node's (OpenSSH) or the server's (PEM).

    Raises:
        ConfigError: there is no such key.
    """
    private, day = _private(key), today()
    signature = private.sign(_content(ledger.head, day), SIGNED)
    return Anchor(ledger.head, day, fingerprint(private.public_key()), base64.b64encode(signature).decode())


def hand_over(anchor: Anchor, file: Path | None, url: str) -> None:
    """Give an anchor to those who keep it.

    Args:
        anchor: of a ledger.
        file: gets it as one more line; None: none does.
        url: gets it as JSON; empty: none does.

    Raises:
        ConfigError: one of them did not take it.
    """
    try:
        if file:
            with file.open("a") as kept:
                kept.write(anchor.line + "\n")
        if url:
            post(url, asdict(anchor))
    except OSError as error:
        raise ConfigError(f"--to {file}: {error.strerror}") from None
    except FederationError as error:
        raise ConfigError(f"--post: {error}") from None


def read_anchors(path: Path) -> list[Anchor]:
    """Anchors, one a line.

    Raises:
        ConfigError: there is no such file, or a line is no anchor.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"--anchors {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"--anchors {path}: it is no text") from None
    return [_read(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]


def verify_anchors(ledger: Ledger, anchors: Iterable[Anchor], key: Path) -> int:
    """Check that a ledger still has every head that its owner has signed.

    Args:
        ledger: to be checked.
        anchors: of this ledger and of others: those of other keys are left out.
        key: file of the owner's public key, in OpenSSH format, or of the private one.

    Returns:
        How many anchors were checked.

    Raises:
        ConfigError: there is no such key.
        LedgerError: an anchor was not signed by the key, or the ledger does not have its head any more.
    """
    public, heads = _public(key), ledger.heads()
    own = [anchor for anchor in anchors if anchor.key == fingerprint(public)]
    for anchor in own:
        try:
            public.verify(base64.b64decode(anchor.signature), _content(anchor.head, anchor.day), SIGNED)
        except (InvalidSignature, ValueError):
            raise LedgerError(f"the anchor of head {anchor.head} was not signed by {key}") from None
        if anchor.head not in heads:
            raise LedgerError(
                f"{ledger.path}: no line has the hash {anchor.head} that was anchored: lines were cut off or written "
                "anew, an old copy was put in its place, or it is of another ledger"
            )
    return len(own)


def _content(head: str, day: float) -> bytes:
    return PURPOSE + json.dumps([head, day]).encode()


def _read(line: str, where: str) -> Anchor:
    try:
        found = json.loads(line)
        anchor = Anchor(**{field.name: field.type(found[field.name]) for field in fields(Anchor)})  # type: ignore[operator]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        anchor = None
    # What is no hash may be anything, and stands in errors.
    if anchor is None or not HEAD.fullmatch(anchor.head):
        raise ConfigError(f"{where}: it is no anchor; `cloister ledger anchor` writes them")
    return anchor


def _private(path: Path) -> ec.EllipticCurvePrivateKey:
    content = _bytes(path)
    load = load_ssh_private_key if b"OPENSSH" in content else load_pem_private_key
    try:
        key = load(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"--key {path} is no private EC key without a passphrase, in OpenSSH or PEM format")
    return key


def _public(path: Path) -> ec.EllipticCurvePublicKey:
    content = _bytes(path)
    if b"PRIVATE KEY" in content:
        return _private(path).public_key()
    try:
        key = load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"--key {path} is no public EC key in OpenSSH format")
    return key


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--key {path}: {error.strerror}") from None
