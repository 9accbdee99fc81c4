"""The examples, run as they are: their own client apps and server apps, over a grid in this process."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from quick_runs import quick_runs  # noqa: F401
from rich.console import Console

from cloister.config.io import flatten, read_settings
from cloister.config.run import parse
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.simulation.checking import check_task
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.tasks import TASKS
from cloister.tasks.datasets.characters import Digits
from cloister.utils.arrays import from_record

EXAMPLES = Path(__file__).parents[1] / "examples"
SITES = ["scikit_learn", pytest.param("pytorch", marks=pytest.mark.torch)]


def settings_of(name):
    """The app's own table of settings, as Flower flattens it."""
    return flatten(tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])


@pytest.fixture
def module_of(monkeypatch):
    """Imports a module of an example, whose packages have the same names."""

    def load(example, module):
        for name in [name for name in sys.modules if name.split(".")[0] in ("sites", "wrapped")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(str(EXAMPLES / example))
        return importlib.import_module(module)

    return load


def test_a_plain_flower_app_with_a_wrapped_strategy(module_of, capsys):
    client = module_of("wrapped", "wrapped.client_app")
    grid = LocalGrid.simulated(client.app, {}, 10)
    server = importlib.import_module("wrapped.server_app")
    server.app(grid, Context(1, 0, {}, RecordDict(), settings_of("wrapped")))
    shown = capsys.readouterr().out
    assert "claim: global-dp, conditional" in shown and "the largest weight is 0." in shown


@pytest.mark.parametrize("example", SITES)
def test_sites_that_train_in_another_framework(module_of, tmp_path, example):
    if example == "pytorch":
        pytest.importorskip("torch")
    client = module_of(example, "sites.client_app")
    config = parse(settings_of(example) | {"output-dir": str(tmp_path), "tensorboard": False, "seed": 1})
    outcome = run(LocalGrid.simulated(client.app, config.flat(), 10), config)
    assert outcome.statement.claim.status == "sound"
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [10] * 3
    first, last = outcome.rounds[0].central["accuracy"], outcome.rounds[-1].central["accuracy"]
    assert first < 0.2 and last > 0.6
    model = from_record(outcome.arrays)
    test = Digits(config.task).load().test
    scores = test.x @ model["softmax/kernel"] + model["softmax/bias"]
    assert np.mean(scores.argmax(axis=1) == test.y) == pytest.approx(last)


def test_no_mechanism_is_claimed_for_clients_that_state_none(module_of, tmp_path):
    """Its clients train without noise, whatever the run asks for."""
    client = module_of("scikit_learn", "sites.client_app")
    settings = {key: value for key, value in settings_of("scikit_learn").items() if not key.startswith("privacy.")}
    asked = {"privacy.server": "none", "privacy.client": "dp-sgd", "num-rounds": 1, "client.batch-size": 32}
    config = parse(settings | asked | {"output-dir": str(tmp_path), "tensorboard": False, "report": False})
    claim = run(LocalGrid.simulated(client.app, config.flat(), 10), config).statement.clients
    assert (claim.status, claim.reasons) == (
        "heuristic",
        ("no reply states that its client applied dp-sgd as this run asks for it",),
    )
    assert not any(size.figures for size in claim.sizes)


class TestAFrozenBackbone:
    @pytest.fixture
    def package(self, monkeypatch):
        """The task's package, as pip would install it."""
        folder = EXAMPLES / "frozen_backbone"
        points = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]["cloister.tasks"]
        monkeypatch.syspath_prepend(str(folder))
        for name, value in points.items():
            monkeypatch.setitem(TASKS._table, name, value)
        return importlib.import_module("frozen_digits.task")

    def test_its_file_holds_the_backbone(self, package):
        with np.load(package.WEIGHTS) as arrays:
            shapes = {name: array.shape for name, array in arrays.items()}
        assert shapes == {"kernel": (64, 32), "bias": (32,)} and package.WEIGHTS.stat().st_size < 10_000

    @pytest.mark.slow
    def test_the_file_is_what_the_script_trains_on_public_digits(self, package, tmp_path):
        """To three digits: other processors round otherwise, and sixty epochs make that a little larger."""
        pretrain = importlib.import_module("frozen_digits.pretrain")
        pretrain.write(tmp_path / "again.npz")
        with np.load(package.WEIGHTS) as shipped, np.load(tmp_path / "again.npz") as again:
            for name in ("kernel", "bias"):
                np.testing.assert_allclose(again[name], shipped[name], atol=0.02)

    @pytest.mark.slow
    def test_the_task_has_no_fault_and_says_what_is_frozen(self, package):
        lines = list(map(str, check_task("frozen-digits")))
        assert not [line for line in lines if line.startswith("fault")]
        assert "165 parameters trained and sent, 2,080 frozen (SHA-256 " in "\n".join(lines)

    @pytest.mark.slow
    def test_a_private_head_learns_what_the_readme_says(self, package, tmp_path):
        """The README's run at its first seed; by chance alone a fifth of the digits is told apart."""
        folder = EXAMPLES / "frozen_backbone"
        settings, _ = re.findall(r'^cloister run --clients 4 -c "(.*)"$', (folder / "README.md").read_text(), re.M)
        more = {"output-dir": str(tmp_path), "seed": 0, "tensorboard": False, "report": False}
        outcome = simulate(read_settings([settings]) | more, 4, ConsoleReporter(10, Console(quiet=True)))
        assert sorted(from_record(outcome.arrays)) == ["network/head/bias", "network/head/kernel"]
        assert outcome.statement.clients.status == "sound"
        assert outcome.rounds[-1].central["accuracy"] > 0.75


def test_an_example_is_an_app_that_flower_takes():
    from flwr.cli.build import build_fab_from_disk

    for example in ("wrapped", "scikit_learn", "pytorch"):
        assert len(build_fab_from_disk(EXAMPLES / example)) < 20_000
