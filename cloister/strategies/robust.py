"""Robust aggregation rules with checked options. Each needs all replies of a round."""

from collections.abc import Sequence

import numpy as np
from flwr.serverapp import strategy as flower
from numpy.typing import NDArray

from cloister.strategies.averaging import Sampled, Sampling
from cloister.utils import check
from cloister.utils.arrays import from_record
from cloister.utils.errors import ConfigError
from cloister.utils.registry import MEDIAN, SELECTION, Aggregated, Capabilities, Messages, trimmed_mean
from cloister.utils.wire import ARRAYS

COLUMNS = 1 << 14
"""Parameters per block in the computation of distances."""


class FedMedian(Sampled, flower.FedMedian):
    """Coordinate-wise median. Source: Yin et al. (2018), arXiv:1803.01498, Definition 1."""

    capabilities = MEDIAN


class FedTrimmedAvg(Sampled, flower.FedTrimmedAvg):
    """Coordinate-wise mean without the largest and smallest share of values.

    Args:
        trim_fraction: share cut off at each end, at least 0 and below ½.
        sampling: as in `Sampled`.

    Source: Yin et al. (2018), arXiv:1803.01498, Definition 2.
    """

    def __init__(self, *, trim_fraction: float = 0.2, **sampling: Sampling | None) -> None:
        super().__init__(**sampling)
        if not 0 <= trim_fraction < 0.5:
            raise ConfigError(f"strategy.trim-fraction must be at least 0 and below 0.5, got {trim_fraction}")
        self.beta = trim_fraction

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities of a trimmed mean with this share cut off."""
        return trimmed_mean(self.beta)


class Krum(Sampled):
    """Krum: the model with the least sum of squared distances to its n - f - 2 nearest other models.

    Of models that tie, the first is taken, in the order of screening. Flower's class computes distances in float32
    without centring. For models that nearly agree, these are rounding errors.

    Args:
        num_malicious: f ≥ 0, number of clients that may be hostile.
        sampling: as in `Sampled`.

    Raises:
        ConfigError: f is negative, or above 0 with fewer than the 2f + 3 nodes that Krum's guarantee needs.

    Source: Blanchard et al. (2017), arXiv:1703.02757, §4.
    """

    capabilities = SELECTION

    def __init__(self, *, num_malicious: int = 0, **sampling: Sampling | None) -> None:
        super().__init__(**sampling)
        check.non_negative(**{"strategy.num-malicious": num_malicious})
        minimum, nodes = 2 * num_malicious + 3, self.train_sampling.min_nodes
        if num_malicious and nodes < minimum:
            raise ConfigError(
                f"strategy.num-malicious = {num_malicious} needs strategy.min-nodes of at least {minimum} "
                f"(2f + 3), found {nodes}"
            )
        self.num_malicious = num_malicious

    def aggregate_train(self, server_round: int, replies: Messages) -> Aggregated:
        """Return the chosen model, unchanged, and its metrics."""
        contents = [message.content for message in replies if not message.has_error()]
        if not contents:
            return None, None
        distances = squared_distances([from_record(content.array_records[ARRAYS]) for content in contents])
        count = len(distances)
        others = distances[~np.eye(count, dtype=bool)].reshape(count, count - 1)
        # Each model's sum of squared distances to its max(1, n - f - 2) nearest others.
        scores = np.sort(others, axis=1)[:, : max(1, count - self.num_malicious - 2)].sum(axis=1)
        chosen = contents[int(np.argmin(scores))]
        return chosen.array_records[ARRAYS], self.train_metrics_aggr_fn([chosen], self.weighted_by_key)


def squared_distances(models: Sequence[dict[str, NDArray]]) -> NDArray:
    """Compute ‖w_i - w_j‖² for every pair of models, shape (n, n).

    The computation is in float64, block by block.
    """
    gram = np.zeros((len(models), len(models)))
    for name, array in models[0].items():
        pieces = [model[name].ravel() for model in models]
        for start in range(0, array.size, COLUMNS):
            columns = np.array([piece[start : start + COLUMNS] for piece in pieces], np.float64)
            # Centring changes no distance. Without it, products of models that nearly agree lose all their digits.
            columns -= columns.mean(axis=0)
            gram += columns @ columns.T
    squares = np.diag(gram)
    return np.maximum(squares[:, None] + squares - 2 * gram, 0.0)
