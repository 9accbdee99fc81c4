"""What it costs a SuperLink to read requests one by one: uvicorn's protocol of ours beside its fastest one.

python benchmarks/protocol.py [requests]

A server process, with the door of `cloister superlink` before an application that only reads, is asked over loopback by
one connection. Processor time is that of the server.
"""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from common import machine, table

from cloister.deploy.http_protocol import BoundedH11Protocol
from cloister.deploy.superlink.door import Door, Receive, Refusal, Scope, Send

PATH = "/v1/fleet/push-object"
PIECE = 5 * 2**20
"""Bytes in which Flower cuts arrays."""
KINDS = {"a short request": (3_000, 100), "a piece sent": (PIECE, 100), "a piece fetched": (100, PIECE)}
"""Bytes of a request and of its answer."""
HEADERS = {f"header-{number}": "v" * 40 for number in range(10)}


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Read all of a request, and answer with as many bytes as it asks for."""
    while (await receive()).get("more_body", False):
        pass
    body = bytes(int(scope["query_string"]))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def everybody(scope: Scope) -> Refusal | None:
    """All senders are known here."""


@contextmanager
def serving(protocol: str) -> Iterator[tuple[http.client.HTTPConnection, int]]:
    """A connection to a server with this protocol, and the id of its process."""
    child = subprocess.Popen([sys.executable, __file__, "serve", protocol], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield http.client.HTTPConnection("127.0.0.1", int(child.stdout.readline())), child.pid
    finally:
        child.terminate()
        child.wait()


def serve(protocol: str) -> None:
    """Serve on a free port, which is printed."""
    config = uvicorn.Config(
        Door(application, everybody),
        http=BoundedH11Protocol if protocol == "ours" else "httptools",
        log_level="warning",
        lifespan="off",
    )
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[listening])


def spent(process: int) -> float:
    """Seconds of processor time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(protocol: str, sent: int, answered: int, count: int) -> tuple[float, float]:
    """Milliseconds of processor time, and in all, of a request."""
    with serving(protocol) as (connection, server):
        before, begun = 0.0, 0.0
        for number in range(count + 1):
            if number == 1:  # the first one warms up
                before, begun = spent(server), time.perf_counter()
            connection.request("POST", f"{PATH}?{answered}", bytes(sent), HEADERS)
            connection.getresponse().read()
        worked, passed = spent(server) - before, time.perf_counter() - begun
    return 1e3 * worked / count, 1e3 * passed / count


def main() -> None:
    """Print a table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    machine()
    rows = []
    for kind, (sent, answered) in KINDS.items():
        times = max(20, count if sent + answered < PIECE else count // 20)
        ours, other = (measured(protocol, sent, answered, times) for protocol in ("ours", "httptools"))
        rows.append(
            [kind, *(f"{value:.2f}" for value in (ours[0], other[0], ours[1], other[1])), f"{ours[0] / other[0]:.1f}"]
        )
    table(["request", "CPU ms, ours", "httptools", "ms in all, ours", "httptools", "ratio of CPU"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        main()
