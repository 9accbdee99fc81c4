"""Personalized models: k hypotheses, each trained by the clients for which its loss is least.

    k hypotheses → each client trains the one with the least loss and releases it with its own noise
    releases → screen → k-means from the hypotheses → each cluster to its own copy of the wrapped strategy

Before the split round, if one is set, all hypotheses are one model, which all clients train.

The server adds no noise. It receives released models, so that all further computation is post-processing.
"""

from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from cloister.privacy.mechanisms.kmeans import clustered, scattered
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
from cloister.utils.errors import FederationError
from cloister.utils.registry import Aggregated, Messages
from cloister.utils.state import only_weights, without_state
from cloister.utils.wire import HYPOTHESES


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
