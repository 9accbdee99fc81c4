"""Scores for membership: which examples was a model trained on? Higher scores speak for a member.

Each attack sees what the target model says of n examples, and what s shadow models say of them, each of which was
trained on some of them.

Sources: Yeom et al. (2018), arXiv:1709.01604, for the loss threshold; Carlini et al. (2022), arXiv:2112.03570,
Algorithms 1 and 2 with §IV for logit-scaled confidences and one variance for all examples where shadow models are few;
Zarifzadeh et al. (2024), arXiv:2312.03262, §3 for RMIA with online reference models.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from cloister.audits.scores import Scores
from cloister.tasks.base import Task

Inside = NDArray[np.bool_]
FLOOR = 1e-7
"""Of a probability, as in the losses of tasks."""
SMALLEST = 1e-9
"""Of a variance."""


@dataclass(frozen=True)
class Seen:
    """What models say of examples.

    Attributes:
        target: the confidence of the model under attack in the right answer, shape (n,): any real number.
        shadows: that of the shadow models, shape (s, n).
        inside: which examples each shadow model was trained on, shape (s, n). Every example is in at least two of them
            and not in at least two.
    """

    target: Scores
    shadows: Scores
    inside: Inside

    def loss_threshold(self) -> Scores:
        """The target's own confidence: that of a member is high."""
        return self.target

    def lira_online(self) -> Scores:
        """ln N(confidence; fit to models with the example) - ln N(confidence; fit to models without it)."""
        return self._log_density(self.inside) - self._log_density(~self.inside)

    def lira_offline(self) -> Scores:
        """How far the confidence lies above those of models without the example, in standard deviations."""
        mean, variance = self._fit(~self.inside)
        found: Scores = (self.target - mean) / np.sqrt(variance)
        return found

    def rmia(self) -> Scores:
        """The share of all examples z that x beats: P(x | target)/P(x) ≥ P(z | target)/P(z).

        P of an example is the mean over models with it and models without it, each kind counted as half. A threshold of
        γ = 1 is taken: a model that generalises has no ratios of 2.
        """
        ratio = _probability(self.target) / self._expected
        found: Scores = stats.rankdata(ratio, "max") / len(ratio)
        return found

    @cached_property
    def _expected(self) -> Scores:
        said = _probability(self.shadows)
        with_it = (said * self.inside).sum(axis=0) / self.inside.sum(axis=0)
        found: Scores = (with_it + (said * ~self.inside).sum(axis=0) / (~self.inside).sum(axis=0)) / 2
        return found

    def _log_density(self, chosen: Inside) -> Scores:
        mean, variance = self._fit(chosen)
        found: Scores = stats.norm.logpdf(self.target, mean, np.sqrt(variance))
        return found

    def _fit(self, chosen: Inside) -> tuple[Scores, float]:
        """The mean for each example over the models chosen for it, and one variance around these means for all."""
        count = chosen.sum(axis=0)
        mean = (self.shadows * chosen).sum(axis=0) / count
        freedom = float((count - 1).sum())
        return mean, max(float((np.square(self.shadows - mean) * chosen).sum() / freedom), SMALLEST)

    def against(self, number: int) -> "Seen":
        """One of the shadow models as the target, and the others as its shadow models.

        Args:
            number: of the shadow model.
        """
        others = np.arange(len(self.shadows)) != number
        return Seen(self.shadows[number], self.shadows[others], self.inside[others])


def confidences(task: Task, y: NDArray, outputs: NDArray) -> Scores:
    """How sure a model is of the right answer: ln p/(1 - p) of the class, or -ln of the loss of a number.

    Args:
        task: that the model solves.
        y: n targets.
        outputs: what the model says, shape (n, classes) or (n,).
    """
    if not task.classes:
        found: Scores = -np.log(task.losses(y, outputs).astype(np.float64) + FLOOR)
        return found
    said = np.clip(outputs.astype(np.float64), FLOOR, 1.0)
    right = np.take_along_axis(said, y.astype(np.int64)[:, None], axis=1)[:, 0]
    # The others' sum, not 1 - p: that is 0 in single precision where the model is sure.
    found = np.log(right) - np.log(np.maximum(said.sum(axis=1) - right, FLOOR))
    return found


def _probability(confidence: Scores) -> Scores:
    found: Scores = 1 / (1 + np.exp(-confidence))
    return found


def drawn(members: int, pool: int, shadows: int, seed: int) -> Inside:
    """Which examples each shadow model is trained on: about as many as the target was, each in as many models.

    Args:
        members: how many examples the target was trained on.
        pool: n of all examples.
        shadows: s of the models, at least 4.
        seed: of the draw.

    Returns:
        Shape (s, n); every example is in at least two models and not in at least two.
    """
    times = int(np.clip(round(shadows * members / pool), 2, shadows - 2))
    order = np.random.default_rng(seed).random((shadows, pool)).argsort(axis=0)
    return order < times


def grouped(scores: Scores, owners: NDArray, size: int) -> Scores:
    """The mean score of each set of `size` examples of one owner; what is left over of an owner is left out.

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
