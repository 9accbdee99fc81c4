"""Distances between the models of a round, which scale metric-aware noise.

The distance of a cohort is the largest distance of any pair of clients, or the root mean square over all pairs.
Distances are plugins: `Distance` objects. The built-in ones use Gram matrices, G = U·Uᵀ per array, in float64,
computed block by block: one pass over memory for any number of pairs.

| edge case | the distance |
|---|---|
| empty cohort, one client | 0: there is no pair |
| clients that agree | 0, also where rounding would make it negative |
| zero update | as for any other; `cosine` gives 1, and 0 between two zero updates, which have no direction |
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
    """Distance between the updates of clients.

    Attributes:
        pairwise: the n x n matrix of distances of a cohort.
        largest: upper bound of the distance of two clients whose updates are clipped to C, for a model of L arrays.
            The distance of a cohort is between 0 and this bound. So the bound is its sensitivity to one client, for
            adding, removing and replacing. Infinite if there is no such bound.
        averaged: whether the distance of a cohort is the root mean square of all pairs, not the largest pair.
    """

    pairwise: Callable[[Cohort], Matrix]
    largest: Callable[[float, int], float]
    averaged: bool = False

    def of(self, cohort: Cohort) -> float:
        """Return the distance of a cohort; 0 for fewer than two clients.

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
"""Largest scratch for one block of the Gram matrices, in bytes; wider blocks mean fewer matrices to sum."""
WIDEST = 1 << 14
"""Largest number of columns of a block: more give no speed-up."""


def largest_distance(cohort: Cohort, pairwise: Callable[[Cohort], Matrix]) -> float:
    """Return the largest distance between two clients; 0 for fewer than two.

    A Gram matrix loses digits if clients nearly agree, but suffices to find the pair. The distance of that pair is then
    computed again from its two updates alone: centred at one of them, it has no cancellation.

    Args:
        cohort: of n updates.
        pairwise: returns the n x n matrix of their distances.
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
    """Compute (1/L) Σ_ℓ ‖w_i(ℓ) - w_j(ℓ)‖_F over the model's L arrays.

    Weights and biases both count. With updates clipped to C it is at most 2C/√L: by Cauchy and Schwarz the sum of L
    norms is at most √L times the norm of the whole difference, and that is at most 2C. Two opposed clients whose
    updates are spread evenly over all arrays reach it, and it is 0 if all clients agree. So one client can move it
    over its whole range.

    Source: Sáinz-Pardo Díaz et al. (2026), Algorithm 1.
    """
    return _total(cohort, map(np.sqrt, _squared_distances(cohort))) / len(cohort.layout.names)


def l2(cohort: Cohort) -> Matrix:
    """Compute ‖w_i - w_j‖₂ over all parameters; at most 2C in a ball of radius C."""
    return np.sqrt(_total(cohort, _squared_distances(cohort)))


def cosine(cohort: Cohort) -> Matrix:
    """Compute 1 - cos(U[i], U[j]): 0 for equal directions, 2 for opposite ones.

    An update of norm 0 has no direction; its distance to any other is 1, and to another such update 0. Clipping does
    not change a direction; the bound is 2 for every C.
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
    """Return the Gram matrix of the bounded updates, not centred, in float64."""
    return _total(cohort, layer_grams(cohort, centred=False))


def layer_grams(cohort: Cohort, centred: bool = True) -> Iterator[Matrix]:
    """Yield the Gram matrix of the bounded updates, array by array, in float64.

    Args:
        cohort: of n updates; each is multiplied by its factor.
        centred: whether the first update is subtracted from all. Differences stay the same and lose fewer digits.

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
                # A copy: the subtraction overwrites the first row with zeros.
                columns -= columns[:1].copy()
            gram += np.matmul(columns, columns.T, out=product)
        yield gram


def _squared_distances(cohort: Cohort) -> Iterator[Matrix]:
    """Yield ‖u_i - u_j‖² = G_ii + G_jj - 2 G_ij, array by array, never below 0."""
    for gram in layer_grams(cohort):
        norms = np.diag(gram)
        yield np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0.0)


def _total(cohort: Cohort, matrices: Iterable[Matrix]) -> Matrix:
    """Return the sum of matrices of a cohort's pairs; zeros if there are none."""
    return sum(matrices, np.zeros((len(cohort), len(cohort))))
