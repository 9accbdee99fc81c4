"""An orderly end on request: a round that is waiting is abandoned, one that is being aggregated is finished.

Asked by SIGTERM (a service manager, `docker stop`) or SIGINT (Ctrl-C; Flower sends it to the ServerApp when the run is
stopped, or the SuperLink or its own parent is gone). A second request ends the process at once; but a SIGINT soon after
the first request is none: whatever stopped the server's parts together has Flower send it too.
"""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS = 30.0
"""After the first request, in which a SIGINT is taken for its echo."""
WAKE_SECONDS = 0.1
"""From one attempt to wake the main thread to the next."""


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
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(self._waking())
                self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
            stack.callback(self._restore)
            yield self

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

    @contextmanager
    def _waking(self) -> Iterator[None]:
        """The block, in which a request that another thread raises is heard while the main thread waits for a lock.

        Flower's threads raise SIGINT when the SuperLink or their parent is gone. Python runs handlers in the main
        thread only, which may wait without a timeout for threads that send objects and try again for ever. Such a wait
        is interrupted only by a signal that the main thread itself receives.
        """
        heard, told = socket.socketpair()
        told.setblocking(False)
        handler = signal.signal(signal.SIGURG, lambda *_: None)
        descriptor = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        done = threading.Event()
        waker = threading.Thread(target=self._wake, args=(heard, threading.get_ident(), done), daemon=True)
        waker.start()
        try:
            yield
        finally:
            done.set()
            signal.set_wakeup_fd(descriptor)
            told.close()
            waker.join()
            heard.close()
            signal.signal(signal.SIGURG, handler)

    def _wake(self, heard: socket.socket, main_thread: int, done: threading.Event) -> None:
        """Interrupt the main thread until it has heard of each request; Python sends the number of every signal."""
        while number := heard.recv(1):
            # A request in the last moment goes to the handler that was there before: it is not heard here.
            while number[0] in SIGNALS and not self.asked and not done.is_set():
                signal.pthread_kill(main_thread, signal.SIGURG)
                done.wait(WAKE_SECONDS)

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
