"""What a strategy can do is declared, known of Flower's, and never guessed."""

import flwr.serverapp.strategy as flower
import pytest

from cloister.aggregation.capabilities import capabilities_of
from cloister.aggregation.constructors import GlobalDP
from cloister.core.capabilities import MEAN, OPTIMIZER, SELECTION, Capabilities
from cloister.core.errors import ConfigError
from cloister.strategies import STRATEGIES
from cloister.strategies.averaging import FedAvg

OPTIONS = {"noise_multiplier": 1.0, "clipping_norm": 1.0}


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_every_strategy_of_ours_declares_itself(name):
    assert isinstance(capabilities_of(STRATEGIES.load(name)()), Capabilities)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (flower.FedAvg, MEAN),
        (flower.FedProx, MEAN),
        (flower.FedAdam, OPTIMIZER),
        (flower.FedAvgM, OPTIMIZER),
        (flower.Krum, SELECTION),
        (flower.MultiKrum, SELECTION),
        (flower.Bulyan, SELECTION),
        (flower.FedXgbBagging, None),
    ],
)
def test_what_is_known_of_flowers_own(kind, expected):
    arguments = {"proximal_mu": 0.1} if kind is flower.FedProx else {}
    assert capabilities_of(kind(**arguments)) == expected


@pytest.mark.parametrize("kind", [flower.FedMedian, flower.FedTrimmedAvg])
@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_the_cuts_of_flowers_ranks_leave_what_flower_keeps(kind, count):
    found = capabilities_of(kind())
    assert found.needs_every_reply and not found.is_uniform_mean
    assert found.cuts(count) == ((count - 1) // 2 if kind is flower.FedMedian else int(0.2 * count))


@pytest.mark.parametrize("kind", [flower.FedMedian, flower.FedTrimmedAvg, flower.Krum, flower.MultiKrum, flower.Bulyan])
def test_flowers_rules_are_not_shown_one_release(kind):
    """They would return it as it is: the mean, under the name of a median."""
    with pytest.raises(ConfigError, match=rf"{kind.__name__} one reply, the release, and it needs every reply"):
        GlobalDP(kind(), **OPTIONS)


class Renamed(flower.FedAvg):
    """Aggregates as Flower does."""


class Overridden(flower.FedAvg):
    """Aggregates in a way of its own, and says nothing."""

    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, replies)


class Inherited(FedAvg):
    """Inherits what FedAvg says, and aggregates in another way."""

    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, list(replies)[:1])


class Declared(Overridden):
    capabilities = OPTIMIZER


def test_who_aggregates_is_who_declares():
    assert capabilities_of(Renamed()) == MEAN
    assert capabilities_of(Overridden()) is None and capabilities_of(Inherited()) is None
    assert capabilities_of(Declared()) == OPTIMIZER


@pytest.mark.parametrize("kind", [Overridden, Inherited, flower.FedXgbBagging])
def test_of_what_nobody_knows_nothing_is_guessed(kind):
    with pytest.raises(ConfigError, match=rf"{kind.__name__} declares no capabilities"):
        GlobalDP(kind(), **OPTIONS)
    assert not GlobalDP(kind(), placement="model", **OPTIONS).is_accounted
