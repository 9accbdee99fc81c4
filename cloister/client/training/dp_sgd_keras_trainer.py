"""DP-SGD for Keras models."""

import math

import keras
import numpy as np

from cloister.client.local import dp_sgd_of
from cloister.client.noise_sources import NoiseSource, refuse_penalty
from cloister.client.training.keras_trainer import optimizer_named
from cloister.client.training.plan import TrainingPlan
from cloister.client.units import Units
from cloister.config.run import PrivacyConfig
from cloister.core.errors import ConfigError
from cloister.privacy.dpsgd.rounding import DEFAULT_OVERSTATEMENT, largest_microbatch
from cloister.privacy.dpsgd.step import DpSgd
from cloister.tasks.base import Examples
from cloister.tasks.keras_model import KerasModel


class PrivateKerasTrainer:
    """Any Keras optimizer on clipped and noised sums of the gradients of single examples, or of groups of them.

    The optimizer starts afresh in every `fit`: nothing of one client's training reaches another's.

    Args:
        model: a classifier, trained in place.
        optimizer: the name of a Keras optimizer.
        batch_size: B, of every plan that follows.
        privacy: the run's `privacy.*`.
        group_cap: most examples of a unit; 1: each example is one.

    Guarantee: as `LocalSteps` and `DpSgd` say; what the optimizer makes of a noised sum is post-processing.

    Raises:
        ConfigError: Keras does not know the optimizer, or the loss is none of a classifier.
        UnsupportedModel: the model's examples have no gradients of their own.
    """

    def __init__(
        self, model: KerasModel, optimizer: str, batch_size: int, privacy: PrivacyConfig, group_cap: int = 1
    ) -> None:
        if model.loss != "cross-entropy":
            raise ConfigError(f"privacy.client = 'dp-sgd' is for classifiers; this model's loss is {model.loss!r}")
        self.model = model
        self.privacy, self.group_cap = privacy, group_cap
        self._optimizer = optimizer_named(optimizer)
        self._dp_sgd = DpSgd(
            model.keras,
            batch_size=batch_size,
            noise_multiplier=privacy.client_noise_multiplier,
            clipping_norm=privacy.client_clipping_norm,
            optimizer=self._optimizer,
            loss=keras.losses.sparse_categorical_crossentropy,
            microbatch_size=_microbatch_size(batch_size, privacy),
            group_cap=group_cap,
        )
        self._initial = [np.array(variable.numpy()) for variable in self._optimizer.variables]
        self._sources = NoiseSource(privacy.noise_seed)

    def fit(self, examples: Examples, plan: TrainingPlan) -> None:
        """Train from the model's weights. There is no loss to tell: it would carry no noise.

        Raises:
            ConfigError: the plan has another batch size, or a penalty.
        """
        refuse_penalty(plan)
        if plan.batch_size != self._dp_sgd.batch_size:
            raise ConfigError(f"client.batch-size = {plan.batch_size} must be {self._dp_sgd.batch_size} in this run")
        self._reset(plan)
        units = Units.of(examples, self.group_cap, self._sources.batch_seed(plan))
        steps = units.steps(plan, self.privacy)
        bound = dp_sgd_of(self.privacy).clipping_norm_in(plan.round)
        self._dp_sgd.noise = self._sources.noise(plan)
        self._draw_masks(plan)
        for batch in steps.batches(self._sources.batch_seed(plan), len(units)):
            chosen = units.of_batch(batch)
            self._dp_sgd.step(chosen.x, chosen.y, bound, chosen.groups)

    def _reset(self, plan: TrainingPlan) -> None:
        for variable, value in zip(self._optimizer.variables, self._initial, strict=True):
            variable.assign(value)
        self._optimizer.learning_rate = plan.learning_rate

    def _draw_masks(self, plan: TrainingPlan) -> None:
        """Dropout's masks are as secret as the noise, and repeated only with it: the server knows the plan's seed."""
        if self._dp_sgd.noise.seeded:
            self.model.reseed(int(np.random.SeedSequence(plan.seed).generate_state(1)[0]))
        else:
            self._dp_sgd.reseed()


def _microbatch_size(batch_size: int, privacy: PrivacyConfig) -> int:
    """So many examples that most Poisson batches are one microbatch: padding costs less than another call."""
    wanted = batch_size if privacy.batch_sampling == "shuffle" else batch_size + math.ceil(2 * math.sqrt(batch_size))
    return max(1, min(wanted, largest_microbatch(batch_size, DEFAULT_OVERSTATEMENT)))
