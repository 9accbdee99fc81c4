"""The process of a SuperLink: its operators, application, options, database and certificates.

The options are those of flwr 1.41 and 1.42. Where a name of Flower is missing, the start fails, and nothing is served.

Operators start runs and register nodes; they are known by their tokens. Flower's interface for account
authentication, `ControlAuthnPlugin`, is what is filled in here.
"""

import os
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from starlette.types import ASGIApp

from cloister.deploy import credentials
from cloister.deploy.credentials import is_known, read_digests
from cloister.deploy.superlink import database
from cloister.deploy.superlink.gate import (
    AppMessages,
    Gate,
    GateKnown,
    NodeKeys,
    RevokedKeys,
    RunningRuns,
    record_no_totals,
)
from cloister.flower import log
from cloister.flower.superlink import (
    ACCESS_TOKEN_KEY,
    ApiErrorCode,
    ControlAuthnPlugin,
    FlowerError,
    NoOpControlAuthnPlugin,
    Shortcut,
    SuperLinkLifespan,
    console_handler,
    create_app,
    extensions,
    get_uvicorn_log_config,
    parse_superlink_options,
)
from cloister.utils.errors import ConfigError

Metadata = Sequence[tuple[str, str | bytes]]


STOP_SECONDS = 30
"""Seconds that a stop waits for requests that have begun: a stranger may send one slowly."""


def serve(operators: Path, arguments: list[str], max_database: int = 8000) -> None:
    """Run a SuperLink with Flower's own options until it is stopped.

    Args:
        operators: file of digests of operators' tokens.
        arguments: of `flower-superlink`.
        max_database: megabytes that the state database may have.

    Raises:
        ConfigError: the file of operators holds none, or an option is missing without which a stranger could read an
            operator's token, register as a node, or take the task of a server's app.
    """
    digests = read_digests(operators)
    sys.argv = ["flower-superlink", *arguments]
    config = parse_superlink_options()
    if config.insecure:
        raise ConfigError(
            "--insecure would send operators' tokens in the clear. Give --ssl-ca-certfile, --ssl-certfile and "
            "--ssl-keyfile, as start.sh of the server's kit does; for a trial on one machine use flower-superlink"
        )
    if not config.enable_supernode_auth:
        raise ConfigError(
            "--enable-supernode-auth is missing: without it any stranger registers as a node. Start the SuperLink by "
            "start.sh of the server's kit, or add the option; for a trial on one machine use flower-superlink"
        )
    if config.superexec_auth_secret is None:
        raise ConfigError(
            "--superexec-auth-secret-file is missing: without it any stranger takes the task of a server's app, and "
            "reads every reply. Name superexec.secret of the server's kit; for a trial use flower-superlink"
        )
    if open_ports := [name for name in os.environ if name.startswith("FLWR_INTERNAL_GRPC_")]:
        raise ConfigError(
            f"{open_ports[0]} is set: it opens a port of Flower's that passes by this SuperLink's checks; unset it"
        )
    max_bytes = max_database * 10**6
    database.set_up(max_bytes)
    if path := database.file_of(config.database):  # one in memory has nothing to give back, and forgets tasks
        try:
            database.prepare(path)
            database.wait_for_tasks(path)
        except sqlite3.Error as error:
            log(WARNING, "the state database %s could not be made ready: %s", path.name, error)
        database.watch(path, max_bytes)
    credentials.watch([Path(path) for path in (config.ssl_certfile, config.ssl_ca_certfile) if path])
    uvicorn.run(
        app=closed_app(replace(config, authn_plugin=OperatorsOnly(digests))),
        host=config.host,
        port=config.port,
        ws="none",
        timeout_graceful_shutdown=STOP_SECONDS,
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        workers=1,
    )


def closed_app(config: Any) -> ASGIApp:
    """Return Flower's SuperLink as an ASGI application. There is one in a process.

    Args:
        config: of the SuperLink.
    """
    install()
    app = create_app(config, SuperLinkLifespan)
    # An extension may add middleware, and may change the application in any other way: none may be there.
    plain = config.fleet_event_log_plugin is None and extensions._try_import_sgxt() is None
    return Shortcut(app) if plain else app


def install() -> None:
    """Put everything of ours in front of Flower's functions, and have it add up no totals.

    | | for nodes | for the server's app | for operators |
    |---|---|---|---|
    | `Gate` | all of messages and objects | | |
    | `GateKnown` | | `pull_object` | |
    | `AppMessages` | | `push_messages` | |
    | `RunningRuns` | `check_abort` | | |
    | `NodeKeys` | the key in a request | | |
    | `RevokedKeys` | | | `register_node` |
    """
    app = AppMessages()
    for each in (Gate(app), GateKnown(), app, RunningRuns(), NodeKeys(), RevokedKeys()):
        each.install()
    record_no_totals()


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
        """Return the answer of a SuperLink without log-in, which `flwr login` prints."""
        return self._without.get_login_details()

    def get_auth_tokens(self, device_code: str) -> NoReturn:
        """Refuse to issue a token: they are provisioned."""
        raise FlowerError(ApiErrorCode.NO_ACCOUNT_AUTH, "operators' tokens are provisioned, not issued here")

    def refresh_tokens(self, metadata: Metadata) -> NoReturn:
        """Refuse to renew a token: one that is not known now is not renewed either."""
        raise FlowerError(ApiErrorCode.ACCOUNT_AUTHENTICATION_FAILED, "unknown operator")
