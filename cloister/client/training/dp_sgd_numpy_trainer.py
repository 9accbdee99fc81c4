"""DP-SGD for models with their own gradients."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from cloister.client.training.dp_sgd_trainer import PrivateTrainer
from cloister.client.units import Units
from cloister.config.privacy import PrivacyConfig
from cloister.core.arrays import Row
from cloister.privacy.dpsgd.exact_noise import noisy_sum
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.numpy_model import NumpyModel
from cloister.tasks.training.numpy_trainer import refuse_what_needs_keras
from cloister.tasks.training.plan import TrainingPlan
from cloister.tasks.training.weighting import weighted_gradients


class PrivateNumpyTrainer(PrivateTrainer):
    """Trainer with plain SGD on clipped and noised sums of the gradients of examples or groups.

    Args:
        model: trained in place; its gradient of a batch is the mean of those of its examples.
        recipe: of the run; its optimizer must be `sgd`.
        privacy: the run's `privacy.*`.
        group_cap: largest number of a unit's examples; 1: each example is a unit.

    Guarantee: that of `LocalSteps` and `noisy_sum`.

    Raises:
        ConfigError: the recipe has another optimizer, or Keras callbacks.
    """

    def __init__(self, model: NumpyModel, recipe: Recipe, privacy: PrivacyConfig, group_cap: int = 1) -> None:
        refuse_what_needs_keras(recipe)
        super().__init__(privacy, group_cap)
        self.model, self._recipe = model, recipe

    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        self._batch_size, self._noise = plan.batch_size, noise

    def _step(self, units: Units, batch: NDArray, bound: float, rate: float) -> None:
        total = noisy_sum(
            (partial(self._gradient, units.examples_of(number)) for number in batch),
            tuple(weight.reshape(-1) for weight in self.model.weights.values()),
            clipping_norm=bound,
            noise_multiplier=self.privacy.dp_sgd.noise_multiplier,
            noise=self._noise,
        )
        # The weights may overflow, and depend on noised sums only.
        with np.errstate(all="ignore"):
            for weight, piece in zip(self.model.weights.values(), total, strict=True):
                weight -= (rate / self._batch_size * piece).reshape(weight.shape).astype(weight.dtype)

    def _gradient(self, unit: Examples) -> Row:
        """Return the mean gradient of a unit's examples, weighted and flat."""
        _, gradients = weighted_gradients(self.model, unit, self._recipe)
        return tuple(gradients[name].reshape(-1) for name in self.model.weights)
