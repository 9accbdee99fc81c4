"""`flower-supernode` with adaptive polling, a wake-up of its executor, and retries after interrupted handshakes."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import TypeVar

from cloister.flower import command, serverapp
from cloister.flower.supernode import fleet_http_connection, start_client_internal

Found = TypeVar("Found")
SHARE = 0.1
"""Polling interval as a share of the time since the last message."""
WAITING = (0.02, 0.5)
"""Least and largest polling interval in seconds for the reply of the node's own client. It reads memory only."""
UNAVAILABLE = 0.05
"""First pause in seconds after a part of a message was not yet there; each next one is twice as long. Flower: 1 s."""


@dataclass
class Polling:
    """Pauses between two polls for messages.

    A message is noticed after a tenth of the time that the node has waited for it, but within `slowest`. So a fast run
    has little delay, and an idle node causes little load on the SuperLink. A pause begins with the poll before it.

    Args:
        fastest: seconds between two polls just after a message, and the shortest pause.
        slowest: seconds between two polls in the long run.
        clock: returns seconds; `sleep` waits for them.
        wake: is called when there is a task for the executor.
    """

    fastest: float = 0.1
    slowest: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    wake: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.heard = self.taken = self.looked = self.clock()
        self.idle = False

    def looking(self, look: Callable[..., Found]) -> Callable[..., Found]:
        """Return Flower's poll function, wrapped to record when there was a message, and to wake the executor."""

        def looked(*arguments: object, **named: object) -> Found:
            self.looked = self.clock()
            found = look(*arguments, **named)
            self.idle = found is None
            if not self.idle:
                self.heard = self.taken = self.clock()
                self.wake()
            return found

        return looked

    def pause(self, seconds: float) -> None:
        """Wait before the next poll.

        While a message is processed, wait at most as long as Flower would, and within `WAITING`.
        """
        now = self.clock()
        if not self.idle:
            self.heard = now
            least, largest = WAITING
            self.sleep(min(max(SHARE * (now - self.taken), least), largest, seconds))
        else:
            pause = min(max(SHARE * (now - self.heard), self.fastest), self.slowest)
            self.sleep(max(pause - (now - self.looked), self.fastest))

    def install(self) -> None:
        """Replace the pauses of Flower's SuperNode: a literal inside its loop, and a default of `pull_objects`.

        A node that polls often finds messages whose parts are on the way.
        """
        names = vars(start_client_internal)
        names["_pull_and_store_message"] = self.looking(names["_pull_and_store_message"])
        names["pull_objects"] = partial(names["pull_objects"], initial_backoff=UNAVAILABLE)
        # The module uses nothing else of `time`.
        names["time"] = SimpleNamespace(sleep=self.pause)


LOOK_SECONDS = 0.2
GAVE_UP = 3
"""Exit status of a SuperNode that ends by itself, after an error of a message."""
SIGNALLED = 0
"""Flower's exit status after a signal. Flower signals itself if the SuperLink refuses a heartbeat."""


def main() -> None:
    """Run `flower-supernode` with the options of this process.

    Before the options come the fastest and the slowest pause in seconds, and the pipe that wakes the executor.
    """
    fastest, slowest, pipe = float(sys.argv.pop(1)), float(sys.argv.pop(1)), int(sys.argv.pop(1))
    sys.argv[0] = "flower-supernode"
    Polling(fastest, slowest, wake=lambda: _wake(pipe)).install()
    serverapp.install(fleet_http_connection)
    # Without its executor a SuperNode would take messages that no client works on.
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    command("flower-supernode")()
    # It returns after an error, which it has logged. Its threads would keep a process that does nothing any more.
    sys.stdout.flush()
    os._exit(GAVE_UP)


def _wake(pipe: int) -> None:
    """Tell the executor about a task. It looks by itself too, so that a lost word costs only time."""
    with suppress(OSError):
        os.write(pipe, b"x")


def _end_with(parent: int) -> None:
    """End this process as by a signal when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
