"""Linear models of scikit-learn for the federation."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn import config_context
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, SGDClassifier, SGDRegressor

from cloister.tasks.numpy_models import NumpyModel, flat
from cloister.utils.errors import ConfigError

Estimator = Any
"""An `SGDClassifier`, an `SGDRegressor` or a `LogisticRegression`; scikit-learn states no types."""
UNUSED = {
    "average": "the weights that travel are not averaged over steps",
    "early_stopping": "a client trains for client.local-epochs",
    "class_weight": "client.class-weights sets them",
    "warm_start": "a client always starts from the weights that it receives",
}
"""Arguments of estimators without effect in a client's training, with the reason."""


class SklearnModel(NumpyModel):
    """Linear model of scikit-learn: `SGDClassifier`, `SGDRegressor` or `LogisticRegression`.

    A client trains it by the estimator's own `partial_fit` or `fit`. The learning rate, epochs and the shuffle follow
    the run in place of `learning_rate`, `eta0`, `max_iter`, `tol`, `shuffle` and `random_state`. Loss and penalty are
    those of the estimator. Weights are float32 arrays named `coef` and `intercept`, in scikit-learn's shapes. They
    start at 0. With `fit_intercept=False` there is no `intercept`.

    Args:
        estimator: not fitted; the model takes a copy.
        features: inputs per example; inputs of shape (n, ...) are flattened to (n, features).
        classes: number of classes; 0 for `SGDRegressor`.

    Raises:
        ConfigError: another estimator, classes that do not fit it, no probabilities, or an argument without effect.
    """

    kind = "sklearn"

    def __init__(self, estimator: Estimator, features: int, classes: int = 0) -> None:
        name = type(estimator).__name__
        if not isinstance(estimator, SGDClassifier | SGDRegressor | LogisticRegression):
            raise ConfigError(
                f"build(): {name} is not supported; use SGDClassifier, SGDRegressor or LogisticRegression"
            )
        if isinstance(estimator, SGDRegressor) != (classes == 0):
            raise ConfigError(f"build(): {name} cannot predict {classes} classes; use another estimator or classes")
        if classes and not hasattr(estimator, "predict_proba"):
            raise ConfigError(
                f"build(): {name}(loss={estimator.loss!r}) has no class probabilities; use loss='log_loss'"
            )
        fresh = type(estimator)().get_params()
        for argument, reason in UNUSED.items():
            if argument in fresh and estimator.get_params()[argument] != fresh[argument]:
                raise ConfigError(f"build(): {name}({argument}=...) has no effect, as {reason}; remove it")
        self.estimator: Estimator = clone(estimator)
        self.classes = classes
        if isinstance(self.estimator, LogisticRegression):
            self.estimator.set_params(warm_start=True).fit(np.zeros((classes, features)), np.arange(classes))
        elif isinstance(self.estimator, SGDClassifier):
            self.estimator.partial_fit(np.zeros((1, features)), [0], classes=np.arange(classes))
        else:
            self.estimator.partial_fit(np.zeros((1, features)), [0.0])
        self.weights: dict[str, NDArray] = {
            name: np.zeros(getattr(self.estimator, f"{name}_").shape, np.float32)
            for name in ("coef", "intercept")[: 1 + bool(self.estimator.fit_intercept)]
        }

    def initialise(self, seed: int) -> None:
        """Set all weights to zero."""
        for array in self.weights.values():
            array[:] = 0

    def fitted(self) -> Estimator:
        """Return the estimator with the current weights, in double precision."""
        for name, array in self.weights.items():
            setattr(self.estimator, f"{name}_", array.astype(np.float64))
        return self.estimator

    def adopt(self) -> None:
        """Replace the weights by those of the estimator; numbers too large for float32 become infinite."""
        with np.errstate(over="ignore"):
            for name, array in self.weights.items():
                array[:] = getattr(self.estimator, f"{name}_")

    def predict(self, x: NDArray) -> NDArray:
        """Return class probabilities of shape (n, classes), or the numbers of a regression, of shape (n,).

        The outputs for a row that is not finite are not finite, and those for the other rows are as without it.
        """
        estimator, inputs = self.fitted(), flat(x).astype(np.float64)
        with config_context(assume_finite=True), np.errstate(all="ignore"):
            found: NDArray = estimator.predict_proba(inputs) if self.classes else estimator.predict(inputs)
            return found.astype(np.float32)

    def loss_and_gradients(self, x: NDArray, y: NDArray) -> tuple[float, dict[str, NDArray]]:
        """Return the mean loss of a batch without the penalty, and its gradient.

        The loss is that of `SGDClassifier(loss="log_loss")`, one class against the rest and summed over classes, or of
        `SGDRegressor(loss="squared_error")`, half of the squared error.

        Args:
            x: n inputs, shape (n, ...).
            y: their labels or numbers, shape (n,).
        """
        inputs, coef = flat(x), np.atleast_2d(self.weights["coef"])
        scores = inputs @ coef.T + self.weights.get("intercept", np.float32(0))
        if self.classes:
            wanted = y[:, None] == (np.arange(self.classes) if self.classes > 2 else np.array([1]))
            losses = np.logaddexp(0, np.where(wanted, -scores, scores)).sum(axis=1)
            slope = np.where(wanted, -1, 1) * np.exp(-np.logaddexp(0, np.where(wanted, scores, -scores)))
        else:
            slope = scores - y[:, None]
            losses = np.square(slope[:, 0]) / 2
        slope = (slope / len(y)).astype(np.float32)
        gradients = {"coef": (slope.T @ inputs).reshape(self.weights["coef"].shape), "intercept": slope.sum(axis=0)}
        return float(losses.mean()), {name: gradients[name] for name in self.weights}
