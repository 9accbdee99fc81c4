"""Every strategy under every privacy and placement, from configuration to result; and FedProx down to its gradient."""

import io
import itertools
import random

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import chi2
from support import failures, flat, mostly_slow

from cloister.client.data import task_of
from cloister.config.run import TaskConfig
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate
from cloister.strategies import STRATEGIES
from cloister.tasks.base import Recipe
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.training.plan import TrainingPlan
from cloister.training.trainers import NumpyTrainer
from cloister.utils.arrays import from_record
from cloister.utils.errors import ConfigError

SGD = Recipe(1, 8, 0.1)

CLIENTS = 5
ROUNDS = 3
GOOD = 0.4
"""Accuracy that says something was learned; chance is 0.1, and what comes out here is 0.5 to 0.9."""

OPTIONS = {
    "fedavgm": {"server-learning-rate": 0.5},
    "fedadam": {"server-learning-rate": 0.1},
    "fedyogi": {"server-learning-rate": 0.1},
    "fedadagrad": {"server-learning-rate": 0.1},
    "fedprox": {"proximal-mu": 0.1},
    "fedtrimmedavg": {"trim-fraction": 0.2},
    "krum": {"num-malicious": 1},
}
ROBUST = {"fedmedian", "fedtrimmedavg", "krum"}
RULED = {"fedmedian", "fedtrimmedavg"}
PRIVACY = [
    ("none", "update"),
    *((server, place) for server in ("global-dp", "metric") for place in ("update", "rule", "model")),
]
CELLS = [(name, server, placement) for name in STRATEGIES.names() for server, placement in PRIVACY]


def is_legal(name, server, placement):
    if server == "none" or placement == "model":
        return True
    return name in RULED if placement == "rule" else name not in ROBUST


def cell(name, server, placement, folder, **more):
    """The configuration of one run: digits, softmax regression, no TensorFlow, everything seeded."""
    keys = {
        "strategy.name": name,
        "strategy.min-nodes": CLIENTS,
        "task.model": "softmax",
        "num-rounds": ROUNDS,
        "privacy.server": server,
        "output-dir": str(folder),
        "tensorboard": False,
        "evaluation.federated": "off",
        "seed": 3,
    }
    keys |= {f"strategy.{option}": value for option, value in OPTIONS.get(name, {}).items()}
    if server != "none":
        keys |= {"privacy.placement": placement, "privacy.noise-seed": 3}
    return keys | {key.replace("__", ".").replace("_", "-"): value for key, value in more.items()}


def quietly(keys):
    return simulate(keys, CLIENTS, ConsoleReporter(keys["num-rounds"], Console(file=io.StringIO())))


LEGAL = [each for each in CELLS if is_legal(*each)]
SLOW = [each for each in LEGAL if each[1] != "metric"]
"""Each strategy at each placement; `metric` differs in its noise alone, which the mechanism's own tests cover."""
FAST = [
    ("fedadagrad", "none", "update"),
    ("fedadam", "global-dp", "update"),
    ("fedavg", "metric", "update"),
    ("fedavgm", "global-dp", "model"),
    ("fedmedian", "global-dp", "rule"),
    ("fedopt", "metric", "model"),
    ("fedprox", "global-dp", "update"),
    ("fedtrimmedavg", "metric", "rule"),
    ("fedyogi", "metric", "update"),
    ("krum", "global-dp", "model"),
]
"""Each strategy once, and each privacy at each placement at least once."""


@pytest.mark.parametrize(
    ("name", "server", "placement"), mostly_slow([*FAST, *(each for each in SLOW if each not in FAST)], FAST)
)
def test_a_legal_combination_learns(name, server, placement, tmp_path):
    outcome = quietly(cell(name, server, placement, tmp_path))
    assert [done.number for done in outcome.rounds] == list(range(ROUNDS + 1))
    for done in outcome.rounds[1:]:
        assert (done.measured.asked, done.measured.accepted, done.measured.rejected) == (CLIENTS, CLIENTS, ())
        assert (done.measured.noise_std is None) == (server == "none")
        assert server == "none" or done.measured.noise_std > 0
        assert (done.measured.distance is not None) == (server == "metric")
    assert np.isfinite(flat(outcome.arrays)).all()
    assert outcome.rounds[-1].central["accuracy"] > GOOD
    assert outcome.plan.claim.mechanism == server
    assert {array.dtype for array in from_record(outcome.arrays).values()} == {np.dtype(np.float32)}


def test_a_placement_that_is_not_for_the_strategy_is_refused_at_the_start(tmp_path):
    def check(name, server, placement):
        folder = tmp_path / f"{name}-{server}-{placement}"
        other = {"rule": "'update'", "update": "'rule'" if name in RULED else "'model'"}[placement]
        says = rf"privacy\.placement = '{placement}'.* use privacy\.placement = {other}"
        with pytest.raises(ConfigError, match=says):
            quietly(cell(name, server, placement, folder))
        assert not folder.exists()

    assert failures([each for each in CELLS if not is_legal(*each)], check) == []


def test_the_matrix_has_no_holes():
    illegal = [each for each in CELLS if not is_legal(*each)]
    assert len(CELLS) == 10 * 7 and len(illegal) == 3 * 2 + 8 * 2
    assert set(FAST) <= set(LEGAL) and {name for name, *_ in FAST} == set(STRATEGIES.names())
    assert {tuple(privacy) for _, *privacy in FAST} == set(PRIVACY)


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "krum"])
def test_the_same_seeds_give_the_same_model(name, tmp_path):
    keys = cell(name, "metric", "model", tmp_path, num_rounds=2)
    assert np.array_equal(flat(quietly(keys).arrays), flat(quietly(keys).arrays))


def test_another_noise_seed_gives_another_model(tmp_path):
    keys = cell("fedavg", "global-dp", "update", tmp_path, num_rounds=1)
    other = quietly(keys | {"privacy.noise-seed": 4})
    assert not np.array_equal(flat(quietly(keys).arrays), flat(other.arrays))


def test_noise_without_clipping_to_speak_of_is_what_its_std_says(tmp_path):
    """The difference to a run without noise, over 650 parameters: χ², two-sided, one false alarm in a million seeds."""
    keys = cell("fedavg", "global-dp", "update", tmp_path, num_rounds=1)
    noisy, silent = quietly(keys), quietly(keys | {"privacy.noise-multiplier": 0.0})
    noise = (flat(noisy.arrays) - flat(silent.arrays)) / noisy.rounds[1].measured.noise_std
    assert noise.size == 650
    assert noisy.rounds[1].measured.noise_std == pytest.approx(0.05 * 2.0 / CLIENTS)
    assert chi2.isf(1 - 5e-7, 650) < np.sum(noise**2) < chi2.isf(5e-7, 650)


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedadam"])
def test_poisson_rounds_of_any_size_are_survived(name, tmp_path, monkeypatch):
    class Repeatable(random.Random):
        """Poisson draws come from the operating system; here they shall come again."""

        def __init__(self):
            super().__init__(11)

    monkeypatch.setattr(random, "SystemRandom", Repeatable)
    keys = cell(name, "global-dp", "update", tmp_path, strategy__sampling="poisson", strategy__fraction_train=0.3)
    outcome = quietly(keys | {"num-rounds": 6, "strategy.min-nodes": 1, "seed": 11})
    asked = [done.measured.asked for done in outcome.rounds[1:]]
    assert 0 in asked and len(set(asked)) > 2
    # The mean is over the expected number of clients, which is public: the noise tells nobody how many came.
    assert all(done.measured.noise_std == pytest.approx(0.05 * 2.0 / 1.5) for done in outcome.rounds[1:])
    assert np.isfinite(flat(outcome.arrays)).all()


# FedProx: what a client minimises is its loss + μ/2·‖w - w_global‖².

RATE = 0.1
STRENGTHS = (0.0, 0.5, 2.0, 8.0)


def digits(count):
    return task_of(TaskConfig(model="softmax")).load().train.take(np.arange(count))


def plan(mu, epochs, batch_size):
    return TrainingPlan(epochs=epochs, batch_size=batch_size, learning_rate=RATE, proximal_mu=mu, seed=(1, 1, 0))


def fitted(trainer, start, examples, mu, epochs, batch_size):
    """The weights after training from `start`, in float64, flat."""
    trainer.model.assign(start)
    trainer.fit(examples, plan(mu, epochs, batch_size))
    return np.concatenate([array.ravel() for array in trainer.model.arrays().values()], dtype=np.float64)


def gradient(weights, examples):
    """Of mean cross-entropy of softmax regression, in float64, flat."""
    kernel, bias = weights[:640].reshape(64, 10), weights[640:]
    x = examples.x.astype(np.float64)
    scores = np.exp(x @ kernel + bias)
    residual = scores / scores.sum(axis=1, keepdims=True)
    residual[np.arange(len(x)), examples.y] -= 1
    return np.concatenate([(x.T @ residual / len(x)).ravel(), residual.mean(axis=0)])


def numpy_trainer():
    rng = np.random.default_rng(4)
    model = SoftmaxRegression(64, 10)
    model.assign({name: rng.normal(0, 0.1, array.shape) for name, array in model.arrays().items()})
    return NumpyTrainer(model, SGD)


@pytest.mark.parametrize("mu", STRENGTHS)
def test_a_numpy_step_is_the_gradient_plus_mu_times_the_way_from_the_global_model(mu):
    trainer, examples = numpy_trainer(), digits(40)
    start = trainer.model.arrays()
    w = origin = np.concatenate([array.ravel() for array in start.values()], dtype=np.float64)
    for steps in (1, 2, 3):  # whole batches: an epoch is a step
        w = w - RATE * (gradient(w, examples) + mu * (w - origin))
        assert np.allclose(fitted(trainer, start, examples, mu, steps, 40), w, rtol=0, atol=1e-6)


def keras_trainer():
    from cloister.training.keras_trainer import KerasTrainer

    model = task_of(TaskConfig(model="mlp")).build()
    model.initialise(4)
    return KerasTrainer(model, SGD)


@pytest.mark.parametrize("make", [numpy_trainer, keras_trainer])
def test_a_larger_mu_keeps_the_client_closer_to_the_global_model(make):
    trainer, examples = make(), digits(120)
    start = trainer.model.arrays()
    origin = np.concatenate([array.ravel() for array in start.values()], dtype=np.float64)
    far = [np.linalg.norm(fitted(trainer, start, examples, mu, 3, 30) - origin) for mu in STRENGTHS]
    assert all(closer < 0.97 * further for further, closer in itertools.pairwise(far))
    # The penalty is nothing at the global model, so it first shows in the second step, where it is -rate·μ·(w₁ - w₀).
    first = fitted(trainer, start, examples, 0.0, 1, 120)
    plain, second = (fitted(trainer, start, examples, mu, 2, 120) for mu in (0.0, 2.0))
    assert np.allclose(fitted(trainer, start, examples, 2.0, 1, 120), first, rtol=0, atol=1e-6)
    assert np.allclose(second - plain, -RATE * 2.0 * (first - origin), rtol=0, atol=1e-6)
    assert np.abs(second - plain).max() > 1e-4


def test_mu_travels_from_the_configuration_to_the_client(tmp_path):
    def trained(name, **options):
        keys = cell(name, "none", "update", tmp_path, num_rounds=1) | options
        return flat(quietly(keys).arrays)

    fedavg, none, some = (
        trained("fedavg"),
        trained("fedprox", **{"strategy.proximal-mu": 0.0}),
        trained("fedprox", **{"strategy.proximal-mu": 1.0}),
    )
    assert np.array_equal(fedavg, none)
    assert np.linalg.norm(some) < 0.8 * np.linalg.norm(none)
