"""What an aggregation strategy takes and gives, and what it declares about itself, so that nobody has to guess."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

Messages = Iterable[Message]
"""To nodes or from them, in any order."""
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]
"""What a strategy makes of the replies of a training round: a model and metrics, if it makes any."""


@dataclass(frozen=True)
class Capabilities:
    """What a strategy does with the replies of a round.

    A strategy declares it as an attribute or property `capabilities`, in the class that defines `aggregate_train` or
    in a subclass of that.

    Attributes:
        needs_every_reply: whether it is meaningless on one reply, as a median or a selection is.
        is_uniform_mean: whether it returns the plain mean of the replies it is given, and nothing else.
        cuts: of n values, how many a coordinate-wise trimmed mean or median cuts off at each end; None: it is neither.
    """

    needs_every_reply: bool = False
    is_uniform_mean: bool = False
    cuts: Callable[[int], int] | None = None


MEAN = Capabilities(is_uniform_mean=True)
"""The plain mean."""
OPTIMIZER = Capabilities()
"""A mean, and a step of a server optimizer with it."""
SELECTION = Capabilities(needs_every_reply=True)
"""A choice among replies, or a statistic of them that is neither a median nor a trimmed mean."""


MEDIAN = Capabilities(needs_every_reply=True, cuts=lambda count: (count - 1) // 2)
"""A coordinate-wise median: all but the one or two values in the middle are cut off."""


def trimmed_mean(share: float) -> Capabilities:
    """The capabilities of a coordinate-wise trimmed mean that cuts off this share of the values at each end."""
    return Capabilities(needs_every_reply=True, cuts=lambda count: int(share * count))


FLOWER: Mapping[str, Callable[[Any], Capabilities]] = {
    "FedAvg": lambda _: MEAN,
    **dict.fromkeys(("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"), lambda _: OPTIMIZER),
    "FedMedian": lambda _: MEDIAN,
    "FedTrimmedAvg": lambda strategy: trimmed_mean(strategy.beta),
    **dict.fromkeys(("MultiKrum", "Bulyan", "QFedAvg"), lambda _: SELECTION),
}
"""By the class of Flower's that defines `aggregate_train`. Its wrappers and its strategies for trees are not here."""


def capabilities_of(strategy: Strategy) -> Capabilities | None:
    """What a strategy declares, or what is known of Flower's class that aggregates for it.

    Args:
        strategy: any Flower strategy.

    Returns:
        None if nothing is known. A declaration that a subclass inherited, and whose `aggregate_train` it replaced,
        says nothing about the subclass.
    """
    for cls in type(strategy).__mro__:
        if "capabilities" in vars(cls):
            return strategy.capabilities  # type: ignore[attr-defined]
        if "aggregate_train" in vars(cls):
            known = FLOWER.get(cls.__name__) if cls.__module__.startswith("flwr.") else None
            return known(strategy) if known else None
    return None
