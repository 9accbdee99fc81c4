"""DP-SGD for PyTorch models."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister.client.dp_sgd import PrivateTrainer, Units
from cloister.config.privacy import PrivacyConfig
from cloister.privacy.dpsgd.nested import MADE_UP, Probe, mapped
from cloister.privacy.dpsgd.torch_calls import Loss
from cloister.privacy.dpsgd.torch_step import TorchDpSgd
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.torch_model import TorchModel
from cloister.training.plan import TrainingPlan
from cloister.training.torch_trainer import optimizer_of, refuse_callbacks, set_rate, try_optimizer
from cloister.utils.arrays import Tensor
from cloister.utils.errors import ConfigError


class PrivateTorchTrainer(PrivateTrainer):
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
        if any(target.loss == "rmse" for target in model.targets.values()):
            raise ConfigError(
                "privacy.client = 'dp-sgd' needs a loss of each example, and 'rmse' is one of a whole batch; use 'mse'"
            )
        super().__init__(privacy, group_cap)
        self.model, self._recipe = model, recipe
        try_optimizer(recipe, model.trained.values())
        self._dp_sgd = self._built(recipe.batch_size)
        self._by_batch_size = {recipe.batch_size: self._dp_sgd}
        self.method, self.why_in_turn = self._dp_sgd.method, self._dp_sgd.why_in_turn

    def _built(self, batch_size: int) -> TorchDpSgd:
        with self.model.in_training(0):
            return TorchDpSgd(
                self.model.module,
                batch_size=batch_size,
                noise_multiplier=self.privacy.dp_sgd.noise_multiplier,
                clipping_norm=self.privacy.dp_sgd.clipping_norm,
                optimizer=optimizer_of(self._recipe, self.model.trained.values()),
                loss=_loss(self.model),
                probe=_probe(self.model),
                group_cap=self.group_cap,
            )

    def _begin(self, plan: TrainingPlan, noise: GaussianNoise) -> None:
        """Make a new optimizer, and reset the masks of dropout.

        Masks are as secret as the noise, and repeat only with it: the server knows the plan's seed.

        Raises:
            ConfigError: the plan has another batch size.
        """
        if self.privacy.dp_sgd.sampling_rate:  # then the expected batch of a client follows from its own size
            if plan.batch_size not in self._by_batch_size:
                self._by_batch_size[plan.batch_size] = self._built(plan.batch_size)
            self._dp_sgd = self._by_batch_size[plan.batch_size]
        if plan.batch_size != self._dp_sgd.batch_size:
            raise ConfigError(f"client.batch-size = {plan.batch_size} must be {self._dp_sgd.batch_size} in this run")
        self._dp_sgd.optimizer = optimizer_of(self._recipe, self.model.trained.values())
        self._dp_sgd.noise = noise
        self._dp_sgd.reseed(plan.seed if noise.seeded else None)

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
        factors = self._recipe.weights(chosen)
        weights = np.ones(len(chosen), np.float32) if factors is None else factors
        return _arrays(self.model.given(chosen.x)), [*_arrays(self.model.expected(chosen.y)), weights], chosen


def _arrays(tensors: Any) -> Any:
    return mapped(lambda tensor: tensor.cpu().numpy(), tensors)


def _probe(model: TorchModel) -> Probe:
    """Return dummy examples in the structure, the shapes and the dtypes of the model.

    The last of the targets are the weights of examples.
    """
    made_up = model.placeholders(MADE_UP)
    y = [np.zeros((MADE_UP, *target.shape), target.dtype) for target in model.targets.values()]
    return _arrays(model.given(made_up)), [*y, np.zeros(MADE_UP, np.float32)]


def _loss(model: TorchModel) -> Loss:
    """Return the sum of an example's losses times its weight, before clipping.

    The weight is a function of the example alone: of its class, or its own.
    """

    def weighted(y: list[Tensor], outputs: object) -> Tensor:
        *targets, weights = y
        first, *rest = (
            target.weight * losses
            for target, losses in zip(model.targets.values(), model.losses(targets, outputs), strict=True)
        )
        total = sum(rest, first)
        return total * weights.to(total.dtype)

    return weighted
