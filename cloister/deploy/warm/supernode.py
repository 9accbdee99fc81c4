"""`flower-supernode` with adaptive polling, and with retries after interrupted handshakes."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from types import SimpleNamespace
from typing import TypeVar

from cloister.flower import command, serverapp
from cloister.flower.supernode import fleet_http_connection, start_client_internal

Found = TypeVar("Found")
SHARE = 0.1
"""Polling interval as a share of the time since the last message."""
WAITING = 0.5
"""Largest polling interval in seconds for the reply of the node's own client. It does not query the SuperLink."""


@dataclass
class Polling:
    """Pauses between two polls for messages.

    A message is noticed after a tenth of the time that the node has waited for it, but within `slowest`. So a fast run
    has little delay, and an idle node causes little load on the SuperLink.

    Args:
        fastest: seconds between two polls just after a message.
        slowest: seconds between two polls in the long run.
        clock: returns seconds; `sleep` waits for them.
    """

    fastest: float = 0.5
    slowest: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self.heard = self.clock()
        self.idle = False

    def looking(self, look: Callable[..., Found]) -> Callable[..., Found]:
        """Return Flower's poll function, wrapped to record when there was a message."""

        def looked(*arguments: object, **named: object) -> Found:
            found = look(*arguments, **named)
            self.idle = found is None
            if not self.idle:
                self.heard = self.clock()
            return found

        return looked

    def pause(self, seconds: float) -> None:
        """Wait before the next poll.

        While a message is processed, wait as long as Flower would, at most `WAITING`.
        """
        if not self.idle:
            self.heard = self.clock()
            self.sleep(min(seconds, WAITING))
        else:
            waited = self.clock() - self.heard
            self.sleep(min(max(SHARE * waited, self.fastest), self.slowest))

    def install(self) -> None:
        """Replace the pause of Flower's SuperNode, which is a literal inside its loop."""
        names = vars(start_client_internal)
        names["_pull_and_store_message"] = self.looking(names["_pull_and_store_message"])
        # The module uses nothing else of `time`.
        names["time"] = SimpleNamespace(sleep=self.pause)


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
