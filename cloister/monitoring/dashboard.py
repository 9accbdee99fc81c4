"""Dashboard: a read-only page about a federation, served over plain HTTP on the loopback only."""

import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from threading import Lock
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.monitoring.snapshot import Finding, Places, Snapshot, findings, look
from cloister.server.reports.html.templates import filled
from cloister.server.reports.rundir import RUN_NAME
from cloister.server.reports.status import RunState, format_state, run_directories, run_state
from cloister.utils.errors import ConfigError
from cloister.utils.text import at_least, at_most

TEMPLATES = files("cloister.monitoring") / "templates"
"""The page, its style, and its script: the page contains no inline script."""
KEPT = 4.0
"""Seconds for which a view is valid, so that many open pages do not query the SuperLink more often."""
LISTED = 100
"""Maximum number of listed runs; the newest ones are listed."""


@dataclass(frozen=True)
class View:
    """State of a federation at one time.

    Attributes:
        snapshot: of nodes, warnings and ledgers.
        found: its problems.
        runs: name of the directory -> state of the run, newest first; None where its files are broken.
        older: number of runs that are not listed.
        when: of the snapshot, in seconds since 1970.
    """

    snapshot: Snapshot
    found: tuple[Finding, ...]
    runs: dict[str, RunState | None]
    older: int
    when: float


class CachedView:
    """Views of a federation, renewed on request after `KEPT` seconds.

    Args:
        places: sources of the snapshots.
        clock: in seconds.
    """

    def __init__(self, places: Places, clock: Callable[[], float] = time.monotonic) -> None:
        self._places, self._clock = places, clock
        self._last: tuple[float, View] | None = None
        self._lock = Lock()

    def view(self) -> View:
        """Return the last view, or a new one if that is too old; one thread at a time makes one."""
        places = self._places
        with self._lock:
            if self._last is not None and self._clock() - self._last[0] < KEPT:
                return self._last[1]
            now, snapshot = time.time(), look(places)
            found = {path.resolve().name: path for path in (run_directories(places.runs) if places.runs else [])}
            # Other directories were not made by a run.
            named = {name: path for name, path in found.items() if RUN_NAME.fullmatch(name)}
            runs: dict[str, RunState | None] = {}
            for name, path in list(named.items())[:LISTED]:
                try:
                    runs[name] = run_state(path)
                except ConfigError:
                    runs[name] = None
            secret = {name for name, state in runs.items() if state is not None and state.hides_progress}
            for name, state in runs.items():
                # ε of a shared ledger would reveal the rounds of another running run that must hide them.
                if state is None or state.state != "running":
                    continue
                if secret - {name} or (snapshot.hides_progress and not state.hides_progress):
                    runs[name] = state.without_ledger()
            seen = View(snapshot, tuple(findings(snapshot, now)), runs, max(len(named) - LISTED, 0), now)
            self._last = self._clock(), seen
            return seen


def overview(view: View, connection: str, live: bool) -> str:
    """Return the page: findings, nodes, runs, budgets.

    Args:
        view: to be shown.
        connection: name of the SuperLink; empty: none is queried.
        live: whether the page shall renew itself.
    """
    snapshot = view.snapshot
    nodes, secret = snapshot.nodes, snapshot.hides_progress
    context = {
        "own_style": (TEMPLATES / "dashboard.css").read_text(encoding="utf-8"),
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(view.when)),
        "live": live and not secret,
        "secret": secret,
        "connection": connection,
        "found": view.found,
        "rejected": snapshot.run.rejected if snapshot.run else (),
        "nodes": nodes,
        "online": sum(node["status"] == "online" for node in nodes or ()),
        "runs": [{"name": name, "facts": state and _row(state)} for name, state in view.runs.items()],
        "details": {name: _details(state) for name, state in view.runs.items() if state is not None},
        "older": view.older,
        "spent": [
            {"ledger": ledger, "unit": unit, "share": f"{at_most(100 * share, 3)} %"}
            for (ledger, unit), share in snapshot.spent.items()
        ],
        "closed": [{"ledger": ledger, "unit": unit} for ledger, unit in snapshot.closed],
    }
    page, frame = ((TEMPLATES / f"{name}.html.jinja").read_text(encoding="utf-8") for name in ("overview", "frame"))
    return filled(page, context, frame)


def _row(run: RunState) -> dict[str, str]:
    """Return the cells of a run in the table of runs."""
    # An ended run claims an ε. For a running one, the ledger so far has one.
    if run.claimed is not None:
        epsilon = at_most(run.claimed, 3) + (f" ({run.claimed_for})" if run.claimed_for != "client" else "")
    elif run.state != "running" or run.privacy == "none":
        epsilon = "none claimed"
    else:
        epsilon = "not told yet" if run.epsilon is None else f"{at_most(run.epsilon, 3)} so far"
    return {
        "task": run.task,
        "privacy": run.privacy,
        "round": f"{run.round}/{run.rounds}",
        "state": _state(run),
        "left": _left(run.seconds_left),
        "epsilon": epsilon,
        "little": run.worth,
    }


def _details(run: RunState) -> list[tuple[str, str]]:
    """Return the facts of `cloister status` about a run, without the unknown ones."""
    little = f"; it is {run.worth}" if run.worth else ""
    claimed = "" if run.claimed is None else f"{at_most(run.claimed, 3)}, for one {run.claimed_for}{little}"
    facts = [
        ("Directory", run.path),
        ("Task", run.task),
        ("Strategy", run.strategy),
        ("Privacy", run.privacy),
        ("Round", f"{run.round} of {run.rounds}"),
        ("State", _state(run)),
        ("Why it ended", run.why),
        ("Time left", _left(run.seconds_left)),
        ("Replies that counted", f"{run.replies[0]} of {run.replies[1]}" if run.replies else ""),
        ("Replies that did not count", "; ".join(run.rejected)),
        ("ε that is claimed", claimed),
        ("Premises of the claim", run.premises),
        (
            "ε of the ledger",
            "" if run.epsilon is None else f"{at_most(run.epsilon, 3)}{little if run.claimed is None else ''}",
        ),
        ("Left of the budget", "" if run.budget_left is None else at_least(run.budget_left, 3)),
    ]
    return [(title, value) for title, value in facts if value]


def _state(run: RunState) -> str:
    return f"running, {format_state(run)}" if run.state == "running" else format_state(run)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes = seconds / 60
    if minutes < 1:
        return "less than a minute"
    return f"about {minutes:.0f} min" if minutes < 120 else f"about {minutes / 60:.0f} h"


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
        return Response((TEMPLATES / "live.js").read_text(encoding="utf-8"), media_type="text/javascript")

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
