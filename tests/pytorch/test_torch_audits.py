"""Audits of finished runs of PyTorch tasks."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_tasks import Small  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from cloister import cli  # noqa: E402
from cloister.audits import gradient_inversion, scores  # noqa: E402
from cloister.audits.audit import FinishedRun  # noqa: E402
from cloister.audits.gradient_inversion import AUDIT  # noqa: E402
from cloister.simulation.simulate import simulate  # noqa: E402
from cloister.tasks import TASKS  # noqa: E402
from cloister.tasks.base import Dataset, Examples  # noqa: E402

pytestmark = pytest.mark.torch
SETTINGS = {"task.name": "mixed", "num-rounds": 2, "seed": 3, "tensorboard": False, "run-name": "small"}
CANARIES = {"privacy.server": "global-dp", "privacy.noise-multiplier": 0.01, "privacy.canaries": 100}


class Mixed(Small):
    """Labels that nothing explains, for a network with statistics that can learn them by heart."""

    input_shape = (30,)

    def load(self) -> Dataset:
        rng = np.random.default_rng(0)
        whole = Examples(rng.standard_normal((160, 30)).astype(np.float32), rng.integers(0, 3, 160))
        return Dataset(whole.take(np.arange(100)), whole.take(np.arange(100, 160)))

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(30, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))


class Pictures(Small):
    """Grey pictures with their channel first."""

    input_shape = (1, 8, 8)
    image_shape = (8, 8)

    def load(self) -> Dataset:
        x = np.random.default_rng(0).random((24, 1, 8, 8), np.float32)
        return Dataset(Examples(x, np.arange(24) % 3), Examples(x[:6], np.arange(6) % 3))

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(scores, "RESAMPLES", 200)
    for kind in (Mixed, Pictures):
        monkeypatch.setitem(TASKS._table, kind.__name__.lower(), f"{__name__}:{kind.__name__}")


def finished(folder, **settings):
    """Return the directory of a run of four clients."""
    given = SETTINGS | {"output-dir": str(folder), "privacy.server": "none"} | settings
    return simulate(given, 4).directory.path


def audited(run, name):
    """Return what one audit finds: `{attack: value}` of a quantity, and whether each control was met."""
    shown = CliRunner().invoke(cli.app, ["audit", str(run), "--only", name, "--shadows", "4"])
    assert shown.exit_code == 0, shown.output
    (found,) = json.loads((run / "audit.json").read_text())["findings"]
    values = {(each["attack"], each["quantity"]): each["value"] for each in found["measured"]}
    return values, [each for each in found["controls"] if not each["met"]]


def test_membership_inference_tells_what_a_network_learnt_by_heart(tmp_path):
    run = finished(tmp_path, **{"client.local-epochs": 20})
    values, unmet = audited(run, "membership-inference")
    assert values["loss threshold", "auc"] > 0.6 and values["LiRA, online", "auc"] > 0.7
    assert unmet == []


def test_client_inference_tells_who_takes_part(tmp_path):
    values, _ = audited(finished(tmp_path), "client-inference")
    assert values["likelihood ratio, round 1", "auc"] > 0.9


def test_canaries_bound_the_epsilon_of_a_run(tmp_path):
    values, unmet = audited(finished(tmp_path, **CANARIES), "canaries")
    assert values["canaries, distribution-free", "epsilon"] > 1 and unmet == []


def test_gradient_inversion_is_left_out_without_keras(tmp_path, monkeypatch):
    """It attacks a network of its own, in Keras, for runs of every framework."""
    run = FinishedRun.read(finished(tmp_path, **{"task.name": "pictures"}))
    assert AUDIT.misfit(run) == ""
    monkeypatch.setattr(gradient_inversion, "find_spec", lambda name: None)
    assert "pip install 'cloister-fl[keras]'" in AUDIT.misfit(run)
