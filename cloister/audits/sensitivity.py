"""Sensitivity self-test: movement of a release by one client, compared with the noise's calibration.

An aggregation is run twice without noise, with and without one client's reply. The strategy's further processing of a
release is post-processing, so the releases are compared. For a wrapper in placement `update` or `rule`, the release is
the input of the wrapped strategy. For any other strategy, it is the returned model. The test must find nothing in
Cloister's wrappers. It must find too little noise in wrappers that noise the output of a stateful strategy.

Source: the recording and replaying of Cebere et al. (2026), arXiv:2602.17454, reduced to one round.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from cloister.aggregation.private_strategy import PrivateStrategy
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.capabilities import Aggregated, Messages
from cloister.core.errors import FederationError
from cloister.core.wire import ARRAYS, EXAMPLES, METRICS
from cloister.flower.messages import assume_run

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Movement:
    """L2 distance that removing one client moves the release, and the distance that the noise is calibrated for.

    Rounding the released weights to their dtype is post-processing, but visible without noise. `rounding` is the L2
    norm of one unit in the last place of every weight.
    """

    moved: float
    calibrated: float
    rounding: float

    @property
    def sound(self) -> bool:
        """Return True if the noise covers the movement."""
        return self.moved <= self.calibrated + self.rounding


def leave_one_out(
    make: Callable[[], Strategy],
    sent: Arrays,
    models: Sequence[Arrays],
    examples: Sequence[float],
    absent: int,
    calibrated: float | None = None,
) -> Movement:
    """Aggregate a cohort with and without the client `absent`.

    Args:
        make: returns a new strategy with its noise switched off.
        sent: the global model of the round.
        models: reply of each client.
        examples: the example count each client reports.
        absent: index of the client that does not reply the second time.
        calibrated: calibrated sensitivity of a third-party strategy; Cloister's strategies measure it themselves.

    Examples:
        >>> from flwr.serverapp.strategy import FedAvg
        >>> from cloister.aggregation.constructors import GlobalDP
        >>> sent, models = {"w": np.zeros(2)}, [{"w": np.array([0.3, 0.4])}, {"w": np.array([3.0, 4.0])}]
        >>> def silent():
        ...     return GlobalDP(FedAvg(), noise_multiplier=0.0, clipping_norm=1.0)
        >>> found = leave_one_out(silent, sent, models, examples=[10, 10], absent=1)
        >>> round(found.moved, 3), found.calibrated, found.sound
        (0.5, 0.5, True)
    """
    strategy = make()
    everyone = release_of(strategy, sent, models, examples, absent=None)
    others = release_of(make(), sent, models, examples, absent)
    if calibrated is None:
        measured = cast(PrivateStrategy, strategy).measured
        calibrated = measured.sensitivity if measured and measured.sensitivity is not None else 0.0
    rounding = np.linalg.norm(np.spacing(np.abs(everyone).astype(Layout.of(sent).dtype)))
    return Movement(float(np.linalg.norm(everyone - others)), calibrated, float(rounding))


def release_of(
    strategy: Strategy, sent: Arrays, models: Sequence[Arrays], examples: Sequence[float], absent: int | None
) -> np.ndarray:
    """Return a strategy's release in its first round, as one vector in float64."""
    rehearsal = Rehearsal(sent, models, examples)
    if not isinstance(strategy, PrivateStrategy) or strategy.mechanism.noises_output:
        return rehearsal.flat(rehearsal.run(strategy, absent))
    tap = _Tap(strategy.inner)
    strategy.inner = cast(Strategy, tap)
    rehearsal.run(strategy, absent)
    return rehearsal.flat(tap.seen)


class Rehearsal:
    """A first training round with given replies, which can be run repeatedly.

    Args:
        sent: the global model of the round.
        models: reply of each client; client i is node i + 1.
        examples: the example count each client reports.
    """

    def __init__(self, sent: Arrays, models: Sequence[Arrays], examples: Sequence[float]) -> None:
        assume_run()
        self._sent = to_record(sent)
        self._layout = Layout.of(sent)
        self._roster = cast(Grid, _Roster(len(models)))
        self._models = [to_record(model) for model in models]
        self._metrics = [MetricRecord({EXAMPLES: count}) for count in examples]

    def run(self, strategy: Strategy, absent: int | None = None) -> ArrayRecord | None:
        """Return the strategy's aggregate of the replies of the clients it asks.

        The client `absent` does not reply.
        """
        asked = list(strategy.configure_train(1, self._sent, ConfigRecord(), self._roster))
        replies = [self._reply(message) for message in asked if message.metadata.dst_node_id - 1 != absent]
        return strategy.aggregate_train(1, replies)[0]

    def flat(self, released: ArrayRecord | None) -> np.ndarray:
        """Return a released model as one vector in float64."""
        if released is None:
            raise FederationError("the strategy released nothing")
        return np.concatenate(self._layout.rows(from_record(released)), dtype=np.float64)

    def _reply(self, message: Message) -> Message:
        # Records are shared, content is not: Flower's wrappers overwrite replies with clipped models.
        client = message.metadata.dst_node_id - 1
        content = RecordDict({ARRAYS: self._models[client], METRICS: self._metrics[client]})
        return Message(content, reply_to=message)


class _Roster:
    """A grid with node ids only, which a strategy reads to choose nodes."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self._nodes + 1)


class _Tap:
    """A wrapper between a decorator and its strategy that stores the decorator's output."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.seen: ArrayRecord | None = None

    def __getattr__(self, name: str) -> object:
        # Python calls this only for attributes that _Tap does not define.
        return getattr(self.inner, name)

    def aggregate_train(self, server_round: int, replies: Messages) -> Aggregated:
        (reply,) = list(replies)
        # A separate record over the same arrays: Flower's rules remove arrays from the reply as they read them.
        self.seen = ArrayRecord(dict(reply.content.array_records[ARRAYS]))
        return self.inner.aggregate_train(server_round, [reply])
