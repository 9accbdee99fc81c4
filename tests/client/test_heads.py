"""Heads of the server's ledger: what messages tell, and what nodes keep."""

import json
import logging

import pytest
from asking import GLOBAL, OPEN, SOFTMAX, context_of, gaussians, message_of
from rich.console import Console

from cloister.client.app import app
from cloister.client.heads import heads_beside, keep_head
from cloister.client.ledgers import ledger_of
from cloister.client.node import node_of
from cloister.client.request import TrainRequest
from cloister.config.run import parse
from cloister.core.wire import CONFIG, LEDGER_HEAD
from cloister.local.grid import LocalGrid
from cloister.privacy.accounting.ledger import GENESIS, Ledger, today
from cloister.server.reports.console import Narrator
from cloister.server.run import run

ONE, TWO = "1" * 64, "2" * 64


def request(head, run="7", number=1):
    return TrainRequest(parse(GLOBAL), run, number, 0, (SOFTMAX,), ledger_head=head)


def test_the_last_head_of_each_run_is_kept(tmp_path):
    ledger = tmp_path / "site.jsonl"
    for head, name, number in ((ONE, "7", 1), (TWO, "7", 2), (ONE, "8", 1), ("", "9", 1)):
        keep_head(ledger, request(head, name, number))
    kept = json.loads((tmp_path / "site.heads.json").read_text())
    assert kept == {
        "7": {"head": TWO, "round": 2, "day": today()},
        "8": {"head": ONE, "round": 1, "day": today()},
    }


@pytest.mark.parametrize("content", ["nonsense", "3", "[]"])
def test_a_file_that_cannot_be_read_stays_as_it_is(tmp_path, content, caplog):
    path = heads_beside(tmp_path / "site.jsonl")
    path.write_text(content)
    with caplog.at_level(logging.WARNING, "cloister.client"):
        keep_head(tmp_path / "site.jsonl", request(ONE))
    assert path.read_text() == content and "was not kept" in caplog.text


@pytest.mark.parametrize("head", ["", "1" * 63, "G" * 64, "../../x", 3, ["1" * 64], ONE + "\n"])
def test_a_head_that_is_none_is_refused(tmp_path, head):
    node = {"partition-id": 0, "num-partitions": 4, "ledger-dir": str(tmp_path)}
    reply = app(message_of(**{LEDGER_HEAD: head, "privacy-events": gaussians(2.0)}), context_of(GLOBAL, node))
    assert "must carry 'ledger-head' as a SHA-256 digest, or not at all" in reply.error.reason
    assert not list(tmp_path.iterdir())


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
    run(LocalGrid(client, config.flat(), nodes), config, Narrator(2, Console(quiet=True)))
    ledger = Ledger(ledgers / "all.jsonl")
    assert told[0] == told[1] == GENESIS and told[2] == told[3] and {*told} <= ledger.heads()
    for node in nodes:
        ((kept),) = json.loads(heads_beside(ledger_of(node_of(node), "digits").path).read_text()).values()
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
    run(LocalGrid(client, config.flat(), nodes), config, Narrator(1, Console(quiet=True)))
    assert fields and not any(LEDGER_HEAD in found for found in fields)
