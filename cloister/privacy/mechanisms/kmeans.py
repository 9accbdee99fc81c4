"""Which of the received models belong together: k-means that starts from the hypotheses.

n models of p parameters and k hypotheses span at most n + k - 1 dimensions. Where that is less than p, distances are
taken from a Gram matrix, in one pass over memory, and k-means runs on coordinates that reproduce them: the same
clusters as in p dimensions, to rounding, at any p.

| edge case | what happens |
|---|---|
| no models | no labels, spread 0; the middles stay the hypotheses |
| one model | it is the middle of its cluster; the other middles stay |
| a hypothesis that no model is nearest to | it stays where it is, with size 0 |
| a model as near to two hypotheses | it goes to the first |
| two equal hypotheses | the first gets everybody; both are named as collapsed |
| NaN or infinite numbers | undefined: a round screens such replies out before |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.core.arrays import Layout, Row
from cloister.core.cohort import Cohort
from cloister.privacy.mechanisms.distance import total_gram

MAX_STEPS = 300
"""Of k-means, as in scikit-learn."""
TOGETHER = 0.1
"""Hypotheses closer than this share of the clients' distance to their own no longer tell groups apart."""

DRAWS = 10
"""Starts of k-means that are tried where the hypotheses are no start."""
ROUNDING = 1e-12
"""Squared distances up to this, where the largest coordinate is 1, come of rounding: such models are the same one."""


@dataclass(frozen=True)
class Clusters:
    """An assignment of n clients to k hypotheses.

    Attributes:
        labels: the hypothesis of each client, shape (n,).
        spread: root mean square distance of the clients to the middle of their cluster; 0 without clients.
        gaps: distances between the middles of the clusters, shape (k, k); an empty one has its hypothesis for a middle.
    """

    labels: NDArray[np.intp]
    spread: float
    gaps: NDArray[np.float64]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many clients each hypothesis got."""
        return tuple(int(count) for count in np.bincount(self.labels, minlength=len(self.gaps)))

    @property
    def collapsed(self) -> tuple[tuple[int, int], ...]:
        """Pairs of hypotheses that lie nearly on one another."""
        near = np.triu(self.gaps <= TOGETHER * self.spread, k=1) if len(self.labels) else np.zeros_like(self.gaps)
        return tuple((int(i), int(j)) for i, j in np.argwhere(near))


def clustered(layout: Layout, models: Sequence[Row], hypotheses: Sequence[Row]) -> Clusters:
    """Assign each model to the hypothesis that k-means, started from the hypotheses, puts it with.

    Args:
        layout: of a model.
        models: n ≥ 0 of them.
        hypotheses: k ≥ 1 of them.

    Source: Galli et al. (2023), Algorithm 1, line 9.
    """
    points = _coordinates(layout, [*models, *hypotheses])
    # Centred between the hypotheses: where they nearly agree, distances lose no digits to what they have in common.
    points -= points[len(models) :].mean(axis=0)
    members, centres = points[: len(models)], points[len(models) :].copy()
    labels = lloyd(members, centres)
    squares = np.square(members - centres[labels]).sum(axis=1)
    spread = float(np.sqrt(squares.mean())) if len(models) else 0.0
    return Clusters(labels, spread, np.linalg.norm(centres[:, None] - centres[None], axis=2))


def scattered(layout: Layout, models: Sequence[Row], count: int) -> list[int]:
    """Choose models far from each other, for k-means to start from where the hypotheses are all alike.

    They are drawn by k-means++ several times; the draw counts that k-means makes the tightest clusters of. This looks
    at nothing but the models: where these were released, it is post-processing. The draws are no secret, and the same
    for the same models.

    Args:
        layout: of a model.
        models: n ≥ 1 of them.
        count: how many to choose, k ≥ 1.

    Returns:
        Their numbers; fewer than k where fewer differ.

    Source: Arthur and Vassilvitskii (2007), k-means++: The Advantages of Careful Seeding.
    """
    points, rng = _coordinates(layout, models), np.random.default_rng(0)
    points -= points.mean(axis=0)
    points /= np.abs(points).max() or 1.0
    return min((_drawn_apart(points, count, rng) for _ in range(DRAWS)), key=lambda draw: _scatter(points, draw))


def _drawn_apart(points: NDArray, count: int, rng: np.random.Generator) -> list[int]:
    """The first with equal probabilities, each other in proportion to its squared distance to the nearest of those."""
    chosen = [int(rng.integers(len(points)))]
    squares = np.square(points - points[chosen[0]]).sum(axis=1)
    while len(chosen) < count and (squares > ROUNDING).any():
        chosen.append(int(rng.choice(len(points), p=squares / squares.sum())))
        squares = np.minimum(squares, np.square(points - points[chosen[-1]]).sum(axis=1))
    return chosen


def _scatter(points: NDArray, start: list[int]) -> float:
    """Sum of squared distances to the middles that k-means finds from a start."""
    centres = points[start]
    return float(np.square(points - centres[lloyd(points, centres)]).sum())


def lloyd(points: NDArray, centres: NDArray) -> NDArray[np.intp]:
    """k-means by Lloyd's iteration; `centres` are moved in place, and one that nobody is nearest to stays.

    scikit-learn's would move an empty cluster to the point farthest from all others, the noisiest client.

    Args:
        points: shape (n, d).
        centres: shape (k, d), the hypotheses to start from.

    Returns:
        The cluster of each point, shape (n,): of centres equally near the first. The objective falls in every step but
        for rounding, which might go round in circles: after `MAX_STEPS` the last assignment stands.
    """
    labels = np.full(len(points), -1, np.intp)
    for _ in range(MAX_STEPS):
        nearest = (np.square(centres).sum(axis=1) - 2 * points @ centres.T).argmin(axis=1)
        if (nearest == labels).all():
            break
        labels = nearest
        for cluster in np.unique(labels):
            centres[cluster] = points[labels == cluster].mean(axis=0)
    return labels


def _coordinates(layout: Layout, rows: Sequence[Row]) -> NDArray[np.float64]:
    """The rows as they are, in float64, or in as many dimensions as there are rows, at the same distances."""
    if layout.size <= len(rows):
        return np.array([np.concatenate(row) for row in rows], np.float64)
    # Centred at the last row, a hypothesis where there are any: where clients nearly agree, differences lose no digits.
    cohort = Cohort(layout, rows[-1], tuple(rows), np.zeros(len(rows)), np.ones(len(rows)))
    values, vectors = np.linalg.eigh(total_gram(cohort))
    return vectors * np.sqrt(np.maximum(values, 0.0))
