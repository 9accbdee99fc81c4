"""What a SuperLink lets in: its own interfaces, in requests of bounded size from senders that are known.

Flower serves a description of all its interfaces to anybody, reads a request of any size into memory, and for any
time, before it asks who sent it, and keeps answers in memory for as long as nobody reads them.
"""

import asyncio
import json
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, NoReturn

from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from starlette.datastructures import Headers

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Refusal = tuple[int, str]
"""A status and a reason."""
Authenticate = Callable[[Scope], Awaitable[Refusal | None]]

OPEN = ("/v1/", "/health")
"""What the paths begin with that are served; all others get 404."""
MAX_UNAUTHENTICATED = 2**16
"""Bytes of the largest request that is read before its sender is known."""
MAX_OBJECT = 32 * 2**20
"""Bytes of a request that holds a part of a message. Flower cuts arrays in pieces of 5 MiB."""
MAX_OF_NODE = 2**19
"""Bytes of any other request of a node: 7,000 parts of a reply are announced in so many."""
MAX_OF_OTHERS = 16 * 2**20
"""Bytes of a request of an app or an operator: an app bundle has 10 MiB at most, and an app announces its messages to
all nodes in one."""
PARSED_BYTES_PER_BYTE = 48
"""Bytes of memory for a byte of a parsed request, at worst: an empty entry has two bytes and takes 94."""
MAX_HELD = 2**30
"""Bytes of memory of all requests and answers together that are under way."""
SHARES = 8
"""One node may take 1/`SHARES` of it, so that others are served meanwhile."""
REQUEST_SILENCE = 60.0
"""Seconds without a byte of a request after which it is refused: its sender is asked to send it again."""
REQUEST_TIMEOUT = 600.0
"""Seconds in which a request has to be there as a whole."""
MAX_HEADER = 2048
"""Bytes of one header: answers and logs repeat some of them, escaped."""
PIECE = 2**16
"""Bytes of an answer that are sent at a time."""
WRITE_TIMEOUT = 600.0
"""Seconds in which a piece of an answer has to be read."""


class Refused(Exception):
    """A request was not let in."""


class Door:
    """ASGI middleware in front of the SuperLink.

    A short request is read before its sender is known, so whoever reaches the port can make others wait: above
    `max_held` bytes of memory a request is answered by 503. A node with long requests and answers is refused above its
    share. Requests count, and answers of more than `MAX_UNAUTHENTICATED` bytes; a connection by itself does not.

    Args:
        app: the SuperLink.
        known: tells by its headers why a request of more than `MAX_UNAUTHENTICATED` bytes is refused; None if its
            sender is known.
        max_held: bytes of memory that requests and answers together may take.

    Attributes:
        held: bytes that they take, by the key of the node that sent them; of all others together by no key.
    """

    def __init__(self, app: App, known: Authenticate, max_held: int = MAX_HELD) -> None:
        self.app, self.known, self.max_held = app, known, max_held
        self.held: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 404 to what is none of the interfaces, and refuse what is too long or too slow; pass on the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif not scope["path"].startswith(OPEN):
            await _send_refusal(send, 404, "Not Found")
        elif any(len(value) > MAX_HEADER for _, value in scope["headers"]):
            await _send_refusal(send, 431, f"a header may have {MAX_HEADER} bytes")
        elif _announced(scope) > (limit := limit_of(scope["path"])):
            await _send_refusal(send, 413, f"requests may have {limit} bytes")
        elif _announced(scope) > MAX_UNAUTHENTICATED and (refusal := await self.known(scope)):
            await _send_refusal(send, *refusal)
        else:
            await self._bounded(scope, receive, send)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request whose length need not be what was announced."""
        request = _Request(self, scope, receive, send)
        try:
            await self.app(scope, request.receive, request.send)
        except Exception:
            # Layers of Starlette put what they are raised into groups.
            if request.refusal is None:
                raise
        finally:
            self.held -= request.held
        if request.refusal and not request.is_answered:
            await _send_refusal(send, *request.refusal)

    def fits(self, sender: bytes) -> bool:
        """Whether the memory suffices for what is held."""
        return self.held.total() <= self.max_held and (not sender or self.held[sender] <= self.max_held // SHARES)


def limit_of(path: str) -> int:
    """How many bytes a request may have."""
    if _is_object(path):
        return MAX_OBJECT
    return MAX_OF_NODE if path.startswith("/v1/fleet/") else MAX_OF_OTHERS


def _is_object(path: str) -> bool:
    """Whether a request holds a part of a message: in memory it is what it was."""
    return path.endswith("/push-object")


def _is_read_only(path: str) -> bool:
    """Whether a request changes nothing, so that its answer can be refused: Flower gives messages and replies once."""
    return path.endswith(("/pull-object", "/get-fab", "/get-run"))


def _pieces(event: Event) -> Iterator[Event]:
    """A piece of an answer, cut up: uvicorn waits with each until those before it have left its memory.

    Of TLS it sees what is not encrypted yet, so that one large piece would leave at once: nobody would wait for its
    reader, and the connection would be closed while it is being read.
    """
    body = memoryview(event.get("body", b""))
    for start in range(0, len(body) - PIECE, PIECE):
        yield {**event, "body": bytes(body[start : start + PIECE]), "more_body": True}
    last = (len(body) - 1) // PIECE * PIECE if len(body) else 0
    yield {**event, "body": bytes(body[last:])} if last else event


def _announced(what: Scope | Event) -> int:
    """How many bytes a request, or an answer, is said to have; 0 where nothing is said."""
    lengths = [value for name, value in what["headers"] if name.lower() == b"content-length"]
    return max((int(value) for value in lengths if value.isdigit()), default=0)


class _Request:
    """A request that is being read, and then answered.

    Args:
        door: counts the memory of all of them, and knows senders.
        scope: its path and headers.
        receive: the next piece.
        send: a piece of the answer.

    Attributes:
        held: bytes of memory that it may take, by the key of its sender.
        refusal: the status and the reason for which it is not let in.
        is_answered: whether the answer has begun.
    """

    def __init__(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None:
        self.door, self.scope, self._next, self._send = door, scope, receive, send
        self.limit, self.growth = limit_of(scope["path"]), 1 if _is_object(scope["path"]) else PARSED_BYTES_PER_BYTE
        self.size, self.is_whole, self.is_answered = 0, False, False
        self.refusal: Refusal | None = None
        self.until = time.monotonic() + REQUEST_TIMEOUT
        self.held: Counter[bytes] = Counter()
        self.sender: bytes | None = None
        if _announced(scope) > MAX_UNAUTHENTICATED:
            self._recognize()

    async def receive(self) -> Event:
        """The next piece; once all of them came, what becomes of the connection.

        Raises:
            Refused: it is too long or too slow, its sender is not known, or there are too many others.
        """
        event = await (self._next() if self.is_whole else self._piece())
        size = len(event.get("body", b""))
        self.size += size
        self._hold(size)
        if not self.is_whole and not event.get("more_body", False):
            self.is_whole = True
            # Only now it is parsed.
            self._hold((self.growth - 1) * self.size)
        self._require_memory()
        if self.size > self.limit:
            self._refuse(413, f"requests may have {self.limit} bytes")
        if self.size > MAX_UNAUTHENTICATED and self.sender is None:
            # It is longer than it said, or did not say how long it is.
            if refusal := await self.door.known(self.scope):
                self._refuse(*refusal)
            self._recognize()
        return event

    async def send(self, event: Event) -> None:
        """Send a piece of the answer; if it is long, wait until nearly all of it has been read.

        Raises:
            Refused: it is read too slowly, or there are too many others.
        """
        if self.refusal is not None:
            return
        if event["type"] == "http.response.start" and (length := _announced(event)) > MAX_UNAUTHENTICATED:
            self._recognize()  # nobody else is told so much
            self._hold(length)
            if _is_read_only(self.scope["path"]):
                self._require_memory()
        self.is_answered = True
        try:
            async with asyncio.timeout(WRITE_TIMEOUT):
                for piece in _pieces(event):
                    await self._send(piece)
        except TimeoutError:
            self._refuse(503, "the answer was not read in time")

    def _recognize(self) -> None:
        """Count what is held from now on for the node that sent it, if it is one."""
        is_node = self.scope["path"].startswith("/v1/fleet/")
        # Decoded: Base64 may write one key in several ways.
        key = Headers(scope=self.scope).get(FLEET_HTTP_PUBLIC_KEY_HEADER, "")
        self.sender = b64decode(key) if is_node else b""

    def _hold(self, size: int) -> None:
        sender = self.sender or b""
        self.held[sender] += size
        self.door.held[sender] += size

    def _require_memory(self) -> None:
        if not self.door.fits(self.sender or b""):
            self._refuse(503, "the SuperLink holds too many requests and answers: try again")

    async def _piece(self) -> Event:
        try:
            async with asyncio.timeout(min(REQUEST_SILENCE, self.until - time.monotonic())):
                return await self._next()
        except TimeoutError:
            self._refuse(503, "the request did not arrive in time: try again")

    def _refuse(self, status: int, reason: str) -> NoReturn:
        self.refusal = (status, reason)
        raise Refused


async def _send_refusal(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    async with asyncio.timeout(WRITE_TIMEOUT):
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
