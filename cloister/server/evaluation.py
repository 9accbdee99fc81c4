"""Scoring the global model on the server's own examples."""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from cloister.core.arrays import from_record
from cloister.core.hypotheses import unstacked
from cloister.tasks.base import Model, Task
from cloister.tasks.making import dataset_of
from cloister.tasks.scores import Classification
from cloister.tasks.validation import with_validation


class CentralEvaluation:
    """The task's metrics on its test set.

    Where the model is several hypotheses, each owner of test examples (all of them together, where they have no owners)
    takes the hypothesis of least loss on them, as a client would.

    Args:
        task: whose test set and metrics.
        model: that the arrays are put into.
        hypotheses: how many models a record holds; 0: one, under its own names.
        pretrained: whether the server trained the initial model on examples of its own, which score nothing then.

    Attributes:
        examples: that models are scored on.
    """

    def __init__(self, task: Task, model: Model, hypotheses: int = 0, pretrained: bool = False) -> None:
        self.task = task
        self.model = model
        self.hypotheses = hypotheses
        data = with_validation(task, dataset_of(task)) if pretrained else dataset_of(task)
        self.examples = data.test
        owners = data.test_owners
        self._owners = np.zeros(len(data.test), np.int64) if owners is None else owners

    def __call__(self, arrays: ArrayRecord) -> dict[str, float]:
        """Named figures of merit of a global model."""
        return self.task.metrics(self.examples.y, self._predictions(arrays))

    def in_detail(self, arrays: ArrayRecord) -> dict[str, object]:
        """The content of `evaluation.json`: figures of merit, and for a classification what was taken for what.

        Args:
            arrays: of a global model.
        """
        y, predicted = self.examples.y, self._predictions(arrays)
        content: dict[str, object] = {"examples": len(y), "metrics": self.task.metrics(y, predicted)}
        if not self.task.classes:
            return content
        return content | asdict(Classification.of(y, predicted, self.task.class_names))

    def _predictions(self, arrays: ArrayRecord) -> NDArray:
        named = from_record(arrays)
        models = unstacked(named) if self.hypotheses else [named]
        predicted = [self._predict(model) for model in models]
        return predicted[0] if len(models) == 1 else self._best(predicted)

    def _predict(self, model: dict[str, NDArray]) -> NDArray:
        self.model.assign(model)
        return self.model.predict(self.examples.x)

    def _best(self, predicted: Sequence[NDArray]) -> NDArray:
        """To each owner the predictions of the hypothesis that suits it best, by their sum of losses."""
        losses = [np.bincount(self._owners, self.task.losses(self.examples.y, each)) for each in predicted]
        # One that has diverged suits nobody.
        best = np.argmin(np.nan_to_num(losses, nan=np.inf, posinf=np.inf), axis=0)[self._owners]
        return np.stack(predicted)[best, np.arange(len(best))]
