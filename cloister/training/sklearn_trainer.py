"""Training of a linear model by scikit-learn itself."""

import warnings

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.numpy_models import flat
from cloister.tasks.sklearn_models import SklearnModel
from cloister.training.plan import TrainingPlan
from cloister.training.trainers import refuse_what_needs_keras
from cloister.utils.errors import ConfigError


class SklearnTrainer:
    """Trainer that calls `partial_fit` once an epoch, or `fit` of `LogisticRegression` with as many iterations.

    `SGDClassifier` and `SGDRegressor` step on each example, so `client.batch-size` has no effect on them.
    `LogisticRegression` has no learning rate either.

    Args:
        model: trained in place.
        recipe: of the run; its optimizer must be `sgd`.

    Raises:
        ConfigError: the recipe has another optimizer, or Keras callbacks.
    """

    def __init__(self, model: SklearnModel, recipe: Recipe) -> None:
        refuse_what_needs_keras(recipe)
        self.model, self._recipe = model, recipe

    def fit(self, examples: Examples, plan: TrainingPlan) -> float:
        """Train from the model's weights, and return the mean loss of the task after the last epoch.

        Weights are NaN if scikit-learn raises an exception because numbers overflow.

        Args:
            examples: n > 0 of them.
            plan: of this round.

        Raises:
            ConfigError: the plan has a penalty on the distance.
        """
        if plan.proximal_mu:
            raise ConfigError(
                f"strategy.proximal-mu = {plan.proximal_mu:g} needs a model in Keras, PyTorch or NumPy: scikit-learn "
                "has no such penalty; use strategy.name = 'fedavg'"
            )
        factors = self._recipe.weights(examples)
        weights = np.ones(len(examples)) if factors is None else factors.astype(np.float64)
        train = self._solve if isinstance(self.model.estimator, LogisticRegression) else self._descend
        try:
            train(examples, plan, weights)
        except ValueError:  # the model and the task have checked all else
            for array in self.model.weights.values():
                array[:] = np.nan
            return float("nan")
        self.model.adopt()
        predicted = self.model.predict(examples.x)
        if not self.model.classes:
            return float(np.mean(weights * np.square(predicted - examples.y)))
        chosen = np.maximum(predicted[np.arange(len(examples)), examples.y], 1e-7)
        return float(np.mean(weights * -np.log(chosen)))

    def _descend(self, examples: Examples, plan: TrainingPlan, weights: NDArray) -> None:
        """Take a step on each example, in a new order in each epoch."""
        estimator = self.model.fitted()
        for epoch in range(plan.epochs):
            if not (rate := plan.rate(epoch)):
                continue
            seed = int(np.random.SeedSequence((*plan.seed, epoch)).generate_state(1)[0])
            estimator.set_params(learning_rate="constant", eta0=rate, random_state=seed, shuffle=True)
            inputs = flat(plan.seen(examples, epoch).x).astype(np.float64)
            estimator.partial_fit(inputs, examples.y, sample_weight=weights)

    def _solve(self, examples: Examples, plan: TrainingPlan, weights: NDArray) -> None:
        """Let the solver take E iterations; an example of weight 0 stands for each class that the site may lack."""
        x, classes = flat(plan.seen(examples, 0).x).astype(np.float64), self.model.classes
        estimator = self.model.fitted().set_params(max_iter=plan.epochs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            estimator.fit(
                np.concatenate([x, np.zeros((classes, x.shape[1]))]),
                np.concatenate([examples.y, np.arange(classes)]),
                sample_weight=np.concatenate([weights, np.zeros(classes)]),
            )
