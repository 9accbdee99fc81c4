"""A protocol of connections that closes those on which nothing is asked, and limits heads of requests.

uvicorn waits without end for the first whole head of a request, and with closing until a peer has read all. Its
httptools parser has no limit on the size of a head, and parses all requests of a connection that came at once: three
connections took 5.5 GB in twelve seconds, and everybody else waited. h11 parses one request at a time, and limits its
head, and its trailers, to 16 KiB each.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTION_SILENCE = 60.0
"""Seconds without a request after which a connection is closed."""


class Prompt(H11Protocol):
    """uvicorn's protocol of a connection. A connection without a request for `CONNECTION_SILENCE` seconds is closed."""

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
