"""The examples in PyTorch, run as tasks of an installed package."""

import importlib
import tomllib
from pathlib import Path

import numpy as np
import pytest
from quick_runs import quick_runs  # noqa: F401
from sklearn.datasets import load_digits
from tasks.test_tasks import real

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from cloister.config.run import TaskConfig  # noqa: E402
from cloister.privacy.dpsgd.torch_step import TorchDpSgd  # noqa: E402
from cloister.simulation.simulate import simulate  # noqa: E402
from cloister.tasks import TASKS  # noqa: E402
from cloister.tasks.making import model_of  # noqa: E402
from cloister.utils.errors import UnsupportedModel  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "pytorch_tasks"
SETTINGS = {"seed": 1, "tensorboard": False, "report": False, "privacy.server": "none", "run-name": "r"}


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The example, as pip would install it."""
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]["cloister.tasks"]
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name, value in points.items():
        monkeypatch.setitem(TASKS._table, name, value)


def run(folder, **settings):
    return simulate(SETTINGS | settings | {"output-dir": str(folder / "runs")}, 4)


def test_a_convolutional_network_learns_digits(tmp_path):
    """Of 8 by 8 pixels, enlarged."""
    pixels, labels = load_digits(return_X_y=True)
    large = np.pad(np.kron(pixels.reshape(-1, 8, 8), np.ones((3, 3))) * 15, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    file = tmp_path / "mnist.npz"
    np.savez(file, x_train=large[:1400], y_train=labels[:1400], x_test=large[1400:], y_test=labels[1400:])
    settings = {"task.name": "mnist-torch", "task.data-path": str(file), "num-rounds": 3}
    settings |= {"client.local-epochs": 4, "client.batch-size": 16}
    outcome = run(tmp_path, **settings)
    assert outcome.rounds[-1].central["accuracy"] > 0.8


def test_the_baseline_of_four_hospitals_learns_and_plain_pytorch_loads_it(tmp_path):
    from safetensors.torch import load_file

    settings = {"task.name": "heart-disease-torch", "task.data-path": real("heart-disease"), "num-rounds": 3}
    outcome = run(tmp_path, **settings)
    assert outcome.rounds[-1].central["accuracy"] > 0.75
    model = importlib.import_module("pytorch_tasks.heart_disease").Baseline()
    model.load_state_dict(load_file(tmp_path / "runs" / "r" / "model.safetensors"))
    assert torch.isfinite(model(torch.zeros(2, model.linear.in_features))).all()


def test_a_site_reads_its_own_file():
    module = importlib.import_module("pytorch_tasks.heart_disease")
    file = Path(real("heart-disease")) / "processed.va.data"
    examples = module.HeartDiseaseTorch(TaskConfig(name="heart-disease-torch")).read(file)
    assert len(examples) == 200 and set(examples.y) == {0, 1}


LIBRARIES = {"scans-monai": "monai", "notes-lora": "peft"}


def loaded(name, model="auto"):
    """A task of the example; its test is skipped where the library is absent."""
    pytest.importorskip(LIBRARIES[name])
    return TASKS.load(name)(TaskConfig(name=name, model=model))


def step_of(task):
    """DP-SGD on the task's module."""
    data, module = task.load().train, task.build()
    trained = [each for each in module.parameters() if each.requires_grad]
    return TorchDpSgd(
        module,
        batch_size=16,
        noise_multiplier=1.0,
        clipping_norm=1.0,
        optimizer=torch.optim.SGD(trained, 0.1),
        loss=lambda y, outputs: torch.nn.functional.cross_entropy(outputs, y, reduction="none"),
        probe=(data.x[:3], data.y[:3]),
    )


@pytest.mark.parametrize("name", LIBRARIES)
def test_models_of_other_libraries_learn(tmp_path, name):
    loaded(name)
    outcome = run(tmp_path, **{"task.name": name, "num-rounds": 4})
    assert outcome.rounds[-1].central["auc"] > 0.8


@pytest.mark.parametrize("name", LIBRARIES)
def test_dp_sgd_computes_them_in_rows(name):
    step = step_of(loaded(name))
    assert step.method == "rows", step.why_in_turn


def test_the_norm_of_batches_is_refused_with_the_norm_that_the_example_has():
    with pytest.raises(UnsupportedModel, match=r"features\.norm0.* normalises an example with the others .*GroupNorm"):
        step_of(loaded("scans-monai", "batch-norm"))


def test_adapters_and_the_head_alone_travel():
    task = loaded("notes-lora")
    model = model_of(task)
    assert all("lora_" in name or ".head." in name for name in model.arrays())
    body = ("words", "places", "query.base_layer", "key", "value.base_layer", "hidden", "output", "first", "second")
    assert all(any(f"{part}." in name for name in model.frozen()) for part in body)
