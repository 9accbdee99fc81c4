"""Rounds of aggregation on the server, with and without its noise, on random replies of the model's size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from cloister.aggregation.private_strategy import PrivateStrategy
from cloister.bench.clock import Action
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import RunConfig, parse
from cloister.core.arrays import to_record
from cloister.core.wire import ARRAYS, EXAMPLES, METRICS
from cloister.local.grid import LocalGrid
from cloister.server.build import build

POOL = 1 << 28
"""Bytes of distinct replies: more than a cache. A round that needs more reuses them."""
MOVED = 0.01
"""Standard deviation of an update on one parameter."""
Arrays = Mapping[str, NDArray]


def with_noise(config: RunConfig) -> RunConfig:
    """Change a run so that its server adds noise to a fixed cohort.

    The noise is its own or that of `global-dp`, without a budget.

    Args:
        config: of the run.
    """
    chosen = config.privacy.server
    server = chosen if chosen.is_noised else parse({"privacy.server": "global-dp"}).privacy.server
    free: dict[str, object] = {"max_epsilon": 0.0}
    if server.is_calibrated:
        free["noise_multiplier"] = 1.0  # the value does not affect the time
    return _with(config, config.privacy.model_copy(update={"server": server.model_copy(update=free)}))


def without_noise(config: RunConfig) -> RunConfig:
    """Change a run so that it has no privacy, and a fixed cohort.

    Args:
        config: of the run.
    """
    return _with(config, parse({"privacy.server": "none"}).privacy)


def _with(config: RunConfig, privacy: PrivacyConfig) -> RunConfig:
    fixed = config.strategy.model_copy(update={"sampling": "fixed"})
    return config.model_copy(update={"strategy": fixed, "privacy": privacy})


def rounds(config: RunConfig, arrays: Arrays, trained: Sequence[Arrays], clients: int) -> Action:
    """Return an action that runs rounds on the server, without a ledger.

    It starts from the replies and ends with the new model.

    Args:
        config: of the run.
        arrays: of the model sent.
        trained: models of the replies, used in sequence.
        clients: number of connected clients.
    """
    strategy, sent = build(config).strategy, to_record(arrays)
    if isinstance(strategy, PrivateStrategy):
        strategy.budget = None
    grid = LocalGrid(_never_called, {}, [{}] * clients)

    def prepare() -> Callable[[], object]:
        asked = strategy.configure_train(1, sent, ConfigRecord(), grid)
        replies = [_reply(message, model) for message, model in zip(asked, cycle(trained), strict=False)]
        return lambda: strategy.aggregate_train(1, replies)

    return prepare


def random_models(arrays: Arrays, count: int) -> list[Arrays]:
    """Return copies of the model with random updates.

    Their number is `count`, or as many as fit into the pool.

    Args:
        arrays: of the model.
        count: number of models needed.
    """
    size = sum(array.nbytes for array in arrays.values())
    return list(islice(_random_models(arrays), max(1, min(count, POOL // max(1, size)))))


def _random_models(arrays: Arrays) -> Iterator[Arrays]:
    rng = np.random.default_rng(0)
    while True:
        yield {name: array + _random(rng, array) for name, array in arrays.items()}


def _random(rng: np.random.Generator, array: NDArray) -> NDArray:
    return (MOVED * rng.standard_normal(array.shape, np.float32)).astype(array.dtype)


def _reply(message: Message, model: Arrays) -> Message:
    content = RecordDict({ARRAYS: to_record(model), METRICS: MetricRecord({EXAMPLES: 1})})
    return Message(content, reply_to=message)


def _never_called(message: Message, context: Context) -> Message:
    raise NotImplementedError("the nodes of a benchmark of the server are asked nothing")
