"""Noise of the clients that is calibrated to their budget, on a node: one number for policy, ledger and noise."""

import pytest
from asking import DP_SGD, GAUSSIAN, OPEN, context_of, message_of
from policed import ask, only, refused
from support import failures

from cloister.client.costs import privacy_costs_of
from cloister.client.node import Node
from cloister.client.request import TrainRequest, request_of
from cloister.config.calibration import calibrated, events_of_clients
from cloister.config.run import parse
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.filters import cost, filter_for
from cloister.privacy.claims.client import sound_unit
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.utils.errors import ConfigError

KEYS = {name: f"privacy.{name}-noise-multiplier" for name in ("dp-sgd", "gaussian")}
CHOICE = {"privacy.server": "laplace-clustering", "privacy.choice-epsilon": 0.1}


def auto(name, epsilon=4.0, **more):
    changes = {key.replace("__", ".").replace("_", "-"): value for key, value in more.items()}
    return OPEN | {"privacy.client": name, KEYS[name]: "auto", "privacy.client-max-epsilon": epsilon} | changes


def spent(config, sizes, multiplier):
    """Return the share of the limit that all rounds take of the client that spends most."""
    privacy = config.privacy
    chosen = filter_for("renyi", privacy.client.max_epsilon, privacy.target_delta)
    each = events_of_clients(privacy, sizes, multiplier)
    dearest = max(sum(cost(chosen, event) for event in events) for events in each)
    return config.num_rounds * dearest / chosen.limit(privacy.client.max_epsilon, privacy.target_delta)


@pytest.mark.parametrize("changes", [{}, {"num_rounds": 37}, {"privacy__target_delta": 1e-7}, CHOICE], ids=str)
def test_is_the_least_with_which_all_rounds_fit(changes):
    sizes = [LocalSteps(60, 10, 2), LocalSteps(11, 10, 2), LocalSteps(600, 10, 2)]

    def check(name, epsilon):
        config = calibrated(parse(auto(name, epsilon, **changes)), sizes if name == "dp-sgd" else ())
        found = config.privacy.client.noise_multiplier
        assert spent(config, sizes, found) <= 1 < spent(config, sizes, 0.997 * found)

    assert failures([(name, epsilon) for name in KEYS for epsilon in (1.5, 8.0)], check) == []


def test_a_unit_at_several_clients_stays_within_the_budget_over_all_of_them():
    sizes, config = [LocalSteps(60, 10, 2), LocalSteps(90, 10, 2)], parse(auto("dp-sgd", 8.0))
    alone, together = (calibrated(config, sizes, shared) for shared in ((), [tuple(sizes)]))

    def epsilon(config):
        sigma = config.privacy.client.noise_multiplier
        return sound_unit(sizes, sigma, config.num_rounds).epsilon(1e-5)

    assert epsilon(together) <= 8.0 < epsilon(alone)
    assert together.privacy.client.noise_multiplier < 1.6 * alone.privacy.client.noise_multiplier


def test_numbers_are_left_as_they_are():
    for settings in (DP_SGD, GAUSSIAN, OPEN):
        config = parse(settings)
        assert calibrated(config) is config


def test_needs_a_budget():
    for name, key in KEYS.items():
        with pytest.raises(ConfigError, match=rf"{key} = 'auto' is calibrated to privacy.client-max-epsilon = 0"):
            parse(auto(name, 0.0))


def test_no_number_of_steps_past_delta_is_promised():
    """More noise does not help against draws that fill all places."""
    tiny = parse(auto("dp-sgd", 8.0, privacy__target_delta=1e-14, num_rounds=1000))
    with pytest.raises(ConfigError, match="has room for"):
        calibrated(tiny, [LocalSteps(60, 10, 2)])


def test_a_node_charges_the_number_that_the_server_has():
    settings = auto("gaussian")
    server = calibrated(parse(settings))
    context = context_of(settings)
    request = request_of(TrainRequest, message_of(), context)
    assert request.config == server
    costs = privacy_costs_of(request, Node.of(context))
    assert costs[0].events == (Gaussian(server.privacy.client.noise_multiplier),)


def test_a_node_with_a_size_of_its_own_refuses_noise_that_the_server_cannot_know():
    with pytest.raises(ConfigError, match=r"needs the number of examples .* `cloister plan --public-size N "):
        request_of(TrainRequest, message_of(), context_of(auto("dp-sgd")))


def test_a_policys_least_noise_is_held_against_the_number(tmp_path):
    settings = calibrated(parse(auto("gaussian", 8.0))).flat()
    found = settings[KEYS["gaussian"]]
    ask(tmp_path, settings, **only("gaussian", min_gaussian_noise_multiplier=found))
    refused("demanded: at least", tmp_path, settings, **only("gaussian", min_gaussian_noise_multiplier=1.01 * found))
