"""An HTTP/1.1 protocol for uvicorn that closes idle connections and limits the headers of a request.

uvicorn waits without end for the first headers of a connection, and with closing until a peer has read all. Its
httptools parser has no limit on the size of headers, and parses all requests of a connection that came at once: three
connections took 5.5 GB in twelve seconds, and everybody else waited. h11 parses one request at a time, and limits its
headers, and its trailers, to 16 KiB each.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTION_SILENCE = 60.0
"""Seconds between two looks at a connection: one without a request between them is closed."""


class BoundedH11Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol. It closes connections that are idle for one to two times `CONNECTION_SILENCE`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(CONNECTION_SILENCE, self._close_if_idle, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self, before: RequestResponseCycle | None) -> None:
        """Close a connection that has had no new request since `before`, which has its answer."""
        if self.transport.is_closing():
            self.transport.abort()  # what is left has not been read until now
        elif self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        self._timer = self.loop.call_later(CONNECTION_SILENCE, self._close_if_idle, self.cycle)
