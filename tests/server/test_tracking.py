"""A run in MLflow: what leaves, what does not, and what happens without MLflow.

Importing MLflow and making a store in a file take ten seconds: fast tests have a client in its place.
"""

import json
import logging
import os
import shutil
import sqlite3
import sys
from collections import namedtuple
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support import failures

from cloister.config.run import parse
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.loggers import _installed
from cloister.simulation.simulate import simulate
from cloister.utils.errors import ConfigError
from cloister.utils.files import DAY

pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="the extra cloister-fl[mlflow] is not installed")
QUICK = {"task.model": "softmax", "num-rounds": 2, "tensorboard": False, "tracking": "mlflow", "client.local-epochs": 1}
SOUND = {"privacy.server": "global-dp", "privacy.noise-multiplier": 2.0}
POISSON = SOUND | {"strategy.sampling": "poisson", "strategy.fraction-train": 0.8}
DAY_IN_MS = DAY * 1000


def mlflow():
    """As the product imports it: whoever comes first decides whether it reports to its makers."""
    return _installed()


@pytest.fixture(autouse=True)
def no_store_of_the_user(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An output-dir: its store is made once, as that takes seconds."""
    return tmp_path_factory.mktemp("runs")


def ran(folder, settings):
    return simulate(QUICK | {"output-dir": str(folder)} | settings, 3, ConsoleReporter(2, Console(quiet=True)))


def tracked(outcome):
    """The run as MLflow knows it."""
    client = mlflow().MlflowClient(f"sqlite:///{outcome.directory.path.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("cloister")
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{outcome.directory.path.name}'")
    return client, run


Param, Metric = namedtuple("Param", "key value"), namedtuple("Metric", "key value timestamp step")


class Client:
    """Keep what a run tells a client of MLflow, and files where a store has them."""

    def __init__(self, store):
        self.file = Path(store.removeprefix("sqlite:///"))
        self.times, self.metrics, self.params, self.kept = [], [], {}, {}

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name, artifact_location):
        self.artifacts = Path(artifact_location.removeprefix("file://"))
        return "1"

    def create_run(self, experiment, start_time, run_name):
        self.file.write_text("begun")
        self.times.append(start_time)
        return SimpleNamespace(info=SimpleNamespace(run_id="a"))

    def log_batch(self, run, metrics=(), params=()):
        self.metrics += metrics
        self.params |= {param.key: param.value for param in params}
        self.times += [metric.timestamp for metric in metrics]
        self.file.write_text(f"{len(self.metrics)} metrics")

    def log_artifact(self, run, path):
        self.artifacts.mkdir(exist_ok=True)
        self.kept[path.name] = Path(shutil.copyfile(path, self.artifacts / path.name))

    def set_terminated(self, run, status, end_time):
        self.file.write_text(status)
        self.status = status
        self.times.append(end_time)


@pytest.fixture
def clients(monkeypatch):
    """Return every client that is asked instead of MLflow's."""
    made = []

    def client(store):
        made.append(Client(store))
        return made[-1]

    module = SimpleNamespace(MlflowClient=client, entities=SimpleNamespace(Param=Param, Metric=Metric))
    monkeypatch.setattr("cloister.server.reports.loggers._installed", lambda: module)
    return made


def curve(client, run, name):
    return {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}


@pytest.mark.slow
@pytest.mark.usefixtures("runs_end_with_a_page")
def test_settings_curves_claim_and_report_of_a_run(folder, tmp_path):
    outcome = ran(folder, SOUND | {"run-name": "sound", "seed": 4})
    client, run = tracked(outcome)
    assert run.info.status == "FINISHED" and run.info.end_time >= run.info.start_time > 10**12
    assert run.data.params["privacy.noise-multiplier"] == "2.0" and run.data.params["task.name"] == "digits"
    assert run.data.params["seed"] == "4"
    for name in ("loss", "accuracy"):
        expected = {done.number: done.central[name] for done in outcome.rounds}
        assert curve(client, run, f"central/{name}") == expected
    epsilons = {done.number: done.measured.epsilon for done in outcome.rounds if done.measured}
    assert curve(client, run, "privacy/epsilon") == epsilons and len(epsilons) == 2
    assert curve(client, run, "replies/rejected") == {1: 0.0, 2: 0.0}
    kept = {
        item.path: client.download_artifacts(run.info.run_id, item.path, str(tmp_path))
        for item in client.list_artifacts(run.info.run_id)
    }
    assert set(kept) == {"privacy.json", "report.html"}
    for name, path in kept.items():
        assert Path(path).read_bytes() == (outcome.directory.path / name).read_bytes()
    assert json.loads(Path(kept["privacy.json"]).read_text())["ended"]["how"] == "as-asked"


def test_a_secret_cohort_tells_neither_times_nor_replies(tmp_path, clients):
    outcome = ran(tmp_path, POISSON)
    (client,) = clients
    assert outcome.plan.hides_times and client.status == "FINISHED"
    names = {metric.key for metric in client.metrics}
    assert {metric.step for metric in client.metrics if metric.key == "central/accuracy"} == {0, 1, 2}
    assert not any(name.startswith("replies/") or name == "privacy/clipped-fraction" for name in names)
    assert len(client.times) > 4 and all(moment % DAY_IN_MS == 0 for moment in client.times)
    assert client.kept.keys() == {"privacy.json"}


def test_any_other_tells_times_replies_and_settings_but_no_seed_of_the_noise(tmp_path, clients):
    ran(tmp_path, SOUND | {"privacy.noise-seed": 7_654_321})
    (client,) = clients
    assert {metric.value for metric in client.metrics if metric.key == "replies/rejected"} == {0.0}
    assert any(moment % DAY_IN_MS for moment in client.times)
    assert client.params["privacy.noise-multiplier"] == "2.0" and "privacy.noise-seed" not in client.params


@pytest.mark.slow
def test_the_store_of_a_secret_cohort_tells_neither_times_nor_replies(folder):
    outcome = ran(folder, POISSON | {"run-name": "secret"})
    client, run = tracked(outcome)
    assert outcome.plan.hides_times and curve(client, run, "central/accuracy").keys() == {0, 1, 2}
    assert not any(name.startswith("replies/") or name == "privacy/clipped-fraction" for name in run.data.metrics)
    with sqlite3.connect(folder / "mlflow.db") as store:
        for table, column in (("runs", "start_time"), ("runs", "end_time"), ("metrics", "timestamp")):
            times = store.execute(f"SELECT {column} FROM {table} WHERE run_uuid = ?", [run.info.run_id]).fetchall()
            assert times and all(time % DAY_IN_MS == 0 for (time,) in times), table
    artifacts = [path for path in (folder / "mlartifacts").rglob("*") if run.info.run_id in str(path)]
    assert any(path.name == "privacy.json" for path in artifacts)


def test_a_store_behind_an_address_would_tell_the_times_and_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"contradicts the secrecy of draws .* sqlite:///"):
        ran(tmp_path, POISSON | {"tracking-uri": "http://127.0.0.1:9"})
    assert not list(tmp_path.glob("*/*"))


def test_a_client_that_fails_ends_the_run_before_it_begins(tmp_path, monkeypatch, clients):
    monkeypatch.setattr(Client, "get_experiment_by_name", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match=r"mlflow.db in output-dir = .* cannot be used as a store of MLflow: ZeroD"):
        ran(tmp_path, SOUND)
    store = "nosuch://name:password@host"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI cannot be used as a store of MLflow") as refused:
        ran(tmp_path, SOUND)
    assert "password" not in str(refused.value) and not list(tmp_path.glob("*/*"))


@pytest.mark.slow
def test_a_store_that_cannot_be_used_ends_the_run_before_it_begins(tmp_path, monkeypatch):
    (tmp_path / "notes").write_text("mine")
    store = f"sqlite:///{tmp_path}/notes/mlflow.db"
    with pytest.raises(ConfigError, match=r"tracking-uri = .* cannot be used as a store of MLflow"):
        ran(tmp_path / "runs", SOUND | {"tracking-uri": store})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.replace("sqlite", "nosuch://name:password@"))
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI cannot be used as a store of MLflow") as refused:
        ran(tmp_path / "runs", SOUND)
    assert "password" not in str(refused.value) and not list((tmp_path / "runs").glob("*/*"))


@pytest.mark.slow
def test_a_run_that_is_not_resumed_leaves_no_second_one_behind(folder):
    outcome = ran(folder, {"run-name": "broken-off", "num-rounds": 1})
    (outcome.directory.path / "privacy.json").unlink()
    (outcome.directory.path / "ledger.json").write_text('{"path": "elsewhere", "head": ""}')
    with pytest.raises(ConfigError, match="and was elsewhere"):
        simulate({"resume": str(outcome.directory.path)}, None, ConsoleReporter(1, Console(quiet=True)))
    tracked(outcome)  # it is one run


def test_a_client_hears_that_a_run_failed_as_it_began(tmp_path, monkeypatch, clients):
    monkeypatch.setattr(PrivacyBudget, "begin", lambda self, run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ran(tmp_path, {"privacy.server": "none"})
    assert clients[0].status == "FAILED" and len(clients[0].times) == 2


def test_a_store_that_breaks_costs_a_warning_and_not_the_run(tmp_path, monkeypatch, caplog, clients):
    calls = []

    def broken(self, run_id, metrics=(), params=(), **_):
        calls.append(len(metrics))
        if metrics:
            raise ConnectionError("name:password@host")

    monkeypatch.setattr(Client, "log_batch", broken)
    with caplog.at_level(logging.WARNING, "cloister.server"):
        outcome = ran(tmp_path, {"privacy.server": "none"})
    assert outcome.ended == "as-asked" and len(outcome.rounds) == 3 and any(calls)
    said = [record.getMessage() for record in caplog.records if "MLflow" in record.getMessage()]
    assert said == [f"MLflow does not have round {number}: ConnectionError" for number in range(3)]


def test_without_mlflow_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"needs MLflow: pip install 'cloister-fl\[mlflow\]'"):
        ran(tmp_path, SOUND)
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.slow
def test_mlflow_reports_nothing_to_its_makers_even_if_it_was_there_before(folder, monkeypatch):
    from mlflow.telemetry import client

    monkeypatch.setattr(client, "_MLFLOW_TELEMETRY_CLIENT", object())
    ran(folder, {"privacy.server": "none", "run-name": "quiet", "num-rounds": 1})
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true" and client.get_telemetry_client() is None


def test_settings_that_cannot_be():
    def check(settings, says):
        with pytest.raises(ConfigError, match=says) as refused:
            parse(settings)
        assert "hidden" not in str(refused.value)

    cases = [
        (
            {"tracking-uri": "sqlite:///a.db"},
            r"tracking-uri = 'sqlite:///a.db' has no effect with tracking = 'none'",
        ),
        ({"tracking": "wandb"}, r"tracking = 'wandb' is not valid: it must be 'none' or 'mlflow'"),
        (
            {"tracking": "mlflow", "tracking-uri": "http://me:hidden@host"},
            "name a store with a password by MLFLOW_TR",
        ),
    ]
    assert failures(cases, check) == []
