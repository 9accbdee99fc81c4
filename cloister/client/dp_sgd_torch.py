"""DP-SGD for PyTorch models."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.client.dp_sgd import DescentTrainer, Units, probe_of, weighted_loss
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.dpsgd.nested import MADE_UP, mapped
from cloister.privacy.dpsgd.torch_step import TorchDpSgd
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.torch_model import TorchModel
from cloister.training.plan import TrainingPlan
from cloister.training.torch_trainer import optimizer_of, refuse_callbacks, set_rate, try_optimizer


class PrivateTorchTrainer(DescentTrainer[TorchDpSgd]):
    """Trainer with any optimizer of PyTorch on clipped and noised sums of the gradients of examples or groups.

    The optimizer starts afresh in every `fit`, so that no state of one client's training reaches another's.

    Args:
        model: trained in place; each example has a loss of its own.
        recipe: of the run: its optimizer, the batch size B of every later plan, and the class weights.
        privacy: the run's `privacy.*`.
        group_cap: largest number of a unit's examples; 1: each example is a unit.

    Guarantee: that of `LocalSteps` and `TorchDpSgd`; the optimizer's use of a noised sum is post-processing.

    Raises:
        ConfigError: PyTorch does not have the optimizer, or a loss is `rmse`. The root of a batch's mean is not a sum
            over examples.
        UnsupportedModel: the model has no gradients of single examples.
    """

    def __init__(self, model: TorchModel, recipe: Recipe, privacy: PrivacyConfig, group_cap: int = 1) -> None:
        refuse_callbacks(recipe)
        super().__init__(recipe, privacy, group_cap, (target.loss for target in model.targets.values()))
        self.model = model
        try_optimizer(recipe, model.trained.values())
        self._prepare(recipe.batch_size)

    def _built(self, batch_size: int) -> TorchDpSgd:
        targets = self.model.targets.values()
        with self.model.in_training(0):
            return TorchDpSgd(
                self.model.module,
                batch_size=batch_size,
                noise_multiplier=self.privacy.dp_sgd.noise_multiplier,
                clipping_norm=self.privacy.dp_sgd.clipping_norm,
                optimizer=optimizer_of(self._recipe, self.model.trained.values()),
                loss=weighted_loss(targets, self.model.losses, lambda weights, dtype: weights.to(dtype)),
                probe=probe_of(_arrays(self.model.given(self.model.placeholders(MADE_UP))), targets),
                group_cap=self.group_cap,
            )

    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        """Make a new optimizer."""
        super()._begin(plan, noise)
        self._dp_sgd.optimizer = optimizer_of(self._recipe, self.model.trained.values())

    def _step(self, units: Units, batch: NDArray, bound: float, rate: float) -> None:
        set_rate(self._dp_sgd.optimizer, rate)
        x, y, chosen = self._given(units, batch)
        with self.model.in_training(0):  # for its modes: each unit's random numbers have a seed of their own
            self._dp_sgd.step(x, y, bound, chosen.groups, self._recipe.clip_shares(chosen))

    def _sum(self, units: Units, batch: NDArray, bound: float) -> dict[str, NDArray]:
        x, y, chosen = self._given(units, batch)
        with self.model.in_training(0):  # as for a step
            found = self._dp_sgd.clipped_sum(x, y, bound, chosen.groups, self._recipe.clip_shares(chosen))
        trained = dict(zip(self.model.trained, found.sums, strict=True))
        return {
            name: trained[name] if name in trained else np.zeros(array.shape)
            for name, array in self.model.arrays().items()
        }

    def _given(self, units: Units, batch: NDArray) -> tuple[Any, list[Any], Examples]:
        """Return inputs, targets with the weights of examples, and examples of the numbered units."""
        chosen = units.of_batch(batch)
        return (
            _arrays(self.model.given(chosen.x)),
            [*_arrays(self.model.expected(chosen.y)), self._weights(chosen)],
            chosen,
        )


def _arrays(tensors: Any) -> Any:
    return mapped(lambda tensor: tensor.cpu().numpy(), tensors)
