"""Evaluation of the global model on the server's examples."""

from dataclasses import asdict

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from cloister.tasks.base import Model, Task
from cloister.tasks.faults import sample, tried
from cloister.tasks.making import dataset_of
from cloister.tasks.scores import Classification, roc_curves
from cloister.tasks.splits import with_validation
from cloister.utils.arrays import from_record, unstacked
from cloister.utils.errors import ConfigError


class CentralEvaluation:
    """Metrics of the task on its test set.

    If the model is several hypotheses, each owner of test examples uses the hypothesis of least loss on them, as a
    client would. Test examples without owners count as one owner.

    Args:
        task: with the test set and the metrics.
        model: that the arrays are assigned to.
        hypotheses: number of models in a record; 0: one, under its own names.
        pretrained: whether the server trained the initial model on its own examples, which the scores then exclude.

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

    @property
    def majority(self) -> float | None:
        """Return the accuracy of always answering the most frequent class of the examples.

        None: an example has no label, or several.
        """
        target, y = self.task.targets.get(""), self.examples.y
        if target is None or target.shape or not (target.classes or target.loss == "binary-cross-entropy"):
            return None
        return float(np.unique(y, return_counts=True)[1].max() / len(y))

    def __call__(self, arrays: ArrayRecord) -> dict[str, float]:
        """Return the metrics of a global model by name."""
        return self.task.metrics(self.examples.y, self._predictions(arrays))

    def in_detail(self, arrays: ArrayRecord) -> dict[str, object]:
        """Return the content of `evaluation.json`.

        It contains the metrics, and for a classification the confusion and the ROC curves of classes. All of it is
        computed on the server's own test examples. Nothing of a site's examples is in it but what the model learnt.

        Args:
            arrays: of a global model.
        """
        y, predicted = self.examples.y, self._predictions(arrays)
        content: dict[str, object] = {"examples": len(y), "metrics": self.task.metrics(y, predicted)}
        target = self.task.targets.get("")
        if target is not None and (pair := target.one_by_one(y, predicted)) is not None:
            count = pair[0].shape[1]
            names = self.task.class_names or [str(number) for number in range(max(2, count))]
            content["roc"] = [asdict(curve) for curve in roc_curves(*pair, names[-count:])]
        if not self.task.classes:
            return content
        return content | asdict(Classification.of(y, predicted, self.task.class_names))

    def _predictions(self, arrays: ArrayRecord) -> NDArray:
        named = from_record(arrays)
        predicted = []
        for model in unstacked(named) if self.hypotheses else [named]:
            self.model.assign(model)
            predicted.append(self.model.predict(self.examples.x))
        if len(predicted) == 1:
            return predicted[0]
        # Each owner of examples takes its hypothesis of least loss.
        losses = [np.bincount(self._owners, self.task.losses(self.examples.y, each)) for each in predicted]
        # A diverged hypothesis counts as infinite loss.
        best = np.argmin(np.nan_to_num(losses, nan=np.inf, posinf=np.inf), axis=0)[self._owners]
        return np.stack(predicted)[best, np.arange(len(best))]


def refuse_unknown_score(task: Task, model: Model, name: str, judged: CentralEvaluation | None) -> None:
    """Refuse early stopping by a score that the task does not report of an untrained model.

    Args:
        task: of the run.
        model: that the task built.
        name: `evaluation.criterion`.
        judged: the evaluation that decides; None: clients' examples do, for which made-up ones of every class stand in.

    Raises:
        ConfigError: the task has no such score, its metrics raise, or the score is undefined on these examples.
    """
    if name == "loss":
        return
    if judged is not None:
        x, y = judged.examples.x, judged.examples.y
    else:
        count = max(2, *(target.classes for target in task.targets.values()))
        x, y = sample(task, None, count), task.placeholders(count).y
    known, problem = tried(lambda: task.metrics(y, model.predict(x)))
    if problem:
        raise ConfigError(f"evaluation.criterion = {name!r}: metrics() of task {task.config.name!r} fails: {problem}")
    if name not in known:
        raise ConfigError(
            f"evaluation.criterion = {name!r} is no score of task {task.config.name!r} on the scored examples; "
            f"it has {', '.join(known)}"
        )
