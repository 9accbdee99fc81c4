"""A cell of the metric-privacy paper's tables on the brain scans: the settings of a run, and the name of its result."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "fedavgm": {"strategy.momentum": 0.5, "strategy.server-learning-rate": 0.1, "strategy.pretrain-epochs": 20},
    "fedmedian": {},
    "fedprox": {"strategy.proximal-mu": 0.5},
    # The paper's class of this name only averages; a server optimizer "sgd" of rate 1 does.
    "fedopt": {"strategy.pretrain-epochs": 20},
    # The paper names no rate; what it names are the defaults of Flower's FedYogi, whose rate is 0.01.
    "fedyogi": {
        "strategy.server-learning-rate": 0.01,
        "strategy.beta-1": 0.9,
        "strategy.beta-2": 0.99,
        "strategy.tau": 1e-3,
        "strategy.pretrain-epochs": 20,
    },
}
SERVERS = ("none", "global-dp", "metric")
PARTITIONS = ("table-2", "table-3")
COMMON = {
    "task.name": "alzheimer-mri",
    "num-rounds": 20,
    "client.local-epochs": 5,
    "tensorboard": False,
    "report": False,
    "evaluation.federated": "on",
}
MULTIPLIER, CLIPPING_NORM = 0.01, 5.0
"""z and C of its tables; table B.15 has z = 0.003."""
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "published": {"privacy.placement": "model"},
    "sound": {"privacy.placement": "update"},
}
METRIC: Mapping[str, Mapping[str, Any]] = {
    "published": {
        "privacy.distance-release": "exact",
        "privacy.distance-clip": "before",
        "privacy.min-distance": 0.0,
    },
    "sound": {"privacy.distance-release": "private", "privacy.distance-clip": "after"},
}
EPOCH = {64: 11.0, 128: 43.0}
"""Seconds of an epoch of all images on two cores, for the first estimate."""
LAST = 5
"""Rounds at the end, over which the paper takes means."""


class Cell(NamedTuple):
    """One run."""

    size: int
    partition: str
    strategy: str
    server: str
    placement: str
    seed: int
    multiplier: float = MULTIPLIER

    @property
    def path(self) -> Path:
        """Return the path of its result in the folder of results."""
        placed = f"-{self.placement}" if self.server != "none" else ""
        noise = f"-z{self.multiplier:g}" if self.server != "none" and self.multiplier != MULTIPLIER else ""
        name = f"{self.partition}-{self.strategy}-{self.server}{placed}{noise}-seed{self.seed}.json"
        return Path(str(self.size)) / name

    def __str__(self) -> str:
        """The name of its result."""
        return self.path.stem

    def settings(self) -> dict[str, Any]:
        """The keys of its configuration, all but where things lie."""
        found = COMMON | {"task.image-size": self.size, "task.partition": self.partition, "seed": self.seed}
        found |= {"strategy.name": self.strategy, "privacy.server": self.server, **STRATEGIES[self.strategy]}
        if self.server == "none":
            return found
        found |= {"privacy.noise-multiplier": self.multiplier, "privacy.clipping-norm": CLIPPING_NORM}
        found |= PLACEMENTS[self.placement]
        if self.placement == "sound" and self.strategy == "fedmedian":
            found["privacy.placement"] = "rule"  # a median has a sensitivity of its own
        return found | (METRIC[self.placement] if self.server == "metric" else {})


def seconds_of_an_epoch(size: int) -> float:
    """Of all images on two cores, about.

    Args:
        size: of an image.
    """
    return EPOCH.get(size, EPOCH[128] * (size / 128) ** 2)
