"""Scoring the global model on the server's own examples."""

from collections.abc import Sequence

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from cloister.core.arrays import from_record
from cloister.core.hypotheses import unstacked
from cloister.tasks.base import Model, Task


class CentralEvaluation:
    """The task's metrics on its test set.

    Where the model is several hypotheses, each owner of test examples (all of them together, where they have no owners)
    takes the hypothesis of least loss on them, as a client would.

    Args:
        task: whose test set and metrics.
        model: that the arrays are put into.
        hypotheses: how many models a record holds; 0: one, under its own names.
    """

    def __init__(self, task: Task, model: Model, hypotheses: int = 0) -> None:
        self.task = task
        self.model = model
        self.hypotheses = hypotheses
        data = task.load()
        self._test = data.test
        owners = data.test_groups
        self._owned = [np.arange(len(data.test))] if owners is None else _indices(owners)

    def __call__(self, arrays: ArrayRecord) -> dict[str, float]:
        """Named figures of merit of a global model."""
        named = from_record(arrays)
        models = unstacked(named) if self.hypotheses else [named]
        predicted = [self._predict(model) for model in models]
        return self.task.metrics(self._test.y, predicted[0] if len(models) == 1 else self._best(predicted))

    def _predict(self, model: dict[str, NDArray]) -> NDArray:
        self.model.assign(model)
        return self.model.predict(self._test.x)

    def _best(self, predicted: Sequence[NDArray]) -> NDArray:
        """To each owner the predictions of the hypothesis that suits it best."""
        chosen = predicted[0].copy()
        for mine in self._owned:
            losses = [self.task.metrics(self._test.y[mine], each[mine])["loss"] for each in predicted]
            chosen[mine] = predicted[int(np.argmin(losses))][mine]
        return chosen


def _indices(owners: NDArray) -> list[NDArray[np.intp]]:
    """Which examples each owner has."""
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(owners[order])) + 1)
