"""The frontier of accuracy and ε: its configurations, its sums without masks, and its table."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cloister.config.calibration import calibrated
from cloister.config.run import parse
from cloister.server.build import build
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate
from cloister.utils.arrays import from_record

SCRIPT = Path(__file__).parents[1] / "experiments" / "frontier.py"
SHARED = {
    "task.name": "digits",
    "task.model": "softmax",
    "num-rounds": 3,
    "evaluation.every": 3,
    "evaluation.federated": "off",
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
    "privacy.dp-sgd-noise-multiplier": 0.0,
    "privacy.dp-sgd-sampling-rate": 1.0,
    "client.learning-rate": 0.5,
    "strategy.name": "fedavgm",
    "strategy.server-learning-rate": 1.0,
    "strategy.momentum": 0.9,
    "strategy.min-nodes": 3,
    "secure-aggregation.enabled": True,
    "secure-aggregation.threshold": 3,
    "secure-aggregation.colluding": 1,
    "seed": 1,
}


@pytest.fixture
def frontier(monkeypatch):
    """The script."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("frontier", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(frontier, settings, members=3):
    config = parse(settings)
    return frontier.trained_in_shares(config, build(config).strategy, members)


def test_sums_without_masks_train_the_model_of_a_run_with_them(frontier, tmp_path):
    """With q = 1 and no noise the draws of both are the same."""
    quiet = ConsoleReporter(1, Console(quiet=True))
    masked = from_record(simulate(SHARED | {"output-dir": str(tmp_path), "tensorboard": False}, 3, quiet).arrays)
    ours = trained(frontier, SHARED)
    assert max(map(np.ptp, ours.values())) > 0.01
    for name, array in ours.items():
        np.testing.assert_allclose(array, masked[name], atol=1e-6)


@pytest.mark.parametrize("members", [3, 4])
def test_sums_without_masks_have_the_noise_of_a_list_of_all_members(frontier, members):
    """One share of `members` colludes, and a step moves the model by hardly more than noise."""
    keys = {
        "num-rounds": 1,
        "privacy.dp-sgd-noise-multiplier": 10.0,
        "privacy.dp-sgd-sampling-rate": 0.001,
        "strategy.min-nodes": members,
    }
    moved = np.concatenate([array.ravel() for array in trained(frontier, SHARED | keys, members).values()])
    units = len(frontier.benchmark_of(parse(SHARED).task).train)
    expected = 0.5 * 10.0 * np.sqrt(members / (members - 1)) / (0.001 * units)
    assert abs(moved.std() / expected - 1) < 5 / np.sqrt(2 * moved.size)


@pytest.mark.parametrize("task", ["digits", "heart-disease", "mnist", "alzheimer-mri"])
def test_every_cell_is_a_configuration(frontier, task):
    for mechanism in frontier.MECHANISMS:
        settings = frontier.settings_of(frontier.Cell(task, mechanism, 2.0, 0), 5000)
        config = parse({**frontier.COMMON, "task.name": task, **frontier.TASKS[task].settings, **settings})
        if mechanism == "distributed DP-SGD":
            assert config.sums_gradients and calibrated(config).shared_release
        else:
            assert config.shared_release is None


def test_central_and_distributed_steps_have_the_same_rate_and_number(frontier):
    from cloister.privacy.dpsgd.local_steps import LocalSteps

    cells = [frontier.Cell("mnist", name, 1.0, 0) for name in ("central DP-SGD", "distributed DP-SGD")]
    central, shared = (frontier.settings_of(cell, 60_000) for cell in cells)
    steps = LocalSteps(60_000, central["client.batch-size"], central["client.local-epochs"])
    assert (steps.rate, steps.count) == (shared["privacy.dp-sgd-sampling-rate"], shared["num-rounds"])


def test_the_table_has_what_is_there_and_the_hours_of_the_rest(frontier, tmp_path, capsys):
    cell = {"task": "digits", "mechanism": "central DP-SGD", "budget": 4.0, "epsilon": 3.5, "unit": "example"}
    lines = [{**cell, "seed": seed, "accuracy": 0.8 + seed / 10, "seconds": 3600.0} for seed in range(2)]
    place = tmp_path / "frontier"
    place.mkdir()
    (place / "digits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    frontier.main(["show", "--results", str(tmp_path), "--seeds", "2"])
    text = (place / "table.md").read_text()
    assert "| digits | central DP-SGD | 4 | 3.5, one example | 0.8500 ± 0.0707 | 2 |" in text
    assert "digits 6." in text, "three budgets of two seeds are left, an hour each"
    assert (place / "figure.png").stat().st_size > 1000
