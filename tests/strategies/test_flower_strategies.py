"""Flower's own strategies by entry point, as Flower documents them: they sample by themselves."""

import pytest
from rich.console import Console

from cloister.config.run import parse
from cloister.server.build import build, named_strategy
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate
from cloister.strategies import STRATEGIES
from cloister.utils.errors import ConfigError

FLOWER = {
    "flower-fedavg": "flwr.serverapp.strategy:FedAvg",
    "flower-fedadam": "flwr.serverapp.strategy:FedAdam",
    "flower-fedprox": "flwr.serverapp.strategy:FedProx",
}
SETTINGS = {"task.model": "softmax", "tensorboard": False, "num-rounds": 2, "client.local-epochs": 1}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    for name, value in FLOWER.items():
        monkeypatch.setitem(STRATEGIES._table, name, value)


def go(tmp_path, name, clients=4, **settings):
    keys = SETTINGS | {"strategy.name": name, "output-dir": str(tmp_path)} | settings
    return simulate(keys, clients, ConsoleReporter(2, Console(quiet=True)))


@pytest.mark.parametrize(
    ("name", "server"), [("flower-fedavg", "none"), ("flower-fedadam", "global-dp"), ("flower-fedprox", "global-dp")]
)
def test_a_run_with_one(tmp_path, name, server):
    outcome = go(tmp_path, name, **{"privacy.server": server})
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [4, 4]
    kind = FLOWER[name].partition(":")[2]
    assert outcome.privacy["sampling"] == f"by the strategy {kind} itself, no amplification claimed"
    assert bool(outcome.rounds[-1].federated) is (server == "none")


def test_keys_that_mean_what_an_argument_of_theirs_means_reach_it(tmp_path):
    config = parse(
        {
            "strategy.name": "flower-fedadam",
            "strategy.fraction-train": 0.5,
            "strategy.min-nodes": 3,
            "strategy.quorum": 2,
            "strategy.beta-1": 0.7,
            "evaluation.federated": "on",
            "strategy.fraction-evaluate": 0.25,
        }
    )
    strategy = named_strategy(config)
    assert (strategy.fraction_train, strategy.fraction_evaluate, strategy.beta_1) == (0.5, 0.25, 0.7)
    assert strategy.min_available_nodes == strategy.min_train_nodes == 2
    outcome = go(tmp_path, "flower-fedavg", **{"strategy.fraction-train": 0.5, "strategy.min-train-nodes": 3})
    assert [done.measured.asked for done in outcome.rounds[1:]] == [3, 3]


def test_what_is_no_argument_of_theirs_is_refused():
    with pytest.raises(ConfigError, match=r"strategy.tau = 1.0 is not an option of 'flower-fedavg'.*min-train-nodes"):
        build(parse({"strategy.name": "flower-fedavg", "strategy.tau": 1.0}))


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy.sampling": "poisson"},
        {"privacy.server": "global-dp", "privacy.population": 4},
        {"evaluation.held-out-clients": 0.25},
    ],
)
def test_a_draw_that_they_do_not_make_is_refused(settings):
    (key,) = [key for key in settings if key != "privacy.server"]
    with pytest.raises(ConfigError, match=f"{key} = .* has no effect with strategy.name = 'flower-fedavg'"):
        build(parse({"strategy.name": "flower-fedavg"} | settings))
