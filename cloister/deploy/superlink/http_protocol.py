"""An HTTP/1.1 protocol for uvicorn that closes idle connections and limits the headers of a request.

uvicorn waits without end for the first headers of a connection, and with closing until a peer has read all. Its
httptools parser has no limit on the size of headers, and parses all requests of a connection that came at once: three
connections took 5.5 GB in twelve seconds, and everybody else waited. h11 parses one request at a time, and limits its
headers, and its trailers, to 16 KiB each. A body in chunks of one byte takes it a second of processor time a mebibyte,
also after the answer, when nobody counts any more what comes: requests say how long they are, or are refused.
"""

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTION_SILENCE = 60.0
"""Seconds between two looks at a connection: one without a request between them is closed."""
GOODBYE = 1.0
"""Seconds in which the answer to a request that is no HTTP, or has no length, can be read."""


class LengthsKnown(h11.Connection):
    """The parser of a connection whose requests say how long they are."""

    def next_event(self) -> Any:
        """As h11's.

        Raises:
            RemoteProtocolError: also for a request in chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            raise h11.RemoteProtocolError("a request in chunks", error_status_hint=411)
        return event


class BoundedH11Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol. It closes connections that are idle for one to two times `CONNECTION_SILENCE`.

    Args:
        config, others: as uvicorn gives them.
    """

    def __init__(self, config: Config, *others: Any, **named: Any) -> None:
        super().__init__(config, *others, **named)
        self.conn = LengthsKnown(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(CONNECTION_SILENCE, self._close_if_idle, self.cycle)

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
        super().send_400_response(msg)
        self.loop.call_later(GOODBYE, self.transport.abort)

    def _close_if_idle(self, before: RequestResponseCycle | None) -> None:
        """Close a connection that has had no new request since `before`, which has its answer."""
        if self.transport.is_closing():
            self.transport.abort()  # what is left has not been read until now
        elif self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        self._timer = self.loop.call_later(CONNECTION_SILENCE, self._close_if_idle, self.cycle)
