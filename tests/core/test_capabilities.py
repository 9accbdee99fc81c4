"""Capabilities of a strategy are declared, known of Flower's, and never guessed."""

from itertools import product

import flwr.serverapp.strategy as flower
import pytest
from support import failures

from cloister.server.private_strategy import GlobalDP, capabilities_of
from cloister.strategies import STRATEGIES
from cloister.strategies.averaging import FedAvg
from cloister.utils.errors import ConfigError
from cloister.utils.registry import MEAN, OPTIMIZER, SELECTION, Capabilities

OPTIONS = {"noise_multiplier": 1.0, "clipping_norm": 1.0}


def test_every_strategy_of_ours_declares_itself():
    def check(name):
        assert isinstance(capabilities_of(STRATEGIES.load(name)()), Capabilities)

    assert failures(STRATEGIES.names(), check) == []


def test_what_is_known_of_flowers_own():
    def check(kind, expected):
        arguments = {"proximal_mu": 0.1} if kind is flower.FedProx else {}
        assert capabilities_of(kind(**arguments)) == expected

    cases = [
        (flower.FedAvg, MEAN),
        (flower.FedProx, MEAN),
        (flower.FedAdam, OPTIMIZER),
        (flower.FedAvgM, OPTIMIZER),
        (flower.Krum, SELECTION),
        (flower.MultiKrum, SELECTION),
        (flower.Bulyan, SELECTION),
        (flower.FedXgbBagging, None),
    ]
    assert failures(cases, check) == []


def test_the_cuts_of_flowers_ranks_leave_what_flower_keeps():
    def check(kind, count):
        found = capabilities_of(kind())
        assert found.needs_every_reply and not found.is_uniform_mean
        assert found.cuts(count) == ((count - 1) // 2 if kind is flower.FedMedian else int(0.2 * count))

    assert failures(product([flower.FedMedian, flower.FedTrimmedAvg], [1, 2, 5, 10]), check) == []


def test_flowers_rules_are_not_shown_one_release():
    """They would return it as it is: the mean, under the name of a median."""

    def check(kind):
        with pytest.raises(ConfigError, match=rf"{kind.__name__} one reply, the release, and it needs every reply"):
            GlobalDP(kind(), **OPTIONS)

    cases = [flower.FedMedian, flower.FedTrimmedAvg, flower.Krum, flower.MultiKrum, flower.Bulyan]
    assert failures(cases, check) == []


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


def test_of_what_nobody_knows_nothing_is_guessed():
    def check(kind):
        with pytest.raises(ConfigError, match=rf"{kind.__name__} declares no capabilities"):
            GlobalDP(kind(), **OPTIONS)
        assert not GlobalDP(kind(), placement="model", **OPTIONS).is_accounted

    assert failures([Overridden, Inherited, flower.FedXgbBagging], check) == []
