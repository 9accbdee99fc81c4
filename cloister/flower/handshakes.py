"""Connecting again after a handshake that was cut: Flower takes a cut connection for a wrong certificate, and gives up.

A SuperLink that is killed cuts handshakes off. OpenSSL says so, with its own name in the message, and Flower gives up
whatever speaks of SSL. Server apps load this file by its place: they may import nothing of this package before the
bundle.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import httpx

CUT = "UNEXPECTED_EOF"
"""What OpenSSL says where a connection is cut during the handshake."""
MAKER = "make_simple_http_retry_invoker"
"""Flower's name for what makes one, in each module that does."""


def retrying(make: Callable[[], Any]) -> Callable[[], Any]:
    """Flower's maker of what tries again, which does so after handshakes that were cut, or took too long, too.

    Args:
        make: Flower's.
    """

    def made() -> Any:
        invoker = make()
        gives_up = invoker.should_giveup
        invoker.should_giveup = lambda error: not _is_cut(error) and gives_up is not None and gives_up(error)
        return invoker

    return made


def install(module: ModuleType) -> None:
    """Have a module of Flower connect again after cut handshakes, in this process.

    Args:
        module: that connects to the SuperLink.
    """
    vars(module)[MAKER] = retrying(vars(module)[MAKER])


def _is_cut(error: Exception) -> bool:
    return isinstance(error, httpx.TimeoutException) or (isinstance(error, httpx.TransportError) and CUT in str(error))
