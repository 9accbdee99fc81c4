"""Serving the dashboard: on this machine to whoever is on it; elsewhere to operators, encrypted."""

import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from cloister.core.errors import ConfigError
from cloister.dashboard.app import application
from cloister.dashboard.guard import LOOPBACK, Guard
from cloister.deploy.credentials import read_digests
from cloister.deploy.http_protocol import BoundedH11Protocol, without_key_updates
from cloister.watch.snapshot import Places

STOP_SECONDS = 5
"""How long a stop waits for requests that have begun: anybody may send one slowly."""


@dataclass(frozen=True)
class Endpoint:
    """Where the dashboard is reached, and by whom.

    Args:
        address: to listen on, and port; 0: any that is free.
        operators: file of digests of operators' tokens; None: nobody is asked for one.
        certificate: of the server, PEM, with its intermediates; None: nothing is encrypted.
        key: of the certificate, PEM.

    Raises:
        ConfigError: it is open to others than this machine, and not to operators alone, or a token would travel in
            the clear, or a file is not what it should be.
    """

    address: tuple[str, int]
    operators: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--certificate and --key come together")
        if not self.is_local and (self.operators is None or self.certificate is None):
            raise ConfigError(
                f"--listen {self.address[0]} is reached from other machines: give --operators, --certificate and "
                "--key, or listen on 127.0.0.1"
            )
        if self.certificate is not None and self.key is not None:
            _check_pair(self.certificate, self.key)

    @property
    def is_local(self) -> bool:
        """Whether this machine alone reaches it."""
        try:
            return self.address[0] == "localhost" or ipaddress.ip_address(self.address[0]).is_loopback
        except ValueError:
            return False

    def guarded(self, app: ASGIApp) -> Guard:
        """The application behind the guard of this endpoint."""
        digests = read_digests(self.operators) if self.operators is not None else ()
        # On other addresses any name is taken: there a page from elsewhere has no operator's token.
        hosts = LOOPBACK | {self.address[0]} if self.is_local else frozenset[str]()
        return Guard(app, hosts, digests)

    def opened(self) -> socket.socket:
        """A socket that listens.

        Raises:
            ConfigError: the address or the port cannot be had.
        """
        host, port = self.address
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"--listen {host}:{port}: {error.strerror}") from None


def serve(places: Places, endpoint: Endpoint, told: Callable[[str], None]) -> None:
    """Serve the dashboard until the process is told to end.

    Args:
        places: to look at.
        endpoint: where it is reached, and by whom.
        told: gets its address.

    Raises:
        ConfigError: it cannot be served there.
    """
    config = uvicorn.Config(
        endpoint.guarded(application(places)),
        http=BoundedH11Protocol,
        ssl_certfile=endpoint.certificate,
        ssl_keyfile=endpoint.key,
        ssl_context_factory=without_key_updates if endpoint.certificate else None,
        log_config=None,
        log_level="warning",
        access_log=False,  # times of requests, and lengths of pages, are not to be kept
        proxy_headers=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    with endpoint.opened() as listening:
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        told(f"dashboard: {'https' if endpoint.certificate else 'http'}://{shown}:{port}/")
        uvicorn.Server(config).run(sockets=[listening])


def _check_pair(certificate: Path, key: Path) -> None:
    """Refuse what cannot be served with; a key with a passphrase is refused too, and nobody is asked for it."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except OSError as error:
        reason = "it is not a pair in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"--certificate {certificate} --key {key}: {reason}") from None
