"""Who may start runs and register nodes at a SuperLink: operators, known by their tokens.

Flower's interface for account authentication, `ControlAuthnPlugin`, is what is filled in here.
"""

from collections.abc import Sequence

from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, AuthnType
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.superlink.auth_plugin import ControlAuthnPlugin

from cloister.deploy.credentials import is_known

Metadata = Sequence[tuple[str, str | bytes]]


class OperatorsOnly(ControlAuthnPlugin):
    """Knows operators by their tokens. All of them act as the one account that Flower has without authentication.

    Args:
        digests: SHA-256 of their tokens.
    """

    def __init__(self, digests: tuple[str, ...]) -> None:
        self.digests = digests

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        """Whether exactly one token is there and is an operator's."""
        tokens = [value for key, value in metadata if key == ACCESS_TOKEN_KEY]
        if len(tokens) != 1 or not isinstance(tokens[0], str) or not is_known(tokens[0], self.digests):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)

    def get_login_details(self) -> AccountAuthLoginDetails | None:
        """There is no log-in: `flwr login` says so."""
        return AccountAuthLoginDetails(
            authn_type=AuthnType.NOOP, device_code="", verification_uri_complete="", expires_in=0, interval=0
        )

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:
        """Refuse to issue a token: they are provisioned."""
        raise FlowerError(ApiErrorCode.NO_ACCOUNT_AUTH, "operators' tokens are provisioned, not issued here")

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:
        """Refuse to renew a token: one that is not known now is not renewed either."""
        raise FlowerError(ApiErrorCode.ACCOUNT_AUTHENTICATION_FAILED, "unknown operator")
