"""What a SuperLink's server does over TLS, where it does not see what waits for its reader below."""

import asyncio
import ssl
from contextlib import asynccontextmanager

import pytest
from closed_link import anybody
from uvicorn.config import Config
from uvicorn.server import ServerState

from cloister.deploy import certificates
from cloister.deploy.http_protocol import BoundedH11Protocol, without_key_updates
from cloister.deploy.superlink.door import Door

SIZE = 2**25
"""Bytes of an answer: more than the sockets of two processes of this machine take."""
ASKED = b"GET /v1/fleet/pull-object HTTP/1.1\r\nHost: x\r\nflwr-public-key: a2V5\r\n\r\n"


async def long_answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % SIZE)]})
    await send({"type": "http.response.body", "body": bytes(SIZE)})


@pytest.fixture
def config(tmp_path):
    authority, key = certificates.new_tls_key(), certificates.new_tls_key()
    signed = certificates.server_certificate(
        key, ["127.0.0.1"], 30, certificates.self_signed(authority, "x", 30), authority
    )
    paths = (tmp_path / "server.key", tmp_path / "server.crt")
    for path, content in zip(paths, (key, signed), strict=True):
        path.write_bytes(content)
    config = Config(
        Door(long_answer, anybody),
        http=BoundedH11Protocol,
        lifespan="off",
        log_config=None,
        ssl_keyfile=paths[0],
        ssl_certfile=paths[1],
        ssl_context_factory=without_key_updates,
    )
    config.load()
    return config


@asynccontextmanager
async def connected(config):
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: BoundedH11Protocol(config, ServerState(), {}), "127.0.0.1", 0, ssl=config.ssl
    )
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=trusting)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        server.close()


def test_nobody_can_ask_for_new_keys(config):
    async def version():
        async with connected(config) as (_, writer):
            return writer.get_extra_info("ssl_object").version()

    assert asyncio.run(version()) == "TLSv1.2"


def test_an_answer_is_held_until_it_is_read(config):
    door = config.app

    async def ask():
        async with connected(config) as (reader, writer):
            writer.transport.pause_reading()
            writer.write(ASKED)
            async with asyncio.timeout(20):
                while not door.held.total():
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # it would have left long before
            unread = door.held.total()
            writer.transport.resume_reading()
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            body = await asyncio.wait_for(reader.readexactly(SIZE), 20)
            return unread, head[:12], len(body)

    assert asyncio.run(ask()) == (SIZE, b"HTTP/1.1 200", SIZE) and not door.held.total()
