"""Sites by name: wherever a run tells of a node that an operator has named."""

import io
import json
import shutil

import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from rich.console import Console

from cloister.client.app import app
from cloister.config.run import parse
from cloister.server.polling_grid import PollingGrid
from cloister.server.reports import status
from cloister.server.reports.console import ConsoleReporter, JsonReporter
from cloister.server.reports.html.page import write_report
from cloister.server.round import Sites
from cloister.server.run import run
from cloister.server.screening import Rejection
from cloister.simulation.grid import LocalGrid

SETTINGS = {"task.model": "softmax", "privacy.server": "none", "tensorboard": False, "num-rounds": 2}
NAMES = {1: "berlin", 2: "lyon", 3: ""}


class Named(LocalGrid):
    """Nodes 2 and 3 fail; a SuperLink knows 1 and 2 by name, and node 2 only while it is connected."""

    def get_nodes(self):
        return [NodeInfo(node_id=node, name=NAMES[node]) for node in self.get_node_ids()]

    def _answer(self, message):
        if message.metadata.dst_node_id > 1:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no"), reply_to=message)
        return super()._answer(message)


def told(tmp_path, narrator, **settings):
    said = io.StringIO()
    config = parse(SETTINGS | settings | {"output-dir": str(tmp_path), "run-name": "r"})
    grid = PollingGrid(Named.simulated(app, config.flat(), 3), 0)
    run(grid, config, narrator(2, Console(file=said, width=10**6, soft_wrap=True, markup=False, highlight=False)))
    return said.getvalue()


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return told(folder := tmp_path_factory.mktemp("named"), ConsoleReporter), folder / "r"


def test_a_line_names_the_site_and_a_nameless_node_by_its_number(said):
    lines = [line.strip().partition(", error")[0] for line in said[0].splitlines() if "rejected:" in line]
    assert set(lines) == {f"rejected: round {n}, {who}" for n in (1, 2) for who in ("lyon", "node 3")}


def test_the_record_and_the_status_have_both(said):
    *_, last = (json.loads(line) for line in (said[1] / "rounds.jsonl").read_text().splitlines())
    assert [(item["node_id"], item["site"]) for item in last["measured"]["rejected"]] == [(2, "lyon"), (3, "")]
    found = status.run_state(said[1])
    assert [reason.partition(",")[0] for reason in found.rejected] == ["lyon", "node 3"]
    assert json.loads(status.as_json(found, None))["run"]["codes"] == {"error": 2}


def test_the_report_names_sites_where_all_have_a_name(said, tmp_path):
    run_directory = shutil.copytree(said[1], tmp_path / "r")
    assert ">2</td><td>1 to 2" in write_report(run_directory).read_text()
    rounds = run_directory / "rounds.jsonl"
    rounds.write_text(rounds.read_text().replace('"site": ""', '"site": "oslo"'))
    assert "lyon, oslo" in write_report(run_directory).read_text()


def test_a_log_for_machines_has_the_number_and_the_name(tmp_path):
    events = [json.loads(line) for line in told(tmp_path, JsonReporter).splitlines()]
    rejected = [(event["node"], event.get("site")) for event in events if event["event"] == "rejected"]
    assert sorted(set(rejected)) == [("2", "lyon"), ("3", None)]


def test_a_secret_cohort_is_not_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(Sites, "learn", lambda *_: pytest.fail("names of a secret cohort"))
    secret = {"privacy.server": "global-dp", "strategy.sampling": "poisson", "strategy.fraction-train": 0.5}
    assert "lyon" not in told(tmp_path, ConsoleReporter, **secret | {"privacy.noise-multiplier": 1.0})


def test_a_name_is_kept_when_its_node_has_left():
    sites, grid = Sites(), Named.simulated(app, parse(SETTINGS).flat(), 2)
    sites.learn(grid)
    grid._contexts.clear()
    sites.learn(grid)
    (item,) = sites.named([Rejection(2, "missing", "no reply came before the deadline")])
    assert (item.who, item.node_id) == ("lyon", 2)


def test_a_name_cannot_forge_a_line():
    class Forging(Named):
        def get_nodes(self):
            return [NodeInfo(node_id=1, name="a\nround 2/2 accuracy 1")]

    sites = Sites()
    sites.learn(Forging.simulated(app, parse(SETTINGS).flat(), 1))
    assert "\n" not in sites.named([Rejection(1, "error", "no")])[0].who
