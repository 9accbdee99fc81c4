"""Personalized models: k hypotheses, each trained by the clients for which its loss is least.

    k hypotheses → each client trains the one with the least loss and releases it with its own noise
    releases → screen → k-means from the hypotheses → each cluster to its own copy of the wrapped strategy

Before the split round, if one is set, all hypotheses are one model, which all clients train.

The server adds no noise. It receives released models, so that all further computation is post-processing.

**k-means** starts from the hypotheses. n models of p parameters and k hypotheses span at most n + k - 1 dimensions. If
that is less than p, distances come from a Gram matrix, in one pass over memory, and k-means runs on coordinates that
reproduce them. The clusters are the same as in p dimensions, to rounding, at any p.

| edge case | result |
|---|---|
| no models | no labels, spread 0; the middles stay the hypotheses |
| one model | it is the middle of its cluster; the other middles stay |
| a hypothesis that is nearest to no model | it stays unchanged, with size 0 |
| a model equally near to two hypotheses | it is assigned to the first |
| two equal hypotheses | the first gets all models; the pair is reported as collapsed |
| NaN or infinite numbers | undefined: screening rejects such replies |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from cloister.privacy.mechanisms.metric import total_gram
from cloister.server.screening import Screening
from cloister.server.strategy_wrapper import (
    Measurements,
    NamedArrays,
    StrategyWrapper,
    aggregated_apart,
    restore,
    state_of,
)
from cloister.utils import check
from cloister.utils.arrays import Layout, Row, State, from_record, joined, part, stacked, to_record, unstacked
from cloister.utils.cohort import Cohort
from cloister.utils.errors import FederationError
from cloister.utils.registry import Aggregated, Messages
from cloister.utils.state import only_weights, without_state
from cloister.utils.wire import HYPOTHESES

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


class LaplaceClustering(StrategyWrapper):
    """k hypotheses around k copies of a strategy.

    The global model contains all hypotheses in one record (`cloister.utils.arrays`). Every client receives all of
    them and returns one trained model, without the number of the hypothesis it started from. An empty cluster keeps its
    hypothesis. All clients of a cluster have equal weight.

    Args:
        inner: the wrapped strategy, which draws the nodes.
        make: returns a copy of it that aggregates one hypothesis. The nodes that the copy draws are ignored.
        hypotheses: k ≥ 1. With k = 1 and no noise, this equals the wrapped strategy. With k > 1 and no noise, this is
            IFCA (Ghosh et al., 2020).
        split_round: before this round all hypotheses are one model, aggregated from all replies. In this round, or the
            first later one with replies, k-means starts from releases far from each other (`scattered`). 0: hypotheses
            differ from the first round.

    Guarantee: none of its own. Only the client's mechanism protects a client's reply.

    Source: Galli et al. (2023), Algorithm 1.
    """

    def __init__(self, inner: Strategy, make: Callable[[], Strategy], hypotheses: int, split_round: int = 0) -> None:
        check.positive(clusters=hypotheses)
        super().__init__(inner)
        self._hypotheses = hypotheses
        self._split_round = split_round
        self.copies = [make() for _ in range(hypotheses)]

    @property
    def hypotheses(self) -> int:
        """Return the number k of hypotheses."""
        return self._hypotheses

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Send all hypotheses to the nodes that the wrapped strategy draws.

        Args:
            server_round: from 1 on.
            arrays: k models, stacked.
            config: sent with the models.
            grid: connects to the nodes.

        Raises:
            FederationError: the number of models differs from k.
        """
        models = unstacked(from_record(arrays))
        if len(models) != self.hypotheses:
            raise FederationError(f"{len(models)} hypotheses were found where {self.hypotheses} are trained")
        config[HYPOTHESES] = self.hypotheses
        messages = super().configure_train(server_round, arrays, config, grid)
        for copy, model in zip(self.copies, models, strict=True):
            # A server optimizer steps from the model it was configured with.
            weights = to_record(without_state(model))
            list(copy.configure_train(server_round, weights, ConfigRecord(dict(config)), grid))
        return messages

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Ask clients to evaluate the hypothesis that fits them best.

        Args:
            server_round: from 1 on.
            arrays: k models, stacked.
            config: sent with the models.
            grid: connects to the nodes.
        """
        config[HYPOTHESES] = self.hypotheses
        return super().configure_evaluate(server_round, arrays, config, grid)

    def needs_all_replies(self, layout: Layout, sent: Row) -> str:
        """Return this mechanism's name: it compares all replies with each other.

        Args:
            layout, sent: as in `StrategyWrapper.screened`.
        """
        return "privacy.server = 'laplace-clustering'"

    def expected_reply(self, sent: NamedArrays) -> NamedArrays:
        """Return one model, since every reply contains one."""
        return unstacked(sent)[0]

    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """Aggregate one hypothesis for each cluster with clients.

        Before the split round, one model is aggregated from all clients.

        Args:
            server_round: from 1 on.
            screening: of the replies that count.
        """
        sent, releases, found = unstacked(from_record(self.sent)), screening.cohort.rows, None
        layout = Layout.of(sent[0])
        weights, trained = only_weights(layout, releases)  # state has other units, and makes no clusters
        members: list[Sequence[Row]] = [releases] * self.hypotheses
        if server_round >= self._split_round:
            start = [weights.rows(model) for model in sent]
            if self._split_round and releases and all(all(map(np.array_equal, start[0], row)) for row in start):
                chosen = scattered(weights, trained, len(start))
                start[: len(chosen)] = [trained[number] for number in chosen]
            # k-means from the hypotheses; if they are all equal, from scattered releases.
            found = clustered(weights, trained, start)
            members = [[releases[i] for i in np.flatnonzero(found.labels == k)] for k in range(self.hypotheses)]
        models, metrics = list(sent), None
        for number, (copy, rows) in enumerate(zip(self.copies, members, strict=True)):
            aggregated, seen = aggregated_apart(copy, server_round, layout, rows) if len(rows) else (None, None)
            models[number] = models[number] if aggregated is None else from_record(aggregated)
            metrics = seen or metrics  # of the last copy with clients
        if found is None:
            # Each copy aggregates, to update its state. All hypotheses take the first model: a strategy may be random.
            models = models[:1] * self.hypotheses
        self.measured = Measurements(
            asked=len(self._asked),
            accepted=len(releases),
            rejected=screening.rejected,
            cluster_sizes=found.sizes if found else (len(releases),),
            collapsed=found.collapsed if found else (),
        )
        return to_record(stacked(models)), metrics

    def state_dict(self) -> State:
        """Return the state of the wrapped strategy and of every copy."""
        copies = {f"copy-{number}": state_of(copy) for number, copy in enumerate(self.copies)}
        return {**super().state_dict(), **joined(copies)}

    def load_state_dict(self, state: State) -> None:
        """Restore the wrapped strategy and every copy."""
        super().load_state_dict(state)
        for number, copy in enumerate(self.copies):
            restore(copy, part(state, f"copy-{number}"))
