"""A run directory that is damaged or foreign is read as data, or refused in a line; nothing in it is run."""

import json
import shutil
from itertools import product

import pytest
from rich.console import Console
from support import failures
from typer.testing import CliRunner

from cloister import cli
from cloister.audits.audit import Effort, FinishedRun, audit
from cloister.audits.findings import Audited
from cloister.monitoring.snapshot import Places, findings, look
from cloister.predict import predict
from cloister.server.reports.compare.runs import read_runs
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.html.page import write_report
from cloister.server.reports.status import run_state
from cloister.simulation.simulate import simulate
from cloister.utils.errors import ConfigError, DataError

MARK = "<script>alert(1)</script>\x1b]0;mine\x07"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    settings = {"task.name": "linear", "num-rounds": 1, "tensorboard": False, "report": False, "privacy.server": "none"}
    simulate(settings | {"output-dir": str(folder), "run-name": "r"}, 2, ConsoleReporter(1, Console(quiet=True)))
    return folder / "r"


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made, tmp_path / "r")
    return tmp_path / "r"


def readers(run):
    data = run.parent / "x.csv"
    data.write_text("a,b\n1,2\n")
    return {
        "status": lambda: run_state(run),
        "report": lambda: write_report(run),
        "compare": lambda: read_runs([run]),
        "audit": lambda: audit(run, Effort()),
        "predict": lambda: predict(run, data),
        "resume": lambda: simulate({"resume": str(run)}, 2, ConsoleReporter(1, Console(quiet=True))),
    }


def test_a_configuration_that_is_none_is_one_error(run):
    (run / "config.json").write_text('{"config": 1e999}')

    def check(reader):
        with pytest.raises((ConfigError, DataError)):
            readers(run)[reader]()

    assert failures(["status", "report", "compare", "audit", "predict", "resume"], check) == []


def test_rounds_that_are_none_are_one_error(run):
    def check(reader, line):
        if reader == "status" and "central" in line:
            line = '{"round": 1, "seconds": [1]}'
        (run / "rounds.jsonl").write_text(line + "\n")
        with pytest.raises(ConfigError):
            readers(run)[reader]()

    wrong = ['{"round": 1e999}', '{"round": "x"}', '{"round": 1, "central": [1]}']
    assert failures(product(["status", "report", "compare"], wrong), check) == []


def test_what_a_watch_computes_with_are_numbers(run):
    content = json.loads((run / "config.json").read_text())
    for wrong in ("x", [1], {}):
        (run / "config.json").write_text(json.dumps(content | {"config": content["config"] | {"round-timeout": wrong}}))
        seen = look(Places(runs=run.parent))
        assert seen.run is None and [item.kind for item in findings(seen, 0.0)] == ["unreadable"]


PREMISE = {"name": MARK, "sentence": MARK, "by": MARK, "known": "assumed", "standing": False}


def test_text_is_neither_markup_nor_orders_to_a_terminal(run):
    for name, place in (("config.json", ("config", "task.name")), ("privacy.json", ("ended", "why"))):
        content = json.loads((run / name).read_text())
        content[place[0]][place[1]] = MARK
        (run / name).write_text(json.dumps(content))
    privacy = json.loads((run / "privacy.json").read_text())
    (run / "privacy.json").write_text(
        json.dumps(privacy | {"mechanism": MARK, "unprotected": [MARK], "premises": [PREMISE]})
    )
    page = write_report(run).read_text()
    assert "alert(1)" in page and "<script" not in page and "\x1b" not in page
    for command in (["status", "--runs"], ["compare"], ["predict"], ["audit"]):
        more = [str(run / "config.json")] if command == ["predict"] else []
        done = CliRunner().invoke(cli.app, [*command, str(run), *more])
        assert done.output and "\x1b" not in done.output, command


def test_what_is_claimed_is_no_order_to_a_terminal_when_a_run_is_audited(run, capsys):
    privacy = FinishedRun.read(run).privacy | {"mechanism": MARK}
    Audited(run, privacy, (), ()).show(Console(markup=False))
    said = capsys.readouterr().out
    assert "alert(1)" in said and "\x1b" not in said
