"""Refusal of requests to the dashboard from elsewhere, and the headers of every answer."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
"""Names of this machine. A request for another name is DNS rebinding: a page from elsewhere made its name lead here."""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
SEALED = "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'none'"
"""The policy of the report, whose content comes from a run: nothing is loaded, no script runs, it has no origin."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer, unless it has a stricter one of its own."""


class Guard:
    """ASGI middleware in front of the dashboard.

    Args:
        app: the dashboard.
        hosts: names by which it may be asked for.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] = LOOPBACK) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse requests that are not allowed, pass the others on, and add `HEADERS` to every answer."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] == "http":
            await (self._refusal(scope) or self.app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if _host(headers) not in self.hosts:
            return PlainTextResponse("the dashboard is not known by this name", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard answers GET and HEAD only", 405, {"Allow": "GET, HEAD"})
        return None


def _host(headers: Headers) -> str:
    """The name that was asked for, without its port; empty where there are several, or none."""
    try:
        (host,) = headers.getlist("host")
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
