"""Trainers by the kind of model they train.

A trainer is made once per process and model, and keeps what is costly to make. `fit` starts from the weights the
model has, takes the examples and a `TrainingPlan`, and returns the mean training loss of the last epoch, if it may be
told.
"""

from typing import Protocol

from cloister.core.registry import Registry
from cloister.tasks.base import Examples
from cloister.tasks.training.plan import TrainingPlan

TRAINERS = Registry(
    "trainer",
    "cloister.trainers",
    {
        "keras": "cloister.tasks.training.keras_trainer:KerasTrainer",
        "numpy": "cloister.tasks.training.numpy_trainer:NumpyTrainer",
    },
)


class Trainer(Protocol):
    """Trains one model in place."""

    def fit(self, examples: Examples, plan: TrainingPlan) -> float | None:
        """Train on the examples; the mean loss of the last epoch, None where it may not be told.

        Args:
            examples: to train on.
            plan: of this round.
        """
        ...
