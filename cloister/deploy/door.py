"""What a SuperLink lets in: its own interfaces, in requests of bounded size from senders that are known.

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
Refusal = tuple[int, str]
"""A status and a reason."""
Known = Callable[[Scope], Awaitable[Refusal | None]]

OPEN = ("/v1/", "/health")
"""What is answered at all."""
SHORT = 2**16
"""Bytes of a request that is read whoever sent it."""
MAX_OBJECT = 32 * 2**20
"""Bytes of a request that holds a part of a message. Flower cuts arrays in pieces of 5 MiB."""
MAX_ANNOUNCED = 2**19
"""Bytes of any other request of a node: 7,000 parts of a reply are announced in so many."""
MAX_BODY = 16 * 2**20
"""Bytes of all others: an app bundle has 10 MiB at most, and an app announces its messages to all nodes in one."""
GROWTH = 48
"""How many bytes a byte of them may become in memory: an empty part has two, and takes 94."""
HELD = 2**30
"""Bytes of memory of all requests together that are being read or answered."""
SILENCE = 60.0
"""Seconds without a byte of a request after which it is refused: its sender is asked to send it again."""
READING = 600.0
"""Seconds in which a request has to be there as a whole."""


class Refused(Exception):
    """A request was not let in."""


class Door:
    """ASGI middleware in front of the SuperLink.

    A short request is read before its sender is known, so whoever reaches the port can make others wait: above
    `max_held` bytes of memory a request is answered by 503. Nobody can take more memory than that.

    Args:
        app: the SuperLink.
        known: why the sender of a request of more than `SHORT` bytes is refused, by its headers; None where he is not.
        max_held: bytes of memory that all requests together may take, which are being read or answered.
    """

    def __init__(self, app: App, known: Known, max_held: int = HELD) -> None:
        self.app, self.known, self.max_held, self.held = app, known, max_held, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 404 to what is none of the interfaces, and refuse what is too long or too slow; pass on the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif not scope["path"].startswith(OPEN):
            await _refuse(send, 404, "Not Found")
        elif _announced(scope) > (limit := limit_of(scope["path"])):
            await _refuse(send, 413, f"requests may have {limit} bytes")
        elif _announced(scope) > SHORT and (refusal := await self.known(scope)):
            await _refuse(send, *refusal)
        else:
            await self._bounded(scope, receive, send)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request whose length need not be what was announced."""
        body, begun = _Body(self, scope, receive), False

        async def noted(event: Event) -> None:
            nonlocal begun
            if body.refusal is None:
                begun = True
                await send(event)

        try:
            with suppress(Refused):
                await self.app(scope, body.receive, noted)
        finally:
            self.held -= body.held
        if body.refusal and not begun:
            await _refuse(send, *body.refusal)


def limit_of(path: str) -> int:
    """How many bytes a request may have."""
    if _is_object(path):
        return MAX_OBJECT
    return MAX_ANNOUNCED if path.startswith("/v1/fleet/") else MAX_BODY


def _is_object(path: str) -> bool:
    """Whether a request holds a part of a message: in memory it is what it was."""
    return path.endswith("/push-object")


def _announced(scope: Scope) -> int:
    lengths = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    return max((int(value) for value in lengths if value.isdigit()), default=0)


class _Body:
    """A request that is being read.

    Args:
        door: counts the memory of all of them, and knows senders.
        scope: its path and headers.
        receive: the next piece.

    Attributes:
        held: bytes of memory that it may take.
        refusal: the status and the reason for which it is not let in.
    """

    def __init__(self, door: Door, scope: Scope, receive: Receive) -> None:
        self.door, self.scope, self.next, self.is_whole = door, scope, receive, False
        self.size, self.held, self.is_known = 0, 0, _announced(scope) > SHORT
        self.limit, self.growth = limit_of(scope["path"]), 1 if _is_object(scope["path"]) else GROWTH
        self.refusal: Refusal | None = None
        self.until = time.monotonic() + READING

    async def receive(self) -> Event:
        """The next piece; once all of them came, what becomes of the connection.

        Raises:
            Refused: it is too long or too slow, its sender is not known, or there are too many others.
        """
        event = await (self.next() if self.is_whole else self._piece())
        self._count(len(event.get("body", b"")))
        if self.size > SHORT and not self.is_known:
            # It is longer than it said, or did not say how long it is.
            if refusal := await self.door.known(self.scope):
                self._refuse(*refusal)
            self.is_known = True
        self.is_whole = not event.get("more_body", False)
        return event

    def _count(self, size: int) -> None:
        self.size += size
        self.held += size * self.growth
        self.door.held += size * self.growth
        if self.size > self.limit:
            self._refuse(413, f"requests may have {self.limit} bytes")
        if self.door.held > self.door.max_held:
            self._refuse(503, "too many requests are being read: try again")

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
