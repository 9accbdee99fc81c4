"""Whole runs of models with a handful of parameters: what they learn, what is claimed, and what they never import."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from test_owners import charges, twenty_hospitals
from test_tasks import real

import cloister.tasks
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate
from cloister.tasks.datasets.regressions import OPTIMA
from cloister.utils.errors import ConfigError

COMMON = {"seed": 1, "tensorboard": False, "keep-checkpoints": 1}
GLOBAL_DP = {"privacy.server": "global-dp", "privacy.clipping-norm": 1.0, "privacy.noise-multiplier": 1.0}


def run(folder, clients, settings):
    everything = COMMON | {"output-dir": str(folder / "runs")} | settings
    return simulate(everything, clients, ConsoleReporter(3, Console(file=io.StringIO())))


def theta(outcome):
    (array,) = outcome.arrays.values()
    return array.numpy()


@pytest.mark.slow
def test_one_model_for_two_populations_ends_between_them(tmp_path):
    """Their mean has an RMSE of ½‖θ*₁ - θ*₂‖ = 5.27 from inputs of unit variance; each alone would have 0.29."""
    outcome = run(tmp_path, 100, {"task.name": "linear", "num-rounds": 25, "task.test-fraction": 0.0} | GLOBAL_DP)
    assert np.abs(theta(outcome) - OPTIMA.mean(axis=0)).max() < 0.5
    assert min(np.linalg.norm(theta(outcome) - optimum) for optimum in OPTIMA) > 4.5


def test_a_user_alone_finds_its_own_optimum(tmp_path):
    settings = {"task.name": "linear", "num-rounds": 60, "strategy.min-nodes": 1, "privacy.server": "none"}
    alone = run(tmp_path, 1, settings)
    assert np.linalg.norm(theta(alone) - OPTIMA[0]) < 0.6


def test_more_clients_than_users_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="has 100 owners for 101 clients"):
        run(tmp_path, 101, {"task.name": "linear", "privacy.server": "none"})
    assert not (tmp_path / "runs").exists()


def test_hospitals_score_the_rmse_on_what_they_keep_back(tmp_path):
    charges(tmp_path, twenty_hospitals())
    settings = {"task.name": "hospital-charges", "task.data-path": str(tmp_path), "num-rounds": 2}
    outcome = run(tmp_path, 14, settings | {"privacy.server": "none", "task.test-fraction": 0.5})
    last = outcome.rounds[-1]
    assert {"loss", "rmse"} <= set(last.federated) and {"loss", "rmse"} <= set(last.central)


@pytest.mark.slow
def test_two_thousand_hospitals_learn(tmp_path):
    settings = {
        "task.name": "hospital-charges",
        "task.data-path": real("cms-inpatient"),
        "num-rounds": 10,
        "strategy.fraction-train": 0.05,
        "privacy.server": "none",
        "task.test-fraction": 0.0,
    }
    outcome = run(tmp_path, 2206, settings)
    assert outcome.rounds[-1].central["rmse"] < 2.0


FRAMEWORKS = ("torch_model", "sklearn_models")
"""Modules that import the framework of their models."""
HEAVY = ("cv2", "keras", "pandas", "scipy.stats", "sklearn", "tensorflow", "torch")


def test_neither_tasks_nor_a_run_of_a_small_one_import_anything_heavy(tmp_path):
    folder = Path(cloister.tasks.__file__).parent
    paths = [path.relative_to(folder).with_suffix("") for path in folder.rglob("[a-z]*.py")]
    light = [".".join(("cloister.tasks", *path.parts)) for path in paths if path.name not in FRAMEWORKS]
    program = f"""
import sys, {", ".join(["cloister.tasks", *light])}
def heavy():
    return [name for name in {HEAVY} if name in sys.modules]
print(heavy())
from cloister.simulation.simulate import simulate
simulate({{"task.name": "linear", "num-rounds": 1, "privacy.server": "none", "tensorboard": False,
           "output-dir": {str(tmp_path)!r}}}, 10)
print(heavy())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=folder.parents[1]
    )
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("[]", "[]")
