"""Orderly end on request: a waiting round is abandoned, and an aggregation is finished.

A request is SIGTERM (a service manager, `docker stop`) or SIGINT (Ctrl-C). Flower sends SIGINT to the ServerApp when
the run is stopped, or the SuperLink or the ServerApp's parent has ended. A second request ends the process at once. A
SIGINT soon after the first request is ignored: one stop of all server processes makes Flower send it too.
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
"""Seconds after the first request during which a SIGINT counts as its echo."""
WAKE_SECONDS = 0.1
"""Seconds between attempts to wake the main thread."""


class StopAsked(BaseException):
    """Request to end the run. It is no `Exception`, so that handlers of errors do not catch it."""


class Stop:
    """Listener for requests to end.

    Attributes:
        asked: the name of the signal; empty without a request.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._since = 0.0
        self._waiting = False
        self._before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Handle signals within the block, in the main thread only."""
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(self._waking())
                self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
            stack.callback(self._restore)
            yield self

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Raise within the block as soon as a request arrives.

        Raises:
            StopAsked: on a request, including an earlier one.
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
        """Interrupt a waiting main thread when another thread raises a request.

        Flower's threads raise SIGINT when the SuperLink or their parent is gone. Python runs handlers in the main
        thread only, which may wait without a timeout for threads that retry sending objects for ever. Only a signal
        that the main thread itself receives interrupts such a wait.
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
        """Interrupt the main thread until it has handled each request.

        Python sends the number of every signal to `heard`.
        """
        while number := heard.recv(1):
            # After `done`, the previous handler receives a request instead.
            while number[0] in SIGNALS and not self.asked and not done.is_set():
                signal.pthread_kill(main_thread, signal.SIGURG)
                done.wait(WAKE_SECONDS)

    def _hear(self, number: int, _: Any) -> None:
        if self.asked:  # only SIGINT still has this handler
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
