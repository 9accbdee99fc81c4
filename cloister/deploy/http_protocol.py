"""An HTTP/1.1 protocol for uvicorn that closes idle connections, and limits what a request may cost before it is known.

uvicorn waits without end for the first headers of a connection, and with closing until a peer has read all. Its
httptools parser has no limit on the size of headers, and parses all requests of a connection that came at once: three
connections took 5.5 GB in twelve seconds, and everybody else waited. h11 parses one request at a time, and is limited
where it has no limit of its own:

| what | without a limit |
|---|---|
| a head that comes all at once | any size: the 16 KiB of h11 are for one that comes in parts |
| blanks before what no header may hold | each way to divide them is tried: 0.8 s for 16 KiB, minutes for 240 |
| a body in chunks | chunks of one byte cost a second a mebibyte, also after the answer, when nobody counts any more |
| answers that nobody reads | the next answer waits for their reader |
"""

import asyncio
import re
import ssl
from collections.abc import Callable
from typing import Any

import h11
from h11 import _abnf, _readers
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTION_SILENCE = 60.0
"""Seconds between two looks at a connection: one without a request between them is closed."""
GOODBYE = 1.0
"""Seconds in which the answer to a request that is no HTTP, or in chunks, can be read."""
MAX_HEAD = 2**14
"""Bytes of a request's line and headers."""
HEAD_ENDS = re.compile(rb"\n\r?\n")

# Possessive: blanks that were taken are not given back. The same headers match, in a time that grows with their length.
vars(_readers)["header_field_re"] = re.compile(_abnf.header_field.replace(_abnf.OWS, _abnf.OWS + "+").encode("ascii"))


class BoundedRequests(h11.Connection):
    """The parser of a connection, on which no request comes in chunks or has a long head."""

    def next_event(self) -> Any:
        """What comes next on the connection.

        Raises:
            RemoteProtocolError: it is no HTTP, a request in chunks, or one with a long head.
        """
        if self.their_state is h11.IDLE and not _ends_soon(self._receive_buffer._data):
            raise h11.RemoteProtocolError("a long head")
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            raise h11.RemoteProtocolError("a request in chunks")
        return event


def _ends_soon(received: bytearray) -> bool:
    """Whether the head at the beginning of what was received ends within its limit, or may still do so."""
    return len(received) <= MAX_HEAD or bool(HEAD_ENDS.search(received, 0, MAX_HEAD))


class BoundedH11Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol. It closes connections that are idle for one to two times `CONNECTION_SILENCE`.

    Args:
        config, others, named: as uvicorn gives them.
    """

    def __init__(self, config: Config, *others: Any, **named: Any) -> None:
        super().__init__(config, *others, **named)
        self.conn = BoundedRequests(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer."""
        super().connection_made(transport)
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what comes; nothing of it once the connection is being closed."""
        if not self.transport.is_closing():
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Refuse what was read, and soon end: a closed connection of TLS is read until its peer closes it too."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.close()  # the answer to a HEAD has no body
        self.loop.call_later(GOODBYE, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that somebody has read."""
        self._is_unread = False
        super().resume_writing()

    def _look_again(self) -> None:
        self._is_unread = self.flow.write_paused
        self._timer = self.loop.call_later(CONNECTION_SILENCE, self._close_if_idle, self.cycle)

    def _close_if_idle(self, before: RequestResponseCycle | None) -> None:
        """Close a connection of which nothing was read since the last look, or without a new request since `before`."""
        if self.transport.is_closing() or self._is_unread:
            self.transport.abort()  # what is left has not been read until now
        elif self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        self._look_again()


def without_key_updates(_: Config, made: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """TLS for a server, of version 1.2.

    In TLS 1.3 anybody may ask for new keys without end, and OpenSSL makes them before a byte is handed on: a connection
    of 5 Mbit/s kept all others waiting.

    Args:
        made: gives uvicorn's own.
    """
    context = made()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context
