"""Aggregation strategies by name. They contain no privacy: `cloister.server` adds a mechanism around them."""

from cloister.utils.registry import Registry

STRATEGIES = Registry(
    "strategy",
    "cloister.strategies",
    {
        "fedavg": "cloister.strategies.averaging:FedAvg",
        "fedprox": "cloister.strategies.averaging:FedProx",
        "fedavgm": "cloister.strategies.fedopt:FedAvgM",
        "fedopt": "cloister.strategies.fedopt:FedOpt",
        "fedadam": "cloister.strategies.fedopt:FedAdam",
        "fedyogi": "cloister.strategies.fedopt:FedYogi",
        "fedadagrad": "cloister.strategies.fedopt:FedAdagrad",
        "fedmedian": "cloister.strategies.robust:FedMedian",
        "fedtrimmedavg": "cloister.strategies.robust:FedTrimmedAvg",
        "krum": "cloister.strategies.robust:Krum",
    },
    "strategy.name",
)
