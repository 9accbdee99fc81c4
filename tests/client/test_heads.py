"""Heads of the server's ledger: what messages tell, and what nodes keep."""

import json
import logging
import threading
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from asking import GLOBAL, OPEN, SOFTMAX, context_of, gaussians, message_of
from rich.console import Console
from support import failures

from cloister.client import ledgers
from cloister.client.app import app
from cloister.client.ledgers import ledger_of, save_server_head, server_heads_path
from cloister.client.node import node_of
from cloister.client.request import TrainRequest
from cloister.config.run import parse
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.utils.wire import CONFIG, LEDGER_HEAD

ONE, TWO = "1" * 64, "2" * 64


def request(head, run="7", number=1):
    return TrainRequest(parse(GLOBAL), run, number, 0, (SOFTMAX,), ledger_head=head)


def tell(ledger, *runs, head=ONE):
    for name in runs:
        save_server_head(ledger, request(head, name))


def kept_beside(ledger):
    return json.loads(server_heads_path(ledger).read_text())


@pytest.fixture
def day(monkeypatch):
    """The day (UTC), which a test may have end."""
    now = ["2026-01-01"]
    monkeypatch.setattr(ledgers, "today", lambda: datetime.fromisoformat(now[0]).replace(tzinfo=UTC).timestamp())
    return now


def test_the_last_head_of_each_run_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(ledgers, "today", lambda: datetime(2026, 3, 1, tzinfo=UTC).timestamp())
    ledger = tmp_path / "site.jsonl"
    for head, name, number in ((ONE, "7", 1), (TWO, "7", 2), (ONE, "8", 1), ("", "9", 1)):
        save_server_head(ledger, request(head, name, number))
    kept = {"2026-03-01": {"7": {"head": TWO, "round": 2}, "8": {"head": ONE, "round": 1}}}
    assert (tmp_path / "site.heads.json").read_text() == json.dumps(kept, indent=2) + "\n", "a line for each"


def test_a_head_of_an_earlier_day_is_replaced_by_nothing(tmp_path, day):
    """A later deletion of lines cannot have a node forget them with one more message of the same run."""
    ledger = tmp_path / "site.jsonl"
    tell(ledger, "7")
    day[0] = "2026-01-02"
    tell(ledger, "7", head=TWO)
    assert {when: told["7"]["head"] for when, told in kept_beside(ledger).items()} == {
        "2026-01-01": ONE,
        "2026-01-02": TWO,
    }


def test_a_server_that_names_many_runs_pushes_out_no_head_that_it_told_before(tmp_path, day, monkeypatch):
    monkeypatch.setattr(ledgers, "MAXIMUM", 20)
    ledger = tmp_path / "site.jsonl"
    for number in range(5):
        day[0] = f"2026-01-0{number + 1}"
        tell(ledger, f"run {number}")
    tell(ledger, "the last before")
    for when in ("2026-01-05", "2026-01-06"):
        day[0] = when
        tell(ledger, *(f"{when} {number}" for number in range(30)))
    kept = kept_beside(ledger)
    assert sum(map(len, kept.values())) == 20
    assert [f"run {number}" in kept[f"2026-01-0{number + 1}"] for number in range(5)] == [True] * 5
    assert "the last before" in kept["2026-01-05"]


def test_of_days_that_are_alike_the_oldest_goes(tmp_path, day, monkeypatch):
    monkeypatch.setattr(ledgers, "MAXIMUM", 3)
    ledger = tmp_path / "site.jsonl"
    for number in range(1, 6):
        day[0] = f"2026-01-0{number}"
        tell(ledger, "7")
    assert list(kept_beside(ledger)) == ["2026-01-03", "2026-01-04", "2026-01-05"]


def test_two_processes_keep_what_both_were_told(tmp_path, monkeypatch):
    """One reads the file, and the other one begins before the first has written."""
    ledger, others, plain = tmp_path / "site.jsonl", [], ledgers.atomic_path

    @contextmanager
    def slow(path):
        if not others:
            others.append(threading.Thread(target=tell, args=(ledger, "8")))
            others[0].start()
            others[0].join(0.2)  # without a lock it has written by now, and is lost
        with plain(path) as partial:
            yield partial

    monkeypatch.setattr(ledgers, "atomic_path", slow)
    tell(ledger, "7")
    others[0].join()
    (told,) = kept_beside(ledger).values()
    assert set(told) == {"7", "8"}


@pytest.mark.parametrize(
    ("content", "kind"), [("nonsense", "JSONDecodeError"), ("3", "AttributeError"), ("[]", "AttributeError")]
)
def test_a_file_that_cannot_be_read_stays_as_it_is(tmp_path, content, kind, caplog):
    path = server_heads_path(tmp_path / "site.jsonl")
    path.write_text(content)
    with caplog.at_level(logging.WARNING, "cloister.client"):
        save_server_head(tmp_path / "site.jsonl", request(ONE))
    assert path.read_text() == content
    assert caplog.messages == [f"the head of the server's ledger was not kept: {kind}"]


def test_a_head_that_is_none_is_refused(tmp_path_factory):
    def check(head):
        tmp_path = tmp_path_factory.mktemp("case")
        node = {"partition-id": 0, "num-partitions": 4, "ledger-dir": str(tmp_path)}
        reply = app(message_of(**{LEDGER_HEAD: head, "privacy-events": gaussians(2.0)}), context_of(GLOBAL, node))
        assert "must carry 'ledger-head' as a SHA-256 digest, or not at all" in reply.error.reason
        assert not list(tmp_path.iterdir())

    assert failures(["", "1" * 63, "G" * 64, "../../x", 3, ["1" * 64], ONE + "\n"], check) == []


def test_nodes_keep_the_heads_of_a_run(tmp_path):
    """Each message tells the head of the ledger as it is then; the kept one shows what the server has lost since."""
    told = []

    def client(message, context):
        if message.metadata.message_type == "train":
            told.append(message.content.config_records[CONFIG][LEDGER_HEAD])
        return app(message, context)

    nodes = [
        {"partition-id": n, "num-partitions": 2, "ledger-dir": str(tmp_path / f"node-{n}"), "data-identity": "ward"}
        for n in range(2)
    ]
    ledgers = tmp_path / "ledgers"
    more = {"num-rounds": 2, "output-dir": str(tmp_path / "runs"), "report": False, "tensorboard": False}
    config = parse(GLOBAL | more | {"privacy.ledger-dir": str(ledgers), "privacy.data-identity": "all"})
    run(LocalGrid(client, config.flat(), nodes), config, ConsoleReporter(2, Console(quiet=True)))
    ledger = Ledger(ledgers / "all.jsonl")
    place, *_ = map(json.loads, (ledgers / "all.jsonl").read_text().splitlines())
    assert place["kind"] == "place" and told[0] == told[1] == place["hash"]
    assert told[2] == told[3] and {*told} <= ledger.heads()
    for node in nodes:
        (told_today,) = kept_beside(ledger_of(node_of(node), "digits").path).values()
        (kept,) = told_today.values()
        assert (kept["head"], kept["round"]) == (told[2], 2)
    lines = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text(lines[0])
    assert told[2] not in Ledger(ledger.path).heads()


def test_a_run_that_records_nothing_tells_no_head(tmp_path):
    fields = []

    def client(message, context):
        fields.append(set(message.content.config_records[CONFIG]))
        return app(message, context)

    more = {"num-rounds": 1, "output-dir": str(tmp_path), "report": False, "tensorboard": False}
    config = parse(OPEN | more)
    nodes = [{"partition-id": n, "num-partitions": 2} for n in range(2)]
    run(LocalGrid(client, config.flat(), nodes), config, ConsoleReporter(1, Console(quiet=True)))
    assert fields and not any(LEDGER_HEAD in found for found in fields)
