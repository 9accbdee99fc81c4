"""Retries after interrupted TLS handshakes, which Flower takes for wrong certificates and does not retry.

A killed SuperLink interrupts handshakes. OpenSSL's message about it contains SSL, and Flower gives up after any SSL
error. Server apps load this file by its path, because they must not import this package before the bundle.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import httpx

CUT = "UNEXPECTED_EOF"
"""Text in OpenSSL's error about a connection that closes during the handshake."""
MAKER = "make_simple_http_retry_invoker"
"""Flower's name for the factory of retry invokers, in each module that uses it."""


def retrying(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return Flower's factory of retry invokers, which retry after a cut or a slow handshake too.

    Args:
        make: Flower's factory.
    """

    def made() -> Any:
        invoker = make()
        gives_up = invoker.should_giveup

        def should_giveup(error: Exception) -> bool:
            is_cut = isinstance(error, httpx.TransportError) and CUT in str(error)
            is_cut = is_cut or isinstance(error, httpx.TimeoutException)
            return not is_cut and gives_up is not None and gives_up(error)

        invoker.should_giveup = should_giveup
        return invoker

    return made


def install(module: ModuleType) -> None:
    """Make a module of Flower retry after interrupted handshakes, in this process.

    Args:
        module: that connects to the SuperLink.
    """
    vars(module)[MAKER] = retrying(vars(module)[MAKER])
