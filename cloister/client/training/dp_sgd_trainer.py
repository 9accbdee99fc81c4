"""DP-SGD for every kind of model: units, batches, noise and clipping norm of a round."""

from abc import ABC, abstractmethod

from numpy.typing import NDArray

from cloister.client.noise_sources import NoiseSource, refuse_penalty
from cloister.client.units import Units
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Examples
from cloister.tasks.training.augmentation import key_of
from cloister.tasks.training.plan import TrainingPlan


class PrivateTrainer(ABC):
    """Trainer by gradient descent on clipped and noised sums of the gradients of examples or groups.

    A subclass for each kind of model defines the start of a round and a step.

    Args:
        privacy: the run's `privacy.*`.
        group_cap: largest number of a unit's examples; 1: each example is a unit.

    Guarantee: that of `LocalSteps`: the public size determines the number of steps, and each is a Gaussian mechanism.
    """

    def __init__(self, privacy: PrivacyConfig, group_cap: int) -> None:
        self.privacy, self.group_cap = privacy, group_cap
        self._sources = NoiseSource(privacy.noise_seed)

    def fit(self, examples: Examples, plan: TrainingPlan) -> None:
        """Train from the model's weights.

        It returns no loss, which would carry no noise.

        Args:
            examples: of this client.
            plan: of this round.

        Raises:
            ConfigError: the plan has a penalty, or a setting that this model cannot train with.
        """
        refuse_penalty(plan)
        seed, bound = self._sources.batch_seed(plan), self.privacy.dp_sgd.mechanism().clipping_norm_in(plan.round)
        units = Units.of(examples, self.group_cap, seed)
        self._begin(plan, self._sources.noise(plan))
        steps, secret = units.steps(plan, self.privacy), self._sources.secret(plan)
        for number, batch in enumerate(steps.batches(seed, len(units))):
            seen = units.changed_by(plan.augmentation, key_of(secret, number))
            self._step(seen, batch, bound, plan.rate(number * plan.epochs // steps.count))

    @abstractmethod
    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        """Prepare a round whose steps use this noise."""

    @abstractmethod
    def _step(self, units: Units, batch: NDArray, bound: float, rate: float) -> None:
        """Take one step on the numbered units, possibly none, clipped to `bound`."""
