"""Gradient of a batch with weighted examples, for a model that computes only the mean over a batch."""

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.numpy_model import NumpyModel


def weighted_gradients(model: NumpyModel, batch: Examples, recipe: Recipe) -> tuple[float, dict[str, NDArray]]:
    """Return the mean of wᵢ·lossᵢ over a batch, and its gradient.

    The gradient is with respect to every weight of the model. Examples of one class share a weight, so the model
    computes the mean of each class.

    Args:
        model: whose gradient of a batch is the mean of the examples' gradients.
        batch: n > 0 examples.
        recipe: with the weight of each class.

    Returns:
        The loss, and for each weight by name an array of its shape.
    """
    weights = recipe.weights(batch.y)
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
