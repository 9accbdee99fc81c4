"""DP-SGD of PyTorch models on a client, beyond the contract of all frameworks."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_tasks import Frozen, Normalised, Scans, Small, made, model  # noqa: E402

from cloister.client.dp_sgd_torch import PrivateTorchTrainer  # noqa: E402
from cloister.config.privacy import PrivacyConfig  # noqa: E402
from cloister.tasks.base import Examples, Recipe  # noqa: E402
from cloister.training.plan import TrainingPlan  # noqa: E402
from cloister.utils.errors import UnsupportedModel  # noqa: E402

pytestmark = pytest.mark.torch
RATE, SIZE = 0.5, 40


class Linear(Small):
    def build(self) -> nn.Module:
        return nn.Linear(6, 3)


class Dropping(Small):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))


def plan(**changes):
    defaults = {"epochs": 1, "batch_size": SIZE, "learning_rate": RATE, "proximal_mu": 0.0, "seed": (1, 1, 0)}
    return TrainingPlan(**(defaults | changes))


def trainer(kind=Linear, optimizer="sgd", sigma=1.0, clip=0.3, **settings):
    privacy = PrivacyConfig(
        server="none", client="dp-sgd", dp_sgd_noise_multiplier=sigma, dp_sgd_clipping_norm=clip, **settings
    )
    return PrivateTorchTrainer(model(kind), Recipe(1, SIZE, RATE, optimizer), privacy)


def data(kind=Linear, size=SIZE):
    return made(kind).load().train.take(np.arange(size))


def moved(own, examples, **changes):
    """How far training moves the weights, as one vector."""
    before = np.concatenate([array.ravel() for array in own.model.arrays().values()])
    assert own.fit(examples, plan(**changes)) is None
    return np.concatenate([array.ravel() for array in own.model.arrays().values()]).astype(np.float64) - before


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_round_repeats_with_its_noise_alone_and_carries_nothing_to_the_next(optimizer):
    for seed, repeats in ((7, True), (-1, False)):
        own, moves = trainer(Dropping, optimizer, noise_seed=seed), []
        start = own.model.arrays()
        for _ in range(2):
            own.model.assign(start)
            moves.append(moved(own, data(Dropping)))
        assert np.array_equal(*moves) == repeats


def test_several_inputs_and_outputs_by_name():
    own = trainer(Scans)
    assert np.isfinite(moved(own, data(Scans))).all() and (own.method == "rows") == (not own.why_in_turn)


def test_groups_of_examples_are_units():
    privacy = PrivacyConfig(server="none", client="dp-sgd", dp_sgd_noise_multiplier=0.0, dp_sgd_clipping_norm=1e-3)
    own = PrivateTorchTrainer(model(Linear), Recipe(1, SIZE, RATE), privacy, group_cap=4)
    one_patient = replace(data(), groups=np.zeros(SIZE, int))
    assert np.linalg.norm(moved(own, one_patient)) <= RATE / SIZE * 1e-3 * 1.001


def test_a_frozen_backbone_in_evaluation_mode_stays_so():
    own = trainer(Frozen)
    before = own.model.frozen()
    assert np.isfinite(moved(own, data(Frozen))).all()
    assert all(np.array_equal(array, before[name]) for name, array in own.model.frozen().items())


def test_a_batch_normalization_is_refused_with_its_replacement():
    with pytest.raises(UnsupportedModel, match=r"layer '1' \(BatchNorm1d\) .* use torch.nn.GroupNorm\(1, 16\)"):
        trainer(Normalised)


def test_no_error_of_an_example_ends_a_round():
    own, examples = trainer(), data()
    bad = Examples(examples.x.copy(), examples.y.copy())
    bad.y[3] = 77  # no class
    assert np.isfinite(moved(own, bad)).all()
