"""Small tasks of PyTorch for tests."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from cloister.config.run import TaskConfig
from cloister.tasks.base import Dataset, Examples, Recipe
from cloister.tasks.making import model_of
from cloister.tasks.targets import Target
from cloister.tasks.torch_model import TorchModel
from cloister.tasks.torch_task import TorchTask


class Small(TorchTask):
    """A label of three classes for six numbers; `network` is the module."""

    recipe = Recipe(local_epochs=2, batch_size=8, learning_rate=0.1)
    classes: ClassVar[int] = 3
    input_shape: ClassVar[Any] = (6,)
    models = ("net",)

    def load(self) -> Dataset:
        return Dataset(self.some(96, 0), self.some(32, 1))

    def some(self, count: int, seed: int) -> Examples:
        x = np.random.default_rng(seed).random((count, 6), np.float32)
        return Examples(x, np.floor(2.99 * x[:, 0]).astype(np.int64))

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


class Normalised(Small):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


class Frozen(Small):
    """A backbone with statistics, in evaluation mode."""

    def build(self) -> nn.Module:
        backbone = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        backbone.eval().requires_grad_(False)
        return nn.Sequential(backbone, nn.Linear(16, 3))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage, self.volume = nn.Linear(17, 3), nn.Linear(17, 1)

    def forward(self, picture: torch.Tensor, age: torch.Tensor) -> dict[str, torch.Tensor]:
        both = torch.cat([picture.flatten(1), age], 1)
        return {"volume": self.volume(both), "stage": self.stage(both)}


class Scans(TorchTask):
    """Two inputs and two outputs by name."""

    recipe = Recipe(local_epochs=2, batch_size=8, learning_rate=0.05)
    input_shape: ClassVar[Any] = {"picture": (1, 4, 4), "age": (1,)}
    target: ClassVar[Any] = {"stage": Target(classes=3), "volume": Target("mse", weight=0.5)}
    models = ("net",)

    def load(self) -> Dataset:
        rng = np.random.default_rng(0)
        x = {"picture": rng.random((64, 1, 4, 4), np.float32), "age": rng.random((64, 1), np.float32)}
        y = {"stage": np.floor(2.99 * x["age"][:, 0]).astype(int), "volume": x["picture"].sum((1, 2, 3))}
        whole = Examples(x, y)
        return Dataset(whole.take(np.arange(48)), whole.take(np.arange(48, 64)))

    def build(self) -> nn.Module:
        return Network()


def made(kind: type[TorchTask] = Small, **config: Any) -> TorchTask:
    return kind(TaskConfig(**config))


def model(kind: type[TorchTask] = Small, seed: int = 1, **config: Any) -> TorchModel:
    found = model_of(made(kind, **config))
    assert isinstance(found, TorchModel)
    found.initialise(seed)
    return found
