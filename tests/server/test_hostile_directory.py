"""A run directory that somebody else made is read as data, or refused in a line; nothing in it is followed or run."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
from rich.console import Console
from support import failures
from typer.testing import CliRunner

from cloister import cli
from cloister.audits.audit import Effort, FinishedRun, audit
from cloister.audits.findings import Audited
from cloister.monitoring.alerts import findings
from cloister.monitoring.snapshot import Places, look
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


@pytest.mark.parametrize("content", ["[" * 200_000, '{"config": 1e999}', None], ids=["deep", "other", "device"])
def test_a_configuration_that_is_none_is_one_error(run, content):
    (run / "config.json").unlink()
    if content is None:
        (run / "config.json").symlink_to("/dev/null")
    else:
        (run / "config.json").write_text(content)

    def check(reader):
        with pytest.raises((ConfigError, DataError)):
            readers(run)[reader]()

    assert failures(["status", "report", "compare", "audit", "predict", "resume"], check) == []


@pytest.mark.parametrize("name", ["config.json", "state.json", "rounds.jsonl"])
def test_a_run_is_not_resumed_from_a_device(run, name):
    (run / "privacy.json").unlink()  # it has not ended
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="resume"):
        readers(run)["resume"]()


def test_rounds_that_are_none_are_one_error(run):
    def check(reader, line):
        if reader == "status" and "central" in line:
            line = '{"round": 1, "seconds": [1]}'
        (run / "rounds.jsonl").write_text(line + "\n")
        with pytest.raises(ConfigError):
            readers(run)[reader]()

    wrong = ["[" * 200_000, '{"round": 1e999}', '{"round": "x"}', '{"round": 1, "central": [1]}']
    assert failures(product(["status", "report", "compare"], wrong), check) == []


def test_what_a_watch_computes_with_are_numbers(run):
    content = json.loads((run / "config.json").read_text())
    for wrong in ("x", [1], {}):
        (run / "config.json").write_text(json.dumps(content | {"config": content["config"] | {"round-timeout": wrong}}))
        seen = look(Places(runs=run.parent))
        assert seen.run is None and [item.kind for item in findings(seen, 0.0)] == ["unreadable"]


@pytest.mark.parametrize("name", ["model.npz", "checkpoints/round-00001.npz"])
def test_a_small_archive_of_many_numbers_is_no_model(run, name):
    np.savez_compressed(run / name, weights=np.zeros(1 << 18))
    with pytest.raises(DataError, match="holds no model"):
        if name == "model.npz":
            readers(run)["audit"]()
        else:
            FinishedRun.read(run).released()


def test_a_number_of_clients_that_nobody_can_simulate(run):
    (run / "simulation.json").write_text(json.dumps({"clients": 10**12}))
    with pytest.raises(ConfigError, match="a whole number up to 1000000"):
        readers(run)["audit"]()


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
