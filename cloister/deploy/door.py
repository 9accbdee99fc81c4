"""What a SuperLink lets in: its own interfaces, in requests of bounded size.

Flower serves a description of all its interfaces to anybody, and reads a request of any size into memory before it
asks who sent it.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/v1/", "/health")
"""What is answered at all."""
MAX_BODY = 32 * 2**20
"""Bytes of a request. Flower cuts arrays in pieces of 5 MiB, and an app bundle has 10 MiB at most."""


class TooLarge(Exception):
    """A request was longer than it may be."""


class Door:
    """ASGI middleware in front of the SuperLink.

    Args:
        app: the SuperLink.
        max_body: bytes that a request may have.
    """

    def __init__(self, app: App, max_body: int = MAX_BODY) -> None:
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 404 to what is none of the interfaces and 413 to what is too long; pass on the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif not scope["path"].startswith(OPEN):
            await _refuse(send, 404, "Not Found")
        elif self._announced(scope) > self.max_body:
            await _refuse(send, 413, f"requests may have {self.max_body} bytes")
        else:
            await self._bounded(scope, receive, send)

    def _announced(self, scope: Scope) -> int:
        lengths = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
        return max((int(value) for value in lengths if value.isdigit()), default=0)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request whose length need not be what was announced."""
        left, begun = self.max_body, False

        async def counted() -> Event:
            nonlocal left
            event = await receive()
            left -= len(event.get("body", b""))
            if left < 0:
                raise TooLarge
            return event

        async def noted(event: Event) -> None:
            nonlocal begun
            if left >= 0:
                begun = True
                await send(event)

        with suppress(TooLarge):
            await self.app(scope, counted, noted)
        if left < 0 and not begun:
            await _refuse(send, 413, f"requests may have {self.max_body} bytes")


async def _refuse(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
