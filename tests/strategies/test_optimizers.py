"""Server optimizers against the closed forms of their papers, written again as plain loops over Python numbers.

The problem: client i wants to be at a point of its own, and in every round goes three tenths of the way there, so the
mean update depends on the model that was sent, and an error in one round shows in all later ones.
"""

import math
import random
from itertools import product

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy.fedopt import FedOpt as FlowerFedOpt
from support import content, failures, flat, grid_of, one_round

from cloister.flower.messages import assume_run
from cloister.server.strategy_wrapper import make_reply
from cloister.strategies.averaging import FedAvg, Sampling
from cloister.strategies.fedopt import Adagrad, Adam, FedAdagrad, FedAdam, FedAvgM, FedOpt, FedYogi, Momentum, Sgd, Yogi
from cloister.utils.arrays import Layout, from_record
from cloister.utils.errors import ConfigError, FederationError

ROUNDS = 5
EXAMPLES = (10, 30, 60)
START = {"kernel": np.array([[0.5, -1.0], [2.0, 0.0]]), "bias": np.array([0.1, -0.2, 0.3])}
WIDTH = 7
GOALS = [
    [3.0, -2.0, 1.0, 0.5, -0.5, 0.25, 4.0],
    [-1.0, 2.0, 1.5, 0.0, 0.75, -3.0, 1.0],
    [0.2, -0.1, 1.8, 0.0, 0.05, 0.0, -2.0],
]
STEP = 0.3


# The papers, one coordinate at a time.


def mean_update(w, coordinate):
    """Δ_t = Σ n_i (w_i - w) / Σ n_i."""
    moves = [STEP * (goal[coordinate] - w) for goal in GOALS]
    return sum(n * move for n, move in zip(EXAMPLES, moves)) / sum(EXAMPLES)


def sgd(w, delta, state, eta):
    """Reddi et al. (2021), Algorithm 1 with SERVEROPT = SGD."""
    return w + eta * delta


def momentum(w, delta, state, eta, beta):
    """Hsu et al. (2019), §4.3: v ← βv + Δ, w ← w + v, here with a rate."""
    state["v"] = beta * state.get("v", 0.0) + delta
    return w + eta * state["v"]


def adaptive(second):
    """Reddi et al. (2021), Algorithm 2: v_{-1} = τ², no bias correction."""

    def step(w, delta, state, eta, beta_1, tau, beta_2=None):
        state["m"] = beta_1 * state.get("m", 0.0) + (1 - beta_1) * delta
        state["v"] = second(state.get("v", tau * tau), delta * delta, beta_2)
        return w + eta * state["m"] / (math.sqrt(state["v"]) + tau)

    return step


adagrad = adaptive(lambda v, square, _: v + square)
adam = adaptive(lambda v, square, beta_2: beta_2 * v + (1 - beta_2) * square)
yogi = adaptive(
    lambda v, square, beta_2: v - (1 - beta_2) * square * ((v > square) - (v < square))  # sign(v - Δ²)
)


def closed_form(rule, **parameters):
    """Models after each of the rounds."""
    w = np.concatenate([array.ravel() for array in START.values()]).tolist()
    states = [{} for _ in w]
    models = []
    for _ in range(ROUNDS):
        w = [rule(x, mean_update(x, k), states[k], **parameters) for k, x in enumerate(w)]
        models.append(w)
    return np.array(models)


# The strategies, whole: nodes drawn, messages sent, replies aggregated.


def client(node_id, sent):
    goal = np.array(GOALS[node_id - 1])
    layout = Layout.of(sent)
    vector = np.concatenate(layout.rows(sent))
    moved = vector + STEP * (goal.astype(vector.dtype) - vector)
    pieces = [moved[a:b] for a, b in zip(layout.offsets, layout.offsets[1:], strict=False)]
    return content(layout.named(tuple(pieces)), EXAMPLES[node_id - 1])


def trained(strategy, dtype=np.float64, rounds=ROUNDS, start=None, first=1):
    """Models after each round of a strategy."""
    grid = grid_of(client, len(GOALS))
    arrays = start or {name: array.astype(dtype) for name, array in START.items()}
    models = []
    for number in range(first, first + rounds):
        record, _ = one_round(strategy, grid, arrays, number)
        assert isinstance(record, ArrayRecord)
        arrays = from_record(record)
        models.append(flat(record))
    return np.array(models)


def everyone(strategy, **options):
    return strategy(train=Sampling(min_nodes=len(GOALS), timeout=0, rng=random.Random(0)), **options)


CASES = {
    "fedavgm, defaults": (FedAvgM, {}, momentum, {"eta": 0.1, "beta": 0.5}),
    "fedavgm, no momentum": (
        FedAvgM,
        {"server_learning_rate": 0.7, "momentum": 0.0},
        sgd,
        {"eta": 0.7},
    ),
    "fedavgm": (FedAvgM, {"server_learning_rate": 1.0, "momentum": 0.9}, momentum, {"eta": 1.0, "beta": 0.9}),
    "fedadam, defaults": (FedAdam, {}, adam, {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}),
    "fedadam": (
        FedAdam,
        {"server_learning_rate": 0.03, "beta_1": 0.5, "beta_2": 0.7, "tau": 0.1},
        adam,
        {"eta": 0.03, "beta_1": 0.5, "beta_2": 0.7, "tau": 0.1},
    ),
    "fedyogi, defaults": (FedYogi, {}, yogi, {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}),
    "fedyogi, large tau": (  # v falls as well as rises: both signs are met
        FedYogi,
        {"tau": 0.5, "beta_2": 0.6},
        yogi,
        {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.6, "tau": 0.5},
    ),
    "fedadagrad, defaults": (FedAdagrad, {}, adagrad, {"eta": 0.1, "beta_1": 0.0, "tau": 1e-3}),
    "fedadagrad": (
        FedAdagrad,
        {"server_learning_rate": 1.0, "tau": 0.2},
        adagrad,
        {"eta": 1.0, "beta_1": 0.0, "tau": 0.2},
    ),
    "fedopt, defaults": (FedOpt, {}, sgd, {"eta": 1.0}),
    "fedopt, sgd": (FedOpt, {"server_optimizer": "sgd", "server_learning_rate": 0.4}, sgd, {"eta": 0.4}),
    "fedopt, momentum": (
        FedOpt,
        {"server_optimizer": "momentum", "server_learning_rate": 0.4, "momentum": 0.8},
        momentum,
        {"eta": 0.4, "beta": 0.8},
    ),
    "fedopt, adam": (
        FedOpt,
        {"server_optimizer": "adam", "server_learning_rate": 0.1},
        adam,
        {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3},
    ),
    "fedopt, yogi": (
        FedOpt,
        {"server_optimizer": "yogi", "server_learning_rate": 0.1, "beta_1": 0.8},
        yogi,
        {"eta": 0.1, "beta_1": 0.8, "beta_2": 0.99, "tau": 1e-3},
    ),
    "fedopt, adagrad": (
        FedOpt,
        {"server_optimizer": "adagrad", "server_learning_rate": 0.1},
        adagrad,
        {"eta": 0.1, "beta_1": 0.9, "tau": 1e-3},
    ),
    "fedopt, the paper's parameters": (  # β₁ = β₂ = 0, τ = 1e-9 in Sáinz-Pardo Díaz et al. (2026)
        FedOpt,
        {"server_optimizer": "adam", "server_learning_rate": 0.1, "beta_1": 0.0, "beta_2": 0.0, "tau": 1e-9},
        adam,
        {"eta": 0.1, "beta_1": 0.0, "beta_2": 0.0, "tau": 1e-9},
    ),
}
cases = pytest.mark.parametrize(("strategy", "options", "rule", "parameters"), CASES.values(), ids=CASES)


@cases
def test_a_strategy_follows_its_paper(strategy, options, rule, parameters):
    models = trained(everyone(strategy, **options))
    assert np.allclose(models, closed_form(rule, **parameters), rtol=1e-11, atol=1e-12)


@cases
def test_a_strategy_follows_its_paper_in_float32_too(strategy, options, rule, parameters):
    models = trained(everyone(strategy, **options), np.float32)
    assert models.dtype == np.float32
    assert np.allclose(models, closed_form(rule, **parameters), rtol=1e-4, atol=1e-4)


def test_the_closed_forms_differ_so_that_none_can_stand_in_for_another():
    rules = [
        closed_form(sgd, eta=0.1),
        closed_form(momentum, eta=0.1, beta=0.9),
        closed_form(adagrad, eta=0.1, beta_1=0.9, tau=1e-3),
        closed_form(adam, eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
        closed_form(yogi, eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
    ]
    for i, one in enumerate(rules):
        for other in rules[:i]:
            assert np.abs(one - other).max() > 1e-3


# Flower's own: the positive control. Its FedAdam starts v at 0 and corrects a bias; its FedOpt only averages.


def flowers(strategy, **options):
    return strategy(min_train_nodes=len(GOALS), min_available_nodes=len(GOALS), **options)


def test_flowers_fedadam_is_not_the_papers_and_this_comparison_shows_it():
    paper = closed_form(adam, eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3)
    theirs = trained(flowers(flower.FedAdam, eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3))
    assert np.abs(theirs - paper).max() > 0.01
    assert not np.allclose(theirs, paper, rtol=1e-4, atol=1e-4)


def test_flowers_fedopt_only_averages():
    assert np.allclose(trained(flowers(FlowerFedOpt, eta=0.1)), closed_form(sgd, eta=1.0))


def test_flowers_momentum_is_the_papers_as_a_check_of_the_closed_form():
    theirs = trained(flowers(flower.FedAvgM, server_learning_rate=0.1, server_momentum=0.5))
    assert np.allclose(theirs, closed_form(momentum, eta=0.1, beta=0.5))


# What holds for all of them.


def test_sgd_with_rate_one_is_fedavg():
    assert np.allclose(trained(everyone(FedOpt)), trained(everyone(FedAvg)), rtol=1e-14, atol=1e-15)


@cases
def test_state_is_plain_arrays_and_a_run_goes_on_from_it(strategy, options, rule, parameters):
    whole = trained(everyone(strategy, **options))
    before, after = everyone(strategy, **options), everyone(strategy, **options)
    halves = trained(before, rounds=2)
    layout = Layout.of(START)
    pieces = [halves[-1][a:b] for a, b in zip(layout.offsets, layout.offsets[1:], strict=False)]
    after.state = {name: array.copy() for name, array in before.state.items()}
    rest = trained(after, rounds=ROUNDS - 2, start=layout.named(tuple(pieces)), first=3)
    # Nodes answer in a random order, and sums depend on it in their last bits.
    assert np.allclose(np.concatenate([halves, rest]), whole, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("optimizer", [Sgd(0.1), Momentum(0.1), Adam(), Yogi(), Adagrad()], ids=lambda o: repr(o)[:8])
def test_a_step_changes_neither_its_state_nor_its_input(optimizer):
    state = optimizer.init(3, np.dtype(np.float32))
    update = np.array([1.0, -2.0, 0.0], np.float32)
    kept = {name: array.copy() for name, array in state.items()}
    after, change = optimizer.step(state, update)
    assert np.array_equal(update, np.array([1.0, -2.0, 0.0], np.float32))
    assert all(np.array_equal(state[name], kept[name]) for name in kept)
    assert change.dtype == np.float32 and change.shape == (3,)
    assert all(array.dtype == np.float32 for array in after.values())


def test_an_update_is_taken_from_the_model_that_was_sent():
    assume_run()
    layout = Layout.of(START)
    with pytest.raises(FederationError, match="before configure_train"):
        everyone(FedOpt).aggregate_train(1, [make_reply(layout, layout.rows(START))])


def test_a_rate_out_of_range_is_refused_by_its_key():
    def check(strategy, rate):
        with pytest.raises(ConfigError, match=r"strategy\.server-learning-rate must be > 0"):
            strategy(server_learning_rate=rate)

    strategies = [FedAvgM, FedAdam, FedYogi, FedAdagrad, FedOpt]
    assert failures(product(strategies, [0.0, -1.0, math.nan, math.inf]), check) == []


def test_an_option_out_of_range_is_refused_by_its_key():
    cases = [
        (FedAvgM, "momentum", 1.0, "momentum"),
        (FedAvgM, "momentum", -0.1, "momentum"),
        (FedAvgM, "momentum", math.nan, "momentum"),
        (FedAdam, "beta_1", 1.0, "beta-1"),
        (FedAdam, "beta_2", 1.0, "beta-2"),
        (FedAdam, "tau", 0.0, "tau"),
        (FedYogi, "beta_1", -0.1, "beta-1"),
        (FedYogi, "beta_2", math.nan, "beta-2"),
        (FedYogi, "tau", math.inf, "tau"),
        (FedAdagrad, "tau", -1.0, "tau"),
        (FedOpt, "beta_2", 2.0, "beta-2"),
        (FedOpt, "momentum", 2.0, "momentum"),
    ]

    def check(strategy, option, value, key):
        with pytest.raises(ConfigError, match=rf"strategy\.{key} must be .*, got {value}"):
            strategy(**{option: value})

    assert failures(cases, check) == []


def test_an_unknown_server_optimizer_is_refused_with_the_choices():
    with pytest.raises(
        ConfigError, match=r"strategy.server-optimizer must be one of adagrad, adam, momentum, sgd, yogi; got 'lion'"
    ):
        FedOpt(server_optimizer="lion")
