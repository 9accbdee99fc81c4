"""Membership scores: evidence that an example was in a model's training set. Higher scores support a member.

Each attack receives the outputs of the target model and of s shadow models on n examples. Each shadow model is trained
on some of these examples.

Sources: Yeom et al. (2018), arXiv:1709.01604, for the loss threshold; Carlini et al. (2022), arXiv:2112.03570,
Algorithms 1 and 2 with §IV for logit-scaled confidences and one variance for all examples where shadow models are few;
Zarifzadeh et al. (2024), arXiv:2312.03262, §3 for RMIA with online reference models.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from cloister.audits.scores import Scores
from cloister.tasks.base import Task

Inside = NDArray[np.bool_]
FLOOR = 1e-7
"""Smallest probability, as in the losses of tasks."""
SMALLEST = 1e-9
"""Smallest variance."""


@dataclass(frozen=True)
class Seen:
    """Confidences of models in the right answers for examples.

    Attributes:
        target: confidence of the attacked model in the right answer, shape (n,): any real number.
        shadows: confidences of the shadow models, shape (s, n).
        inside: True for the training examples of each shadow model, shape (s, n). Every example is in the training sets
            of at least two models, and absent from those of at least two.
    """

    target: Scores
    shadows: Scores
    inside: Inside

    def loss_threshold(self) -> Scores:
        """Return the target's own confidence: that of a member is high."""
        return self.target

    def lira_online(self) -> Scores:
        """Compute ln N(confidence; fit to models with the example) - ln N(confidence; fit to models without it)."""
        return self._log_density(self.inside) - self._log_density(~self.inside)

    def lira_offline(self) -> Scores:
        """Compute the confidence's standardized distance above the absent models.

        The absent models are those without the example.
        """
        mean, variance = self._fit(~self.inside)
        found: Scores = (self.target - mean) / np.sqrt(variance)
        return found

    def rmia(self) -> Scores:
        """Compute the share of all examples z that x dominates: P(x | target)/P(x) ≥ P(z | target)/P(z).

        P of an example is the mean over models with it and models without it, each kind with weight one half. The
        threshold is γ = 1: a model that generalizes has no ratios of 2.
        """
        said, outside = _probability(self.shadows), ~self.inside
        with_it = (said * self.inside).sum(axis=0) / self.inside.sum(axis=0)
        without = (said * outside).sum(axis=0) / outside.sum(axis=0)
        ratio = _probability(self.target) / ((with_it + without) / 2)
        found: Scores = stats.rankdata(ratio, "max") / len(ratio)
        return found

    def _log_density(self, chosen: Inside) -> Scores:
        mean, variance = self._fit(chosen)
        found: Scores = stats.norm.logpdf(self.target, mean, np.sqrt(variance))
        return found

    def _fit(self, chosen: Inside) -> tuple[Scores, float]:
        """Return the mean of each example over its chosen models, and one variance.

        The variance is common to all examples, around these means.
        """
        count = chosen.sum(axis=0)
        mean = (self.shadows * chosen).sum(axis=0) / count
        freedom = float((count - 1).sum())
        return mean, max(float((np.square(self.shadows - mean) * chosen).sum() / freedom), SMALLEST)

    def against(self, number: int) -> "Seen":
        """Return one shadow model as the target, with the others as its shadow models.

        Args:
            number: of the shadow model.
        """
        others = np.arange(len(self.shadows)) != number
        return Seen(self.shadows[number], self.shadows[others], self.inside[others])


def confidences(task: Task, y: NDArray, outputs: NDArray) -> Scores:
    """Compute a model's confidence in the right answer.

    It is ln p/(1 - p) of a class, or -ln of the loss of a number.

    Args:
        task: that the model solves.
        y: n targets.
        outputs: of the model, shape (n, classes) or (n,).
    """
    if not task.classes:
        found: Scores = -np.log(task.losses(y, outputs).astype(np.float64) + FLOOR)
        return found
    said = np.clip(outputs.astype(np.float64), FLOOR, 1.0)
    right = np.take_along_axis(said, y.astype(np.int64)[:, None], axis=1)[:, 0]
    # The sum of the other classes, since 1 - p is 0 in single precision for a very confident model.
    found = np.log(right) - np.log(np.maximum(said.sum(axis=1) - right, FLOOR))
    return found


def _probability(confidence: Scores) -> Scores:
    found: Scores = 1 / (1 + np.exp(-confidence))
    return found


def drawn(members: int, pool: int, shadows: int, seed: int) -> Inside:
    """Draw the training examples of each shadow model.

    A model has about as many as the target. Each example is in equally many models.

    Args:
        members: number of training examples of the target.
        pool: n of all examples.
        shadows: s of the models, at least 4.
        seed: of the draw.

    Returns:
        Shape (s, n); every example is in at least two models and absent from at least two.
    """
    times = int(np.clip(round(shadows * members / pool), 2, shadows - 2))
    order = np.random.default_rng(seed).random((shadows, pool)).argsort(axis=0)
    return order < times


def grouped(scores: Scores, owners: NDArray, size: int) -> Scores:
    """Return the mean score of each set of `size` examples of one owner.

    An incomplete set is dropped.

    Args:
        scores: of n examples.
        owners: of each, shape (n,).
        size: of a set.
    """
    found = []
    for owner in np.unique(owners):
        own = scores[owners == owner]
        whole = len(own) // size * size
        found.append(own[:whole].reshape(-1, size).mean(axis=1))
    return np.concatenate(found) if found else np.zeros(0)
