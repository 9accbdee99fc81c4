"""How far the models of a round lie apart: the number that scales metric-aware noise.

A distance of a cohort is the largest distance of any pair of clients, or the root of the mean of all squared ones.
Distances are plugins: `Distance` objects. All of ours come from Gram matrices, G = U·Uᵀ per array, in float64, made
block by block: one pass over memory whatever the number of pairs.

| edge case | the distance |
|---|---|
| empty cohort, one client | 0: there is no pair |
| clients that agree | 0, also where rounding would take it below |
| zero update | as for any other; `cosine`, which knows no direction of it, gives 1, and 0 to another zero update |
| NaN or infinite update | screening has rejected it |
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from cloister.core.cohort import Cohort, updates
from cloister.core.registry import Registry
from cloister.core.threads import spans

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Distance:
    """A way to say how far two clients lie apart.

    Attributes:
        pairwise: the n x n matrix of distances of a cohort.
        largest: what no distance of two clients can pass once updates are clipped to C, for a model of L arrays. The
            distance of a cohort lies between 0 and that, so one client moves it by no more: it is its sensitivity,
            for adding, removing and replacing alike. Infinite where there is no such bound.
        averaged: take the root of the mean of the squares of all pairs, not the largest pair, for the cohort's.
    """

    pairwise: Callable[[Cohort], Matrix]
    largest: Callable[[float, int], float]
    averaged: bool = False

    def of(self, cohort: Cohort) -> float:
        """The distance of a cohort; 0 where there are fewer than two clients.

        Args:
            cohort: of n updates.
        """
        if not self.averaged:
            return largest_distance(cohort, self.pairwise)
        count = len(cohort)
        return math.sqrt(float(np.sum(self.pairwise(cohort) ** 2)) / (count * (count - 1))) if count > 1 else 0.0


DISTANCES = Registry(
    "distance",
    "cloister.distances",
    {
        "mean-layer-frobenius": "cloister.privacy.mechanisms.distance:MEAN_LAYER_FROBENIUS",
        "l2": "cloister.privacy.mechanisms.distance:L2",
        "cosine": "cloister.privacy.mechanisms.distance:COSINE",
        "rms": "cloister.privacy.mechanisms.distance:RMS",
    },
)

GRAM_BYTES = 32 << 20
"""Largest scratch for one block of the Gram matrices; wider blocks mean fewer matrices to add up."""
WIDEST = 1 << 14
"""Columns of a block above which nothing more is gained."""


def largest_distance(cohort: Cohort, pairwise: Callable[[Cohort], Matrix]) -> float:
    """The largest distance between two clients; 0 where there are fewer than two.

    A Gram matrix loses digits where clients nearly agree. It only has to find the pair, though: for two clients
    alone, centred at one of them, nothing cancels, so the winning pair is measured again by itself.

    Args:
        cohort: of n updates.
        pairwise: gives the n x n matrix of their distances.
    """
    if len(cohort) < 2:
        return 0.0
    matrix = pairwise(cohort)
    if len(cohort) == 2:
        return float(matrix[0, 1])
    upper = np.triu_indices(len(cohort), k=1)
    winner = int(np.argmax(matrix[upper]))
    return largest_distance(cohort.take(np.array([upper[0][winner], upper[1][winner]])), pairwise)


def mean_layer_frobenius(cohort: Cohort) -> Matrix:
    """(1/L) Σ_ℓ ‖w_i(ℓ) - w_j(ℓ)‖_F over the L arrays of the model, weights and biases alike.

    With updates clipped to C it is at most 2C/√L: by Cauchy and Schwarz the sum of L norms is at most √L times the
    norm of the whole difference, and that is at most 2C. Two opposed clients that spread over all arrays evenly
    reach it, and while everybody agrees it is 0: one client can move it over its whole range.

    Source: Sáinz-Pardo Díaz et al. (2026), Algorithm 1.
    """
    return _total(cohort, map(np.sqrt, _squared_distances(cohort))) / len(cohort.layout.names)


def l2(cohort: Cohort) -> Matrix:
    """‖w_i - w_j‖₂ over all parameters together; at most 2C between two points of a ball of radius C."""
    return np.sqrt(_total(cohort, _squared_distances(cohort)))


def cosine(cohort: Cohort) -> Matrix:
    """1 - cos(U[i], U[j]) of the updates: 0 where clients agree on a direction, 2 where they oppose each other.

    An update of norm 0 has no direction; its distance to any other is 1, and to another such update 0. Clipping does
    not change a direction; 2 is the bound whatever C is.
    """
    gram = total_gram(cohort)
    norms = np.sqrt(np.diag(gram))
    still = norms == 0
    unit = np.where(still, 1.0, norms)
    distances = 1 - gram / np.outer(unit, unit)
    distances[np.ix_(still, still)] = 0.0
    return np.clip(distances, 0.0, 2.0)


MEAN_LAYER_FROBENIUS = Distance(mean_layer_frobenius, lambda bound, arrays: 2 * bound / math.sqrt(arrays))
L2 = Distance(l2, lambda bound, arrays: 2 * bound)
RMS = Distance(l2, lambda bound, arrays: 2 * bound, averaged=True)
COSINE = Distance(cosine, lambda bound, arrays: 2.0)


def total_gram(cohort: Cohort) -> Matrix:
    """The Gram matrix of the bounded updates over all parameters together, not centred, in float64."""
    return _total(cohort, layer_grams(cohort, centred=False))


def layer_grams(cohort: Cohort, centred: bool = True) -> Iterator[Matrix]:
    """The Gram matrix of the bounded updates, array by array, in float64.

    Args:
        cohort: of n updates; each counts with its factor.
        centred: subtract the first update from all. Differences stay the same and lose fewer digits.

    Yields:
        n x n matrices.
    """
    count = len(cohort)
    width = min(WIDEST, max(256, GRAM_BYTES // (8 * max(1, count))))
    block, product = np.empty(width * count), np.empty((count, count))
    for _, stretches in groupby(spans(cohort.layout.sizes, width), key=lambda span: span.layer):
        gram = np.zeros((count, count))
        for span in stretches:
            columns = updates(cohort.rows, cohort.sent, span, block)
            if (cohort.factors != 1).any():
                columns *= cohort.factors[:, None]
            if centred:
                # A copy: the first row turns into zeros while it is subtracted.
                columns -= columns[:1].copy()
            gram += np.matmul(columns, columns.T, out=product)
        yield gram


def _squared_distances(cohort: Cohort) -> Iterator[Matrix]:
    """‖u_i - u_j‖² = G_ii + G_jj - 2 G_ij, array by array, never below 0."""
    for gram in layer_grams(cohort):
        norms = np.diag(gram)
        yield np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0.0)


def _total(cohort: Cohort, matrices: Iterable[Matrix]) -> Matrix:
    """The sum of matrices of a cohort's pairs; zero where there are none."""
    return sum(matrices, np.zeros((len(cohort), len(cohort))))
