"""Who may start runs and register nodes at a SuperLink: operators, known by their tokens.

Flower's interface for account authentication, `ControlAuthnPlugin`, is what is filled in here.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from cloister.deploy.credentials import is_known
from cloister.flower.superlink import (
    ACCESS_TOKEN_KEY,
    ApiErrorCode,
    ControlAuthnPlugin,
    FlowerError,
    NoOpControlAuthnPlugin,
)

Metadata = Sequence[tuple[str, str | bytes]]


class OperatorsOnly(ControlAuthnPlugin):
    """Knows operators by their tokens. All of them act as the one account that Flower has without authentication.

    Args:
        digests: SHA-256 of their tokens.
    """

    def __init__(self, digests: tuple[str, ...]) -> None:
        self.digests = digests
        # Not a base class: where Flower sees an instance of it, it requires no token.
        self._without = NoOpControlAuthnPlugin()

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, Any]:
        """Return True if there is exactly one token and it is an operator's, and the account."""
        tokens = [value for key, value in metadata if key == ACCESS_TOKEN_KEY]
        if len(tokens) != 1 or not isinstance(tokens[0], str) or not is_known(tokens[0], self.digests):
            return False, None
        return self._without.validate_tokens_in_metadata(metadata)

    def get_login_details(self) -> Any:
        """There is no log-in: `flwr login` says so."""
        return self._without.get_login_details()

    def get_auth_tokens(self, device_code: str) -> NoReturn:
        """Refuse to issue a token: they are provisioned."""
        raise FlowerError(ApiErrorCode.NO_ACCOUNT_AUTH, "operators' tokens are provisioned, not issued here")

    def refresh_tokens(self, metadata: Metadata) -> NoReturn:
        """Refuse to renew a token: one that is not known now is not renewed either."""
        raise FlowerError(ApiErrorCode.ACCOUNT_AUTHENTICATION_FAILED, "unknown operator")
