"""FedAvg and FedProx, and the base class of all strategies here, with checked sampling of nodes."""

from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.capabilities import MEAN, Aggregated, Capabilities, Messages
from cloister.core.cohort import Cohort, scratch_for, weighted_sum
from cloister.core.draw import Draw
from cloister.core.state import State, joined, part
from cloister.core.threads import Span, for_each_span, spans
from cloister.core.wire import ARRAYS, CONFIG, EXAMPLES, PROXIMAL_MU, ROUND, number
from cloister.flower import log
from cloister.strategies.sampling import Sampling


class Sampled(flower.FedAvg):
    """Flower's FedAvg with `Sampling`: the base class of every strategy here.

    Args:
        train: sampling of nodes for training rounds.
        evaluate: sampling of nodes for federated evaluation; None switches it off.

    Attributes:
        last_draw: nodes of the last training round, with their sampling; before the first round, the planned draw.
    """

    def __init__(self, train: Sampling | None = None, evaluate: Sampling | None = None) -> None:
        super().__init__()
        self.train_sampling = Sampling() if train is None else train
        self.evaluate_sampling = evaluate
        self.last_draw: Draw = self.train_sampling.plan()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Draw the nodes of this round and address the model to them."""
        self.last_draw = draw = self.train_sampling.draw(grid)
        return _addressed(draw, MessageType.TRAIN, server_round, arrays, config)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Draw the nodes that evaluate this round's model, if evaluation is on."""
        if self.evaluate_sampling is None:
            return []
        return _addressed(self.evaluate_sampling.draw(grid), MessageType.EVALUATE, server_round, arrays, config)

    def state_dict(self) -> State:
        """Return the state of the draws. A subclass with further state between rounds adds it."""
        evaluate = self.evaluate_sampling
        return joined(
            {"train": self.train_sampling.state_dict(), "evaluate": evaluate.state_dict() if evaluate else {}}
        )

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""
        self.train_sampling.load_state_dict(part(state, "train"))
        if self.evaluate_sampling:
            self.evaluate_sampling.load_state_dict(part(state, "evaluate"))

    def summary(self) -> None:
        """Log the sampling of nodes."""
        how = self.train_sampling
        log(INFO, "%s: %s sampling of %g of the nodes", type(self).__name__, how.kind, how.fraction)


def _addressed(draw: Draw, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord) -> list[Message]:
    config[ROUND] = server_round
    record = RecordDict({ARRAYS: arrays, CONFIG: config})
    return [Message(record, node, kind) for node in draw.nodes]


class FedAvg(Sampled):
    """Federated averaging: the mean of the clients' models, weighted by their example counts.

    Source: McMahan et al. (2017), arXiv:1602.05629.
    """

    capabilities: Capabilities = MEAN

    def aggregate_train(self, server_round: int, replies: Messages) -> Aggregated:
        """Return the weighted mean, Σ w_i·θ_i / Σ w_i. A single reply is passed on unchanged, without a copy.

        The sum is computed block by block, as the first model plus the mean of the differences from it.
        """
        contents = [message.content for message in replies if not message.has_error()]
        if not contents:
            return None, None
        metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        if len(contents) == 1:
            return contents[0].array_records[ARRAYS], metrics
        models = [from_record(content.array_records[ARRAYS]) for content in contents]
        records = [tuple(content.metric_records.values()) for content in contents]
        weights = np.array([number(record, EXAMPLES) for (record,) in records])
        weights /= weights.sum()
        layout = Layout.of(models[0])
        rows = tuple(layout.rows(model) for model in models)
        cohort = Cohort(layout, rows[0], rows, np.zeros(len(rows)), weights)
        mean = tuple(np.empty(piece.size, layout.dtype) for piece in rows[0])

        def average(span: Span, scratch: NDArray) -> None:
            total = weighted_sum(cohort, span, weights.astype(scratch.dtype), scratch, span.of(mean))
            total += span.of(rows[0])

        for_each_span(spans(layout.sizes), average, lambda: scratch_for(layout), cost=len(rows))
        return to_record(layout.named(mean)), metrics


class FedProx(FedAvg):
    """FedAvg whose clients add μ/2·‖w - w_global‖² to their loss.

    Args:
        proximal_mu: μ ≥ 0. 0.5 in Sáinz-Pardo Díaz et al. (2026).
        sampling: as in `Sampled`.

    Source: Li et al. (2020), arXiv:1812.06127.
    """

    def __init__(self, *, proximal_mu: float = 0.5, **sampling: Any) -> None:
        super().__init__(**sampling)
        check.non_negative(**{"strategy.proximal-mu": proximal_mu})
        self.proximal_mu = proximal_mu

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Configure the messages of FedAvg, and send μ to the clients."""
        config[PROXIMAL_MU] = self.proximal_mu
        return super().configure_train(server_round, arrays, config, grid)
