"""The gradient of a batch whose examples weigh differently, of a model that knows only the mean over a batch."""

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.numpy_model import NumpyModel


def weighted_gradients(model: NumpyModel, batch: Examples, recipe: Recipe) -> tuple[float, dict[str, NDArray]]:
    """The mean of wᵢ·lossᵢ over a batch, and its gradient with respect to every weight of the model.

    Examples of one class have one weight, so the mean over each class is asked of the model.

    Args:
        model: whose gradient of a batch is the mean of those of its examples.
        batch: n > 0 examples.
        recipe: says what an example of each class weighs.

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
