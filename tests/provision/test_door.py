"""Requests that are slow, or many: whoever reaches the port takes no more memory, and no more time, than is given."""

import asyncio

import pytest
from closed_link import anybody
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import Response
from starlette.routing import Route

from cloister.deploy.superlink import door
from cloister.deploy.superlink.door import Door

SCOPE = {"type": "http", "path": "/v1/fleet/push-object", "headers": []}
PULL = "/v1/fleet/pull-object"


async def reading(scope, receive, send):
    """An application that reads all of a request, and answers; it then waits for the end of the connection."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Connection:
    """A request in pieces, after which nothing comes any more unless it is whole."""

    def __init__(self, *pieces, is_whole=True, path=SCOPE["path"], says=None):
        self.pieces, self.is_whole, self.status = list(pieces), is_whole, None
        length = [] if says is None else [(b"content-length", str(says).encode())]
        self.scope = SCOPE | {"path": path, "headers": length}

    async def receive(self):
        if not self.pieces:
            await asyncio.Event().wait()
        piece = self.pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces) or not self.is_whole}

    async def send(self, event):
        self.status = event.get("status", self.status)

    async def to(self, application):
        await application(self.scope, self.receive, self.send)
        return self.status


@pytest.mark.parametrize("waits", ["REQUEST_SILENCE", "REQUEST_TIMEOUT"])
def test_a_request_that_does_not_go_on_is_asked_for_again_and_gives_its_memory_back(monkeypatch, waits):
    monkeypatch.setattr(door, waits, 0.01)
    closed = Door(reading, anybody)
    assert asyncio.run(Connection(b"x" * 100, is_whole=False).to(closed)) == 503
    assert closed.held.total() == 0


@pytest.mark.parametrize(("size", "status"), [(door.MAX_HEADER, 200), (door.MAX_HEADER + 1, 431)])
def test_a_header_has_a_length(size, status):
    """Answers and logs repeat some of them."""
    asked = Connection(b"x")
    asked.scope["headers"] = [(b"flwr-package-name", bytes(size))]
    assert asyncio.run(asked.to(Door(reading, anybody))) == status


def test_whoever_answers_late_is_not_refused(monkeypatch):
    """What is waited for after the last piece is the end of the connection."""
    monkeypatch.setattr(door, "REQUEST_SILENCE", 0.01)
    ended = []

    async def late(scope, receive, send):
        assert not (await receive())["more_body"]
        try:
            await asyncio.wait_for(receive(), 0.1)
        except TimeoutError:
            ended.append("nothing came")
        await reading(scope, Connection(b"").receive, send)

    assert asyncio.run(Connection(b"x").to(Door(late, anybody))) == 200 and ended


def test_requests_that_are_many_are_asked_to_come_again():
    closed = Door(reading, anybody, max_held=250)

    async def three():
        waiting = [asyncio.ensure_future(Connection(b"x" * 100, is_whole=False).to(closed)) for _ in range(2)]
        await asyncio.sleep(0)
        refused = await Connection(b"x" * 100).to(closed)
        small = await Connection(b"x" * 50).to(closed)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return refused, small, await Connection(b"x" * 100, b"x" * 100).to(closed)

    assert asyncio.run(three()) == (503, 200, 200)
    assert closed.held.total() == 0


def test_what_a_request_becomes_in_memory_counts():
    """32 MiB of empty parts took a gigabyte."""
    closed = Door(reading, anybody, max_held=100 * door.PARSED_BYTES_PER_BYTE)
    assert asyncio.run(Connection(b"x" * 100, path="/v1/fleet/push-messages").to(closed)) == 200
    assert asyncio.run(Connection(b"x" * 101, path="/v1/fleet/push-messages").to(closed)) == 503
    assert asyncio.run(Connection(b"x" * 101).to(closed)) == 200 and closed.held.total() == 0


def test_a_request_that_is_not_whole_takes_what_has_come_of_it():
    """Some hundred of them, each without its last byte, had everybody else refused."""
    closed = Door(reading, anybody, max_held=200 + 10 * door.PARSED_BYTES_PER_BYTE)

    async def several():
        halves = [Connection(b"x" * 100, is_whole=False, path="/v1/fleet/push-messages") for _ in range(2)]
        waiting = [asyncio.ensure_future(each.to(closed)) for each in halves]
        await asyncio.sleep(0.01)
        held, other = closed.held.total(), await Connection(b"x" * 10, path="/v1/fleet/pull-messages").to(closed)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return held, other

    assert asyncio.run(several()) == (200, 200) and closed.held.total() == 0


def test_a_request_counts_once_also_when_its_connection_ends():
    held = []

    async def ending(scope, receive, send):
        for _ in range(3):
            await receive()
            held.append(closed.held.total())

    closed = Door(ending, anybody)
    peer = Connection(b"x" * 10, path="/v1/fleet/push-messages")
    plain = peer.receive

    async def receive():
        return await plain() if peer.pieces else {"type": "http.disconnect"}

    peer.receive = receive
    asyncio.run(peer.to(closed))
    assert held == [10 * door.PARSED_BYTES_PER_BYTE] * 3


@pytest.mark.parametrize("path", [PULL, "/v1/fleet/get-fab", "/v1/fleet/get-run"])
def test_answers_that_can_be_asked_for_again_are_refused_above_a_nodes_share(path):
    closed = Door(answering(LONG), anybody, max_held=door.SHARES * (2 * LONG - 1))

    async def two():
        first, second = Unread(0, b"a2V5", path=path), Unread(9, b"a2V5", path=path)
        waiting = asyncio.ensure_future(first.to(closed))
        await asyncio.sleep(0.01)
        status = await second.to(closed)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return status

    assert asyncio.run(two()) == 503


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/fleet/push-object", 32 * 2**20),
        ("/v1/runtime/push-object", 32 * 2**20),
        ("/v1/fleet/push-messages", 2**19),
        ("/v1/runtime/push-messages", 16 * 2**20),
        ("/v1/control/start-run", 16 * 2**20),
    ],
)
def test_each_kind_of_request_has_its_length(path, limit):
    closed = Door(reading, anybody)
    for says in (None, 1):
        assert asyncio.run(Connection(bytes(limit), path=path, says=says and limit).to(closed)) == 200
        assert asyncio.run(Connection(bytes(limit), b"x", path=path, says=says and limit + 1).to(closed)) == 413


class Unread(Connection):
    """A peer that reads no more of an answer than this many pieces."""

    def __init__(self, reads, key, *pieces, path=PULL):
        super().__init__(*(pieces or [b"x"]), path=path)
        self.scope |= {"headers": [(b"flwr-public-key", key)]}
        self.reads, self.got = reads, []

    async def send(self, event):
        await super().send(event)
        if event["type"] == "http.response.body":
            if len(self.got) == self.reads:
                await asyncio.Event().wait()
            self.got.append((len(event["body"]), event.get("more_body", False)))


LONG, PIECE = door.MAX_UNAUTHENTICATED + 1, door.PIECE


def answering(size):
    async def application(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": bytes(size), "more_body": False})

    return application


class TestAnswers:
    """An answer takes memory for as long as nobody reads it."""

    @pytest.mark.parametrize(
        ("size", "pieces"),
        [
            (LONG, [(PIECE, True), (LONG - PIECE, False)]),
            (PIECE, [(PIECE, False)]),
            (0, [(0, False)]),
            (3 * PIECE, [(PIECE, True)] * 2 + [(PIECE, False)]),
        ],
    )
    def test_a_long_one_is_held_until_it_is_read(self, size, pieces):
        closed, peer = Door(answering(size), anybody), Unread(9, b"a2V5")
        assert asyncio.run(peer.to(closed)) == 200 and peer.got == pieces
        assert closed.held.total() == 0

    def test_while_it_is_not_read_no_others_are_made(self):
        closed = Door(answering(LONG), anybody, max_held=door.SHARES * (2 * LONG + 1))

        async def ask():
            unread = [Unread(1, b"b25l") for _ in range(3)]
            waiting = [asyncio.ensure_future(each.to(closed)) for each in unread]
            await asyncio.sleep(0.01)
            statuses = [each.status for each in unread], closed.held[b"one"]
            other = await Unread(9, b"b3RoZXI=").to(closed)
            again = await Unread(9, b"b25l").to(closed)
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return *statuses, other, again, await Unread(9, b"b25l").to(closed)

        assert asyncio.run(ask()) == ([200, 200, 503], 2 * LONG, 200, 503, 200)
        assert closed.held.total() == 0

    @pytest.mark.parametrize("path", ["/v1/fleet/pull-messages", "/v1/runtime/pull-messages", "/v1/control/start-run"])
    def test_what_is_told_once_is_not_refused(self, path):
        """Flower marks a message as delivered, deletes a reply, or begins a run, before it answers."""
        closed, peer = (
            Door(answering(LONG), anybody, max_held=door.PARSED_BYTES_PER_BYTE),
            Unread(9, b"a2V5", path=path),
        )
        assert asyncio.run(peer.to(closed)) == 200 and peer.got == [(PIECE, True), (LONG - PIECE, False)]
        assert closed.held.total() == 0

    def test_nobody_has_longer_than_that_for_it(self, monkeypatch):
        monkeypatch.setattr(door, "WRITE_TIMEOUT", 0.05)
        closed, peer = Door(answering(LONG), anybody), Unread(1, b"a2V5")
        asyncio.run(asyncio.wait_for(peer.to(closed), 20))
        assert peer.got == [(PIECE, True)] and closed.held.total() == 0


def test_one_node_takes_its_share_and_not_that_of_others():
    """What came before it was known whose it is counts for nobody."""
    closed = Door(reading, anybody, max_held=door.SHARES * 2 * LONG)

    async def ask():
        stuck = Unread(0, b"b25lcw==", bytes(LONG), bytes(LONG), path=SCOPE["path"])
        waiting = asyncio.ensure_future(stuck.to(closed))
        await asyncio.sleep(0.01)
        keys = (b"b25lcw==", b"b25lcx==", b"b3RoZXI=", b"")
        pieces = (bytes(LONG), bytes(LONG + 1))
        statuses = [await Unread(9, key, *pieces, path=SCOPE["path"]).to(closed) for key in keys]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return statuses

    assert asyncio.run(ask()) == [503, 503, 200, 200], "the first two are one key"
    assert closed.held.total() == 0


class TestBehindLayers:
    """Flower's SuperLink leads requests through layers of Starlette, which wrap what is raised."""

    @pytest.fixture
    def layered(self):
        async def answered(request):
            return Response(bytes(len(await request.body())))

        async def passed(request, go_on):
            return await go_on(request)

        return Starlette(
            routes=[Route(path, answered, methods=["POST"]) for path in ("/v1/control/start-run", PULL)],
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=passed)],
        )

    @pytest.mark.parametrize(
        ("path", "held", "status"),
        [
            ("/v1/control/start-run", door.PARSED_BYTES_PER_BYTE * LONG, 200),
            ("/v1/control/start-run", 9, 503),
            (PULL, door.PARSED_BYTES_PER_BYTE * LONG, 503),
        ],
    )
    def test_a_refusal_is_told(self, layered, path, held, status):
        """In the last case there is room for the request, and not for its answer."""
        closed = Door(layered, anybody, max_held=held)
        peer = Connection(bytes(LONG), path=path)
        peer.scope |= {"method": "POST", "query_string": b"", "root_path": "", "http_version": "1.1"}
        assert asyncio.run(asyncio.wait_for(peer.to(closed), 20)) == status
        assert closed.held.total() == 0

    def test_other_errors_are_not_hidden(self):
        async def broken(scope, receive, send):
            raise ValueError("a fault")

        with pytest.raises(ValueError, match="a fault"):
            asyncio.run(Connection(b"x").to(Door(broken, anybody)))


class TestSenders:
    """A long request is read from a sender who is known."""

    @pytest.fixture
    def asked(self):
        """What the application was shown, and who was asked about."""
        return [], []

    @pytest.fixture
    def closed(self, asked):
        read, questions = asked

        async def nobody(scope):
            questions.append(scope["path"])
            return 401, "unknown"

        async def application(scope, receive, send):
            more = True
            while more:
                event = await receive()
                read.append(len(event["body"]))
                more = event["more_body"]
            await reading(scope, Connection(b"").receive, send)

        return Door(application, nobody)

    def test_one_that_says_how_long_it_is_is_not_read(self, closed, asked):
        assert (
            asyncio.run(Connection(bytes(door.MAX_UNAUTHENTICATED + 1), says=door.MAX_UNAUTHENTICATED + 1).to(closed))
            == 401
        )
        assert asked == ([], [SCOPE["path"]])

    @pytest.mark.parametrize("says", [None, 1, door.MAX_UNAUTHENTICATED])
    def test_one_that_does_not_is_not_read_to_its_end(self, closed, asked, says):
        pieces = [bytes(door.MAX_UNAUTHENTICATED), b"x", b"y"]
        assert asyncio.run(Connection(*pieces, says=says).to(closed)) == 401
        assert asked == ([door.MAX_UNAUTHENTICATED], [SCOPE["path"]]) and closed.held.total() == 0

    @pytest.mark.parametrize("says", [None, door.MAX_UNAUTHENTICATED])
    def test_a_short_one_is(self, closed, asked, says):
        assert asyncio.run(Connection(bytes(door.MAX_UNAUTHENTICATED), says=says).to(closed)) == 200
        assert asked == ([door.MAX_UNAUTHENTICATED], [])

    @pytest.mark.parametrize("says", [None, door.MAX_UNAUTHENTICATED + 3])
    def test_somebody_who_is_known_is_asked_for_once(self, says):
        questions = []

        async def known(scope):
            questions.append(scope)

        pieces = [bytes(door.MAX_UNAUTHENTICATED), b"x", b"y", b"z"]
        assert asyncio.run(Connection(*pieces, says=says).to(Door(reading, known))) == 200
        assert len(questions) == 1
