"""The dashboard in a real browser: it renews itself, is light or dark as asked, and a screen reader can read it."""

from threading import Thread

import pytest
import uvicorn
from browser import audited, chromium
from reported import line, write_run

from cloister.monitoring import snapshot as snapshots
from cloister.monitoring.dashboard import CachedView, Guard, application, listening, overview
from cloister.monitoring.snapshot import Places
from cloister.server.reports.html.page import write_report

pytestmark = pytest.mark.slow
DARK = "--blink-settings=preferredColorScheme=0"
REJECTED = [{"node_id": n, "site": f"site-{n}", "code": "non-finite", "detail": "holds NaN " * n} for n in range(9)]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Runs and nodes; every look finds the first node under another name."""
    write_report(write_run(tmp_path / "runs" / "ended"))
    rounds = [line(n, rejected=REJECTED, seconds={"total": 900.0}) for n in range(20)]
    write_run(tmp_path / "runs" / "died", rounds=rounds, settings={"num-rounds": 30}, privacy={"status": "running"})
    looks = []

    def nodes(_):
        looks.append(None)
        found = {"node-id": "1", "status": "online", "since": "2026-01-01T10:00:00Z"}
        return [found | {"name": f"look-{len(looks)}"}, found | {"name": "lyon", "status": "offline"}]

    monkeypatch.setattr(snapshots, "warnings_of", lambda connection: ["certificate server.pem ends on 2026-02-01"])
    monkeypatch.setattr(snapshots, "living_nodes", nodes)
    return Places("hospital", tmp_path / "runs")


@pytest.fixture
def address(places, monkeypatch):
    """Of a dashboard that looks anew for every page."""
    monkeypatch.setattr("cloister.monitoring.dashboard.KEPT", 0.0)
    config = uvicorn.Config(Guard(application(places)), log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with listening("127.0.0.1", 0) as opened:
        thread = Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{opened.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


def test_it_renews_itself(tmp_path, address):
    patient = ("--virtual-time-budget=30000", "--dump-dom")
    told = chromium(tmp_path, address, *patient)
    assert "look-1<" not in told and "look-" in told and 'id="lost" role="status" hidden' in told
    (first,) = chromium(tmp_path, address + "?live=off", *patient).split("look-")[1:]
    (second,) = chromium(tmp_path, address + "?live=off", *patient).split("look-")[1:]
    assert int(second.partition("<")[0]) == int(first.partition("<")[0]) + 1


def test_it_says_when_nobody_answers(tmp_path, address, monkeypatch):
    """The first look is shown, and every later one breaks the server."""
    seen = CachedView.view

    def once(self):
        monkeypatch.setattr(CachedView, "view", lambda _: 1 / 0)
        return seen(self)

    monkeypatch.setattr(CachedView, "view", once)
    told = chromium(tmp_path, address, "--virtual-time-budget=30000", "--dump-dom")
    assert "look-1" in told and 'id="lost" role="status">' in told


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_asked(tmp_path, address, scheme):
    from PIL import Image

    picture = tmp_path / "page.png"
    asked = [DARK] if scheme == "dark" else []
    chromium(tmp_path, f"{address}", "--window-size=1200,1600", f"--screenshot={picture}", *asked)
    shown = Image.open(picture).convert("L").histogram()
    assert sum(shown[:64] if scheme == "dark" else shown[192:]) > 0.8 * sum(shown)


def test_a_screen_reader_can_read_it(tmp_path, places):
    page = tmp_path / "page.html"
    page.write_text(overview(CachedView(places).view(), "hospital", True))
    for scheme in ([], [DARK]):
        audited(tmp_path, page, scheme)
