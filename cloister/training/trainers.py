"""Registry of trainers, by the kind of model that they train, and minibatch gradient descent for NumPy models.

A trainer is made once per process and model, and caches costly state. `fit` starts from the model's current weights
and receives examples and a `TrainingPlan`. It returns the mean training loss of the last epoch, if that may be
released.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.numpy_models import NumpyModel
from cloister.training.plan import TrainingPlan
from cloister.utils.errors import ConfigError
from cloister.utils.registry import Registry

TRAINERS = Registry(
    "trainer",
    "cloister.trainers",
    {
        "keras": "cloister.training.keras_trainer:KerasTrainer",
        "numpy": "cloister.training.trainers:NumpyTrainer",
        "sklearn": "cloister.training.sklearn_trainer:SklearnTrainer",
        "torch": "cloister.training.torch_trainer:TorchTrainer",
    },
)


class Trainer(Protocol):
    """Trainer of one model, in place."""

    def fit(self, examples: Examples, plan: TrainingPlan) -> float | None:
        """Train on the examples, and return the mean loss of the last epoch.

        None: the loss may not be released.

        Args:
            examples: to train on.
            plan: of this round.
        """
        ...


def weighted_gradients(model: NumpyModel, batch: Examples, recipe: Recipe) -> tuple[float, dict[str, NDArray]]:
    """Return the mean of wᵢ·lossᵢ over a batch, and its gradient.

    The gradient is with respect to every weight of the model. The model computes the mean of examples that share a
    factor, such as those of one class.

    Args:
        model: whose gradient of a batch is the mean of the examples' gradients.
        batch: n > 0 examples.
        recipe: with the factors of the losses.

    Returns:
        The loss, and for each weight by name an array of its shape.
    """
    weights = recipe.weights(batch)
    if weights is None:
        return model.loss_and_gradients(batch.x, batch.y)
    loss, total = 0.0, {name: np.zeros_like(array) for name, array in model.weights.items()}
    for weight in np.unique(weights):
        alike = weights == weight
        share = float(weight) * np.count_nonzero(alike) / len(batch)
        own, gradients = model.loss_and_gradients(batch.x[alike], batch.y[alike])
        loss += share * own
        total = {name: array + np.float32(share) * gradients[name] for name, array in total.items()}
    return loss, total


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
        ConfigError: the recipe has another optimizer than `sgd`, options of one, or Keras callbacks.
    """
    if recipe.optimizer != "sgd":
        raise ConfigError(f"client.optimizer must be 'sgd' for a model in NumPy, got {recipe.optimizer!r}")
    if recipe.optimizer_options:
        named = ", ".join(recipe.optimizer_options)
        raise ConfigError(
            f"client.optimizer-options: {named} needs a model in Keras; plain SGD in NumPy has no options"
        )
    if recipe.callbacks is not None:
        raise ConfigError("the task's Keras callbacks need a model in Keras; use client.callbacks = false")
