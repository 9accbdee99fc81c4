"""Serving the dashboard: by plain HTTP, on the loopback alone."""

import ipaddress
import socket
from collections.abc import Callable

import uvicorn

from cloister.core.errors import ConfigError
from cloister.dashboard.app import application
from cloister.dashboard.guard import LOOPBACK, Guard
from cloister.watch.snapshot import Places

STOP_SECONDS = 5
"""Seconds that a stop waits for requests that have begun."""


def serve(places: Places, address: tuple[str, int], told: Callable[[str], None]) -> None:
    """Serve the dashboard until the process is asked to end.

    Args:
        places: to look at.
        address: of the loopback, and a port; 0: any that is free.
        told: gets the address of the page.

    Raises:
        ConfigError: other machines would reach the address, or it cannot be had.
    """
    with _opened(*address) as listening:
        host, port = listening.getsockname()[:2]
        told(f"dashboard: http://{f'[{host}]' if ':' in host else host}:{port}/")
        config = uvicorn.Config(
            Guard(application(places), LOOPBACK | {address[0]}),
            log_config=None,
            log_level="warning",
            access_log=False,  # times of requests, and lengths of pages, are not to be kept
            proxy_headers=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        uvicorn.Server(config).run(sockets=[listening])


def _opened(host: str, port: int) -> socket.socket:
    """Return a socket that listens."""
    if not _is_loopback(host):
        raise ConfigError(
            f"--listen {host}: other machines would reach the dashboard, which asks for no password. "
            "Listen on 127.0.0.1, and reach it by ssh -L or through a proxy that asks for one (docs/operation.md)"
        )
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"--listen {host}:{port}: {error.strerror}") from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
