"""Flower's SuperLink, with its Control interface closed to all but operators, its nodes kept apart, and limits of size.

The open-source SuperLink of flwr 1.41 authenticates nobody who starts a run, registers a node or reads a log, and
serves nodes and operators on one port. Its interface for account authentication, `ControlAuthnPlugin`, is what is
filled in here; only the choice of plugin is not reachable by an option, so that its parts are put together here. They
are those of flwr 1.41.0: with another version this fails at start, and nothing is served.
"""

import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from logging import WARNING
from pathlib import Path
from threading import Event, Thread

import uvicorn
from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, AuthnType
from flwr.supercore import log
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink import extensions
from flwr.superlink.auth_plugin import ControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from cloister.core.errors import ConfigError
from cloister.core.files import DAY
from cloister.deploy import certificates, database, revoked
from cloister.deploy.abandoned import Abandoned, Sending
from cloister.deploy.apart import OwnMessages
from cloister.deploy.cleanup import DeletesExpired
from cloister.deploy.credentials import is_known, read_digests
from cloister.deploy.door import App, Door
from cloister.deploy.http_protocol import BoundedH11Protocol
from cloister.deploy.interrupted import DeliveredMessage, recover
from cloister.deploy.replies import ReplyLimit
from cloister.deploy.retries import RetryWhenBusy
from cloister.deploy.runs import RunningRuns
from cloister.deploy.senders import KnownSenders
from cloister.deploy.shortcut import Shortcut
from cloister.deploy.unfinished import WholeReplies

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
        """Refuse: tokens are provisioned."""
        raise FlowerError(ApiErrorCode.NO_ACCOUNT_AUTH, "operators' tokens are provisioned, not issued here")

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:
        """Refuse: a token that is not known now is not renewed either."""
        raise FlowerError(ApiErrorCode.ACCOUNT_AUTHENTICATION_FAILED, "unknown operator")


def serve(operators: Path, arguments: list[str], max_database: int = 8000) -> None:
    """Run a SuperLink with Flower's own options until it is stopped.

    Args:
        operators: file of digests of operators' tokens.
        arguments: of `flower-superlink`.
        max_database: megabytes that the state database may have.

    Raises:
        ConfigError: the file of operators holds none, a token would travel in the clear, or anybody could take the
            task of a server's app.
    """
    digests = read_digests(operators)
    sys.argv = ["flower-superlink", *arguments]
    config = _parse_superlink_lifespan_config()
    if config.insecure:
        raise ConfigError("operators' tokens would travel in the clear; to try things out, use flower-superlink")
    if config.superexec_auth_secret is None:
        raise ConfigError(
            "without --superexec-auth-secret-file whoever reaches the port can take the task of a server's app, and "
            "read every reply; name the file superexec.secret of the kit"
        )
    if not config.enable_supernode_auth:
        log(WARNING, "without --enable-supernode-auth whoever reaches the port can register as a node")
    before = _keep_database(config.database, max_database * 10**6)
    _watch_certificates([Path(path) for path in (config.ssl_certfile, config.ssl_ca_certfile) if path])
    uvicorn.run(
        app=closed_app(replace(config, authn_plugin=OperatorsOnly(digests)), before),
        host=config.host,
        port=config.port,
        http=BoundedH11Protocol,
        ws="none",
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        workers=1,
    )


def closed_app(config: SuperLinkLifespanConfig, before: Sequence[DeliveredMessage] = ()) -> App:
    """Flower's SuperLink behind our door, as an ASGI application. There is one in a process.

    Args:
        config: of the SuperLink.
        before: what nodes were given by the SuperLink before it, the last one of each node last.
    """
    path = _file_of(config.database)
    own = OwnMessages(before, path.parent if path else None)
    own.install()
    DeletesExpired().install()
    WholeReplies(own.handover.unfinished).install()
    abandoned = Abandoned(before)
    abandoned.install()
    Sending(abandoned).install()
    RetryWhenBusy().install()
    # Outermost: it counts also what the objects' guard does not hand on.
    ReplyLimit().install()
    RunningRuns().install()
    revoked.install()
    app = create_app(config, SuperLinkLifespan)
    # An extension may add middleware, and may change the application in any other way: none may be there.
    plain = config.fleet_event_log_plugin is None and extensions._try_import_sgxt() is None
    return Door(Shortcut(app) if plain else app, KnownSenders(app))


def _keep_database(name: str, max_bytes: int) -> list[DeliveredMessage]:
    """Compact the state database, bound it and watch it; one in memory has nothing to give back, and forgets tasks.

    Returns:
        What nodes were given before, and have not answered.
    """
    database.set_up(max_bytes)
    if not (path := _file_of(name)):
        return []
    before = []
    try:
        database.prepare(path)
        database.wait_for_tasks(path)
        before = recover(path)
    except sqlite3.Error as error:
        log(WARNING, "the state database %s could not be made ready: %s", path.name, error)
    database.watch(path, max_bytes)
    return before


def _file_of(name: str) -> Path | None:
    """The file of a state database, if it has one."""
    return None if name == FLWR_IN_MEMORY_DB_NAME or "://" in name else Path(name).resolve()


def expiring(paths: Sequence[Path], now: datetime) -> list[str]:
    """A line for each certificate that ends within a month, or has ended."""
    ends = {path.name: certificates.expiry_of(path.read_bytes()) for path in paths}
    return [
        f"certificate {name} {'ends' if end > now else 'ended'} on {end:%Y-%m-%d}: cloister provision --renew"
        for name, end in ends.items()
        if (end - now).days < certificates.EXPIRY_WARNING_DAYS
    ]


def _watch_certificates(paths: Sequence[Path]) -> None:
    """Say now and every day which certificates end soon."""

    def work() -> None:
        while True:
            for line in expiring(paths, datetime.now(UTC)):
                log(WARNING, "%s", line)
            Event().wait(DAY)

    Thread(target=work, name="certificates", daemon=True).start()
