"""DP-SGD for Keras models."""

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from cloister.client.dp_sgd import PrivateTrainer, Units
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.dpsgd.step import DpSgd
from cloister.privacy.dpsgd.tracing import Loss, made_up
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Recipe
from cloister.tasks.keras_model import KerasModel
from cloister.training.keras_trainer import optimizer_named
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import Tensor
from cloister.utils.errors import ConfigError


class PrivateKerasTrainer(PrivateTrainer):
    """Trainer with any Keras optimizer on clipped and noised sums of the gradients of examples or groups.

    The optimizer is reset in every `fit`, so that no state of one client's training reaches another's.

    Args:
        model: a classifier, trained in place.
        recipe: of the run: its optimizer, the batch size B of every later plan, and the class weights.
        privacy: the run's `privacy.*`.
        group_cap: largest number of a unit's examples; 1: each example is a unit.

    Guarantee: that of `LocalSteps` and `DpSgd`; the optimizer's use of a noised sum is post-processing.

    Raises:
        ConfigError: Keras does not have the optimizer, or the loss is not that of a classifier.
        UnsupportedModel: the model has no gradients of single examples.
    """

    def __init__(self, model: KerasModel, recipe: Recipe, privacy: PrivacyConfig, group_cap: int = 1) -> None:
        if model.loss != "cross-entropy":
            raise ConfigError(f"privacy.client = 'dp-sgd' is for classifiers; this model's loss is {model.loss!r}")
        super().__init__(privacy, group_cap)
        self.model = model
        self._optimizer, batch_size = optimizer_named(recipe.optimizer, recipe.optimizer_options), recipe.batch_size
        self._dp_sgd = DpSgd(
            model.keras,
            batch_size=batch_size,
            noise_multiplier=privacy.dp_sgd.noise_multiplier,
            clipping_norm=privacy.dp_sgd.clipping_norm,
            optimizer=self._optimizer,
            loss=_loss(recipe),
            probe=made_up(model.keras),
            group_cap=group_cap,
        )
        self.method, self.why_in_turn = self._dp_sgd.method, self._dp_sgd.why_in_turn
        self._initial = [np.array(variable.numpy()) for variable in self._optimizer.variables]

    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        """Reset the optimizer and the masks of dropout.

        Masks are as secret as the noise, and repeat only with it: the server knows the plan's seed.

        Raises:
            ConfigError: the plan has another batch size.
        """
        if plan.batch_size != self._dp_sgd.batch_size:
            raise ConfigError(f"client.batch-size = {plan.batch_size} must be {self._dp_sgd.batch_size} in this run")
        for variable, value in zip(self._optimizer.variables, self._initial, strict=True):
            variable.assign(value)
        self._dp_sgd.noise = noise
        self._dp_sgd.reseed(plan.seed if noise.seeded else None)

    def _step(self, units: Units, batch: NDArray, bound: float, rate: float) -> None:
        self._optimizer.learning_rate = rate
        chosen = units.of_batch(batch)
        self._dp_sgd.step(chosen.x, chosen.y, bound, chosen.groups)


def _loss(recipe: Recipe) -> Loss:
    """Return an example's loss times its class weight, before clipping."""
    found = recipe.weights(np.arange(len(recipe.class_weights) or 1))
    if found is None:
        return keras.losses.sparse_categorical_crossentropy
    weights = tf.constant(found)

    def weighted(labels: Tensor, outputs: Tensor) -> Tensor:
        losses = keras.losses.sparse_categorical_crossentropy(labels, outputs)
        own = tf.gather(weights, labels) if recipe.class_weights else weights[0]
        return losses * tf.cast(own, losses.dtype)

    return weighted
