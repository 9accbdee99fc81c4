"""Connections on which nobody asks or reads anything do not stay; request headers have a limit."""

import asyncio
import logging
import re
from contextlib import asynccontextmanager
from types import SimpleNamespace

import h11
import pytest
from h11 import _abnf, _readers
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.protocols.http import h11_impl
from uvicorn.server import ServerState

from cloister.deploy import http_protocol
from cloister.deploy.http_protocol import BoundedH11Protocol

ASKED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(http_protocol, "CONNECTION_SILENCE", 0.05)


@asynccontextmanager
async def connection(answered, body=b"", state=None):
    """To a server whose application answers with this when it may."""

    async def application(scope, receive, send):
        await answered.wait()
        length = b"%d" % len(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})

    config = Config(application, http=BoundedH11Protocol, lifespan="off", log_config=None, timeout_keep_alive=600)
    config.load()
    loop, state = asyncio.get_running_loop(), state or ServerState()
    server = await loop.create_server(lambda: BoundedH11Protocol(config, state, {}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()


async def comes_and_goes(state):
    """Wait for a connection, and for its end."""
    async with asyncio.timeout(20):
        while not state.connections:
            await asyncio.sleep(0.01)
        while state.connections:
            await asyncio.sleep(0.01)


async def is_closed(reader):
    return await asyncio.wait_for(reader.read(), 20) == b""


@pytest.mark.parametrize("said", [b"", ASKED[:20], b"GET"])
def test_one_that_asks_nothing_is_closed(said):
    async def wait():
        async with connection(asyncio.Event()) as (reader, writer):
            writer.write(said)
            return await is_closed(reader)

    assert asyncio.run(wait())


@pytest.mark.parametrize("said", [b"", ASKED[:20]])
def test_so_is_one_that_asks_nothing_more(said):
    async def wait():
        may = asyncio.Event()
        may.set()
        async with connection(may) as (reader, writer):
            writer.write(ASKED)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(said)
            return await is_closed(reader)

    assert asyncio.run(wait())


def test_one_that_waits_for_its_answer_gets_it():
    async def wait():
        may = asyncio.Event()
        async with connection(may) as (reader, writer):
            writer.write(ASKED)
            asyncio.get_running_loop().call_later(10 * http_protocol.CONNECTION_SILENCE, may.set)
            return await reader.readuntil(b"\r\n\r\n")

    assert asyncio.run(wait()).startswith(b"HTTP/1.1 200")


def test_one_that_asks_again_and_again_stays():
    async def ask():
        may = asyncio.Event()
        may.set()
        async with connection(may) as (reader, writer):
            for _ in range(200):
                writer.write(ASKED)
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(http_protocol.CONNECTION_SILENCE / 50)

    asyncio.run(ask())


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = [
    (b"GET / HTTP/1.1\r\n", b"a:b\r\n"),
    (b"GET / HTTP/1.1\r\na: ", b"x"),
    (b"GET /", b"x"),
    (CHUNKED, b"1\r\nx\r\n"),
]


@pytest.mark.parametrize(("begins", "goes_on"), ENDLESS, ids=["headers", "a value", "a path", "chunks"])
def test_a_head_without_end_is_not_read(monkeypatch, begins, goes_on):
    monkeypatch.setattr(http_protocol, "CONNECTION_SILENCE", 60.0)
    mebibyte = goes_on * (2**20 // len(goes_on))

    async def send():
        async with connection(asyncio.Event()) as (_, writer):
            writer.write(begins)
            with pytest.raises(ConnectionError):
                for _ in range(100):
                    writer.write(mebibyte)
                    await asyncio.wait_for(writer.drain(), 20)

    asyncio.run(send())


@pytest.mark.parametrize(
    "request_in_chunks", [CHUNKED, CHUNKED.replace(b"chunked\r\n", b"chunked\r\nContent-Length: 3\r\n")]
)
def test_a_request_in_chunks_is_refused_before_the_application_sees_it(request_in_chunks):
    """The application never answers."""

    async def ask():
        async with connection(asyncio.Event()) as (reader, writer):
            writer.write(request_in_chunks)
            return await asyncio.wait_for(reader.read(), 20)

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 400")


class Transport(asyncio.Transport):
    """That of nobody."""

    closed = aborted = False

    def write(self, data):
        pass

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def abort(self):
        self.aborted = True


def protocol_of(transport):
    config = Config(lambda *_: None, http=BoundedH11Protocol, lifespan="off", log_config=None)
    config.load()
    protocol = BoundedH11Protocol(config, ServerState(), {})
    protocol.connection_made(transport)
    return protocol


@pytest.mark.parametrize("is_read", [True, False])
def test_an_answer_has_the_time_between_two_looks_to_be_read(monkeypatch, is_read):
    """One that began just before a look, as it took long to make, has not been refused to anybody."""
    monkeypatch.setattr(http_protocol, "CONNECTION_SILENCE", 60.0)

    async def look():
        transport = Transport()
        protocol = protocol_of(transport)
        protocol.cycle = SimpleNamespace(response_complete=False, disconnected=False, message_event=asyncio.Event())
        protocol.pause_writing()
        protocol._close_if_idle(protocol.cycle)
        assert not transport.aborted
        if is_read:
            protocol.resume_writing()
            protocol.pause_writing()
        protocol._close_if_idle(protocol.cycle)
        assert transport.aborted != is_read
        protocol.connection_lost(None)

    asyncio.run(look())


def test_one_that_is_refused_is_read_no_more_and_soon_aborted(monkeypatch):
    """A connection of TLS that is closed hands on what still comes, until its peer closes it."""
    assert http_protocol.GOODBYE <= 1
    monkeypatch.setattr(http_protocol, "GOODBYE", 0.0)

    async def send():
        transport = Transport()
        protocol = protocol_of(transport)
        protocol.data_received(CHUNKED)
        assert transport.closed
        protocol.data_received(b"1\r\nx\r\n")
        assert protocol.conn.trailing_data == (b"", False)
        await asyncio.sleep(0.01)
        assert transport.aborted

    asyncio.run(send())


async def answer_to(request):
    """What a server says whose application never answers."""
    async with connection(asyncio.Event()) as (reader, writer):
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 10)


def test_a_head_that_comes_all_at_once_has_the_same_limit():
    """Where it comes in parts h11 has one of its own."""
    long = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 10_000 + b"\r\n"
    assert asyncio.run(answer_to(long)).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("end", [b"\x0b", b"\x00"])
def test_blanks_before_what_no_header_may_hold_keep_nobody_waiting(end):
    """The time for so many grew with their square: 20 seconds."""
    assert asyncio.run(answer_to(b"GET / HTTP/1.1\r\na:" + b" " * 80_000 + end + b"\r\n\r\n")).startswith(
        b"HTTP/1.1 400"
    )


@pytest.mark.parametrize("ends", [b"\r\n\r\n", b"\n\n"])
@pytest.mark.parametrize("size", [http_protocol.MAX_HEAD, 2 * http_protocol.MAX_HEAD])
def test_a_head_within_the_limit_is_read_whatever_comes_after_it(ends, size):
    conn = http_protocol.BoundedRequests(h11.SERVER)
    conn.receive_data(b"GET / HTTP/1.1\r\nHost: x" + ends + b"x" * size)
    assert isinstance(conn.next_event(), h11.Request)


def test_the_answer_to_a_head_in_chunks_is_no_error_of_ours(caplog):
    with caplog.at_level(logging.ERROR):
        asyncio.run(answer_to(CHUNKED.replace(b"POST", b"HEAD")))
    assert not caplog.records


@given(st.lists(st.sampled_from([b"a", b":", b" ", b"\t", b"\x0b", b"\x00", b"b c"]), max_size=12).map(b"".join))
def test_the_same_headers_are_taken_as_before(line):
    as_before = re.compile(_abnf.header_field.encode()).fullmatch(line)
    now = _readers.header_field_re.fullmatch(line)
    assert (now and now.groupdict()) == (as_before and as_before.groupdict())


def test_one_that_asks_on_and_on_and_reads_nothing_is_closed():
    """Its next answer waits for those before it to be read."""

    async def ask():
        may, state = asyncio.Event(), ServerState()
        may.set()
        async with connection(may, bytes(2**12), state) as (reader, writer):
            reader._transport.pause_reading()
            # The answers are more than the sockets of two processes of this machine take.
            writer.write(ASKED * 2**13)
            await comes_and_goes(state)

    asyncio.run(ask())


def test_requests_are_read_one_by_one(monkeypatch):
    """All of the first quarter of a mebibyte was parsed, whether or not the first request had its answer."""
    begun, cycle = [], h11_impl.RequestResponseCycle
    monkeypatch.setattr(
        h11_impl, "RequestResponseCycle", lambda **parts: begun.append(parts["scope"]) or cycle(**parts)
    )

    async def ask():
        may = asyncio.Event()
        async with connection(may) as (reader, writer):
            writer.write(ASKED * 1000)
            async with asyncio.timeout(20):
                while not begun:
                    await asyncio.sleep(0.01)
            before = len(begun)
            may.set()
            for _ in range(1000):
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            return before

    assert asyncio.run(ask()) == 1 and len(begun) == 1000


def test_nobody_waits_until_a_closed_connection_has_been_read():
    """It has more to be read than the sockets of two processes of this machine take."""

    async def ask():
        may, state = asyncio.Event(), ServerState()
        async with connection(may, bytes(2**25), state) as (reader, writer):
            reader._transport.pause_reading()
            may.set()
            writer.write(ASKED)
            await comes_and_goes(state)

    asyncio.run(ask())
