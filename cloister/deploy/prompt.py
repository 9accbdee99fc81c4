"""Connections on which nothing is asked are closed: uvicorn waits for the first whole header without end."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

SILENCE = 60.0
"""Seconds without a request after which a connection is closed."""


class Prompt(HttpToolsProtocol):
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
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        else:
            self._looks = self.loop.call_later(SILENCE, self._look, self.cycle)
