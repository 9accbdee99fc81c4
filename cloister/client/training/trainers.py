"""Trainers by the kind of model they train.

A trainer is made once per process and model, and keeps what is costly to make. `fit` starts from the weights the
model has, takes the examples and a `TrainingPlan`, and returns the mean training loss of the last epoch, if it may be
told. Trainers for `privacy.client = "dp-sgd"` go by the kind of model and `-dp-sgd`; they are made with the batch size,
the run's `privacy.*` and the most examples of a unit as well.
"""

from typing import Protocol

from cloister.client.training.plan import TrainingPlan
from cloister.core.registry import Registry
from cloister.tasks.base import Examples

TRAINERS = Registry(
    "trainer",
    "cloister.trainers",
    {
        "keras": "cloister.client.training.keras_trainer:KerasTrainer",
        "keras-dp-sgd": "cloister.client.training.dp_sgd_keras_trainer:PrivateKerasTrainer",
        "numpy": "cloister.client.training.numpy_trainer:NumpyTrainer",
        "numpy-dp-sgd": "cloister.client.training.dp_sgd_numpy_trainer:PrivateNumpyTrainer",
    },
)


class Trainer(Protocol):
    """Trains one model in place."""

    def fit(self, examples: Examples, plan: TrainingPlan) -> float | None:
        """Train on the examples; the mean loss of the last epoch, None where it may not be told.

        Args:
            examples: of this client.
            plan: of this round.
        """
        ...
