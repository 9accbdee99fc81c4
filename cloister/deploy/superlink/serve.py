"""The process of a SuperLink: its operators, application, options, database and certificates.

The options are those of flwr 1.41 and 1.42. Where a name of Flower is missing, the start fails, and nothing is served.

Operators start runs and register nodes; they are known by their tokens. Flower's interface for account
authentication, `ControlAuthnPlugin`, is what is filled in here.

The state is in SQLite, with a longer wait for locks, return of freed pages to the disk, and a limit.
"""

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from logging import INFO, WARNING
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn, TypeVar

import uvicorn
from fastapi import HTTPException
from sqlalchemy.exc import OperationalError
from starlette.types import ASGIApp

from cloister.deploy import credentials
from cloister.deploy.credentials import is_known, read_digests
from cloister.deploy.superlink.gate import (
    AppMessages,
    Gate,
    GateKnown,
    RevokedKeys,
    RunningRuns,
    record_no_totals,
)
from cloister.flower import log
from cloister.flower.superlink import (
    ACCESS_TOKEN_KEY,
    FLWR_IN_MEMORY_DB_NAME,
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
    sql_mixin,
)
from cloister.utils.errors import ConfigError

Metadata = Sequence[tuple[str, str | bytes]]


STOP_SECONDS = 30
"""Seconds that a stop waits for requests that have begun: a stranger may send one slowly."""
T = TypeVar("T")
BUSY_SECONDS = 30.0
"""Time that a transaction waits for others. Flower's own 5 s are too few for 50 nodes on a loaded machine."""
PAGE = 4096
INCREMENTAL = 2
"""SQLite's mode that returns freed pages to the disk on demand."""
AT_ONCE = 64 * 2**20 // PAGE
"""Pages returned in one step. Other transactions wait meanwhile."""
ABSENCE = 180.0
"""Seconds: Flower's 60 for a missing heartbeat, and the start of this server on a busy machine."""
INTERVAL = 60.0
"""Seconds between two checks of the size."""
NEARLY = 0.8
"""Share of the limit above which each check logs a warning."""
SPARE = 2**30
"""Free bytes of the disk below which each check logs a warning."""


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
    set_up_databases(max_bytes)
    if path := database_file(config.database):  # one in memory has nothing to give back, and forgets tasks
        try:
            prepare_database(path)
            wait_for_tasks(path)
        except sqlite3.Error as error:
            log(WARNING, "the state database %s could not be made ready: %s", path.name, error)
        watch_database(path, max_bytes)
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
    | `RevokedKeys` | | | `register_node` |
    """
    app = AppMessages()
    for each in (Gate(app), GateKnown(), app, RunningRuns(), RevokedKeys()):
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


def database_file(name: str) -> Path | None:
    """Return the file of a state database, if it has one.

    Args:
        name: of the database, as configured for Flower.
    """
    return None if name == FLWR_IN_MEMORY_DB_NAME or "://" in name else Path(name).resolve()


def set_up_databases(max_bytes: int) -> None:
    """Set the waiting time and the limit of Flower's databases, and answer 503 while one is busy."""
    ours = {"busy_timeout": str(int(1000 * BUSY_SECONDS)), "max_page_count": str(max(max_bytes // PAGE, 1))}
    names = vars(sql_mixin)
    kept = tuple((name, value) for name, value in names["SQLITE_PRAGMAS"] if name not in ours)
    names["SQLITE_PRAGMAS"] = (*ours.items(), *kept)
    mixin: Any = sql_mixin.SqlMixin
    if not hasattr(mixin.session, "plain"):
        mixin.session = patient(mixin.session)


def patient(session: Callable[..., AbstractContextManager[T]]) -> Callable[..., AbstractContextManager[T]]:
    """Return Flower's `session`, which answers 503 for a locked database and 507 for a full one.

    After a 503 Flower's clients send the request again.
    """

    @contextmanager
    def asked_again(self: object) -> Iterator[T]:
        try:
            with session(self) as inner:
                yield inner
        except OperationalError as error:
            reason = str(error.orig)
            if "locked" in reason:
                log(WARNING, "the state database was locked for %g s: the client is asked to try again", BUSY_SECONDS)
                raise HTTPException(503, "the state database is busy: try again") from None
            if "full" in reason:
                log(WARNING, "the state database is at its limit, or its disk is full")
                raise HTTPException(507, "the state database is full") from None
            raise

    vars(asked_again)["plain"] = session
    return asked_again


def prepare_database(path: Path) -> None:
    """Compact a database that no SuperLink has open, and let it return freed pages on demand from now on."""
    with closing(sqlite3.connect(path)) as connection:
        before = path.stat().st_size
        connection.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    if (freed := before - path.stat().st_size) > SPARE // 100:
        log(INFO, "the state database gave back %d MB", freed // 10**6)


def wait_for_tasks(path: Path) -> None:
    """Extend the deadline of each task that ran when the SuperLink ended, for the next heartbeat of its process.

    Args:
        path: of a database that no SuperLink has open.
    """
    until = (datetime.now(UTC) + timedelta(seconds=ABSENCE)).isoformat(sep=" ")
    running = "running_at IS NOT NULL AND finished_at IS NULL AND token IS NOT NULL"
    with closing(sqlite3.connect(path)) as connection, connection:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'task'").fetchone():
            connection.execute(f"UPDATE task SET active_until = ? WHERE {running}", (until,))


def give_back(path: Path) -> int:
    """Return freed pages of a database in use to the disk.

    Returns:
        Its size in bytes, with its log.
    """
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
        # As a script: `execute` takes one step, which is one page.
        connection.executescript(f"PRAGMA incremental_vacuum({AT_ONCE})")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return sum(part.stat().st_size for part in (path, path.with_name(f"{path.name}-wal")) if part.exists())


def look_at_database(path: Path, max_bytes: int) -> list[str]:
    """Return freed pages to the disk; return a warning for each scarce resource."""
    try:
        size = give_back(path)
    except sqlite3.OperationalError as error:
        return [f"the state database could not be compacted: {error}"]
    said = []
    if size > NEARLY * max_bytes:
        said.append(f"the state database has {size // 10**6} MB of the {max_bytes // 10**6} MB it may have")
    if (free := shutil.disk_usage(path).free) < SPARE:
        said.append(f"the disk of the state database has {free // 10**6} MB left")
    return said


def watch_database(path: Path, max_bytes: int, interval: float = INTERVAL) -> Event:
    """Check a database at intervals, in a thread that ends with the process or when the returned event is set."""
    ended = Event()

    def work() -> None:
        while not ended.wait(interval):
            for line in look_at_database(path, max_bytes):
                log(WARNING, "%s", line)

    Thread(target=work, name="state-database", daemon=True).start()
    return ended
