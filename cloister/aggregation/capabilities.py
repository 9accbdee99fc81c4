"""Capabilities of Flower strategies, declared by the strategy or listed here for Flower's classes."""

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
"""Capabilities by the Flower class that defines `aggregate_train`, without Flower's wrappers and tree strategies."""


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
