"""The examples, run as they are: their own client apps and server apps, over a grid in this process."""

import importlib
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from cloister.config.run import flatten, parse
from cloister.core.arrays import from_record
from cloister.local.grid import LocalGrid
from cloister.server.run import run
from cloister.tasks.digits import Digits

EXAMPLES = Path(__file__).parents[1] / "examples"
SITES = ["scikit_learn", "pytorch"]


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
    assert "claim: global-dp, sound" in shown and "the largest weight is 0." in shown


@pytest.mark.parametrize("example", SITES)
def test_sites_that_train_in_another_framework(module_of, tmp_path, example):
    if example == "pytorch":
        pytest.importorskip("torch", reason="PyTorch is no dependency: it is run where it is installed")
    client = module_of(example, "sites.client_app")
    config = parse(settings_of(example) | {"output-dir": str(tmp_path), "tensorboard": False, "seed": 1})
    outcome = run(LocalGrid.simulated(client.app, config.flat(), 10), config)
    assert outcome.plan.claim.status == "sound"
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [10] * 3
    first, last = outcome.rounds[0].central["accuracy"], outcome.rounds[-1].central["accuracy"]
    assert first < 0.2 and last > 0.6
    model = from_record(outcome.arrays)
    x, y = Digits(config.task).load().test.x, Digits(config.task).load().test.y
    scores = x @ model["softmax/kernel"] + model["softmax/bias"]
    assert np.mean(scores.argmax(axis=1) == y) == pytest.approx(last)


@pytest.mark.parametrize("example", ["wrapped", *SITES])
def test_an_example_is_an_app_that_flower_takes(example, tmp_path):
    from flwr.cli.build import build_fab_from_disk

    assert len(build_fab_from_disk(EXAMPLES / example)) < 20_000
