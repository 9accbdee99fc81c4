"""Registry of trainers, by the kind of model that they train.

A trainer is made once per process and model, and caches costly state. `fit` starts from the model's current weights and
receives examples and a `TrainingPlan`. It returns the mean training loss of the last epoch, if that may be released.
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
    """Trainer of one model, in place."""

    def fit(self, examples: Examples, plan: TrainingPlan) -> float | None:
        """Train on the examples, and return the mean loss of the last epoch.

        None: the loss may not be released.

        Args:
            examples: to train on.
            plan: of this round.
        """
        ...
