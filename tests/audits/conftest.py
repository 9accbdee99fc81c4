"""A small run to attack, and noise that is the same in every test run."""

import os
from itertools import count
from random import Random

import pytest
from quick_runs import coarse_accounts, quick_runs  # noqa: F401

from cloister.audits import scores
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server import build
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate

SMALL = {
    "task.model": "softmax",
    "num-rounds": 2,
    "client.local-epochs": 2,
    "seed": 3,
    "tensorboard": False,
    "run-name": "small",
}


class Silent(ConsoleReporter):
    """Tells nobody."""

    def __init__(self):
        super().__init__(0)
        self.console.quiet = True


@pytest.fixture
def seeded_noise(monkeypatch):
    """Each shadow run asks for noise of its own; here these are the streams of 0, 1, 2 and so on."""
    seeds = count()
    monkeypatch.setattr(build, "GaussianNoise", lambda seed=None: GaussianNoise(next(seeds)))


@pytest.fixture
def repeated_entropy(monkeypatch):
    """Noise and canaries that are the operating system's to a run, and the same in every test run."""
    monkeypatch.setattr(os, "urandom", Random(1).randbytes)


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr(scores, "RESAMPLES", 200)


@pytest.fixture
def run_of(tmp_path):
    """The directory of a small run on digits with these settings."""

    def make(clients=4, **settings):
        given = SMALL | {"output-dir": str(tmp_path / "runs")} | settings
        return simulate(given, clients, Silent()).directory.path

    return make


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """A small run without privacy, which no test may change."""
    folder = tmp_path_factory.mktemp("plain")
    settings = SMALL | {"output-dir": str(folder), "privacy.server": "none", "keep-checkpoints": 0}
    return simulate(settings, 4, Silent()).directory.path
