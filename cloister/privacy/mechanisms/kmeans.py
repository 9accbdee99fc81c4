"""Clustering of the received models by k-means that starts from the hypotheses.

n models of p parameters and k hypotheses span at most n + k - 1 dimensions. If that is less than p, distances come from
a Gram matrix, in one pass over memory, and k-means runs on coordinates that reproduce them. The clusters are the same
as in p dimensions, to rounding, at any p.

| edge case | result |
|---|---|
| no models | no labels, spread 0; the middles stay the hypotheses |
| one model | it is the middle of its cluster; the other middles stay |
| a hypothesis that is nearest to no model | it stays unchanged, with size 0 |
| a model equally near to two hypotheses | it is assigned to the first |
| two equal hypotheses | the first gets all models; the pair is reported as collapsed |
| NaN or infinite numbers | undefined: screening rejects such replies |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.mechanisms.metric import total_gram
from cloister.utils.arrays import Layout, Row
from cloister.utils.cohort import Cohort

# Not scikit-learn's KMeans: it moves an empty cluster to the farthest client, where the paper's algorithm keeps the
# hypothesis. And its draws differ from version to version, while a run that resumes must repeat them.
MAX_STEPS = 300
"""Most steps of k-means, as in scikit-learn."""
TOGETHER = 0.1
"""Two hypotheses count as collapsed if their distance is at most this share of the clients' spread."""

DRAWS = 10
"""Number of k-means++ draws if the hypotheses cannot serve as a start."""
ROUNDING = 1e-12
"""Squared distance, at a largest coordinate of 1, up to which two models count as equal: it is rounding error."""


@dataclass(frozen=True)
class Clusters:
    """Assignment of n clients to k hypotheses.

    Attributes:
        labels: the hypothesis of each client, shape (n,).
        spread: root mean square distance of the clients to the centre of their cluster; 0 without clients.
        gaps: distances between the centres of the clusters, shape (k, k); the centre of an empty one is its hypothesis.
    """

    labels: NDArray[np.intp]
    spread: float
    gaps: NDArray[np.float64]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of clients of each hypothesis."""
        return tuple(int(count) for count in np.bincount(self.labels, minlength=len(self.gaps)))

    @property
    def collapsed(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of hypotheses that nearly coincide."""
        near = np.triu(self.gaps <= TOGETHER * self.spread, k=1) if len(self.labels) else np.zeros_like(self.gaps)
        return tuple((int(i), int(j)) for i, j in np.argwhere(near))


def clustered(layout: Layout, models: Sequence[Row], hypotheses: Sequence[Row]) -> Clusters:
    """Assign each model to its cluster by k-means, started from the hypotheses.

    Args:
        layout: of a model.
        models: n ≥ 0 of them.
        hypotheses: k ≥ 1 of them.

    Source: Galli et al. (2023), Algorithm 1, line 9.
    """
    points = _coordinates(layout, [*models, *hypotheses])
    # Centred between the hypotheses: if they nearly agree, distances keep their digits.
    points -= points[len(models) :].mean(axis=0)
    members, centres = points[: len(models)], points[len(models) :].copy()
    labels = lloyd(members, centres)
    squares = np.square(members - centres[labels]).sum(axis=1)
    spread = float(np.sqrt(squares.mean())) if len(models) else 0.0
    return Clusters(labels, spread, np.linalg.norm(centres[:, None] - centres[None], axis=2))


def scattered(layout: Layout, models: Sequence[Row], count: int) -> list[int]:
    """Choose models far from each other, as a start if all hypotheses are alike.

    They are drawn by k-means++ several times, and the draw with the tightest clusters is returned. The first index of a
    draw is uniform, and each next one has a probability in proportion to the squared distance to the nearest drawn one.
    The choice depends
    on the models alone: if these were released, it is post-processing. The draws are public, and the same for the same
    models.

    Args:
        layout: of a model.
        models: n ≥ 1 of them.
        count: k ≥ 1, number of models to choose.

    Returns:
        Their indices; fewer than k if fewer models differ.

    Source: Arthur and Vassilvitskii (2007), k-means++: The Advantages of Careful Seeding.
    """
    points, rng = _coordinates(layout, models), np.random.default_rng(0)
    points -= points.mean(axis=0)
    points /= np.abs(points).max() or 1.0
    draws = []
    for _ in range(DRAWS):
        chosen = [int(rng.integers(len(points)))]
        squares = np.square(points - points[chosen[0]]).sum(axis=1)
        while len(chosen) < count and (squares > ROUNDING).any():
            chosen.append(int(rng.choice(len(points), p=squares / squares.sum())))
            squares = np.minimum(squares, np.square(points - points[chosen[-1]]).sum(axis=1))
        centres = points[chosen]
        draws.append((float(np.square(points - centres[lloyd(points, centres)]).sum()), chosen))
    return min(draws, key=lambda draw: draw[0])[1]


def lloyd(points: NDArray, centres: NDArray) -> NDArray[np.intp]:
    """Run k-means by Lloyd's iteration, in place; empty clusters keep their centres.

    Args:
        points: shape (n, d).
        centres: shape (k, d), the hypotheses to start from.

    Returns:
        The cluster of each point, shape (n,): the first of equally near centres. The objective falls in every step up
        to rounding, which might cause a cycle: after `MAX_STEPS` the last assignment is returned.
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
    """Return the rows in float64, or equidistant coordinates in fewer dimensions."""
    if layout.size <= len(rows):
        return np.array([np.concatenate(row) for row in rows], np.float64)
    # Centred at the last row, a hypothesis if there are any: if clients nearly agree, differences keep their digits.
    cohort = Cohort(layout, rows[-1], tuple(rows), np.zeros(len(rows)), np.ones(len(rows)))
    values, vectors = np.linalg.eigh(total_gram(cohort))
    return vectors * np.sqrt(np.maximum(values, 0.0))
