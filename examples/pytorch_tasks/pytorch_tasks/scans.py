"""Made-up scans, told apart by a DenseNet of MONAI."""

import numpy as np
import torch
from monai.networks.nets import DenseNet

from cloister import Dataset, Examples, Recipe, TorchTask

SIDE = 32
NORMS = {"group-norm": ("group", {"num_groups": 4}), "batch-norm": "batch"}
"""MONAI's argument by `task.model`. DP-SGD needs a norm of each scan alone: the first."""


class ScansMonai(TorchTask):
    """Half of the scans have a round lesion."""

    recipe = Recipe(local_epochs=2, batch_size=16, learning_rate=0.01, optimizer="adam")
    classes, class_names = 2, ("healthy", "lesion")
    input_shape = (1, SIDE, SIDE)
    image_shape = (SIDE, SIDE)
    models = tuple(NORMS)
    public = True

    def load(self) -> Dataset:
        """Return 240 scans to train on and 80 to test on."""
        rng = np.random.default_rng(0)
        return Dataset(scans(rng, 240), scans(rng, 80))

    def build(self) -> torch.nn.Module:
        """Return a small DenseNet; `DenseNet121` has the same arguments."""
        return DenseNet(
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            init_features=16,
            growth_rate=8,
            block_config=(2, 2),
            norm=NORMS[self.model_name],
        )


def scans(rng: np.random.Generator, count: int) -> Examples:
    """Return made-up scans with pixels from 0 to 1, and whether each has a lesion."""
    y = np.arange(count) % 2
    places = np.arange(SIDE)
    middle, width = rng.uniform(8, SIDE - 8, (2, count, 1)), rng.uniform(2, 3, (count, 1))
    row, column = np.exp(-(((places - middle) / width) ** 2))
    lesions = y[:, None, None] * row[:, :, None] * column[:, None, :]
    x = 0.3 + 0.5 * lesions + rng.normal(0, 0.1, (count, SIDE, SIDE))
    return Examples(np.clip(x, 0, 1)[:, None].astype(np.float32), y)
