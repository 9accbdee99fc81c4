"""The process of a SuperLink: its options, its state database, its certificates, and uvicorn.

They are those of flwr 1.41 and 1.42: where a name of Flower is not there, this fails at start, and nothing is served.
"""

import os
import sqlite3
import sys
from dataclasses import replace
from logging import WARNING
from pathlib import Path

import uvicorn

from cloister.core.errors import ConfigError
from cloister.deploy import certificates
from cloister.deploy.credentials import read_digests
from cloister.deploy.superlink import database
from cloister.deploy.superlink.app import closed_app
from cloister.deploy.superlink.operators import OperatorsOnly
from cloister.flower import log
from cloister.flower.superlink import console_handler, get_uvicorn_log_config, parse_superlink_options

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
    certificates.watch([Path(path) for path in (config.ssl_certfile, config.ssl_ca_certfile) if path])
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
