"""Small federations for tests: models, replies, and clients that misbehave."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from cloister.server.strategy_wrapper import StrategyWrapper
from cloister.simulation.grid import LocalGrid
from cloister.strategies.averaging import FedAvg, Sampling
from cloister.utils.arrays import from_record, to_record

Arrays = dict[str, np.ndarray]
ClientFunction = Callable[[int, Arrays], Any]


def failures(cases: Iterable[Any], check: Callable[..., None]) -> list[str]:
    """Return each case that fails `check`, with its error; a case that is a tuple holds all arguments."""
    found, cases = [], list(cases)
    assert cases, "there is no case"
    for case in cases:
        try:
            check(*(case if isinstance(case, tuple) else (case,)))
        except (Exception, pytest.fail.Exception) as error:
            found.append(f"{case!r}: {type(error).__name__}: {error}")
    return found


def every(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Make one test of a check for several cases, which names each case that fails."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def test() -> None:
            assert failures(cases, check) == []

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def mostly_slow(cases: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """Parameters of a test: those in `fast` in every run of the tests, the others with `-m slow`."""
    fast = list(fast)
    return [case if case in fast else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)


def zeros(width: int = 6) -> Arrays:
    return {"kernel": np.zeros((width, 2), np.float32), "bias": np.zeros(3, np.float32)}


def random_models(count: int, scale: float = 1.0, seed: int = 0, like: Arrays | None = None) -> list[Arrays]:
    rng = np.random.default_rng(seed)
    shapes = like or zeros()
    return [
        {name: (scale * rng.standard_normal(array.shape)).astype(array.dtype) for name, array in shapes.items()}
        for _ in range(count)
    ]


def all_nodes(kind: type = FedAvg, **options: Any) -> Any:
    return kind(train=Sampling(min_nodes=1, timeout=0), **options)


def content(model: Arrays, examples: Any = 10, **metrics: float) -> RecordDict:
    return RecordDict({"arrays": to_record(model), "metrics": MetricRecord({"num-examples": examples, **metrics})})


def grid_of(answer: ClientFunction, nodes: int) -> LocalGrid:
    """Nodes 1 to n; `answer(node id, global model)` gives a reply's content, or raises."""

    def client(message: Message, context: Context) -> Message:
        sent = from_record(message.content.array_records["arrays"])
        return Message(answer(context.node_id, sent), reply_to=message)

    return LocalGrid(client, {}, [{} for _ in range(nodes)])


def one_round(
    strategy: Strategy, grid: LocalGrid, sent: Arrays, server_round: int = 1
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """A training round as the round loop runs it."""
    messages = strategy.configure_train(server_round, to_record(sent), ConfigRecord(), grid)
    replies: Iterable[Message] = grid.send_and_receive(messages)
    # Some of Flower's own strategies go over the replies twice; ours are given them as they come.
    return strategy.aggregate_train(server_round, replies if isinstance(strategy, StrategyWrapper) else list(replies))


def flat(record: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.ravel() for array in from_record(record).values()])
