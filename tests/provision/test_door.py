"""Requests that are slow, or many: whoever reaches the port takes no more memory, and no more time, than is given."""

import asyncio

import pytest

from cloister.deploy import door
from cloister.deploy.door import Door

SCOPE = {"type": "http", "path": "/v1/x", "headers": []}


async def reading(scope, receive, send):
    """An application that reads all of a request, and answers; it then waits for the end of the connection."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Connection:
    """A request in pieces, after which nothing comes any more unless it is whole."""

    def __init__(self, *pieces, is_whole=True):
        self.pieces, self.is_whole, self.status = list(pieces), is_whole, None

    async def receive(self):
        if not self.pieces:
            await asyncio.Event().wait()
        piece = self.pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces) or not self.is_whole}

    async def send(self, event):
        self.status = event.get("status", self.status)

    async def to(self, application):
        await application(SCOPE, self.receive, self.send)
        return self.status


@pytest.mark.parametrize("waits", ["SILENCE", "READING"])
def test_a_request_that_does_not_go_on_is_asked_for_again_and_gives_its_memory_back(monkeypatch, waits):
    monkeypatch.setattr(door, waits, 0.01)
    closed = Door(reading)
    assert asyncio.run(Connection(b"x" * 100, is_whole=False).to(closed)) == 503
    assert closed.held == 0


def test_whoever_answers_late_is_not_refused(monkeypatch):
    """What is waited for after the last piece is the end of the connection."""
    monkeypatch.setattr(door, "SILENCE", 0.01)
    ended = []

    async def late(scope, receive, send):
        assert not (await receive())["more_body"]
        try:
            await asyncio.wait_for(receive(), 0.1)
        except TimeoutError:
            ended.append("nothing came")
        await reading(scope, Connection(b"").receive, send)

    assert asyncio.run(Connection(b"x").to(Door(late))) == 200 and ended


def test_requests_that_are_many_are_asked_to_come_again():
    closed = Door(reading, max_held=250)

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
    assert closed.held == 0
