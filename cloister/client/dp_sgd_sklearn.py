"""DP-SGD for linear models of scikit-learn."""

from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from cloister.client.dp_sgd import PrivateNumpyTrainer, Units
from cloister.config.privacy import PrivacyConfig
from cloister.tasks.base import Recipe
from cloister.tasks.sklearn_models import SklearnModel
from cloister.utils.errors import UnsupportedModel

SUPPORTED = ("log_loss", "squared_error")


class PrivateSklearnTrainer(PrivateNumpyTrainer):
    """Trainer of `SGDClassifier` and `SGDRegressor` on clipped and noised sums, by gradients of our own.

    The L2 penalty shrinks `coef` before each step. It depends on public settings and noised sums alone, so it is
    post-processing.

    Args:
        model: trained in place.
        recipe, privacy, group_cap: as in `PrivateNumpyTrainer`.

    Guarantee: that of `PrivateNumpyTrainer`.

    Raises:
        UnsupportedModel: the estimator is `LogisticRegression`, or has another loss or penalty.
    """

    def __init__(self, model: SklearnModel, recipe: Recipe, privacy: PrivacyConfig, group_cap: int = 1) -> None:
        estimator = model.estimator
        if isinstance(estimator, LogisticRegression):
            raise UnsupportedModel(
                "LogisticRegression has a solver without gradients of single examples; use "
                "SGDClassifier(loss='log_loss')"
            )
        name = type(estimator).__name__
        if estimator.loss not in SUPPORTED:
            wanted = SUPPORTED[0 if model.classes else 1]
            raise UnsupportedModel(f"{name}(loss={estimator.loss!r}) has no form for DP-SGD; use loss={wanted!r}")
        if estimator.penalty not in ("l2", None):
            raise UnsupportedModel(
                f"{name}(penalty={estimator.penalty!r}) has no form for DP-SGD; use penalty='l2' or None"
            )
        super().__init__(model, recipe, privacy, group_cap)
        self._decay = float(estimator.alpha) if estimator.penalty else 0.0
        if self._decay and privacy.dp_sgd.sampling_rate:
            raise UnsupportedModel(
                f"{name}(penalty={estimator.penalty!r}) shrinks weights at each client, and a step on a secure sum has "
                "gradients alone; use penalty=None"
            )

    def _step(self, units: Units, batch: NDArray, bound: float, rate: float) -> None:
        self.model.weights["coef"] *= max(0.0, 1 - rate * self._decay)
        super()._step(units, batch, bound, rate)
