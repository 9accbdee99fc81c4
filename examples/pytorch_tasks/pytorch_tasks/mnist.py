"""MNIST with a small convolutional network."""

from dataclasses import replace

import torch

from cloister import Dataset, Examples, Recipe, TorchTask
from cloister.tasks.datasets.characters import Mnist


class Cnn(torch.nn.Module):
    """Two convolutions with 26,010 parameters (Papernot et al., 2021), which is also Opacus' example."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 8, stride=2, padding=3)
        self.conv2 = torch.nn.Conv2d(16, 32, 4, stride=2)
        self.hidden = torch.nn.Linear(512, 32)
        self.output = torch.nn.Linear(32, 10)

    def forward(self, x):
        """Return logits of shape (n, 10) for pictures of shape (n, 1, 28, 28)."""
        x = torch.nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2, 1)
        x = torch.nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2, 1)
        return self.output(torch.relu(self.hidden(x.flatten(1))))


class MnistTorch(TorchTask, Mnist):
    """The data of the task `mnist`, with channels first."""

    recipe = Recipe(local_epochs=1, batch_size=32, learning_rate=0.2)
    input_shape = (1, 28, 28)
    models = ("cnn",)
    public = True

    def load(self) -> Dataset:
        """Return the published split."""
        data = Mnist.load(self)
        return replace(data, train=channels_first(data.train), test=channels_first(data.test))

    def build(self) -> torch.nn.Module:
        """Return the network. Its last layer gives logits."""
        return Cnn()


def channels_first(examples: Examples) -> Examples:
    """Move the last axis of the inputs before the height."""
    return replace(examples, x=examples.x.transpose(0, 3, 1, 2))
