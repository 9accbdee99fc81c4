"""Minibatch gradient descent for models that give their own gradient."""

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import ConfigError
from cloister.tasks.base import Examples
from cloister.tasks.numpy_model import NumpyModel
from cloister.tasks.training.plan import TrainingPlan


class NumpyTrainer:
    """Plain SGD, with FedProx's penalty μ/2·‖w - w_global‖² where the plan has one.

    Args:
        model: trained in place.
        optimizer: `sgd`; these models know no other.

    Raises:
        ConfigError: another optimizer was asked for.
    """

    def __init__(self, model: NumpyModel, optimizer: str) -> None:
        if optimizer != "sgd":
            raise ConfigError(f"client.optimizer must be 'sgd' for a model in NumPy, got {optimizer!r}")
        self.model = model

    def fit(self, examples: Examples, plan: TrainingPlan) -> float:
        """Train from the model's weights, which are also the centre of the penalty.

        Args:
            examples: to train on.
            plan: of this round.
        """
        anchor = self.model.arrays()
        rng = np.random.default_rng(plan.seed)
        loss = 0.0
        for _ in range(plan.epochs):
            loss = self._epoch(examples, rng.permutation(len(examples)), plan, anchor)
        return loss

    def _epoch(self, examples: Examples, order: NDArray, plan: TrainingPlan, anchor: dict[str, NDArray]) -> float:
        total = 0.0
        for start in range(0, len(order), plan.batch_size):
            batch = examples.take(order[start : start + plan.batch_size])
            loss, gradients = self.model.loss_and_gradients(batch.x, batch.y)
            for name, weight in self.model.weights.items():
                step = gradients[name]
                if plan.proximal_mu:
                    step = step + plan.proximal_mu * (weight - anchor[name])
                weight -= np.float32(plan.learning_rate) * step
            # The last minibatch may be smaller, and counts for less.
            total += loss * len(batch)
        return total / len(order)
