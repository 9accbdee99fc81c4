"""An orderly end on request: a round that is waiting is abandoned, one that is being aggregated is finished.

Asked by SIGTERM (a service manager, `docker stop`) or SIGINT (Ctrl-C; Flower sends it to the ServerApp when the run is
stopped, or the SuperLink or its own parent is gone). A second request ends the process at once; but a SIGINT soon after
the first request is none: whatever stopped the server's parts together has Flower send it too.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS = 30.0
"""After the first request, in which a SIGINT is taken for its echo."""


class StopAsked(BaseException):
    """Somebody asked the run to end. Not an `Exception`: code that contains errors is not to contain this."""


class Stop:
    """Listens for requests to end.

    Attributes:
        asked: the name of the signal; empty as long as nobody asked.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._since = 0.0
        self._waiting = False
        self._before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """The block, in which requests are heard. Only a main thread hears signals; elsewhere nothing changes."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            yield self
        finally:
            self._restore()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block, which may be left at any moment.

        Raises:
            StopAsked: on a request, also on an earlier one.
        """
        self._waiting = True
        try:
            if self.asked:
                raise StopAsked(self.asked)
            yield
        finally:
            self._waiting = False

    def _hear(self, number: int, _: Any) -> None:
        if self.asked:  # only SIGINT is still listened to
            if time.monotonic() - self._since > ECHO_SECONDS:
                self._restore()
                signal.raise_signal(number)
            return
        self.asked, self._since = signal.Signals(number).name, time.monotonic()
        if (before := self._before.pop(signal.SIGTERM, None)) is not None:
            signal.signal(signal.SIGTERM, before)
        if self._waiting:
            self._waiting = False
            raise StopAsked(self.asked)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
