"""Heart disease in four hospitals, in the shape of FLamby: a dataset of each center, a baseline, and its loss."""

from pathlib import Path

import numpy as np
import torch

from cloister import Dataset, Examples, Recipe, Target, TorchTask
from cloister.config.run import TaskConfig
from cloister.tasks.datasets.patients import HOSPITALS, HeartDisease
from cloister.tasks.partition import holdout
from cloister.utils.files import expanded


class FedHeartDisease(torch.utils.data.Dataset):
    """The patients of one center. FLamby's dataset of this name has the same arguments and items."""

    def __init__(self, center: int, train: bool, data_path: Path):
        file = data_path / f"processed.{HOSPITALS[center]}.data"
        whole = HeartDisease(TaskConfig(name="heart-disease")).read(file)
        training, test = holdout(whole.y, 0.2, np.random.default_rng(0))
        part = whole.take(training if train else test)
        self.features, self.labels = torch.tensor(part.x), torch.tensor(part.y, dtype=torch.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.features[index], self.labels[index]


class Baseline(torch.nn.Module):
    """Logistic regression, which gives a logit: `BaselineLoss` is binary cross-entropy with logits."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(HeartDisease.table.width, 1)

    def forward(self, x):
        """Return logits of shape (n,)."""
        return self.linear(x)[:, 0]


class HeartDiseaseTorch(TorchTask, HeartDisease):
    """A site reads its own file as in the task `heart-disease`."""

    recipe = Recipe(local_epochs=5, batch_size=16, learning_rate=0.1)
    classes, class_names = 0, ()
    target = Target("binary-cross-entropy")
    models = ("baseline",)
    public = True

    def load(self) -> Dataset:
        """Return the data of all centers; each is a site of the natural partition."""
        folder = expanded(self.config.data_path)
        train, test = (
            [self.examples(FedHeartDisease(center, part, folder)) for center in range(len(HOSPITALS))]
            for part in (True, False)
        )
        owners = np.repeat(np.arange(len(HOSPITALS)), [len(each) for each in train])
        return Dataset(Examples.joined(train), Examples.joined(test), owners=owners)

    def build(self) -> torch.nn.Module:
        """Return the baseline."""
        return Baseline()
