"""Synthetic linear data of two populations, which tells personalised models from a single global one.

Half of the users follow one optimum, half the other (Galli et al., 2023, §5.1). The paper does not state the
distribution of the inputs. Here it is N(0, I), so that the noise of mean ½ moves no optimum.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Dataset, Examples, Model, Recipe, Regression

if TYPE_CHECKING:
    import keras

OPTIMA = np.array([[5.0, 6.0], [4.0, -4.5]])
"""θ* of the users with even and with odd numbers."""
USERS = 100
SAMPLES = 10
"""Number of examples of each user."""
DATA_SEED = 0
"""A constant, so that every run of every strategy uses the same users."""


class Linear(Regression):
    """y = x·θ* + u, u uniform on [0, 1). x is float32 of shape (n, 2). Training users and test users are disjoint."""

    recipe = Recipe(local_epochs=1, batch_size=10, learning_rate=0.1)
    partition = "natural"
    input_shape = (OPTIMA.shape[1],)
    models = ("linear", "keras")
    public = True
    bundled = True

    def load(self) -> Dataset:
        """Return `USERS` training users and as many test users.

        Each has `SAMPLES` examples.
        """
        rng = np.random.default_rng(DATA_SEED)
        users = np.repeat(np.arange(USERS), SAMPLES)
        train, test = _drawn(users, rng), _drawn(users, rng)
        return Dataset(train, test, owners=users, test_owners=users, groups={"user": users})

    def build(self) -> Model:
        """Return a linear map with two parameters and no intercept, in NumPy or Keras."""
        if self.model_name == "keras":
            from cloister.tasks.keras_model import KerasModel

            return KerasModel(linear_network, loss="squared-error")
        from cloister.tasks.regression import LinearRegression

        return LinearRegression(features=OPTIMA.shape[1])


def _drawn(users: NDArray, rng: np.random.Generator) -> Examples:
    x = rng.standard_normal((len(users), OPTIMA.shape[1]))
    y = np.vecdot(x, OPTIMA[users % len(OPTIMA)]) + rng.random(len(users))
    return Examples(x.astype(np.float32), y.astype(np.float32))


def linear_network() -> "keras.Model":
    """Return a linear map without an intercept."""
    import keras

    initial = keras.initializers.RandomNormal(stddev=1.0)
    return keras.Sequential(
        [
            keras.Input(OPTIMA.shape[1:], name="x"),
            keras.layers.Dense(1, use_bias=False, kernel_initializer=initial, name="linear"),
        ],
        name="linear",
    )
