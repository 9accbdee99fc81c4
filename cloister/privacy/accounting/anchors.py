"""Anchors of a ledger: signed heads that another party keeps, to detect a truncated or replaced ledger.

A hash chain detects a change within a ledger. It cannot detect that the last lines are missing, that a tail was
rewritten, or that an old copy replaces the file: each of these is an unbroken ledger. A party that has an earlier head
detects them. An anchor is such a head, with the day, signed by the key of the ledger's owner. So the owner cannot deny
that the ledger had this head, and the keeper cannot deny the head that the owner gave.

An anchor contains no number of lines and no time finer than the day: both would reveal how often a client was drawn.
Two anchors reveal only whether anything was recorded between them.
"""

import base64
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key

from cloister.privacy.accounting.ledger import Ledger, today
from cloister.utils.errors import ConfigError, FederationError, LedgerError
from cloister.utils.keys import fingerprint
from cloister.utils.posting import post

PURPOSE = b"cloister ledger head\0"
"""Prefix of the signed content, which separates anchors from other uses of the key."""
SIGNED = ec.ECDSA(hashes.SHA384())
HEAD = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Anchor:
    """Signed head of a ledger.

    Attributes:
        head: SHA-256 of its last line, 64 hexadecimal digits.
        day: of the signature, in seconds since 1970.
        key: fingerprint of the public key, as `ssh-keygen -l` prints it.
        signature: ECDSA over the head and the day, base64.
    """

    head: str
    day: float
    key: str
    signature: str

    @property
    def line(self) -> str:
        """Return the anchor as JSON, in one line."""
        return json.dumps(asdict(self), sort_keys=True)


def anchored(ledger: Ledger, key: Path) -> Anchor:
    """Return the signed head of a ledger.

    Args:
        ledger: to anchor.
        key: file of a private EC key: the node's (OpenSSH) or the server's (PEM).

    Raises:
        ConfigError: the key cannot be read.
    """
    private, day = _private(key), today()
    signature = private.sign(_content(ledger.head, day), SIGNED)
    return Anchor(ledger.head, day, fingerprint(private.public_key()), base64.b64encode(signature).decode())


def hand_over(anchor: Anchor, file: Path | None, url: str) -> None:
    """Append an anchor to a file and post it to a URL, for its keepers.

    Args:
        anchor: of a ledger.
        file: receives it as an additional line; None: no file.
        url: receives it as JSON; empty: no URL.

    Raises:
        ConfigError: the file or the URL rejected it.
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
    """Read anchors from a file, one a line.

    Raises:
        ConfigError: the file cannot be read, or a line is no anchor.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"--anchors {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"--anchors {path}: it is no text") from None
    anchors = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            anchor = Anchor(**{field.name: field.type(found[field.name]) for field in fields(Anchor)})  # type: ignore[operator]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            anchor = None
        # Error messages contain the head, so anything other than a hash is refused.
        if anchor is None or not HEAD.fullmatch(anchor.head):
            raise ConfigError(f"{path}, line {number}: it is no anchor; `cloister ledger anchor` writes them")
        anchors.append(anchor)
    return anchors


def verify_anchors(ledger: Ledger, anchors: Iterable[Anchor], key: Path) -> int:
    """Verify that a ledger still contains every head that its owner has signed.

    Args:
        ledger: to verify.
        anchors: of this and of other ledgers: anchors of other keys are ignored.
        key: file of the owner's public key, in OpenSSH format, or of the private one.

    Returns:
        Number of verified anchors.

    Raises:
        ConfigError: the key cannot be read.
        LedgerError: an anchor was not signed by the key, or the ledger no longer contains its head.
    """
    content = _bytes(key)
    public: object = None
    if b"PRIVATE KEY" in content:
        public = _private(key).public_key()
    else:
        with suppress(ValueError, UnsupportedAlgorithm):
            public = load_ssh_public_key(content)
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise ConfigError(f"--key {key} is no public EC key in OpenSSH format")
    heads = ledger.heads()
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


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--key {path}: {error.strerror}") from None
