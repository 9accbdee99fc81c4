"""Flower strategies that wrap a Flower strategy: the base class, and a wrapper that only screens replies.

A wrapper is itself a Flower strategy, so Flower's own `start` can run it. It can wrap any Flower strategy. It processes
replies first: the wrapped strategy receives screened models, in `PrivateStrategy` released ones.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from cloister.privacy.accounting.events import Event
from cloister.privacy.claims.claim import Claim
from cloister.server.canaries import NO_CANARIES, Canaries
from cloister.server.screening import Rejection, Screening, average_metrics, screen
from cloister.utils.arrays import Layout, Row, State, Stateful, declares_state, from_record, joined, part, to_record
from cloister.utils.errors import ConfigError, FederationError
from cloister.utils.registry import (
    MEAN,
    MEDIAN,
    OPTIMIZER,
    SELECTION,
    Aggregated,
    Capabilities,
    Draw,
    Messages,
    trimmed_mean,
)
from cloister.utils.state import averaged_state, is_state, with_valid_variances, without_state
from cloister.utils.threads import free_memory
from cloister.utils.wire import ARRAYS, EXAMPLES, METRICS, TRAIN_LOSS

NamedArrays = Mapping[str, NDArray]
Send = Callable[[Messages], Messages]
FLOWER: Mapping[str, Callable[[Any], Capabilities]] = {
    "FedAvg": lambda _: MEAN,
    **dict.fromkeys(("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"), lambda _: OPTIMIZER),
    "FedMedian": lambda _: MEDIAN,
    "FedTrimmedAvg": lambda strategy: trimmed_mean(strategy.beta),
    **dict.fromkeys(("MultiKrum", "Bulyan", "QFedAvg"), lambda _: SELECTION),
}
"""Capabilities by the Flower class that defines `aggregate_train`, without Flower's wrappers and tree strategies."""
SERVER_NODE = 0
"""Node id of a reply that the server itself makes."""


def capabilities_of(strategy: Strategy) -> Capabilities | None:
    """Return the declared capabilities of a strategy, or those listed for its Flower class.

    Args:
        strategy: any Flower strategy.

    Returns:
        None if neither exists. A declaration counts only if the class that defines `aggregate_train`, or a subclass of
        it, declares. Otherwise the declaration describes another aggregation.
    """
    mro = type(strategy).__mro__
    aggregates = next(cls for cls in mro if "aggregate_train" in vars(cls))
    declares = next((cls for cls in mro if "capabilities" in vars(cls)), None)
    if declares is not None and issubclass(declares, aggregates):
        declared: object = getattr(strategy, "capabilities", None)
        return declared if isinstance(declared, Capabilities) else None
    known = FLOWER.get(aggregates.__name__) if aggregates.__module__.startswith("flwr.") else None
    return known(strategy) if known else None


def require_memory(component: str, layout: Layout, clients: int) -> None:
    """Refuse a round whose replies do not fit into memory, before a client is asked.

    If the system does not report its free memory, every round is accepted.

    Args:
        component: component that needs all replies of a round together.
        layout: of a reply.
        clients: n, largest number of clients asked.

    Raises:
        ConfigError: n replies need more than the free memory.
    """
    one = sum(size * np.dtype(dtype).itemsize for size, dtype in zip(layout.sizes, layout.dtypes, strict=True))
    free = free_memory()
    if free is not None and free < clients * one:
        raise ConfigError(
            f"{component} has to see all replies of a round together: {clients} clients with {_read(one)} each need "
            f"{_read(clients * one)}, and {_read(free)} of memory are free. Ask fewer clients "
            "(strategy.fraction-train), train a smaller model, or give the server more memory. A mean under "
            "privacy.server = 'global-dp' in placement 'update' adds replies up as they come, and needs none of this"
        )


def _read(count: int) -> str:
    """Format a number of bytes for people."""
    unit, name = next(
        (each for each in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")) if count >= each[0]), (1, "bytes")
    )
    return f"{count / unit:.3g} {name}"


@dataclass(frozen=True)
class Measurements:
    """Measurements of one round on the server.

    `clipped_fraction`, `clip_calibration` and `distance` come from un-noised updates: only the server may see them.
    `epsilon` is the ε of the ledger after the round, if a guarantee exists. `abandoned`: too few replies counted, and
    the model is unchanged.
    """

    asked: int
    accepted: int
    rejected: tuple[Rejection, ...] = ()
    noise_std: float | None = None
    noise_multiplier: float | None = None
    sensitivity: float | None = None
    clipping_norm: float | None = None
    clipped_fraction: float | None = None
    clip_calibration: float | None = None
    distance: float | None = None
    released_distance: float | None = None
    cluster_sizes: tuple[int, ...] = ()
    collapsed: tuple[tuple[int, int], ...] = ()
    epsilon: float | None = None
    abandoned: bool = False


class StrategyWrapper(Strategy):
    """A strategy around a strategy. Subclasses define the aggregation of the replies that count.

    Attributes:
        inner: the wrapped strategy.
        min_replies: smallest number of replies that must count; with fewer the round is abandoned. 0: no minimum.
        measured: measurements of the last training round.
        unscored: the rejected replies of the last evaluation round.
        canaries: canaries in training, with their scores so far.
        draws_are_seen: True if nodes may learn which nodes were drawn. Draws then amplify no privacy.
    """

    canaries: Canaries = NO_CANARIES
    draws_are_seen = False

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.min_replies = 0
        self.measured: Measurements | None = None
        self.unscored: tuple[Rejection, ...] = ()
        self._sent: ArrayRecord | None = None
        self._asked: tuple[Message, ...] = ()
        self._asked_to_score: tuple[Message, ...] = ()
        self._draw: Draw | None = getattr(inner, "last_draw", None)
        self._expected: float = 0

    @property
    def has_secret_cohorts(self) -> bool:
        """Return True if the number of nodes asked in a round must stay secret."""
        return False

    @property
    def is_accounted(self) -> bool:
        """Return True if the server's releases have a guarantee that composes."""
        return False

    @property
    def hypotheses(self) -> int:
        """Return the number of models trained side by side; 0 for one model under its own array names."""
        return 0

    def caveats(self) -> tuple[str, ...]:
        """Return the reasons against the server mechanism's guarantee."""
        return ()

    def events(self, layout: Layout) -> tuple[Event, ...]:
        """Return the worst-case releases of a round; empty without server noise.

        Args:
            layout: of the model.
        """
        return ()

    @contextmanager
    def recorded(self, layout: Layout, server_round: int) -> Iterator[None]:
        """Record the releases of a round before the block runs, if the server adds noise.

        Args:
            layout: of the model.
            server_round: counted from 1.
        """
        yield

    def claim(self) -> Claim:
        """Return the claim about the models; empty without server noise."""
        return Claim("none")

    def calibrated(self, layout: Layout, rounds: int) -> Self:
        """Return this strategy with its noise calibrated to its budget, if it has noise.

        Args:
            layout: of the model.
            rounds: number of rounds to come.
        """
        return self

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Let the wrapped strategy choose the nodes, and store the model sent.

        Args:
            server_round: from 1 on.
            arrays: the model.
            config: sent with the model.
            grid: connects to the nodes.

        Raises:
            FederationError: the model has no arrays, or an array that does not hold floats.
            ConfigError: the replies of the first round must be held together and do not fit into memory.
        """
        Layout.of(from_record(arrays))  # refuses a model that cannot be federated before a node trains it
        has_state = any(map(is_state, arrays))  # the wrapped strategy does not see state
        seen = to_record(without_state(from_record(arrays))) if has_state else arrays
        messages = list(self.inner.configure_train(server_round, seen, config, grid))
        for message in messages if has_state else ():
            message.content[ARRAYS] = arrays
        begins, self._sent = self._sent is None, arrays
        self._asked = tuple(messages)
        # If a strategy draws a random number of nodes, only the expected number is public.
        self._draw = getattr(self.inner, "last_draw", None)
        self._expected = float(self._draw.expected if self._draw else len(messages))
        if begins:
            # For a secret cohort size, the expected size plus six standard deviations is used. The refusal then reveals
            # nothing about the real size.
            expected = self.expected_reply(from_record(self.sent))
            layout = Layout.of(expected)
            secret = self._draw is not None and self._draw.kind == "poisson"
            maximum = math.ceil(self._expected + 6 * math.sqrt(self._expected)) if secret else len(self._asked)
            if component := self.needs_all_replies(layout, layout.rows(expected)):
                require_memory(component, layout, maximum)
        return messages

    def needs_all_replies(self, layout: Layout, sent: Row) -> str:
        """Name the component that needs all replies of a round in memory.

        The name is empty if replies are summed as they come.

        Args:
            layout, sent: as in `screened`.
        """
        return f"strategy {type(self.inner).__name__}"

    def receive(self, replies: Messages) -> Screening:
        """Screen the replies of a training round as they come.

        Args:
            replies: in any order, with errors; each is read once, and kept only if needed.

        Raises:
            FederationError: no model was sent.
        """
        expected = self.expected_reply(from_record(self.sent))
        layout = Layout.of(expected)
        return self.screened(replies, layout, layout.rows(expected))

    def collect(self, server_round: int, messages: Messages, send: Send) -> Screening:
        """Send the messages of a training round, and screen the replies as they come.

        Args:
            server_round: from 1 on.
            messages: from `configure_train`.
            send: sends messages and returns the replies that come before the deadline.
        """
        return self.receive(send(messages))

    def screened(self, replies: Messages, layout: Layout, sent: Row) -> Screening:
        """Screen the replies.

        Args:
            replies: as in `receive`.
            layout: required layout of a reply.
            sent: origin of the updates.
        """
        return screen(replies, self._asked, layout, sent)

    def aggregate_train(self, server_round: int, replies: Messages | Screening) -> Aggregated:
        """Screen the replies and aggregate those that count.

        Args:
            server_round: from 1 on.
            replies: in any order, with errors; or the result of `receive`.

        Returns:
            The new model, None if the round is abandoned; and the training metrics.

        Raises:
            FederationError: no model was sent, or the wrapped strategy returned arrays with other names.
        """
        screening = replies if isinstance(replies, Screening) else self.receive(replies)
        accepted = len(screening.cohort)
        if accepted < self.min_replies:
            self.measured = Measurements(len(self._asked), accepted, screening.rejected, abandoned=True)
            return None, None
        arrays, metrics = self.aggregate(server_round, screening)
        if arrays is None:
            return None, metrics
        if any(map(is_state, arrays)):
            arrays = to_record(with_valid_variances(from_record(arrays)))
        layout = Layout.of(from_record(self.sent))
        if tuple(array.dtype for array in arrays.values()) == layout.dtypes and tuple(arrays) == layout.names:
            return arrays, metrics
        # Some Flower optimizers turn float32 into float64: return the names, order and dtypes sent.
        named = from_record(arrays)
        if set(named) != set(layout.names):
            raise FederationError("the wrapped strategy returned other arrays than it was given")
        return to_record(layout.named(layout.rows(named))), metrics

    @property
    def sent(self) -> ArrayRecord:
        """Return the model sent last.

        Raises:
            FederationError: no model was sent.
        """
        if self._sent is None:
            raise FederationError(
                "aggregate_train was called before configure_train: there is no model to compare with"
            )
        return self._sent

    def expected_reply(self, sent: NamedArrays) -> NamedArrays:
        """Return arrays in the layout of a reply, from whose values updates are computed."""
        return sent

    def reply_bytes(self, sent: NamedArrays) -> int:
        """Return the bytes of the arrays that a reply to a training message carries.

        Args:
            sent: the arrays of the message.
        """
        return sum(array.nbytes for array in self.expected_reply(sent).values())

    @abstractmethod
    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """Compute the new global model from the replies that count.

        Args:
            server_round: from 1 on.
            screening: of the replies; at least `min_replies` count.
        """

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Let the wrapped strategy choose the nodes, and store the messages.

        Args:
            server_round: from 1 on.
            arrays: the model.
            config: sent with the model.
            grid: connects to the nodes.
        """
        self._asked_to_score = tuple(self.inner.configure_evaluate(server_round, arrays, config, grid))
        return self._asked_to_score

    def aggregate_evaluate(self, server_round: int, replies: Messages) -> MetricRecord | None:
        """Average each metric over the replies that contain it; return None if no reply counts.

        Args:
            server_round: from 1 on.
            replies: in any order, with errors.
        """
        means, self.unscored = average_metrics(replies, self._asked_to_score)
        return MetricRecord(dict(means)) if means else None

    def summary(self) -> None:
        """Log the summary of the wrapped strategy."""
        self.inner.summary()

    def state_dict(self) -> State:
        """Return the state to resume from, including the wrapped strategy's if it declares one."""
        return joined({"inner": state_of(self.inner)})

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ConfigError: the wrapped strategy declares no state.
        """
        restore(self.inner, part(state, "inner"))


def state_of(strategy: Strategy) -> State:
    """Return the state of a strategy between rounds; empty if it declares none."""
    return strategy.state_dict() if declares_state(strategy) and isinstance(strategy, Stateful) else {}


def restore(strategy: Strategy, state: State) -> None:
    """Restore a strategy from the state that `state_of` returned.

    Args:
        strategy: newly constructed.
        state: of a strategy of the same class.

    Raises:
        ConfigError: the strategy declares no state. Training with reset moments would differ from the original run.
    """
    if not declares_state(strategy) or not isinstance(strategy, Stateful):
        raise ConfigError(
            f"resume: strategy {type(strategy).__name__} does not say what it keeps from round to round, so that a run "
            "with it cannot go on; its class needs state_dict and load_state_dict of its own (docs/extending.md)"
        )
    strategy.load_state_dict(state)


class NoPrivacyStrategy(StrategyWrapper):
    """A wrapper without privacy: every reply that counts goes to the wrapped strategy.

    Args:
        inner: the wrapped strategy.
        by_examples: weight replies by their example counts; if False, all replies weigh the same.
    """

    def __init__(self, inner: Strategy, *, by_examples: bool = True) -> None:
        super().__init__(inner)
        self.by_examples = by_examples

    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """Pass the replies to the wrapped strategy, reduced to model, weight and training loss.

        Args:
            server_round: from 1 on.
            screening: of the replies.
        """
        self.measured = Measurements(len(self._asked), len(screening.accepted), screening.rejected)
        if not screening.accepted:
            return None, None
        losses: list[float | None] = []
        for message in screening.accepted:
            # The loss in a reply's only metric record, if it is a finite number.
            keys = [record.get(TRAIN_LOSS) for record in message.content.metric_records.values()]
            loss = keys[0] if len(keys) == 1 else None
            losses.append(loss if isinstance(loss, float) and abs(loss) < float("inf") else None)
        shown = losses if all(loss is not None for loss in losses) else [None] * len(losses)
        weights = screening.examples if self.by_examples else [1.0] * len(losses)
        cohort = screening.cohort
        return aggregated_apart(self.inner, server_round, cohort.layout, cohort.rows, weights, shown)


def aggregated_apart(
    strategy: Strategy,
    server_round: int,
    layout: Layout,
    rows: Sequence[Row],
    examples: Sequence[float] | None = None,
    losses: Sequence[float | None] | None = None,
) -> Aggregated:
    """Let a strategy aggregate the trained weights of some models, and average their state beside it.

    State is a plain mean, with the weights of the replies. Beside a median, a trimmed mean or a selection it is a
    median or that trimmed mean: one client must not decide it.

    Args:
        strategy: aggregates replies without state.
        server_round: from 1 on.
        layout: of the models.
        rows: n ≥ 1 models.
        examples: weights of the replies, > 0, shape (n,); None: 1 each.
        losses: training losses, shape (n,); None: none.
    """
    examples = examples or [1.0] * len(rows)
    replies = [
        make_reply(layout, row, weight, loss)
        for row, weight, loss in zip(rows, examples, losses or [None] * len(rows), strict=True)
    ]
    arrays, metrics = strategy.aggregate_train(server_round, replies)
    if arrays is None or not any(map(is_state, layout.names)):
        return arrays, metrics
    known = capabilities_of(strategy) or MEAN
    cuts = known.cuts or (MEDIAN.cuts if known.needs_every_reply else None)
    named = {**from_record(arrays), **averaged_state(layout, rows, examples, cuts(len(rows)) if cuts else 0)}
    if set(named) != set(layout.names):
        raise FederationError("the wrapped strategy returned other arrays than it was given")
    return to_record({name: named[name] for name in layout.names}), metrics


def make_reply(layout: Layout, row: Row, examples: float = 1.0, loss: float | None = None) -> Message:
    """Make a training reply with the weights of a model, without copying them.

    Args:
        layout: of the model.
        row: parameters of the model, flat, one piece per array; not copied.
        examples: weight of the reply, > 0.
        loss: training loss; None to omit it.
    """
    metrics = MetricRecord({EXAMPLES: examples})
    if loss is not None:
        metrics[TRAIN_LOSS] = loss
    arrays = to_record(without_state(layout.named(row)))
    return Message(RecordDict({ARRAYS: arrays, METRICS: metrics}), SERVER_NODE, MessageType.TRAIN)
