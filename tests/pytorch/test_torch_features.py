"""Frozen features of a PyTorch module, whose weights are in a file."""

import hashlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import safetensors.torch  # noqa: E402
from torch import nn  # noqa: E402
from torch_tasks import Small  # noqa: E402

from cloister.config.run import TaskConfig  # noqa: E402
from cloister.tasks.features import FeatureTask  # noqa: E402
from cloister.tasks.making import model_of  # noqa: E402
from cloister.utils.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.torch


class Backed(Small):
    """A task with a backbone of its own, and a head on 5 features."""

    def build_extractor(self):
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.ReLU())

    def build_head(self, features):
        return nn.Linear(features, 3)


@pytest.fixture
def key(tmp_path):
    torch.manual_seed(3)
    path = tmp_path / "own.safetensors"
    safetensors.torch.save_file(Backed(TaskConfig(name="small")).build_extractor().state_dict(), path)
    return f"{path}@{hashlib.sha256(path.read_bytes()).hexdigest()}"


def task_of(kind, key):
    return FeatureTask(kind(TaskConfig(name="small")), TaskConfig(name="small", features=key))


def test_each_example_has_features_of_its_own_in_evaluation_mode(key):
    task, x = task_of(Backed, key), np.random.default_rng(0).random((7, 6)).astype(np.float32)
    together = task.prepared(x)
    assert together.shape == (7, 5)
    np.testing.assert_array_equal(together, np.concatenate([task.prepared(x[i : i + 1]) for i in range(7)]))
    np.testing.assert_array_equal(together, task_of(Backed, key).prepared(x))


def test_the_head_takes_the_features(key):
    task = task_of(Backed, key)
    model, data = model_of(task), task.load()
    assert sum(array.size for array in model.arrays().values()) == 18
    assert model.predict(data.test.x).shape == (32, 3)


def test_weights_without_a_module_are_refused(key):
    with pytest.raises(ConfigError, match=r"own.safetensors holds weights alone; .* needs build_extractor\(\)"):
        task_of(Small, key)


def test_weights_of_another_module_are_refused(key):
    class Other(Backed):
        def build_extractor(self):
            return nn.Linear(6, 4)

    with pytest.raises(ConfigError, match=r"does not fit the module of build_extractor\(\)"):
        task_of(Other, key)
