"""Replies that have to be seen together are refused before anybody is asked, where there is no memory for them."""

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedMedian, Krum
from support import all_nodes, content, grid_of, one_round

from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.gaussian import global_dp
from cloister.server import strategy_wrapper
from cloister.server.canaries import Canaries
from cloister.server.clustering import LaplaceClustering
from cloister.server.private_strategy import GlobalDP, MetricDP, PrivateStrategy
from cloister.server.strategy_wrapper import NoPrivacyStrategy
from cloister.strategies.averaging import FedAvg, Sampling
from cloister.utils.arrays import stacked, to_record
from cloister.utils.errors import ConfigError

CLIENTS = 5
MODEL = {"kernel": np.zeros((30, 10), np.float32), "bias": np.zeros(25, np.float64)}
"""1,400 bytes; five of them are 7,000."""
DP = {"noise_multiplier": 1.0, "clipping_norm": 1.0}
COMPONENTS = {
    "strategy FedAvg": lambda: NoPrivacyStrategy(all_nodes()),
    "strategy Krum": lambda: NoPrivacyStrategy(Krum(min_train_nodes=1, min_available_nodes=1)),
    "privacy.server = 'metric' around strategy FedAvg": lambda: MetricDP(all_nodes(), **DP),
    "privacy.server = 'global-dp' around strategy FedMedian": lambda: GlobalDP(FedMedian(), placement="rule", **DP),
    "privacy.server = 'global-dp' around strategy FedAvg": lambda: GlobalDP(all_nodes(), placement="model", **DP),
    "privacy.canaries = 3": lambda: PrivateStrategy(all_nodes(), global_dp(**DP), canaries=Canaries.drawn(3)),
}


@pytest.fixture
def free(monkeypatch):
    """Say how many bytes are free."""
    return lambda count: monkeypatch.setattr(strategy_wrapper, "free_memory", lambda: count)


def asked(strategy, model=MODEL):
    """The nodes that are asked to train, in the order in which they would be."""
    seen = []
    grid = grid_of(lambda node, sent: seen.append(node) or content(sent), CLIENTS)
    one_round(strategy, grid, model)
    return seen


@pytest.mark.parametrize("component", COMPONENTS)
def test_replies_that_have_to_be_held_are_refused_before_anybody_is_asked(free, component):
    free(5600)
    with pytest.raises(ConfigError) as refused:
        asked(COMPONENTS[component]())
    assert str(refused.value) == (
        f"{component} has to see all replies of a round together: 5 clients with 1.4 kB each need 7 kB, and 5.6 kB of "
        "memory are free. Ask fewer clients (strategy.fraction-train), train a smaller model, or give the server more "
        "memory. A mean under privacy.server = 'global-dp' in placement 'update' adds replies up as they come, and "
        "needs none of this"
    )


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("enough", [7000, 10**12, None])
def test_with_memory_for_them_they_are_asked(free, component, enough):
    free(enough)
    strategy, grid = COMPONENTS[component](), grid_of(lambda node, sent: content(sent), CLIENTS)
    assert len(list(strategy.configure_train(1, to_record(MODEL), ConfigRecord(), grid))) == CLIENTS


def test_nobody_was_asked(free):
    free(0)
    seen, strategy = [], NoPrivacyStrategy(all_nodes())
    with pytest.raises(ConfigError, match="and 0 bytes of memory are free"):
        one_round(strategy, grid_of(lambda node, sent: seen.append(node) or content(sent), CLIENTS), MODEL)
    assert not seen


@pytest.mark.parametrize("clip", [1.0, AdaptiveClip(1.0)])
def test_what_is_added_up_as_it_comes_needs_no_memory(free, clip):
    free(0)
    assert len(asked(GlobalDP(all_nodes(), noise_multiplier=1.0, clipping_norm=clip))) == CLIENTS


def test_clustering_holds_one_model_of_each_client(free):
    clustering = LaplaceClustering(all_nodes(), all_nodes, 2)
    models, grid = to_record(stacked([MODEL, MODEL])), grid_of(lambda node, sent: content(sent), CLIENTS)
    free(6999)
    with pytest.raises(ConfigError, match=r"'laplace-clustering' has to see all .* 5 clients with 1.4 kB each"):
        clustering.configure_train(1, models, ConfigRecord(), grid)
    free(7000)
    assert clustering.configure_train(1, models, ConfigRecord(), grid)


def test_it_is_asked_once(free):
    """Later rounds find the memory in which the first one's replies were."""
    free(7000)
    strategy = NoPrivacyStrategy(all_nodes())
    asked(strategy)
    free(0)
    assert len(asked(strategy)) == CLIENTS


def test_a_secret_number_of_clients_does_not_show(free):
    """The expected one counts, and six deviations: 2.5 + 9.5, rounded up."""
    for _ in range(5):
        drawn = FedAvg(train=Sampling(0.5, kind="poisson"))
        free(12 * 1400 - 1)
        with pytest.raises(ConfigError, match="12 clients with"):
            MetricDP(drawn, **DP).configure_train(
                1, to_record(MODEL), ConfigRecord(), grid_of(lambda node, sent: content(sent), CLIENTS)
            )


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (3_210_000, "3.21 MB"), (32 * 10**9, "32 GB")],
)
def test_bytes_for_a_person(count, words):
    assert strategy_wrapper._read(count) == words
