"""Minibatch gradient descent for NumPy models."""

import numpy as np

from cloister.core.errors import ConfigError
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.numpy_model import NumpyModel
from cloister.tasks.training.plan import TrainingPlan
from cloister.tasks.training.weighting import weighted_gradients


class NumpyTrainer:
    """Plain SGD, with FedProx's penalty μ/2·‖w - w_global‖² if the plan has one.

    Args:
        model: trained in place.
        recipe: of the run; its optimizer must be `sgd`.

    Raises:
        ConfigError: the recipe has another optimizer, or Keras callbacks.
    """

    def __init__(self, model: NumpyModel, recipe: Recipe) -> None:
        refuse_what_needs_keras(recipe)
        self.model, self._recipe = model, recipe

    def fit(self, examples: Examples, plan: TrainingPlan) -> float:
        """Train from the model's weights, which are also the centre of the penalty.

        Args:
            examples: to train on.
            plan: of this round.
        """
        anchor = self.model.arrays()
        rng = np.random.default_rng(plan.seed)
        loss = 0.0
        for epoch in range(plan.epochs):
            seen = plan.seen(examples, epoch)
            order, total = rng.permutation(len(examples)), 0.0
            for start in range(0, len(order), plan.batch_size):
                batch = seen.take(order[start : start + plan.batch_size])
                own, gradients = weighted_gradients(self.model, batch, self._recipe)
                for name, weight in self.model.weights.items():
                    step = gradients[name]
                    if plan.proximal_mu:
                        step = step + plan.proximal_mu * (weight - anchor[name])
                    weight -= np.float32(plan.rate(epoch)) * step
                total += own * len(batch)  # the last minibatch may be smaller
            loss = total / len(examples)
        return loss


def refuse_what_needs_keras(recipe: Recipe) -> None:
    """Refuse recipes that NumPy models do not support.

    Raises:
        ConfigError: the recipe has another optimizer than `sgd`, or Keras callbacks.
    """
    if recipe.optimizer != "sgd":
        raise ConfigError(f"client.optimizer must be 'sgd' for a model in NumPy, got {recipe.optimizer!r}")
    if recipe.callbacks is not None:
        raise ConfigError("the task's Keras callbacks need a model in Keras; use client.callbacks = false")
