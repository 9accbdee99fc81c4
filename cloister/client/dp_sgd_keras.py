"""DP-SGD for Keras models."""

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.client.dp_sgd import DescentTrainer, Units, probe_of, weighted_loss
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.dpsgd.nested import MADE_UP
from cloister.privacy.dpsgd.step import DpSgd
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.training.keras_trainer import optimizer_named
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import Tensor


class PrivateKerasTrainer(DescentTrainer[DpSgd]):
    """Trainer with any Keras optimizer on clipped and noised sums of the gradients of examples or groups.

    The optimizer is reset in every `fit`, so that no state of one client's training reaches another's.

    Args:
        model: trained in place; each example has a loss of its own.
        recipe: of the run: its optimizer, the batch size B of every later plan, and the class weights.
        privacy: the run's `privacy.*`.
        group_cap: largest number of a unit's examples; 1: each example is a unit.

    Guarantee: that of `LocalSteps` and `DpSgd`; the optimizer's use of a noised sum is post-processing.

    Raises:
        ConfigError: Keras does not have the optimizer, or a loss is `rmse`. The root of a batch's mean is not a sum
            over examples.
        UnsupportedModel: the model has no gradients of single examples.
    """

    def __init__(self, model: KerasModel, recipe: Recipe, privacy: PrivacyConfig, group_cap: int = 1) -> None:
        super().__init__(recipe, privacy, group_cap, (target.loss for target in model.targets.values()))
        self.model = model
        self._optimizer = optimizer_named(recipe.optimizer, recipe.optimizer_options)
        self._prepare(recipe.batch_size)
        self._initial = [np.array(variable.numpy()) for variable in self._optimizer.variables]

    def _built(self, batch_size: int) -> DpSgd:
        x = tf.nest.map_structure(
            lambda spec: np.zeros((MADE_UP, *spec.shape[1:]), spec.dtype.as_numpy_dtype), self.model.specs
        )
        targets = self.model.targets.values()
        return DpSgd(
            self.model.keras,
            batch_size=batch_size,
            noise_multiplier=self.privacy.dp_sgd.noise_multiplier,
            clipping_norm=self.privacy.dp_sgd.clipping_norm,
            optimizer=self._optimizer,
            loss=weighted_loss(targets, self.model.losses, tf.cast),
            probe=probe_of(x, targets),
            group_cap=self.group_cap,
        )

    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        """Reset the optimizer."""
        super()._begin(plan, noise)
        for variable, value in zip(self._optimizer.variables, self._initial, strict=True):
            variable.assign(value)

    def _step(self, units: Units, batch: NDArray, bound: float, rate: float) -> None:
        self._optimizer.learning_rate = rate
        x, y, chosen = self._given(units, batch)
        self._dp_sgd.step(x, y, bound, chosen.groups, self._recipe.clip_shares(chosen))

    def _sum(self, units: Units, batch: NDArray, bound: float) -> dict[str, NDArray]:
        x, y, chosen = self._given(units, batch)
        found = self._dp_sgd.clipped_sum(x, y, bound, chosen.groups, self._recipe.clip_shares(chosen))
        trained = {id(own): total for own, total in zip(self.model.keras.trainable_variables, found.sums, strict=True)}
        return {
            name: trained[id(own)] if id(own) in trained else np.zeros(own.shape)
            for name, own in self.model.variables.items()
        }

    def _given(self, units: Units, batch: NDArray) -> tuple[Tensor, list[Tensor], Examples]:
        """Return inputs, targets with the weights of examples, and examples of the numbered units."""
        chosen = units.of_batch(batch)
        return self.model.given(chosen.x), [*self.model.expected(chosen.y), self._weights(chosen)], chosen
