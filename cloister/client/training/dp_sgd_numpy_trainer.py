"""DP-SGD for models that give their own gradient."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from cloister.client.training.dp_sgd_trainer import PrivateTrainer
from cloister.client.units import Units
from cloister.config.privacy import PrivacyConfig
from cloister.core.arrays import Row
from cloister.core.errors import ConfigError
from cloister.privacy.dpsgd.one_by_one import noisy_sum
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Examples
from cloister.tasks.numpy_model import NumpyModel
from cloister.tasks.training.plan import TrainingPlan


class PrivateNumpyTrainer(PrivateTrainer):
    """Plain SGD on clipped and noised sums of the gradients of single examples, or of groups of them.

    Args:
        model: trained in place; its gradient of a batch is the mean of those of its examples.
        optimizer: `sgd`; these models know no other.
        batch_size: not needed before training.
        privacy: the run's `privacy.*`.
        group_cap: most examples of a unit; 1: each example is one.

    Guarantee: as `LocalSteps` and `noisy_sum` say.

    Raises:
        ConfigError: another optimizer was asked for.
    """

    def __init__(
        self, model: NumpyModel, optimizer: str, batch_size: int, privacy: PrivacyConfig, group_cap: int = 1
    ) -> None:
        if optimizer != "sgd":
            raise ConfigError(f"client.optimizer must be 'sgd' for a model in NumPy, got {optimizer!r}")
        super().__init__(privacy, group_cap)
        self.model = model

    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        self._rate, self._noise = plan.learning_rate / plan.batch_size, noise

    def _step(self, units: Units, batch: NDArray, bound: float) -> None:
        total = noisy_sum(
            (partial(self._gradient, units.examples_of(number)) for number in batch),
            tuple(weight.reshape(-1) for weight in self.model.weights.values()),
            clipping_norm=bound,
            noise_multiplier=self.privacy.dp_sgd.noise_multiplier,
            noise=self._noise,
        )
        self._descend(self._rate, total)

    def _gradient(self, unit: Examples) -> Row:
        """The mean gradient of a unit's examples, flat."""
        _, gradients = self.model.loss_and_gradients(unit.x, unit.y)
        return tuple(gradients[name].reshape(-1) for name in self.model.weights)

    def _descend(self, rate: float, total: Row) -> None:
        """Weights may leave the range of numbers; what they become follows from noised sums alone."""
        with np.errstate(all="ignore"):
            for weight, piece in zip(self.model.weights.values(), total, strict=True):
                weight -= (rate * piece).reshape(weight.shape).astype(weight.dtype)
