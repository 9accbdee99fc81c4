"""Watching a federation: what is wrong, as lines, metrics and calls."""

import json
import re
import sys
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from prometheus_client import generate_latest
from reported import write_run
from rich.console import Console
from support import failures
from typer.testing import CliRunner

from cloister import cli
from cloister.monitoring import snapshot as snapshots
from cloister.monitoring.metrics import Latest, Watch, change, registry
from cloister.monitoring.snapshot import Places, Snapshot, findings, look
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.status import RunState, run_state
from cloister.simulation.simulate import simulate
from cloister.utils.errors import ConfigError, FederationError

sys.path.insert(0, str(Path(__file__).parents[1] / "runtimes"))
from processes import free_ports

NOW = 1_800_000_007.0
RUN = RunState(
    path="/runs/a", task="digits", strategy="fedavg", privacy="none", round=3, rounds=10, written=NOW - 5,
    replies=(3, 4), rejected=("lyon, error: no",), codes={"error": 1}, seconds=2.5, timeout=600.0, quorum=2,
    epsilon=1.5, claimed=None, claimed_for="", budget_left=0.5, ended=False, state="running", how="", why="",
)  # fmt: skip
QUIET = replace(RUN, rejected=(), codes={})
NODES = (
    {"node-id": "1", "name": "berlin", "status": "online", "since": "2026-01-01T10:00:00Z"},
    {"node-id": "2", "name": "lyon", "status": "online", "since": "2026-01-01T10:00:00Z"},
    {"node-id": "3", "name": "", "status": "registered", "since": ""},
)
OFFLINE = (NODES[0], NODES[1] | {"status": "offline"}, NODES[2])
MIDNIGHT = NOW - NOW % 86400


def test_the_rules():
    def check(snapshot, kinds):
        assert [item.kind for item in findings(snapshot, NOW)] == kinds

    cases = [
        (Snapshot(), []),
        (Snapshot(QUIET, NODES), []),
        (Snapshot(RUN, NODES), ["rejected"]),
        (Snapshot(replace(QUIET, state="dead"), NODES), ["run-dead"]),
        (Snapshot(replace(QUIET, written=NOW - 1199)), []),
        (Snapshot(replace(QUIET, written=NOW - 1201)), ["stalled"]),
        (Snapshot(replace(QUIET, written=NOW - 1201, state="ended")), []),
        (Snapshot(replace(QUIET, written=MIDNIGHT - 5 * 86400)), []),
        (Snapshot(QUIET, OFFLINE), ["quorum-lost", "site-offline"]),
        (Snapshot(replace(QUIET, quorum=1), OFFLINE), ["site-offline"]),
        (Snapshot(replace(QUIET, state="ended"), OFFLINE), ["site-offline"]),
        (Snapshot(replace(QUIET, state="ended", how="too-few-nodes")), ["run-failed"]),
        (Snapshot(replace(QUIET, state="ended", how="budget")), ["budget-spent"]),
        (Snapshot(replace(QUIET, state="ended", how="site-budgets")), ["budget-spent"]),
        (Snapshot(replace(QUIET, state="ended", how="operator")), []),
        (Snapshot(spent={("a", "client"): 0.89}), []),
        (Snapshot(spent={("a", "client"): 0.9}), ["budget-low"]),
        (Snapshot(spent={("a", "client"): 0.99}), ["budget-spent"]),
        (Snapshot(missing=("a",)), ["no-ledger"]),
        (Snapshot(warnings=("a certificate ends",), unreadable=("no answer",)), ["unreadable", "warning"]),
    ]
    assert failures(cases, check) == []


def test_every_rule_is_in_the_table_with_its_level():
    listed = dict(
        re.findall(r"^\| `([\w-]+)` \| (\w+) \|", sys.modules[findings.__module__].__doc__, flags=re.MULTILINE)
    )
    worst = Snapshot(
        replace(RUN, state="dead", how="error"),
        OFFLINE,
        ("soon",),
        {("a", "client"): 0.9, ("b", "client"): 1.0},
        1,
        ("x",),
        ("c",),
    )
    found = findings(worst, NOW) + findings(Snapshot(replace(QUIET, written=NOW - 9999), OFFLINE), NOW)
    assert {item.kind: item.level for item in found} == listed


def metrics(snapshot):
    latest = Latest()
    latest.snapshot, latest.found, latest.when = snapshot, findings(snapshot, NOW), NOW
    return generate_latest(registry(latest)).decode()


def test_metrics_of_a_run():
    shown = metrics(Snapshot(RUN, OFFLINE, (), {("ledger", "client"): 0.25}, 4096))
    for line in (
        "cloister_round 3.0",
        "cloister_rounds 10.0",
        'cloister_run_state{state="running"} 1.0',
        'cloister_run_state{state="dead"} 0.0',
        'cloister_replies{kind="accepted"} 3.0',
        'cloister_replies{kind="error"} 1.0',
        "cloister_round_seconds 2.5",
        "cloister_round_age_seconds 5.0",
        "cloister_epsilon 1.5",
        "cloister_epsilon_left 0.5",
        'cloister_site_online{site="berlin"} 1.0',
        'cloister_site_online{site="lyon"} 0.0',
        'cloister_budget_spent{ledger="ledger",unit="client"} 0.25',
        "cloister_database_bytes 4096.0",
        'cloister_findings{kind="quorum-lost",level="critical"} 1.0',
    ):
        assert f"{line}\n" in shown


def test_what_a_claim_keeps_secret_is_no_metric(tmp_path):
    """From the files of a real run whose guarantee rests on secret cohorts."""
    settings = {
        "task.model": "softmax", "privacy.server": "global-dp", "privacy.noise-multiplier": 1.0, "tensorboard": False,
        "strategy.sampling": "poisson", "strategy.fraction-train": 0.5, "num-rounds": 2, "report": False,
        "output-dir": str(tmp_path), "run-name": "r",
    }  # fmt: skip
    simulate(settings, 4, ConsoleReporter(2, Console(quiet=True)))
    shown = metrics(look(Places(runs=tmp_path)))
    assert "cloister_round 2.0" in shown and "cloister_epsilon" in shown
    for name in ("replies", "round_seconds", "round_age_seconds"):
        assert f"cloister_{name}" not in shown
    assert run_state(tmp_path / "r").seconds is None
    state = run_state(tmp_path / "r")
    assert state.hides_times and not state.written % 86400


BY_ROUND = (
    *("round", "replies", "epsilon", "epsilon_left", "round_seconds", "round_age_seconds"),
    *("budget_spent", "database_bytes"),
)


def test_the_moment_of_a_change_is_no_metric_where_times_are_hidden():
    """Prometheus notes when a number changes: one that does so every round would tell how long each of them took."""
    run = replace(QUIET, written=MIDNIGHT, seconds=None)
    spent = {("ledger", "client"): 0.25}

    def differing(before, after):
        """The metrics that change when a round is finished, after which 90 % of the budget is spent."""
        low, high = ({("ledger", "client"): share} for share in (0.89, 0.91))
        looks = ((*before, low), (*after, high))
        seen = [metrics(Snapshot(each, NODES, (), share, size)).splitlines() for each, size, share in looks]
        return {each.partition(" ")[0] for each in set(seen[0]) ^ set(seen[1])}

    later = replace(RUN, written=MIDNIGHT, seconds=None, round=4, replies=(2, 4), epsilon=1.8, budget_left=0.2)
    assert differing((run, 4096), (later, 8192)) == set()
    shown = metrics(Snapshot(run, NODES, (), spent, 4096))
    assert not {f"cloister_{name}" for name in BY_ROUND} & names(shown) and 'state="running"} 1.0' in shown
    assert "cloister_round 4.0" in metrics(Snapshot(replace(later, state="ended")))


def test_two_nodes_of_a_site_are_one_metric():
    shown = metrics(Snapshot(nodes=(NODES[0], NODES[0] | {"node-id": "9", "status": "offline"})))
    assert shown.count("cloister_site_online{") == 1 and 'cloister_site_online{site="berlin"} 1.0' in shown


def test_what_stands_in_a_name_breaks_neither_metrics_nor_a_terminal(monkeypatch):
    name = 'a"\\\n\x1b[2J\udc80'
    node = NODES[0] | {"name": name, "status": "offline"}
    assert metrics(Snapshot(nodes=(node,))).count("cloister_site_online{") == 1
    monkeypatch.setattr(snapshots, "warnings_of", lambda connection: [])
    monkeypatch.setattr(snapshots, "living_nodes", lambda connection: (node,))
    for arguments in (
        ["status", "hospital", "--runs", "absent", "--check"],
        ["status", "hospital", "--runs", "absent"],
    ):
        monkeypatch.setattr("cloister.deploy.sites.living_nodes", lambda connection: (node,))
        monkeypatch.setattr("cloister.deploy.warm.probe.warnings_of", lambda connection: [])
        monkeypatch.setattr("cloister.server.reports.status.superlink_runs", lambda connection: [])
        said = CliRunner().invoke(cli.app, arguments).output
        assert "offline" in said and "\x1b" not in said and len(said.splitlines()) == 1
    told = []
    monkeypatch.setattr("cloister.monitoring.metrics.look", lambda places: Snapshot(nodes=(node,)))
    Watch(Places(), told=told.append).look()
    assert told and "\x1b" not in "".join(told)


def test_what_cannot_be_read_is_a_finding_and_never_the_end(tmp_path):
    (tmp_path / "runs" / "broken").mkdir(parents=True)
    assert look(Places(runs=tmp_path / "runs")) == Snapshot()
    (tmp_path / "runs" / "broken" / "config.json").write_text("[]")
    places = Places("", tmp_path / "runs", (tmp_path,), tmp_path / "state.db")
    broken, ledger, database = look(places).unreadable
    assert "broken" in broken and "directory" in ledger and "state.db: No such file" in database
    assert look(Places(runs=tmp_path / "absent")).unreadable == (f"there is no folder {tmp_path / 'absent'}",)


def test_the_size_of_a_database_is_that_with_its_log(tmp_path):
    (tmp_path / "state.db").write_bytes(bytes(5))
    assert look(Places(database=tmp_path / "state.db")).database_bytes == 5
    (tmp_path / "state.db-wal").write_bytes(bytes(3))
    assert look(Places(database=tmp_path / "state.db")).database_bytes == 8


def test_the_dashboard_asks_for_metrics_that_there_are():
    text = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
    board = json.loads(text)
    asked = {name for panel in board["panels"] for target in panel["targets"] for name in names(target["expr"])}
    full = Snapshot(RUN, OFFLINE, (), {("ledger", "client"): 0.25}, 4096)
    assert asked and asked <= names(metrics(full))


def names(text):
    return set(re.findall(r"\bcloister_\w+", text))


def test_the_share_of_a_ledgers_budget(tmp_path):
    ledger = Ledger(tmp_path / "l.jsonl")
    budget = PrivacyBudget(ledger, "first", max_epsilon=4.0)
    budget.begin("first")
    for number in range(3):
        with budget.release(Gaussian(4.0), number):
            pass
    seen = look(Places(ledgers=(ledger.path, tmp_path / "none.jsonl")))
    assert seen.spent == {(str(ledger.path), "client"): pytest.approx(budget.share())} and not seen.unreadable
    (tmp_path / "none.jsonl").write_text("{}\n")
    (said,) = look(Places(ledgers=(tmp_path / "none.jsonl",))).unreadable
    assert "none.jsonl" in said and "\n" not in said


def test_a_ledger_that_is_not_there(tmp_path):
    """One that is named, and the copy in a run that has ended; a run under way may keep its own elsewhere."""
    place = write_run(tmp_path / "runs" / "a")
    kept, lost = tmp_path / "kept.jsonl", tmp_path / "lost.jsonl"
    kept.write_text("")
    places = Places(runs=place, ledgers=(kept, lost))
    assert look(places).missing == (str(lost), str(place / "ledger.jsonl"))
    (place / "ledger.jsonl").write_text("")
    assert look(places).missing == (str(lost),)
    write_run(tmp_path / "runs" / "b", privacy={"status": "running"})
    assert look(Places(runs=tmp_path / "runs" / "b")).missing == ()


def test_a_superlink_that_does_not_answer_is_a_finding(monkeypatch):
    def refuse(connection):
        raise FederationError("SuperLink connection 'hospital': no answer")

    monkeypatch.setattr(snapshots, "living_nodes", refuse)
    (item,) = findings(look(Places("hospital")), NOW)
    assert (item.kind, item.level) == ("unreadable", "critical") and "no answer" in item.text


def test_a_change_is_what_begins_and_what_ends():
    one, two = findings(Snapshot(RUN, OFFLINE), NOW), findings(Snapshot(QUIET, NODES), NOW)
    later = findings(Snapshot(RUN, OFFLINE), NOW + 60)
    assert change(one, later) is None and change([], []) is None
    assert [item.kind for item in change(two, one).begun] == ["quorum-lost", "rejected", "site-offline"]
    over = change(one, two)
    assert not over.begun and over.content["text"].startswith("over: ") and len(over.content["ended"]) == 3


def test_a_warning_with_another_number_is_the_same():
    seen = [findings(Snapshot(warnings=(f"the clock is {late} s ahead", "it ends in 9 days")), NOW) for late in (3, 14)]
    assert len(seen[0]) == 2 and change(*seen) is None


@pytest.fixture
def hook():
    """A web server that keeps what is posted, and refuses as long as it is told to."""
    calls, refusals = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if refusals:
                refusals.pop()
                self.send_response(500)
            else:
                calls.append(json.loads(body))
                self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/secret-token", calls, refusals
        server.shutdown()
        thread.join()


def test_a_webhook_is_called_once_for_each_change_and_again_if_it_refused(hook, monkeypatch, caplog):
    url, calls, refusals = hook
    seen = iter(
        [
            Snapshot(QUIET, NODES),
            Snapshot(QUIET, OFFLINE),
            Snapshot(QUIET, OFFLINE),
            Snapshot(QUIET, OFFLINE),
            Snapshot(QUIET, NODES),
        ]
    )
    monkeypatch.setattr("cloister.monitoring.metrics.look", lambda places: next(seen))
    monkeypatch.setattr(time, "time", lambda: NOW)
    watch = Watch(Places(), url, told=lambda line: None)
    watch.look()
    assert calls == []
    refusals.append(1)
    watch.look()
    assert calls == [] and "HTTPStatusError" in caplog.text and "secret-token" not in caplog.text
    watch.look()
    watch.look()
    assert [[item["kind"] for item in call["begun"]] for call in calls] == [["quorum-lost", "site-offline"]]
    watch.look()
    assert len(calls) == 2 and calls[1]["text"].startswith("over: ")


def test_it_serves_metrics_until_it_is_stopped(tmp_path):
    ended, looks = Event(), []
    watch = Watch(Places(), told=looks.append)
    with (
        HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as taken,
        pytest.raises(ConfigError, match=f"--listen 127.0.0.1:{taken.server_port}: Address already in use"),
    ):
        watch.serve(("127.0.0.1", taken.server_port), 60.0, ended)
    (port,) = free_ports(1)
    thread = Thread(target=watch.serve, args=(("127.0.0.1", port), 60.0, ended))
    thread.start()
    try:
        deadline = time.monotonic() + 120
        while not watch.latest.when and time.monotonic() < deadline:
            time.sleep(0.01)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
            (found,) = re.findall(r"^cloister_last_look_seconds (.*)$", answer.read().decode(), flags=re.MULTILINE)
    finally:
        ended.set()
        thread.join(120)
    assert float(found) == watch.latest.when and not thread.is_alive()


def test_the_check_for_monitors(tmp_path, monkeypatch):
    def checked():
        done = CliRunner().invoke(cli.app, ["status", "hospital", "--runs", str(tmp_path), "--check"])
        return done.exit_code, done.output

    monkeypatch.setattr(snapshots, "warnings_of", lambda connection: [])
    monkeypatch.setattr(snapshots, "living_nodes", lambda connection: NODES)
    assert checked() == (0, "ok\n")
    monkeypatch.setattr(snapshots, "living_nodes", lambda connection: OFFLINE)
    assert checked() == (1, "warning: site-offline: lyon is offline since 2026-01-01T10:00:00Z\n")
    monkeypatch.setattr(snapshots, "run_state", lambda path: replace(QUIET, state="dead"))
    monkeypatch.setattr(snapshots, "run_directories", lambda path: [path])
    code, said = checked()
    assert code == 2 and said.startswith("critical: run-dead: run /runs/a, round 3 of 10")


def test_an_address_that_is_none():
    def check(listen):
        done = CliRunner().invoke(cli.app, ["watch", "--listen", listen])
        assert done.exit_code and "must be an address and a port" in done.output

    assert failures(["9464", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:0", "127.0.0.1:65536"], check) == []


def test_a_webhook_that_is_no_url():
    with pytest.raises(ConfigError, match=r"--webhook 'hospital' must begin with https:// or http://"):
        Watch(Places(), "hospital")
