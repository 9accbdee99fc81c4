"""Credentials of an operator: a random token, of which the server stores only a digest."""

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
    """Generate a token of 256 random bits."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token in hex. A random token needs no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def credentials_file(address: str, token: str) -> str:
    """Return a `credentials.yaml` with the token, for the `flwr` command.

    The token is for the SuperLink at `address`. The content is JSON, which is YAML. The refresh token is a placeholder
    that the command requires: tokens are not refreshed.
    """
    stored = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
    entries = {
        f"flower.account-auth.{address}.{key}": b64encode(value.encode()).decode() for key, value in stored.items()
    }
    return json.dumps(entries, indent=2) + "\n"


def token_in(credentials: bytes) -> str:
    """Return the token in a `credentials.yaml` that `credentials_file` made.

    Raises:
        ConfigError: it contains no token.
    """
    try:
        stored = json.loads(credentials)
        (token,) = (value for key, value in stored.items() if key.endswith(".oidc-access-token"))
        return b64decode(token, validate=True).decode()
    except (ValueError, AttributeError, TypeError):
        raise ConfigError("operator/credentials.yaml holds no operator's token: --remake operator") from None


def read_digests(path: Path) -> tuple[str, ...]:
    """Read the digests of the operators' tokens.

    Each line has one, with an optional comment after it.

    Raises:
        ConfigError: the file is absent or empty, or a line contains no digest.
    """
    try:
        lines = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"operators {path}: {error.strerror}") from None
    if not lines or not all(DIGEST.fullmatch(line) for line in lines):
        raise ConfigError(f"operators {path} must hold the SHA-256 of an operator's token on each line, at least one")
    return tuple(lines)


def is_known(token: str, digests: tuple[str, ...]) -> bool:
    """Return whether a token is an operator's, in time independent of the result."""
    found = [hmac.compare_digest(digest_of(token), digest) for digest in digests]
    return any(found)
