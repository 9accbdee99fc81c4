"""Targets of a task: the numbers that one output of a model is trained to predict, their loss, checks and metrics.

| loss | targets | predictions | metrics |
|---|---|---|---|
| `cross-entropy` | class numbers | probabilities of the classes, on a last axis | loss, accuracy; one label: f1, auc |
| `binary-cross-entropy` | 0 or 1 | probabilities of 1 | loss, accuracy, `auc` of one row of findings |
| `mse`, `rmse` | numbers | numbers | loss (the mean squared error), rmse |
| `mae` | numbers | numbers | loss (the mean absolute error), mae |
| a function | class numbers if `classes` are stated, else numbers | as these | loss, and accuracy or rmse |

An example's loss is the mean over the numbers of its target (pixels, findings, places of a sequence). So each example
has a loss of its own, which evaluation, audits and DP-SGD use. `rmse` trains on the root of a batch's mean, and
is scored as `mse`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cloister.tasks.scores import class_figures, mean_auc
from cloister.utils.arrays import Tensor
from cloister.utils.errors import ConfigError
from cloister.utils.rows import Shape, cast, each_field, fields, finite_rows

LossName = Literal["cross-entropy", "binary-cross-entropy", "mse", "rmse", "mae", "squared-error"]
"""Names of losses; `squared-error` is `mse`."""
Loss = LossName | Callable[[Tensor, Tensor], Tensor]
"""Training loss: a name, or a function of targets and predictions, in Keras operations, with a loss of each example."""
FLOOR = 1e-7
"""Least probability in a logarithm, as in Keras."""
SUM = 1e-3
"""Largest deviation from 1 of the sum of an example's probabilities. Rounding errors of float32 are far smaller."""


@dataclass(frozen=True)
class Target:
    """One output of a model, and what it is trained on.

    Args:
        loss: its name, or a function `loss(targets, predictions)` from n examples to losses of shape (n, ...).
        shape: of one example's target: () for one number or label, (14,) for 14 findings, (64, 64) for a mask.
        classes: number of classes of `cross-entropy`, 2 or more; 0 for numbers.
        weight: factor of this output's loss in the sum over all outputs, above 0.
    """

    loss: Loss = "cross-entropy"
    shape: Shape = ()
    classes: int = 0
    weight: float = 1.0

    @property
    def fault(self) -> str:
        """Return the first reason why no model can be trained on this target; empty if there is none."""
        if isinstance(self.loss, str) and self.loss not in get_args(LossName):
            return f"loss {self.loss!r} is none of {', '.join(get_args(LossName))}, and no function"
        if not isinstance(self.shape, tuple) or not all(isinstance(size, int) and size > 0 for size in self.shape):
            return f"shape {self.shape!r} must be a tuple of whole numbers above 0, such as (64, 64), or () for one"
        if self.loss == "cross-entropy" and self.classes < 2:
            return f"'cross-entropy' needs the number of classes, 2 or more; found classes {self.classes}"
        if self.classes and isinstance(self.loss, str) and self.loss != "cross-entropy":
            return f"{self.loss!r} takes numbers; leave out classes, or use 'cross-entropy'"
        if not 0 < self.weight < math.inf:
            return f"weight {self.weight} must be a finite number above 0"
        return ""

    @property
    def dtype(self) -> DTypeLike:
        """Return the dtype of targets in training and scoring."""
        return np.int64 if self.classes else np.float32

    @property
    def output_shape(self) -> Shape:
        """Return the shape of one example's prediction."""
        return (*self.shape, self.classes) if self.classes else self.shape

    def described(self) -> str:
        """Describe the valid targets in words."""
        if self.classes:
            numbers = f"labels from 0 to {self.classes - 1}"
        else:
            numbers = "0 or 1" if self.loss == "binary-cross-entropy" else "finite numbers"
        return f"{numbers} of shape {('n', *self.shape)}".replace("'", "")

    def usable(self, y: NDArray) -> NDArray[np.bool_]:
        """Return a mask of the valid targets, shape (n,); each is checked by itself.

        Args:
            y: numbers of shape (n, *shape).
        """
        valid: NDArray[np.bool_] = finite_rows(y)
        axes = tuple(range(1, y.ndim))
        if self.classes:
            valid &= ((y >= 0) & (y < self.classes)).all(axis=axes)
        elif self.loss == "binary-cross-entropy":
            valid &= ((y == 0) | (y == 1)).all(axis=axes)
        return valid

    def shaped(self, outputs: NDArray) -> NDArray:
        """Return a model's outputs in the shape of predictions, (n, *output_shape), such as (n, 1) as (n,).

        The shape stays if the numbers do not fit.
        """
        fits = math.prod(outputs.shape[1:]) == math.prod(self.output_shape)
        return outputs.reshape(len(outputs), *self.output_shape) if fits else outputs

    def losses(self, y: NDArray, scores: NDArray) -> NDArray:
        """Return the loss of each example, shape (n,); for `rmse` the squared error.

        Args:
            y: targets, shape (n, *shape).
            scores: predictions, shape (n, *output_shape).

        Raises:
            ConfigError: a function of the task returns no loss for each example.
        """
        if callable(self.loss):
            each = np.asarray(self.loss(y, scores))
            if not each.ndim or len(each) != len(y):
                raise ConfigError(NO_LOSSES.format(shape=each.shape))
        elif self.loss == "cross-entropy":
            each = cross_entropies(y, scores)
        elif self.loss == "binary-cross-entropy":
            likely = np.clip(scores.astype(np.float64), FLOOR, 1 - FLOOR)
            each = -np.where(y > 0.5, np.log(likely), np.log1p(-likely))
        elif self.loss == "mae":
            each = np.abs(scores.astype(np.float64) - y)
        else:
            each = np.square(scores.astype(np.float64) - y)
        return each.mean(axis=tuple(range(1, each.ndim))) if each.ndim > 1 else each

    def metrics(self, y: NDArray, scores: NDArray) -> dict[str, float]:
        """Return named metrics of predictions against targets; `loss` is the mean of `losses`.

        Args:
            y, scores: as in `losses`.
        """
        loss = float(self.losses(y, scores).mean())
        found = {"loss": loss}
        if self.classes:
            found["accuracy"] = float(np.mean(scores.argmax(axis=-1) == y))
            found |= {} if self.shape else class_figures(y, scores)
        elif self.loss == "binary-cross-entropy":
            found["accuracy"] = float(np.mean((scores >= 0.5) == (y > 0.5)))
            if len(self.shape) < 2:
                found |= mean_auc(y.reshape(len(y), -1), scores.reshape(len(y), -1))
        elif self.loss == "mae":
            found["mae"] = loss
        else:
            found["rmse"] = float(np.square(scores.astype(np.float64) - y).mean()) ** 0.5
        return found

    def one_by_one(self, y: NDArray, scores: NDArray) -> tuple[NDArray, NDArray] | None:
        """Return which examples are of each class or finding, and their scores, both of shape (n, k).

        Of two classes it is class 1 alone, as their scores are complementary.

        Args:
            y, scores: as in `losses`.

        Returns:
            None for numbers, and for targets with several labels or rows.
        """
        if self.classes and not self.shape:
            first = 1 if self.classes == 2 else 0
            return y[:, None] == np.arange(first, self.classes), scores[:, first:]
        if self.loss == "binary-cross-entropy" and len(self.shape) < 2:
            return y.reshape(len(y), -1), scores.reshape(len(y), -1)
        return None

    def fault_of_outputs(self, outputs: NDArray) -> tuple[str, str]:
        """Return what is wrong with a model's finite outputs of the right shape, and the remedy; empty if nothing is.

        Args:
            outputs: predictions, shape (n, *output_shape).
        """
        is_share = outputs.min() >= 0 and outputs.max() <= 1
        if self.loss == "cross-entropy" and not (is_share and np.abs(outputs.sum(axis=-1) - 1).max() <= SUM):
            # Shares that do not add up to 1 may be several findings, each with a probability of its own.
            other = (
                ", or state a target of 'binary-cross-entropy'" if is_share else ", as it is trained on probabilities"
            )
            remedy = f"end the model with activation='softmax'{other}"
        elif self.loss == "binary-cross-entropy" and not is_share:
            remedy = "end the model with activation='sigmoid', as it is trained on probabilities"
        else:
            return "", ""
        return "outputs that are no probabilities, such as logits", remedy

    @property
    def remedy_for_outputs(self) -> str:
        """Return how to end a model so that its outputs have the shape of predictions."""
        if not self.output_shape:
            return "end it with one unit"
        if len(self.output_shape) == 1:
            return f"end it with {self.output_shape[0]} units"
        return f"end it with outputs of shape {self.output_shape} for each example"


def cross_entropies(y: NDArray, scores: NDArray) -> NDArray:
    """Return the negative log-likelihood of each label, in nats.

    Like Keras, floor probabilities at 1e-7.

    Args:
        y: labels, shape (n, ...).
        scores: class probabilities, shape (n, ..., classes).

    Returns:
        The shape of y.
    """
    chosen = np.take_along_axis(scores, y.astype(np.int64)[..., None], axis=-1)[..., 0]
    return -np.log(np.maximum(chosen, FLOOR))


NO_LOSSES = (
    "the loss function must give one number per example, found shape {shape}; a Keras loss needs reduction='none'"
)
Targets = Mapping[str, Target]
"""Targets by the names of the model's outputs; the name of a single output is empty."""


def cast_targets(targets: Targets, y: NDArray) -> NDArray:
    """Return targets in the dtypes of training and scoring.

    Args:
        targets: of the task.
        y: n rows with their fields.
    """
    return each_field(lambda name, array: cast(array, targets[name].dtype), y)


def losses_of(targets: Targets, y: NDArray, scores: NDArray) -> NDArray:
    """Return the weighted sum of all outputs' losses for each example, shape (n,).

    Args:
        targets: of the task.
        y, scores: targets and predictions with their fields.
    """
    true, said = fields(y), fields(scores)
    total: NDArray = np.zeros(len(y), np.float32)
    for name, target in targets.items():
        total = total + target.weight * target.losses(true[name], said[name])
    return total


def metrics_of(targets: Targets, y: NDArray, scores: NDArray) -> dict[str, float]:
    """Return the metrics of all outputs; of several, with the output's name and a point before each.

    Args:
        targets: of the task.
        y, scores: targets and predictions with their fields.
    """
    true, said = fields(y), fields(scores)
    if set(targets) == {""}:
        return targets[""].metrics(y, scores)
    found = {"loss": float(losses_of(targets, y, scores).mean())}
    for name, target in targets.items():
        found |= {f"{name}.{metric}": value for metric, value in target.metrics(true[name], said[name]).items()}
    return found
