"""The dashboard: content of its page, and access to it."""

import asyncio
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace

import html5lib
import httpx
import pytest
from prometheus_client import generate_latest
from reported import LEDGER, OF_ALL, OF_RUN, SOUND, line, write_run
from typer.testing import CliRunner

from cloister import cli
from cloister.monitoring import snapshot as snapshots
from cloister.monitoring.dashboard import HEADERS, KEPT, CachedView, Guard, application
from cloister.monitoring.metrics import Latest, registry
from cloister.monitoring.snapshot import Places, findings
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.claim import Claim, Statement
from cloister.privacy.claims.to_json import record
from cloister.server.reports import status
from cloister.utils.errors import FederationError

NODES = [
    {"node-id": "1", "name": "berlin", "status": "online", "since": "2026-01-01T10:00:00Z"},
    {"node-id": "2", "name": "lyon", "status": "offline", "since": "2026-01-02T10:00:00Z"},
    {"node-id": "3", "name": "", "status": "registered", "since": ""},
]
RUNNING = {"privacy": {"status": "running"}}
"""Content of `privacy.json` before a run has ended."""
REJECTED = [{"node_id": 2, "site": "lyon", "code": "non-finite", "detail": "holds NaN"}]


class Asking:
    """Asks an application, without a server.

    Args:
        app: to be asked.
        base_url: by which it is asked.
    """

    def __init__(self, app, base_url="http://127.0.0.1:8000"):
        self.app, self.base_url = app, base_url

    def request(self, method, address, headers=()):
        async def ask():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=self.base_url) as opened:
                return await opened.request(method, address, headers=headers)

        return asyncio.run(ask())

    def get(self, address, headers=()):
        return self.request("GET", address, headers)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Of a dashboard of the runs in `tmp_path`, on a SuperLink with three nodes."""
    monkeypatch.setattr(snapshots, "warnings_of", lambda connection: [])
    monkeypatch.setattr(snapshots, "living_nodes", lambda connection: NODES)
    return Asking(Guard(application(Places("hospital", tmp_path))))


def page(client, address):
    """The text of a page, which is HTML without a fault."""
    answer = client.get(address)
    assert answer.status_code == 200
    parser = html5lib.HTMLParser(strict=True)
    words = " ".join(" ".join(parser.parse(answer.text).itertext()).split())
    return re.sub(r" ([:.,;])", r"\1", words)


def spend_some(path):
    """A ledger with a budget, of which a little is spent."""
    budget = PrivacyBudget(Ledger(path), "a", max_epsilon=8.0)
    budget.begin("a")
    with budget.release(Gaussian(4.0), 1):
        pass


def lines(count=3, **of_the_last):
    return [line(number, **(of_the_last if number == count else {})) for number in range(count + 1)]


def held(place):
    """The lock of a run whose process lives."""
    file = (place / "running").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_the_overview(tmp_path, client):
    ended, begun = write_run(tmp_path / "ended"), tmp_path / "begun"
    write_run(begun, rounds=[*lines(1), line(2, rejected=REJECTED, seconds={"total": 90.0})], **RUNNING)
    os.utime(ended / "config.json", (1000, 1000))
    with held(begun):
        shown = page(client, "/")
    assert "berlin online 2026-01-01T10:00:00Z" in shown and "lyon offline 2026-01-02T10:00:00Z" in shown
    assert "node 3 registered never seen" in shown
    assert "1 of 3 online" in shown
    assert "warning: site-offline: lyon is offline since 2026-01-02" in shown
    assert "critical: quorum-lost: 1 nodes are online, and a round needs 2" in shown
    assert "lyon, non-finite: holds NaN" in shown
    assert re.search(r"begun digits global-dp 2/3 running, last written \d+ s ago about 2 min 0\.6", shown)
    assert re.search(r"ended digits global-dp 3/3 ended: as-asked 1", shown)
    assert shown.index("begun digits") < shown.index("ended digits")


def test_a_run(tmp_path, client):
    write_run(tmp_path / "a", rounds=lines(3, rejected=REJECTED), settings={"privacy.max-epsilon": 2.0})
    shown = page(client, "/")
    assert f"Directory {tmp_path / 'a'}" in shown
    assert "Round 3 of 3" in shown and "State ended: as-asked" in shown and "Replies that counted 3 of 4" in shown
    assert (
        "ε that is claimed 1, for one client" in shown
        and "ε of the ledger 0.9" in shown
        and "Left of the budget 1.1" in shown
    )
    assert "Replies that did not count lyon, non-finite: holds NaN" in shown and "Time left about" not in shown


def test_what_an_ended_run_claims(tmp_path):
    """One that somebody ended claims all that was planned, and DP-SGD on the clients has an ε of its own."""
    stopped = Statement(replace(SOUND, figures=(replace(OF_RUN, epsilon=28.37), OF_ALL)), 3, "fixed", LEDGER)
    ended = record(stopped) | {"ended": {"how": "operator", "why": "asked to stop"}}
    write_run(tmp_path / "early", rounds=lines(3), privacy=ended)
    steps = write_run(tmp_path / "steps", "dp-sgd", lines(3))
    settings = json.loads((steps / "config.json").read_text())
    settings["config"] |= {"privacy.server": "none", "privacy.client": "dp-sgd"}
    (steps / "config.json").write_text(json.dumps(settings))
    client = Asking(application(Places(runs=tmp_path)))
    shown = page(client, "/")
    assert re.search(r"early digits global-dp 3/3 ended: operator 28\.4 weak", shown)
    assert re.search(r"steps digits dp-sgd on clients 3/3 ended: as-asked 3 \(example\)", shown)
    assert "28.4, for one client; it is weak" in shown and shown.count("weak") == 2
    assert "ε that is claimed 3, for one example" in shown
    state = status.run_state(tmp_path / "early")
    told = status.told(state, None)
    assert state.claimed == 28.37 and "  ε 28.4 claimed, for one client; weak" in told


def test_budgets(tmp_path):
    path = tmp_path / "ledger.jsonl"
    spend_some(path)
    client = Asking(application(Places(ledgers=(path,))))
    assert re.search(rf"{path} client \d[\d.]* %", page(client, "/"))


def test_ledgers_of_which_no_budget_can_be_kept(tmp_path):
    path, sound = tmp_path / "open.jsonl", tmp_path / "sound.jsonl"
    PrivacyBudget(Ledger(path), "a").record_unprotected("scores")
    spend_some(sound)
    told = f"some of their releases have no guarantee. {path}, for each client"
    shown = page(Asking(application(Places(ledgers=(path,)))), "/")
    assert told in shown and "No ledger with a budget" not in shown
    shown = page(Asking(application(Places(ledgers=(path, sound)))), "/")
    assert told in shown and re.search(rf"{sound} client \d[\d.]* %", shown)
    assert "some of their releases" not in page(Asking(application(Places(ledgers=(sound,)))), "/")


def test_budgets_beside_runs_need_not_be_named(tmp_path):
    path = tmp_path / "ledgers" / "digits.jsonl"
    path.parent.mkdir()
    spend_some(path)
    write_run(tmp_path / "a")
    shown = page(Asking(application(Places(runs=tmp_path))), "/")
    assert re.search(rf"{path} client \d[\d.]* %", shown)
    result = CliRunner().invoke(cli.app, ["status", "--runs", str(tmp_path)])
    assert re.search(rf"^budget for each client: \d[\d.]* % is spent in {path}$", result.output, re.MULTILINE)
    with held(secret_run(tmp_path / "b")):
        assert "budget for" not in CliRunner().invoke(cli.app, ["status", "--runs", str(tmp_path)]).output


def test_what_has_no_epsilon_says_so(tmp_path, client):
    place = write_run(tmp_path / "none")
    (place / "privacy.json").write_text(json.dumps(record(Statement(Claim("none"), 3, "fixed", LEDGER))))
    assert "none claimed" in page(client, "/")


def test_a_newer_run_does_not_show_the_epsilon_that_an_older_one_adds_to_in_secret(tmp_path):
    """In a ledger that both have, ε of the newer one's rounds counts what the older one has spent since."""
    older, newer = secret_run(tmp_path / "a"), write_run(tmp_path / "b", **RUNNING)
    os.utime(older / "config.json", (86400, 86400))

    def shown():
        asking = Asking(application(Places(runs=tmp_path)))
        told = CliRunner().invoke(cli.app, ["status", "--runs", str(tmp_path)]).output
        overview = page(asking, "/")
        return overview.partition(f"Directory {newer}")[2].partition(" Directory ")[0], overview, told

    with held(newer):
        run, overview, told = shown()
        assert "ε of the ledger 0.9" in run and "0.9 so far" in overview and "ε 0.9" in told
        with held(older):
            run, overview, told = shown()
    assert "Round" in run and "ε of the ledger" not in run
    assert "0.9 so far" not in overview and "not told yet" in overview
    assert "digits" in told and "ε" not in told


def test_nothing_to_look_at(tmp_path):
    client = Asking(application(Places(runs=tmp_path)))
    shown = page(client, "/")
    for told in ("No SuperLink was asked", "There is no run yet", "No ledger with a budget", "Nothing is wrong."):
        assert told in shown


def test_a_superlink_that_does_not_answer(tmp_path, client, monkeypatch):
    def silent(_):
        raise FederationError("it does not answer")

    monkeypatch.setattr(snapshots, "living_nodes", silent)
    shown = page(client, "/")
    assert "critical: unreadable: it does not answer" in shown and "SuperLink hospital gave no answer." in shown


# What a claim keeps secret.


def secret_run(place, **more):
    """A run under way whose cohorts and times are secret: its configuration says so, and no line has counts."""
    write_run(place, rounds=[line(number, secret=True) for number in range(3)], **RUNNING, **more)
    config = place / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hides-times": True}))
    return place


def test_secret_cohorts_and_times_stay_secret(tmp_path, client):
    place = secret_run(tmp_path / "a")
    with held(place):
        shown, raw = page(client, "/"), client.get("/").text
    assert "last written on 20" in shown
    for told in ("Replies that", "s ago", "Time left about", "of 4"):
        assert told not in shown
    # The moment at which a page changes is not to be noted by a browser or by what is between.
    assert "live.js" not in raw and 'data-live="no"' in raw and "live=on" not in raw
    assert "It is not renewed by itself, so that nothing notes when a round ends" in shown


def test_ledgers_are_hidden_with_the_rounds(tmp_path):
    path, runs = tmp_path / "ledger.jsonl", tmp_path / "runs"
    spend_some(path)
    client = Asking(application(Places(runs=runs, ledgers=(path,))))
    with held(secret_run(runs / "a")):
        shown = page(client, "/")
    assert "ledgers are not shown" in shown and str(path) not in shown


def test_a_newer_run_does_not_show_the_budget_that_an_older_one_spends_in_secret(tmp_path):
    """Neither among budgets, nor in an event, nor as a metric, however many runs have begun since."""
    path, runs = tmp_path / "ledger.jsonl", tmp_path / "runs"
    budget = PrivacyBudget(Ledger(path), "a", max_epsilon=2.0)
    budget.begin("a")
    while budget.share() < 0.92:
        with budget.release(Gaussian(8.0), 1):
            pass
    places = Places(runs=runs, ledgers=(path,), database=path)
    older = secret_run(runs / "a")
    write_run(runs / "b")
    os.utime(older / "config.json", (86400, 86400))

    def shown():
        latest = Latest()
        latest.snapshot = snapshots.look(places)
        latest.found = findings(latest.snapshot, 0.0)
        return page(Asking(application(places)), "/"), generate_latest(registry(latest)).decode()

    with held(older):
        seen, metrics = shown()
    assert snapshots.look(places).run.path.endswith("b") and "ledgers are not shown" in seen
    assert "of the budget" not in seen
    assert not [name for name in ("budget_spent", "database_bytes", "epsilon") if f"cloister_{name}" in metrics]
    seen, metrics = shown()
    assert "of the budget for each client is spent" in seen
    assert all(f"cloister_{name}" in metrics for name in ("budget_spent", "database_bytes", "epsilon"))


# Who is let in.


def test_every_answer_is_closed(tmp_path, client):
    write_run(tmp_path / "a")
    policy = HEADERS["Content-Security-Policy"]
    assert "script-src 'self';" in policy and "default-src 'none';" in policy and "frame-ancestors 'none'" in policy
    for method, code in (("GET", 200), ("HEAD", 200), ("POST", 405), ("DELETE", 405)):
        for address in ("/", "/live.js", "/nothing", "/runs/a", "/../a/config.json", "/live.js/"):
            answer = client.request(method, address)
            assert answer.status_code == (code if code == 405 or address in ("/", "/live.js") else 404), address
            for name, value in HEADERS.items():
                assert answer.headers.get_list(name) == [value]


def test_the_page_has_no_script_of_its_own(tmp_path, client):
    write_run(tmp_path / "a")
    text = client.get("/").text
    assert re.findall(r"<script.*?</script>", text, re.DOTALL) == ['<script src="/live.js" defer></script>']
    assert not re.search(r"\son\w+=|javascript:", text)
    assert "<script" not in client.get("/?live=off").text
    assert client.get("/live.js").headers["content-type"] == "text/javascript; charset=utf-8"


def test_hostile_folders_and_words(tmp_path, monkeypatch):
    """Names of folders that no run has are left out; words of a run are escaped."""
    for name in ("<img src=x>", "b c", "d\nSet-Cookie: e", "ok"):
        write_run(tmp_path / name, rounds=lines(3, rejected=[REJECTED[0] | {"detail": "<script>1</script>\x1b[2J"}]))
    evil = [NODES[0] | {"name": "<script>alert(1)</script>", "status": "<b>"}]
    monkeypatch.setattr(snapshots, "warnings_of", lambda connection: ["<script>2</script>"])
    monkeypatch.setattr(snapshots, "living_nodes", lambda connection: evil)
    client = Asking(application(Places("<i>", tmp_path)))
    text = client.get("/").text
    assert text.count("<script") == 1 and "\x1b" not in text and "<b>" not in text and "<i>" not in text
    assert "<img" not in text and "b c" not in text and "Set-Cookie" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_broken_runs_are_told_and_break_nothing(tmp_path, client):
    for name, content in {"a": "{}", "b": "nonsense", "c": '{"config": 3}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
        (tmp_path / name / "rounds.jsonl").write_bytes(b'\xff\xfe{"round": []}\n')
    assert page(client, "/").count("its files are not what a run writes") == 3


def test_a_name_from_elsewhere_that_leads_here_is_refused(client):
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "", "[::1", "a:b:c"):
        assert client.get("/", {"Host": host}).status_code == 421
    for host in ("localhost", "localhost:9", "127.0.0.1:1234", "[::1]:80", "LOCALHOST"):
        assert client.get("/live.js", {"Host": host}).status_code == 200


def test_other_machines_do_not_reach_it():
    for host in ("0.0.0.0", "::", "192.0.2.1", "server.example", "localhost.example"):
        done = CliRunner().invoke(cli.app, ["dashboard", "--listen", f"[{host}]:0" if ":" in host else f"{host}:0"])
        assert done.exit_code == 1 and "other machines would reach the dashboard" in done.output, host
        assert "ssh -L" in done.output


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(cli.app, ["dashboard", "--runs", str(tmp_path), "--listen", f"127.0.0.1:{port}"])
    assert done.exit_code == 1 and f"--listen 127.0.0.1:{port}: Address already in use" in done.output


def test_an_address_that_is_none():
    for listen in ("8000", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x", f"127.0.0.1:{'9' * 5000}"):
        done = CliRunner().invoke(cli.app, ["dashboard", "--listen", listen])
        assert done.exit_code and "must be an address and a port" in done.output, listen


def test_a_look_is_kept_for_some_seconds(tmp_path, monkeypatch):
    """For any number of pages, the SuperLink is not asked more often."""
    asked, now = [], [100.0]
    monkeypatch.setattr(snapshots, "warnings_of", lambda connection: [])
    monkeypatch.setattr(snapshots, "living_nodes", lambda connection: asked.append(now[0]) or NODES)
    cached = CachedView(Places("hospital", tmp_path), lambda: now[0])
    first = cached.view()
    now[0] += KEPT - 0.1
    assert cached.view() is first
    now[0] += 0.2
    assert cached.view() is not first and asked == [100.0, now[0]]


# As a process.


@pytest.fixture
def served(tmp_path):
    """Starts the command, gives its address, and ends it."""
    children = []

    def start(*options):
        command = [sys.executable, "-c", "from cloister.cli import app; app()", "dashboard", *options]
        child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return re.search(r"https?://\S+", child.stdout.readline()).group()

    yield start
    for child in children:
        child.terminate()
        child.communicate(timeout=60)


@pytest.mark.runtimes
def test_it_is_served_on_the_loopback(tmp_path, served):
    write_run(tmp_path / "runs" / "a")
    address = served("--listen", "127.0.0.1:0")
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert "<summary>a</summary>" in answer.read().decode()
        assert answer.headers.get_all("cache-control") == ["no-store"] and "server" not in answer.headers
