"""What a SuperLink lets in: its own interfaces, in requests of bounded size.

Flower serves a description of all its interfaces to anybody, and reads a request of any size into memory, and for any
time, before it asks who sent it.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, NoReturn

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/v1/", "/health")
"""What is answered at all."""
MAX_BODY = 32 * 2**20
"""Bytes of a request. Flower cuts arrays in pieces of 5 MiB, and an app bundle has 10 MiB at most."""
HELD = 2**30
"""Bytes of all requests together that are being read or answered."""
SILENCE = 60.0
"""Seconds without a byte of a request after which it is refused: its sender is asked to send it again."""
READING = 600.0
"""Seconds in which a request has to be there as a whole."""


class Refused(Exception):
    """A request was not let in."""


class Door:
    """ASGI middleware in front of the SuperLink.

    Requests are read before their sender is known, so whoever reaches the port can make others wait: above `max_held`
    bytes a request is answered by 503. Nobody can take more memory than that.

    Args:
        app: the SuperLink.
        max_body: bytes that a request may have.
        max_held: bytes that all requests together may have, which are being read or answered.
    """

    def __init__(self, app: App, max_body: int = MAX_BODY, max_held: int = HELD) -> None:
        self.app, self.max_body, self.max_held, self.held = app, max_body, max_held, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 404 to what is none of the interfaces, and refuse what is too long or too slow; pass on the rest."""
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
        body, begun = _Body(self, receive), False

        async def noted(event: Event) -> None:
            nonlocal begun
            if body.refusal is None:
                begun = True
                await send(event)

        try:
            with suppress(Refused):
                await self.app(scope, body.receive, noted)
        finally:
            self.held -= body.size
        if body.refusal and not begun:
            await _refuse(send, *body.refusal)


class _Body:
    """A request that is being read.

    Args:
        door: counts the bytes of all of them.
        receive: the next piece.

    Attributes:
        size: bytes that came.
        refusal: the status and the reason for which it is not let in.
    """

    def __init__(self, door: Door, receive: Receive) -> None:
        self.door, self.next, self.size, self.is_whole = door, receive, 0, False
        self.refusal: tuple[int, str] | None = None
        self.until = time.monotonic() + READING

    async def receive(self) -> Event:
        """The next piece; once all of them came, what becomes of the connection.

        Raises:
            Refused: it is too long or too slow, or there are too many others.
        """
        event = await (self.next() if self.is_whole else self._piece())
        size = len(event.get("body", b""))
        self.size, self.door.held = self.size + size, self.door.held + size
        if self.size > self.door.max_body:
            self._refuse(413, f"requests may have {self.door.max_body} bytes")
        if self.door.held > self.door.max_held:
            self._refuse(503, "too many requests are being read: try again")
        self.is_whole = not event.get("more_body", False)
        return event

    async def _piece(self) -> Event:
        try:
            async with asyncio.timeout(min(SILENCE, self.until - time.monotonic())):
                return await self.next()
        except TimeoutError:
            self._refuse(503, "the request did not arrive in time: try again")

    def _refuse(self, status: int, reason: str) -> NoReturn:
        self.refusal = (status, reason)
        raise Refused


async def _refuse(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
