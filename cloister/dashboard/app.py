"""The dashboard as an ASGI application: four addresses, all of them to be read."""

import os

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from cloister.dashboard.guard import SEALED
from cloister.dashboard.pages import overview, run_page
from cloister.dashboard.template import SCRIPT
from cloister.dashboard.views import CachedView, Run, View
from cloister.server.reports.rundir import REPORT
from cloister.watch.snapshot import Places


def application(places: Places) -> Starlette:
    """Make the dashboard of a federation; it lets everybody in, so that `Guard` belongs in front.

    Args:
        places: to look at.
    """
    site = _Site(places)
    routes = [
        Route("/", site.overview),
        Route("/live.js", site.script),
        Route("/runs/{name}", site.run),
        Route("/runs/{name}/report.html", site.report),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # a redirection would be made of the name that was asked for
    return app


class _Site:
    """What stands at each address. The functions are not `async`: Starlette calls them in threads."""

    def __init__(self, places: Places) -> None:
        self._places, self._cached = places, CachedView(places)

    def overview(self, request: Request) -> Response:
        return HTMLResponse(overview(self._cached.view(), self._places.connection, _live(request)))

    def run(self, request: Request) -> Response:
        view, run = self._asked(request)
        return HTMLResponse(run_page(view, run, _live(request)))

    def report(self, request: Request) -> Response:
        path = self._asked(request)[1].path / REPORT
        try:
            # Not through a link: somebody else may have made the directory.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                return HTMLResponse(file.read(), headers={"Content-Security-Policy": SEALED})
        except OSError:
            raise HTTPException(404) from None

    def script(self, _: Request) -> Response:
        return Response(SCRIPT, media_type="text/javascript")

    def _asked(self, request: Request) -> tuple[View, Run]:
        view = self._cached.view()
        run = view.run(request.path_params["name"])
        if run is None:
            raise HTTPException(404)
        return view, run


def _live(request: Request) -> bool:
    return request.query_params.get("live") != "off"
