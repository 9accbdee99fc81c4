"""`flower-supernode` that looks for messages when some are likely, and outlives cuts; Flower's own does neither."""

import os
import sys

from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supernode import fleet_http_connection
from flwr.supernode.cli import flower_supernode

from cloister.deploy import handshakes
from cloister.deploy.warm.polling import Polling

GAVE_UP = 3
"""Exit status of a SuperNode that has ended by itself, after an error of a message."""
SIGNALLED = 0
"""Flower's exit status of one that a signal has ended; it sends the signal to itself where a heartbeat is refused."""


def main() -> None:
    """Be `flower-supernode`, with its options; before them stand the fastest and the slowest pause in seconds."""
    fastest, slowest = float(sys.argv.pop(1)), float(sys.argv.pop(1))
    sys.argv[0] = "flower-supernode"
    Polling(fastest, slowest).install()
    handshakes.install(fleet_http_connection)
    # Without its executor a SuperNode would take messages that nobody works on.
    start_parent_process_monitor(os.getppid())
    flower_supernode()
    # It returns after an error, which it has logged. Its threads would keep a process that does nothing any more.
    sys.stdout.flush()
    os._exit(GAVE_UP)


if __name__ == "__main__":
    main()
