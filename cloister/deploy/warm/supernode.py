"""`flower-supernode` with adaptive polling, and with retries after interrupted handshakes."""

import os
import signal
import sys
import time
from threading import Thread

from cloister.deploy.warm.polling import Polling
from cloister.flower import command, serverapp
from cloister.flower.supernode import fleet_http_connection

LOOK_SECONDS = 0.2
GAVE_UP = 3
"""Exit status of a SuperNode that ends by itself, after an error of a message."""
SIGNALLED = 0
"""Flower's exit status after a signal. Flower signals itself if the SuperLink refuses a heartbeat."""


def main() -> None:
    """Run `flower-supernode` with the options of this process.

    The fastest and the slowest pause in seconds precede the options.
    """
    fastest, slowest = float(sys.argv.pop(1)), float(sys.argv.pop(1))
    sys.argv[0] = "flower-supernode"
    Polling(fastest, slowest).install()
    serverapp.install(fleet_http_connection)
    # Without its executor a SuperNode would take messages that no client works on.
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    command("flower-supernode")()
    # It returns after an error, which it has logged. Its threads would keep a process that does nothing any more.
    sys.stdout.flush()
    os._exit(GAVE_UP)


def _end_with(parent: int) -> None:
    """End this process as by a signal when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
