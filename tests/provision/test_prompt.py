"""Connections on which nobody asks anything do not stay."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from cloister.deploy import prompt
from cloister.deploy.prompt import Prompt

ASKED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(prompt, "SILENCE", 0.05)


@asynccontextmanager
async def connection(answered):
    """To a server whose application answers when it may."""

    async def application(scope, receive, send):
        await answered.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = Config(application, http=Prompt, lifespan="off", log_config=None, timeout_keep_alive=600)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Prompt(config, ServerState(), {}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()


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
            asyncio.get_running_loop().call_later(10 * prompt.SILENCE, may.set)
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
                await asyncio.sleep(prompt.SILENCE / 50)

    asyncio.run(ask())
