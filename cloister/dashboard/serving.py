"""Dashboard as an ASGI application, served over plain HTTP on the loopback only."""

import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.core.errors import ConfigError
from cloister.dashboard.pages import overview
from cloister.dashboard.template import SCRIPT
from cloister.dashboard.views import CachedView
from cloister.watch.snapshot import Places

STOP_SECONDS = 5
"""Seconds for which a stop waits for open requests."""
LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
"""Names of this machine. A request for another name is DNS rebinding: a foreign page resolved its name to here."""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer."""


def application(places: Places) -> Starlette:
    """Return the dashboard of a federation, without access control; put `Guard` in front of it.

    Args:
        places: sources of the snapshots.
    """
    cached = CachedView(places)

    # These functions are not `async`: Starlette calls them in threads.
    def page(request: Request) -> Response:
        live = request.query_params.get("live") != "off"
        return HTMLResponse(overview(cached.view(), places.connection, live))

    def script(_: Request) -> Response:
        return Response(SCRIPT, media_type="text/javascript")

    app = Starlette(routes=[Route("/", page), Route("/live.js", script)])
    app.router.redirect_slashes = False  # a redirection would contain the requested name
    return app


class Guard:
    """ASGI middleware in front of the dashboard.

    Args:
        app: the dashboard.
        hosts: accepted host names of requests.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] = LOOPBACK) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse requests for other names or with other methods, and add `HEADERS` to every answer."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] != "http":
            return
        app = self.app
        try:
            (host,) = Headers(scope=scope).getlist("host")
            name = urlsplit(f"//{host}").hostname
        except ValueError:  # several names, none, or an invalid one
            name = None
        if name not in self.hosts:
            app = PlainTextResponse("the dashboard is not known by this name", 421)
        elif scope["method"] not in ("GET", "HEAD"):
            app = PlainTextResponse("the dashboard answers GET and HEAD only", 405, {"Allow": "GET, HEAD"})
        await app(scope, receive, with_headers)


def listening(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: of the loopback.
        port: 0: any free one.

    Raises:
        ConfigError: other machines would reach the address, or it is unavailable.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"--listen {host}: other machines would reach the dashboard, which asks for no password. "
            "Listen on 127.0.0.1, and reach it by ssh -L or through a proxy that asks for one (docs/operation.md)"
        )
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"--listen {host}:{port}: {error.strerror}") from None


def serve(places: Places, address: tuple[str, int], told: Callable[[str], None]) -> None:
    """Serve the dashboard until the process is stopped.

    Args:
        places: sources of the snapshots.
        address: as in `listening`.
        told: receives the address of the page.

    Raises:
        ConfigError: as in `listening`.
    """
    with listening(*address) as opened:
        host, port = opened.getsockname()[:2]
        told(f"dashboard: http://{f'[{host}]' if ':' in host else host}:{port}/")
        config = uvicorn.Config(
            Guard(application(places), LOOPBACK | {address[0]}),
            log_config=None,
            log_level="warning",
            access_log=False,  # do not store times of requests and lengths of pages
            proxy_headers=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        uvicorn.Server(config).run(sockets=[opened])
