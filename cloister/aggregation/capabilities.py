"""What is known of a strategy: what it declares, or what Flower's classes are known to do."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.serverapp.strategy import Strategy

from cloister.core.capabilities import MEAN, MEDIAN, OPTIMIZER, SELECTION, Capabilities, trimmed_mean

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
        None if nothing is known. A declaration counts where it is made by the class that defines `aggregate_train`, or
        by a subclass of that: one of a class beside it, or above it, is about another aggregation.
    """
    mro = type(strategy).__mro__
    aggregates = next(cls for cls in mro if "aggregate_train" in vars(cls))
    declares = next((cls for cls in mro if "capabilities" in vars(cls)), None)
    if declares is not None and issubclass(declares, aggregates):
        declared: object = getattr(strategy, "capabilities", None)
        return declared if isinstance(declared, Capabilities) else None
    known = FLOWER.get(aggregates.__name__) if aggregates.__module__.startswith("flwr.") else None
    return known(strategy) if known else None
