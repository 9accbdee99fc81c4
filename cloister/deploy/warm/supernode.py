"""`flower-supernode` that looks for messages when some are likely, and outlives cuts; Flower's own does neither."""

import os
import sys
from collections.abc import Callable

import httpx
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.retry import RetryInvoker
from flwr.supernode import fleet_http_connection
from flwr.supernode.cli import flower_supernode

from cloister.deploy.warm.polling import Polling

CUT = "UNEXPECTED_EOF"
"""What OpenSSL says where a connection is cut during the handshake."""
GAVE_UP = 3
"""Exit status of a SuperNode that has ended by itself, after an error of a message."""
REFUSED = 0
"""Flower's exit status of one that a signal has ended; it sends the signal to itself where a heartbeat is refused."""


def patient(make: Callable[[], RetryInvoker]) -> Callable[[], RetryInvoker]:
    """Flower's maker of what tries again, which takes a cut handshake for a wrong certificate and gives up.

    Args:
        make: Flower's.
    """

    def made() -> RetryInvoker:
        invoker = make()
        gives_up = invoker.should_giveup
        invoker.should_giveup = lambda error: not _is_cut(error) and gives_up is not None and gives_up(error)
        return invoker

    return made


def _is_cut(error: Exception) -> bool:
    return isinstance(error, httpx.TransportError) and CUT in str(error)


def main() -> None:
    """Be `flower-supernode`, with its options; before them stand the fastest and the slowest pause in seconds."""
    fastest, slowest = float(sys.argv.pop(1)), float(sys.argv.pop(1))
    sys.argv[0] = "flower-supernode"
    Polling(fastest, slowest).install()
    names = vars(fleet_http_connection)
    names["make_simple_http_retry_invoker"] = patient(names["make_simple_http_retry_invoker"])
    # Without its executor a SuperNode would take messages that nobody works on.
    start_parent_process_monitor(os.getppid())
    flower_supernode()
    # It returns after an error, which it has logged. Its threads would keep a process that does nothing any more.
    sys.stdout.flush()
    os._exit(GAVE_UP)


if __name__ == "__main__":
    main()
