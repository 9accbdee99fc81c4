"""Trainers by the kind of model they train.

A trainer is made once per process and model, and keeps what is costly to make. `fit` starts from the weights the
model has, takes the examples and a `TrainingPlan`, and returns the mean training loss of the last epoch.
"""

from typing import Protocol

from cloister.client.plan import TrainingPlan
from cloister.core.registry import Registry
from cloister.tasks.base import Examples

TRAINERS = Registry(
    "trainer",
    "cloister.trainers",
    {
        "keras": "cloister.client.keras_trainer:KerasTrainer",
        "numpy": "cloister.client.numpy_trainer:NumpyTrainer",
    },
)


class Trainer(Protocol):
    """Trains one model in place."""

    def fit(self, examples: Examples, plan: TrainingPlan) -> float:
        """Train on the examples; the mean loss of the last epoch."""
        ...
