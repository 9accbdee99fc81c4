"""Scoring the global model on the server's own examples."""

from flwr.app import ArrayRecord

from cloister.core.arrays import from_record
from cloister.tasks.base import Examples, Model, Task


class CentralEvaluation:
    """The task's metrics on its test set.

    Args:
        task: whose test set and metrics.
        model: that the arrays are put into.
    """

    def __init__(self, task: Task, model: Model) -> None:
        self.task = task
        self.model = model
        self._test: Examples = task.load().test

    def __call__(self, arrays: ArrayRecord) -> dict[str, float]:
        """Named figures of merit of a global model."""
        self.model.assign(from_record(arrays))
        return self.task.metrics(self._test.y, self.model.predict(self._test.x))
