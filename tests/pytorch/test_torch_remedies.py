"""Layers that Opacus' `ModuleValidator` refuses: accepted here, or refused with a replacement that is accepted."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from cloister.privacy.dpsgd.torch_step import TorchDpSgd  # noqa: E402
from cloister.utils.errors import UnsupportedModel  # noqa: E402

pytestmark = pytest.mark.torch
REFUSED = {
    "batch norm": nn.BatchNorm2d,
    "batch norm without statistics": lambda channels: nn.BatchNorm2d(channels, track_running_stats=False),
    "synchronised batch norm": nn.SyncBatchNorm,
    "instance norm with statistics": lambda channels: nn.InstanceNorm2d(channels, track_running_stats=True),
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.inner(x)[0][:, -1])


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.inner(x, x, x)[0].mean(dim=1))


def step_of(module, shape):
    """Take one step of DP-SGD."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((7, *shape)).astype(np.float32), rng.integers(0, 3, 7)
    own = TorchDpSgd(
        module,
        batch_size=8,
        noise_multiplier=1.0,
        clipping_norm=1.0,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        loss=lambda y, outputs: nn.functional.cross_entropy(outputs, y, reduction="none"),
        probe=(x[:3], y[:3]),
    )
    own.step(x, y)


def convolutional(norm):
    return nn.Sequential(nn.Conv2d(2, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))


@pytest.mark.parametrize("name", REFUSED)
def test_the_replacement_of_a_refused_layer_is_accepted(name):
    with pytest.raises(UnsupportedModel, match="GroupNorm") as refusal:
        step_of(convolutional(REFUSED[name](8)), (2, 6, 6))
    sizes = re.search(r"GroupNorm\((\d+), (\d+)\)", str(refusal.value))
    step_of(convolutional(nn.GroupNorm(*map(int, sizes.groups() if sizes else (4, 8)))), (2, 6, 6))


def test_the_replacement_of_a_batch_norm_over_features_is_accepted():
    with pytest.raises(UnsupportedModel, match="GroupNorm") as refusal:
        step_of(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), (4,))
    sizes = re.search(r"GroupNorm\((\d+), (\d+)\)", str(refusal.value))
    step_of(nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(*map(int, sizes.groups())), nn.Linear(8, 3)), (4,))


@pytest.mark.parametrize("kind", [Recurrent, Attentive])
def test_recurrence_and_attention_need_no_layers_of_their_own(kind):
    step_of(kind(), (4, 6))
