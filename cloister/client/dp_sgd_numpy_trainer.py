"""DP-SGD for models that give their own gradient."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cloister.client.noise_sources import NoiseSource, refuse_penalty
from cloister.client.plan import TrainingPlan
from cloister.core.arrays import Row
from cloister.core.config import PrivacyConfig
from cloister.core.errors import ConfigError
from cloister.privacy.dpsgd.one_by_one import noisy_sum
from cloister.privacy.local_steps import LocalSteps, clipping_norm_of
from cloister.tasks.base import Examples
from cloister.tasks.numpy_model import NumpyModel


class PrivateNumpyTrainer:
    """Plain SGD on clipped and noised sums of the gradients of single examples.

    Args:
        model: trained in place; its gradient of a batch is the mean of those of its examples.
        optimizer: `sgd`; these models know no other.
        batch_size: not needed before training.
        privacy: the run's `privacy.*`.

    Guarantee: as `LocalSteps` and `noisy_sum` say.

    Raises:
        ConfigError: another optimizer was asked for.
    """

    def __init__(self, model: NumpyModel, optimizer: str, batch_size: int, privacy: PrivacyConfig) -> None:
        if optimizer != "sgd":
            raise ConfigError(f"client.optimizer must be 'sgd' for a model in NumPy, got {optimizer!r}")
        self.model = model
        self.privacy = privacy
        self._sources = NoiseSource(privacy.noise_seed)

    def fit(self, examples: Examples, plan: TrainingPlan) -> None:
        """Train from the model's weights. There is no loss to tell: it would carry no noise."""
        refuse_penalty(plan)
        steps = LocalSteps(len(examples), plan.batch_size, plan.epochs, self.privacy.batch_sampling)
        noise, bound = self._sources.noise(plan), clipping_norm_of(self.privacy, plan.round)
        like = tuple(weight.reshape(-1) for weight in self.model.weights.values())
        for batch in steps.batches(self._sources.batch_seed(plan)):
            total = noisy_sum(
                self._gradients(examples, batch),
                like,
                clipping_norm=bound,
                noise_multiplier=self.privacy.client_noise_multiplier,
                noise=noise,
            )
            for weight, piece in zip(self.model.weights.values(), total, strict=True):
                weight -= (plan.learning_rate / plan.batch_size * piece).reshape(weight.shape).astype(weight.dtype)

    def _gradients(self, examples: Examples, batch: NDArray[np.intp]) -> Iterator[Callable[[], Row]]:
        """What gives the gradient of each example in the batch."""
        return (partial(self._gradient, examples, index) for index in batch)

    def _gradient(self, examples: Examples, index: int) -> Row:
        one = examples.take(np.array([index]))
        _, gradients = self.model.loss_and_gradients(one.x, one.y)
        return tuple(gradients[name].reshape(-1) for name in self.model.weights)
