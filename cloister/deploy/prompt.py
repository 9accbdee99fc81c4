"""Connections that take room and do nothing are closed, and heads of requests have a limit.

uvicorn waits for the first whole head of a request without end, and with closing until a peer has read all. With
httptools, its parser where that is installed, a head has no limit, and all requests of a connection are parsed that
came at once: three connections took 5.5 GB in twelve seconds, and everybody else waited. h11 reads one request at a
time, whose head and whose trailers have 16 KiB each.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

SILENCE = 60.0
"""Seconds without a request after which a connection is closed."""


class Prompt(H11Protocol):
    """uvicorn's protocol of a connection, which is closed when nothing was asked on it for `SILENCE` seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look."""
        super().connection_made(transport)
        self._looks = self.loop.call_later(SILENCE, self._look, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """End looking."""
        self._looks.cancel()
        super().connection_lost(exc)

    def _look(self, before: RequestResponseCycle | None) -> None:
        """Close a connection that has had no new request since `before`, which has its answer."""
        if self.transport.is_closing():
            self.transport.abort()  # what is left has not been read until now
        elif self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        self._looks = self.loop.call_later(SILENCE, self._look, self.cycle)
