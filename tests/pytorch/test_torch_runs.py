"""Runs of PyTorch tasks from end to end: mechanisms, statistics, resuming, saved models and devices."""

import sys
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quick_runs import quick_runs  # noqa: E402, F401
from torch_tasks import Normalised, Small, made, model  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from cloister.cli import app  # noqa: E402
from cloister.client.app import app as client_app  # noqa: E402
from cloister.client.trainers import chosen_to_train  # noqa: E402
from cloister.config.run import parse  # noqa: E402
from cloister.predict import predict  # noqa: E402
from cloister.server.reports.console import ConsoleReporter  # noqa: E402
from cloister.server.run import run  # noqa: E402
from cloister.simulation.grid import LocalGrid  # noqa: E402
from cloister.simulation.simulate import simulate  # noqa: E402
from cloister.tasks import TASKS  # noqa: E402
from cloister.tasks.making import model_of  # noqa: E402
from cloister.utils.arrays import from_record  # noqa: E402
from cloister.utils.errors import CloisterError, FederationError, NodeConfigError  # noqa: E402
from cloister.utils.state import STATE  # noqa: E402

pytestmark = pytest.mark.torch
BASE = {"num-rounds": 2, "seed": 1, "tensorboard": False, "report": False, "privacy.server": "none"}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name in ("Small", "Normalised", "Frozen", "Scans"):
        monkeypatch.setitem(TASKS._table, name.lower(), f"torch_tasks:{name}")


def settings(folder, **changes):
    return BASE | {"task.name": "small", "output-dir": str(folder)} | changes


SECURE = {"secure-aggregation.enabled": True, "strategy.min-nodes": 4, "privacy.server": "global-dp"}
RUNS = {
    "plain": {},
    "proximal": {"strategy.name": "fedprox", "client.optimizer": "adam", "client.class-weights": "1,2,3"},
    "several inputs and outputs, ended early": {"task.name": "scans", "evaluation.patience": 1},
    "global DP with statistics": {"task.name": "normalised", "privacy.server": "global-dp"},
    "metric noise on a frozen backbone": {"task.name": "frozen", "privacy.server": "metric"},
    "secure sum of weights and statistics": SECURE | {"task.name": "normalised"},
    "local Gaussian": {"privacy.client": "gaussian"},
    "local Laplace": {"privacy.client": "laplace"},
    "hypotheses chosen privately": {"privacy.server": "laplace-clustering", "privacy.client": "gaussian"},
    "median of statistics": {"task.name": "normalised", "strategy.name": "fedmedian"},
    "evaluation at the sites": {"evaluation.federated": "on", "task.test-fraction": 0.2},
    "a start that the server trains": {"strategy.pretrain-epochs": 1},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_every_client_and_saves_a_model_that_loads(tmp_path, name):
    outcome = simulate(settings(tmp_path, **RUNS[name]), 4)
    assert outcome.ended in ("as-asked", "early-stop")
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [4] * (len(outcome.rounds) - 1)
    saved = sorted(outcome.directory.path.glob("*.safetensors"))
    assert len(saved) == (2 if "clustering" in RUNS[name].get("privacy.server", "") else 1)
    loaded = model_of(made(vars(sys.modules["torch_tasks"])[RUNS[name].get("task.name", "small").capitalize()]))
    loaded.load(saved[0])
    kept = {
        key.removeprefix("0/"): array for key, array in from_record(outcome.arrays).items() if not key.startswith("1/")
    }
    np.testing.assert_equal(loaded.arrays(), kept)


def test_equal_seeds_give_equal_runs_whatever_ran_before(tmp_path):
    ends = []
    for number in (0, 1):
        torch.manual_seed(number)
        outcome = simulate(settings(tmp_path / str(number), **{"task.name": "normalised"}), 2)
        ends.append(from_record(outcome.arrays))
    np.testing.assert_equal(*ends)


def test_statistics_stay_at_each_site_and_in_its_own_model(tmp_path):
    config = parse(settings(tmp_path, **{"task.name": "normalised", "task.statistics": "local"}))
    nodes = [{"partition-id": n, "num-partitions": 2, "model-dir": str(tmp_path / str(n))} for n in (0, 1)]
    outcome = run(LocalGrid(client_app, config.flat(), nodes), config, ConsoleReporter(2))
    released, *own = (model(Normalised) for _ in range(3))
    released.load(outcome.directory.path / "model.safetensors")
    mean = f"{STATE}1.running_mean"
    assert mean not in from_record(outcome.arrays) and not released.arrays()[mean].any()
    for number, each in enumerate(own):
        each.load(tmp_path / str(number) / "model.safetensors")
    np.testing.assert_array_equal(*(each.arrays()["0.weight"] for each in own))
    assert not np.array_equal(*(each.arrays()[mean] for each in own))


def test_a_resumed_run_ends_like_one_without_interruption(tmp_path):
    whole = simulate(settings(tmp_path / "whole", **{"task.name": "normalised", "num-rounds": 3}), 2)
    begun = simulate(settings(tmp_path / "begun", **{"task.name": "normalised", "num-rounds": 1}), 2)
    resumed = simulate({"resume": str(begun.directory.path), "num-rounds": 3}, 2)
    np.testing.assert_equal(from_record(resumed.arrays), from_record(whole.arrays))


def test_a_released_model_that_is_not_finite_is_named(tmp_path):
    diverging = {"strategy.name": "fedavgm", "strategy.server-learning-rate": 1e37, "num-rounds": 1}
    with pytest.raises(CloisterError, match=r"model\.safetensors cannot be used: weights or predictions are NaN"):
        simulate(settings(tmp_path, **diverging), 2)


def test_predictions_are_those_of_the_saved_model(tmp_path):
    outcome = simulate(settings(tmp_path), 2)
    rows = made().some(5, 7)
    np.savez(tmp_path / "rows.npz", x=rows.x, y=rows.y)
    found = predict(outcome.directory.path, tmp_path / "rows.npz")
    loaded = model()
    loaded.load(outcome.directory.path / "model.safetensors")
    np.testing.assert_array_equal(found.outputs, loaded.predict(rows.x))
    assert found.metrics["loss"] == pytest.approx(made().metrics(rows.y, found.outputs)["loss"])


@pytest.mark.parametrize("name", ["normalised", "scans"])
def test_a_task_is_checked(name):
    done = CliRunner().invoke(app, ["check", "task", name])
    assert done.exit_code == 0 and "one round of 2 clients: loss" in done.output, done.output


def test_a_run_is_planned():
    told = "task.name='normalised' privacy.server='global-dp' num-rounds=2"
    done = CliRunner().invoke(app, ["plan", "--clients", "4", "-c", told])
    assert done.exit_code == 0 and "ε" in done.output, done.output


def test_a_private_choice_of_a_hypothesis_is_made_row_by_row():
    """A row on which a model fails has its own largest loss, and no other row's changes."""

    class Fails(Small):
        def build(self):
            return OnlyFinite()

    task, own = made(Fails), model(Fails)
    clustered = {"privacy.server": "laplace-clustering", "privacy.client": "dp-sgd", "privacy.choice-epsilon": 1e4}
    privacy = parse(clustered).privacy
    good = own.arrays()
    bad = {name: -30 * array for name, array in good.items()}
    rows = task.some(6, 0)
    y = own.predict(rows.x).argmax(1)
    rows.x[2] = np.nan
    assert chosen_to_train(privacy, own, [bad, good], task, replace(rows, y=y)) == 1
    assert chosen_to_train(privacy, own, [good, bad], task, replace(rows, y=y)) == 0


class OnlyFinite(torch.nn.Linear):
    def __init__(self):
        super().__init__(6, 3)

    def forward(self, x):
        if not torch.isfinite(x).all():
            raise ValueError
        return super().forward(x)


class TestDevice:
    def test_a_node_s_choice_holds_for_its_model(self):
        own = model()
        for device in ("cpu", "auto"):
            own.move(device)
            assert {each.device for each in own.module.parameters()} == {own.device}
            assert own.given(made().some(2, 0).x).device == own.device

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
    def test_a_device_that_is_not_there_is_told_to_its_owner_alone(self, tmp_path):
        with pytest.raises(
            NodeConfigError, match="'cuda': PyTorch finds no such device on this machine; use auto or cpu"
        ):
            model().move("cuda")
        config = parse(settings(tmp_path, **{"num-rounds": 1}))
        nodes = [{"partition-id": n, "num-partitions": 2, "device": "cuda"} for n in (0, 1)]
        with pytest.raises(FederationError, match=r"NodeConfigError: details are in the log of the node$"):
            run(LocalGrid(client_app, config.flat(), nodes), config, ConsoleReporter(1))
