"""`cloister bench`: what it measures, what it refuses, and that it reads no data and leaves nothing behind."""

import json
import logging
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cloister import cli
from cloister.bench.clock import Times, in_turns
from cloister.bench.measure import Options, bench
from cloister.bench.record import record
from cloister.bench.words import render
from cloister.tasks.digits import Digits

ROOT = Path(__file__).parents[2]
SETTINGS = "task.model='softmax' seed=1"
TINY = {"task.model": "softmax", "seed": 1}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A working directory of the test's own, and a task whose data nobody may read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Digits, "load", lambda task: pytest.fail("data was read"))


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def measured(settings=None, **options):
    """The table, from as few turns as there can be, as JSON that was read back."""
    return json.loads(json.dumps(record(bench(TINY | (settings or {}), Options(**{"seconds": 0.01} | options)))))


def test_it_says_what_privacy_costs(tmp_path):
    result = invoke("-c", SETTINGS, "--seconds", 0.2)
    assert result.exit_code == 0, result.output
    for part in (
        "digits, fedavg; 650 parameters, batches of 16, 4 of 4 clients a round",
        "no data was read, nothing was sent, spent or written",
        "numpy ",
        "a training step, DP-SGD",
        "aggregation, metric",
        "noise on a message, gaussian",
        "noise on a message, laplace",
        "a number of exact noise, ",
        "2,600 down, 2,600 up",
        "1000 examples each, 315 steps",
        "as configured (server metric, clients none)",
    ):
        assert part in result.output, part
    assert not list(tmp_path.iterdir())


class TestNumbers:
    def test_a_round_is_the_sum_of_its_parts(self):
        told = measured({"privacy.server": "global-dp", "privacy.client": "dp-sgd"}, clients=3, examples=32)
        rows, sizes = told["rows"], told["sizes"]
        assert sizes == {"parameters": 650, "batch-size": 16, "steps": 10, "cohort": 3, "down": 2600, "up": 2600}
        for kind, name in (("plain", "plain"), ("configured", "private")):
            client, server = 10 * rows["training"][name]["median"], rows["aggregation"][name]["median"]
            assert told["round"][kind]["one-by-one"] == pytest.approx(3 * client + server)
            assert told["round"][kind]["side-by-side"] == pytest.approx(client + server)

    def test_noise_on_messages_counts_where_clients_add_it(self):
        told = measured({"privacy.server": "none", "privacy.client": "gaussian"}, examples=16)
        rows = told["rows"]
        client = 5 * rows["training"]["plain"]["median"] + rows["gaussian"]["private"]["median"]
        expected = client + rows["aggregation"]["plain"]["median"]
        assert told["round"]["configured"]["side-by-side"] == pytest.approx(expected)
        assert rows["aggregation"]["what"] == "aggregation, global-dp", "what noise on the server would cost"

    def test_models_side_by_side_are_all_sent(self):
        told = measured({"privacy.server": "laplace-clustering", "privacy.clusters": 3, "privacy.client": "laplace"})
        assert (told["sizes"]["down"], told["sizes"]["up"]) == (7800, 2600)

    def test_a_cohort_that_is_drawn(self):
        drawn = {"privacy.server": "global-dp", "strategy.sampling": "poisson", "strategy.fraction-train": 0.5}
        assert measured(drawn, clients=8)["sizes"]["cohort"] == 4

    def test_a_step_is_timed_and_not_a_turn(self, monkeypatch):
        one = {"plain": Times((8.0,)), "private": Times((16.0,))}
        monkeypatch.setattr(
            "cloister.bench.rows.in_turns", lambda actions, seconds: {name: one[name] for name in actions}
        )
        rows = measured()["rows"]
        assert (rows["training"]["plain"]["median"], rows["training"]["private"]["median"]) == (1.0, 2.0)
        assert rows["aggregation"]["ratio"] == 2.0


class TestClock:
    def test_actions_take_turns_and_the_first_is_not_counted(self):
        order = []
        actions = {name: lambda name=name: partial(order.append, name) for name in "ab"}
        found = in_turns(actions, 0.0)
        assert order == ["a", "b", "a", "b"] and all(len(times.seconds) == 1 for times in found.values())

    def test_getting_ready_is_not_timed(self, monkeypatch):
        now = iter(np.cumsum(np.ones(100)))
        monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))

        def prepare():
            time.perf_counter()
            return lambda: None

        assert in_turns({"a": prepare}, 0.0)["a"].seconds == (1.0,)

    def test_figures_of_turns(self):
        times, base = Times((1.0, 2.0, 3.0, 4.0, 100.0)), Times((1.0, 1.0, 1.0, 2.0, 10.0))
        assert (times.median, times.spread, times.ratio(base)) == (3.0, (2.0, 4.0), 2.0)
        assert times.times(0.5).median == 1.5 and Times((7.0,)).spread == (7.0, 7.0)


def test_it_spends_nothing_and_needs_no_budget_that_is_left(tmp_path):
    settings = {
        "privacy.server": "global-dp",
        "privacy.noise-multiplier": "auto",
        "privacy.max-epsilon": 1e-3,
        "privacy.ledger-dir": str(tmp_path),
    }
    assert measured(settings)["rows"]["aggregation"]["private"]["median"] > 0
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_done_says_why():
    found = bench(TINY | {"strategy.name": "krum", "privacy.server": "none"}, Options(seconds=0.01))
    (line,) = (line for line in render(found) if "cannot be done" in line)
    assert "aggregation, global-dp: cannot be done: privacy.placement = 'update'" in line
    assert found.configured is not None and found.rows["aggregation"].private is None


def test_strategies_that_write_about_their_rounds_are_quiet(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, "flwr"):
        measured({"strategy.name": "fedmedian", "privacy.server": "none"})
    assert not caplog.records


@pytest.mark.slow
def test_a_model_of_keras():
    row = measured({"task.model": "mlp"})["rows"]["training"]
    assert row["plain"]["median"] > 0 and row["private"]["median"] > 0 and not row["why"]


def test_its_options_are_explained():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    options = {option for parameter in get_command(cli.app).commands["bench"].params for option in parameter.opts}
    for option in options - {"-c", "-n", "--help"}:
        assert f"| `{option}" in page, option


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-c", "num-round=3"], "ConfigError: unknown key 'num-round'; did you mean 'num-rounds'"),
        (["-c", "stray"], "SettingsError: -c (--run-config): "),
        (["-c", SETTINGS, "-n", 1], "ConfigError: clients = 1 is fewer than strategy.min-nodes = 2"),
        (["-c", SETTINGS, "--seconds", 0], "ConfigError: --seconds must be > 0, got 0"),
        (["-c", SETTINGS, "--seconds", "nan"], "ConfigError: --seconds must be > 0, got nan"),
        (["-c", f"{SETTINGS} privacy.server='global-dp' privacy.population=9"], "privacy.population = 9 registers"),
        (["-c", "task.name='digit'"], "unknown task 'digit'"),
    ],
)
def test_an_error_is_one_line_that_names_the_key(tmp_path, arguments, says):
    result = invoke(*arguments)
    assert result.exit_code in (1, 2)
    (line,) = result.output.splitlines()
    assert says in line and not list(tmp_path.iterdir())
