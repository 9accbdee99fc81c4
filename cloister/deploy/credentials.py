"""An operator's credentials: a random token that the operator keeps, of which the server holds a digest only."""

import hashlib
import hmac
import json
import re
import secrets
from base64 import b64decode, b64encode
from pathlib import Path

from cloister.core.errors import ConfigError

DIGEST = re.compile(r"[0-9a-f]{64}")


def new_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """SHA-256 in hex. A random token needs no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def credentials_file(address: str, token: str) -> str:
    """The token as the `flwr` command keeps one for the SuperLink at `address`, in `credentials.yaml` (JSON is YAML).

    There is nothing to refresh a token with: the second one is there because the command wants two.
    """
    stored = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
    entries = {
        f"flower.account-auth.{address}.{key}": b64encode(value.encode()).decode() for key, value in stored.items()
    }
    return json.dumps(entries, indent=2) + "\n"


def token_in(credentials: bytes) -> str:
    """The token in a `credentials.yaml` that `credentials_file` made.

    Raises:
        ConfigError: there is none in it.
    """
    try:
        stored = json.loads(credentials)
        (token,) = (value for key, value in stored.items() if key.endswith(".oidc-access-token"))
        return b64decode(token, validate=True).decode()
    except (ValueError, AttributeError, TypeError):
        raise ConfigError("operator/credentials.yaml holds no operator's token: --remake operator") from None


def read_digests(path: Path) -> tuple[str, ...]:
    """The operators a server knows: a digest a line, with a comment after it if one likes.

    Raises:
        ConfigError: there is no such file, or a line in it is no digest, or it has none.
    """
    try:
        lines = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"operators {path}: {error.strerror}") from None
    if not lines or not all(DIGEST.fullmatch(line) for line in lines):
        raise ConfigError(f"operators {path} must hold the SHA-256 of an operator's token on each line, at least one")
    return tuple(lines)


def is_known(token: str, digests: tuple[str, ...]) -> bool:
    """Whether a token is an operator's; takes as long whether or not it is."""
    found = [hmac.compare_digest(digest_of(token), digest) for digest in digests]
    return any(found)
