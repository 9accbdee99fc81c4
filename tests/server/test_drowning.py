"""Noise that leaves nothing to learn is told before a run, by public numbers alone."""

import math

import numpy as np
from support import failures

from cloister.config.run import parse
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.server.build import build
from cloister.server.preflight import low_snr_warnings
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate
from cloister.utils.arrays import Layout

LAYOUT = Layout.of({"w": np.zeros(400, np.float32)})
"""√p = 20."""
SERVER = {"privacy.server": "global-dp", "num-rounds": 4}
CLIENTS = {"privacy.server": "none", "num-rounds": 4}


def told(settings, nodes=10, sizes=()):
    named = {"task.model": "softmax", "strategy.fraction-train": 1.0} | settings
    return low_snr_warnings(build(parse(named)), LAYOUT, nodes, sizes)


def test_it_begins_where_the_noise_is_longer_than_all_updates_and_drowns_them_at_five_times():
    def check(settings, key, at_5):
        assert not told(settings | {key: 0.29 * at_5})
        for share in (0.31, 0.98):
            (line,) = told(settings | {key: share * at_5})
            assert "noise lets the model learn little: over 4 rounds" in line and "drowns" not in line
        (line,) = told(settings | {key: 1.02 * at_5})
        assert "noise drowns what the clients teach" in line
        assert key in line and "5.1 times" in line and "10 clients a round, 400 parameters" in line
        assert f"level at {key} = {at_5 / 5:.2g}" in line

    cases = [
        (SERVER, "privacy.noise-multiplier", 5 * 10 * 2 / 20),
        (CLIENTS | {"privacy.client": "gaussian"}, "privacy.gaussian-noise-multiplier", 5 * math.sqrt(40) / 20),
        (
            CLIENTS | {"privacy.client": "laplace", "privacy.radius": 2.0},
            "privacy.laplace-noise-multiplier",
            5 * math.sqrt(40),
        ),
    ]
    assert failures(cases, check) == []


def test_more_clients_or_rounds_help():
    drowning = SERVER | {"privacy.noise-multiplier": 6.0}
    assert told(drowning) and not told(drowning, nodes=50) and not told(drowning | {"num-rounds": 100})
    assert told(drowning | {"strategy.fraction-train": 0.5}, nodes=10)


def test_a_distance_that_may_take_the_noise_away_is_no_reason():
    metric = {"privacy.server": "metric", "privacy.noise-multiplier": 10.0, "num-rounds": 4}
    assert told(SERVER | {"privacy.noise-multiplier": 10.0})
    assert not told(metric | {"privacy.distance-direction": "multiply"})


def test_steps_of_dp_sgd():
    """Ten clients, four rounds, two steps each of 32: 80 steps, whose noise is σ√(400·80) long, and 80·32 gradients."""
    sizes = [LocalSteps(64, 32, 1)] * 10
    at_5 = 5 * 80 * 32 / (20 * math.sqrt(80))
    settings = CLIENTS | {"privacy.client": "dp-sgd", "client.batch-size": 32}
    assert not told(settings | {"privacy.dp-sgd-noise-multiplier": 0.29 * at_5}, sizes=sizes)
    assert "drowns" not in told(settings | {"privacy.dp-sgd-noise-multiplier": 0.98 * at_5}, sizes=sizes)[0]
    assert "drowns" in told(settings | {"privacy.dp-sgd-noise-multiplier": 1.02 * at_5}, sizes=sizes)[0]
    assert not told(settings | {"privacy.dp-sgd-noise-multiplier": 1e6}), "sizes are not known"


def test_batches_larger_than_any_client():
    settings = CLIENTS | {"privacy.client": "dp-sgd", "client.batch-size": 1000}
    (line,) = told(settings, sizes=[LocalSteps(examples, 1000, 1) for examples in (100, 250)])
    assert "client.batch-size = 1000" in line and "250 examples at most" in line and "4 times too short" in line
    assert not told(settings, sizes=[LocalSteps(1000, 1000, 1)])


def test_a_run_says_it_when_it_begins(tmp_path, capsys):
    settings = SERVER | {"task.model": "softmax", "output-dir": str(tmp_path), "num-rounds": 1, "report": False}
    simulate(settings | {"privacy.noise-multiplier": 50.0, "tensorboard": False}, 4, ConsoleReporter(1))
    shown = capsys.readouterr().out
    assert shown.index("warning: the server's noise drowns") < shown.index("round   1/1")
    simulate(settings | {"privacy.noise-multiplier": 0.1, "tensorboard": False}, 4, ConsoleReporter(1))
    assert "warning" not in capsys.readouterr().out
