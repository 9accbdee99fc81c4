"""Strategies that wrap a strategy: what every decorator shares, and the one that only screens.

A decorator is itself a Flower strategy, so Flower's own `start` can drive it, and it wraps any Flower strategy. It
acts on the way in: the wrapped strategy sees screened (and, in `PrivateStrategy`, released) models and does the rest.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from cloister.aggregation.canaries import NO_CANARIES, Canaries
from cloister.aggregation.memory import require_memory
from cloister.aggregation.screening import Rejection, Screening, average_metrics, screen
from cloister.core.arrays import Layout, Row, from_record, to_record
from cloister.core.capabilities import Aggregated, Messages
from cloister.core.draw import Draw
from cloister.core.errors import ConfigError, FederationError
from cloister.core.state import State, Stateful, declares_state, joined, part
from cloister.core.wire import ARRAYS, EXAMPLES, METRICS, TRAIN_LOSS
from cloister.privacy.accounting.events import Event
from cloister.privacy.claims.claim import Claim

NamedArrays = Mapping[str, NDArray]
Send = Callable[[Messages], Messages]
NOBODY = 0
"""The node that a reply of no node is addressed to."""


@dataclass(frozen=True)
class Measurements:
    """What a decorator saw in one round.

    `clipped_fraction`, `clip_calibration` and `distance` come from un-noised updates: they are for the server's own
    eyes. `epsilon` is what the ledger amounts to after the round, where something sound can be said. `abandoned`: too
    few replies counted, and the model is what it was. `began_early`: whether the round before had begun this one, where
    rounds can be.
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
    began_early: bool | None = None


class Decorator(Strategy):
    """A strategy around a strategy. Subclasses say what becomes of the replies that count.

    Attributes:
        inner: the wrapped strategy.
        min_replies: how many must count, or the round is abandoned; 0: as many as come.
        measured: of the last training round.
        unscored: the replies of the last evaluation round that did not count.
        canaries: that take part in training, where there are any, with their scores so far.
        draws_are_seen: whether nodes may learn who was drawn. Draws then amplify nothing.
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
        """Whether it must not be told how many nodes a round asked: something rests on it."""
        return False

    @property
    def is_accounted(self) -> bool:
        """Whether the server's releases have a guarantee that can be composed."""
        return False

    @property
    def hypotheses(self) -> int:
        """How many models are trained side by side; 0: one, under its own names."""
        return 0

    def caveats(self) -> tuple[str, ...]:
        """What must be said against the server's mechanism, where there is one."""
        return ()

    def events(self, layout: Layout) -> tuple[Event, ...]:
        """What the server's mechanism releases in a round at worst; empty where it noises nothing.

        Args:
            layout: of the model.
        """
        return ()

    @contextmanager
    def recorded(self, layout: Layout, server_round: int) -> Iterator[None]:
        """The block, with the releases of a round recorded before it; none where the server noises nothing.

        Args:
            layout: of the model.
            server_round: counted from 1.
        """
        yield

    def claim(self) -> Claim:
        """What may be said about the models: nothing where the server noises nothing."""
        return Claim("none")

    def calibrated(self, layout: Layout, rounds: int) -> Self:
        """This strategy with its noise calibrated to its budget, where it has noise and that was asked for.

        Args:
            layout: of the model.
            rounds: that are to come.
        """
        return self

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Let the wrapped strategy choose the nodes; remember what they are sent.

        Args:
            server_round: from 1 on.
            arrays: the model.
            config: goes along with it.
            grid: that knows the nodes.

        Raises:
            FederationError: the model has no arrays, or some that do not hold floats.
            ConfigError: the replies of the first round have to be held together, and there is no memory for them.
        """
        Layout.of(from_record(arrays))  # a model that cannot be federated is refused before anybody trains it
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        begins, self._sent = self._sent is None, arrays
        self._asked = tuple(messages)
        # A strategy that draws a random number of nodes says how many it expected: that number is public.
        self._draw = getattr(self.inner, "last_draw", None)
        self._expected = float(self._draw.expected if self._draw else len(messages))
        if begins:
            self._require_memory()
        return messages

    def needs_all_replies(self, layout: Layout, sent: Row) -> str:
        """What has to see all replies of a round together, in words; empty where they are added up as they come.

        Args:
            layout, sent: as in `screened`.
        """
        return f"strategy {type(self.inner).__name__}"

    def _require_memory(self) -> None:
        """Refuse a first round whose replies the memory has no room for.

        A number of clients that is drawn in secret is taken as the expected one and six deviations: the real one must
        not show in a refusal.

        Raises:
            ConfigError: it has none.
        """
        expected = self.expected_reply(from_record(self.sent))
        layout = Layout.of(expected)
        secret = self._draw is not None and self._draw.kind == "poisson"
        maximum = math.ceil(self._expected + 6 * math.sqrt(self._expected)) if secret else len(self._asked)
        if component := self.needs_all_replies(layout, layout.rows(expected)):
            require_memory(component, layout, maximum)

    def receive(self, replies: Messages) -> Screening:
        """Screen the replies of a training round while they come.

        Args:
            replies: in any order, errors among them; each is looked at once, and kept only if it has to be.

        Raises:
            FederationError: nothing was sent before.
        """
        expected = self.expected_reply(from_record(self.sent))
        layout = Layout.of(expected)
        return self.screened(replies, layout, layout.rows(expected))

    def collect(self, server_round: int, messages: Messages, send: Send) -> Screening:
        """Send the messages of a training round, and screen the replies while they come.

        Args:
            server_round: from 1 on.
            messages: as `configure_train` made them.
            send: sends messages, and gives the replies that come before the deadline.
        """
        return self.receive(send(messages))

    def screened(self, replies: Messages, layout: Layout, sent: Row) -> Screening:
        """The replies, screened.

        Args:
            replies: as in `receive`.
            layout: of what a reply has to be like.
            sent: from which updates are counted.
        """
        return screen(replies, self._asked, layout, sent)

    def aggregate_train(self, server_round: int, replies: Messages | Screening) -> Aggregated:
        """Screen the replies and aggregate those that count.

        Args:
            server_round: from 1 on.
            replies: in any order, errors among them; or what `receive` has made of them.

        Returns:
            The new model, None if the round is abandoned; and the training metrics.

        Raises:
            FederationError: nothing was sent before, or the wrapped strategy returned other arrays than it was given.
        """
        screening = replies if isinstance(replies, Screening) else self.receive(replies)
        accepted = len(screening.cohort)
        if accepted < self.min_replies:
            self.measured = Measurements(len(self._asked), accepted, screening.rejected, abandoned=True)
            return None, None
        arrays, metrics = self.aggregate(server_round, screening)
        return (None if arrays is None else _in_layout(arrays, Layout.of(from_record(self.sent)))), metrics

    @property
    def sent(self) -> ArrayRecord:
        """What the nodes were sent last.

        Raises:
            FederationError: nothing yet.
        """
        if self._sent is None:
            raise FederationError(
                "aggregate_train was called before configure_train: there is no model to compare with"
            )
        return self._sent

    def expected_reply(self, sent: NamedArrays) -> NamedArrays:
        """Arrays like those that a node has to send back, and from which its update is counted."""
        return sent

    @abstractmethod
    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """The new global model, from the replies that count.

        Args:
            server_round: from 1 on.
            screening: of the replies; at least `min_replies` count.
        """

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Let the wrapped strategy choose the nodes; remember who was asked.

        Args:
            server_round: from 1 on.
            arrays: the model.
            config: goes along with them.
            grid: that knows the nodes.
        """
        self._asked_to_score = tuple(self.inner.configure_evaluate(server_round, arrays, config, grid))
        return self._asked_to_score

    def aggregate_evaluate(self, server_round: int, replies: Messages) -> MetricRecord | None:
        """The mean of each metric over the replies that have it; None if no reply counts.

        Args:
            server_round: from 1 on.
            replies: in any order, errors among them.
        """
        means, self.unscored = average_metrics(replies, self._asked_to_score)
        return MetricRecord(dict(means)) if means else None

    def summary(self) -> None:
        """As the wrapped strategy."""
        self.inner.summary()

    def state_dict(self) -> State:
        """What goes on from round to round, of the wrapped strategy too if it says what that is."""
        return joined({"inner": state_of(self.inner)})

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ConfigError: the wrapped strategy does not say how.
        """
        restore(self.inner, part(state, "inner"))


def state_of(strategy: Strategy) -> State:
    """What a strategy keeps from round to round; nothing if it does not say."""
    return strategy.state_dict() if declares_state(strategy) and isinstance(strategy, Stateful) else {}


def restore(strategy: Strategy, state: State) -> None:
    """Let a strategy go on from what `state_of` returned.

    Args:
        strategy: made anew.
        state: of another one of its kind.

    Raises:
        ConfigError: it does not say how. Fresh moments in the place of those that were lost would be another training.
    """
    if not declares_state(strategy) or not isinstance(strategy, Stateful):
        raise ConfigError(
            f"resume: strategy {type(strategy).__name__} does not say what it keeps from round to round, so that a run "
            "with it cannot go on; its class needs state_dict and load_state_dict of its own (docs/extending.md)"
        )
    strategy.load_state_dict(state)


def _in_layout(arrays: ArrayRecord, layout: Layout) -> ArrayRecord:
    """The model in the names, order and dtypes it was sent in: some Flower optimizers turn float32 into float64."""
    if tuple(array.dtype for array in arrays.values()) == layout.dtypes and tuple(arrays) == layout.names:
        return arrays
    named = from_record(arrays)
    if set(named) != set(layout.names):
        raise FederationError("the wrapped strategy returned other arrays than it was given")
    return to_record(layout.named(layout.rows(named)))


class Screened(Decorator):
    """No privacy: every reply that counts goes to the wrapped strategy.

    Args:
        inner: the wrapped strategy.
        by_examples: weight replies by their example counts; otherwise every reply counts the same.
    """

    def __init__(self, inner: Strategy, *, by_examples: bool = True) -> None:
        super().__init__(inner)
        self.by_examples = by_examples

    def aggregate(self, server_round: int, screening: Screening) -> Aggregated:
        """Hand the replies on, cleaned of everything that was not asked for.

        Args:
            server_round: from 1 on.
            screening: of the replies.
        """
        self.measured = Measurements(len(self._asked), len(screening.accepted), screening.rejected)
        if not screening.accepted:
            return None, None
        losses = [_train_loss(message) for message in screening.accepted]
        shown = losses if all(loss is not None for loss in losses) else [None] * len(losses)
        weights = screening.examples if self.by_examples else [1.0] * len(losses)
        cohort = screening.cohort
        replies = [
            virtual_reply(cohort.layout, row, weight, loss)
            for row, weight, loss in zip(cohort.rows, weights, shown, strict=True)
        ]
        return self.inner.aggregate_train(server_round, replies)


def virtual_reply(layout: Layout, row: Row, examples: float = 1.0, loss: float | None = None) -> Message:
    """A training reply as a node would send it, over memory the server already has.

    Args:
        layout: of the model.
        row: its numbers, flat, one piece per array; not copied.
        examples: what the reply weighs, > 0.
        loss: of training; None: none is told.
    """
    metrics = MetricRecord({EXAMPLES: examples})
    if loss is not None:
        metrics[TRAIN_LOSS] = loss
    return Message(RecordDict({ARRAYS: to_record(layout.named(row)), METRICS: metrics}), NOBODY, MessageType.TRAIN)


def _train_loss(message: Message) -> float | None:
    """The training loss in a reply's one metric record, if it is a finite number."""
    keys = [record.get(TRAIN_LOSS) for record in message.content.metric_records.values()]
    return keys[0] if len(keys) == 1 and isinstance(keys[0], float) and abs(keys[0]) < float("inf") else None
