"""Units that are clipped to a share of S: the sum as defined, and a sensitivity of S for any shares."""

import keras
import numpy as np
import pytest
from examples_of_dpsgd import (
    MODELS,
    batch,
    brute_force,
    coupled,
    dp_sgd,
    functional,
    head,
    norm,
    perturbed,
    relative_error,
    take_in_turn,
)
from support import failures

from cloister.privacy.dpsgd import in_turn
from cloister.privacy.dpsgd.batches import Members
from cloister.privacy.dpsgd.noise import noisy_sum
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils.errors import ConfigError

layers = keras.layers
S = 0.5
SHARES = np.array([1.0, 0.02, 0.3, 0.7, 0.001, 1.0, 0.5, 0.1])
HOSTILE = np.array([np.nan, np.inf, -np.inf, 1e300, 50.0, -3.0, 0.0, 1.0])


def recurrent():
    """Return the recurrent model that XLA compiles in the least time."""
    return functional((4, 3), lambda x: head(layers.SimpleRNN(5)(x)))


BUILDS = {"rows": MODELS["normalized"], "in turn": recurrent}


@pytest.fixture(scope="module")
def steps():
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_turn, "WIDE", 20)  # some of the gradients are not made
        for name, build in BUILDS.items():
            keras.utils.set_random_seed(7)
            found[name] = dp_sgd(perturbed(build()))
    return found


def by_brute_force(model, x, y, shares):
    each = [brute_force(model, x[[i]], y[[i]], S * share) for i, share in enumerate(shares)]
    return [np.sum(same, axis=0) for same in zip(*each, strict=True)]


def farthest(steps, shares, limits):
    """How far a unit moves each model's sum, relative to its limit: the largest of all units and models."""
    found = []
    for step in steps.values():
        x, y = batch(step.model, len(shares))
        for leaving, limit in enumerate(limits):
            whole, others = coupled(step, 100 * x, y, S * np.asarray(shares), leaving)
            found.append(norm([a - b for a, b in zip(whole, others, strict=True)]) / limit)
    return max(found)


def test_each_unit_is_clipped_to_its_share_in_every_engine(steps):
    def check(name):
        step = steps[name]
        x, y = batch(step.model, len(SHARES))
        found = step.clipped_sum(x, y, S, shares=SHARES)
        assert step.method == name and 0 < found.clipped <= 8
        assert relative_error(found.sums, by_brute_force(step.model, x, y, SHARES)) < 5e-4

    assert not failures(BUILDS, check)


def test_a_unit_moves_the_sum_by_its_share_of_s_and_by_nothing_else(steps):
    assert 0.9 < farthest(steps, SHARES, S * SHARES) <= 1


def test_the_search_finds_shares_that_nothing_holds_below_one(steps):
    """A twin whose weights multiply the clipped gradient as they are."""
    assert farthest(steps, 3 * SHARES, np.full(8, S)) > 2


def test_no_number_as_a_share_lets_a_unit_move_the_sum_by_more_than_s(steps):
    def check(name):
        step = steps[name]
        x, y = batch(step.model, len(HOSTILE))
        for number in range(len(HOSTILE)):
            found = step.clipped_sum(1e4 * x[[number]], y[[number]], S, shares=HOSTILE[[number]])
            assert norm(found.sums) <= S and found.non_finite == 0
        assert np.isfinite(norm(step.clipped_sum(0 * x, y, S, shares=HOSTILE).sums))

    assert not failures(BUILDS, check)


def test_a_group_is_clipped_to_the_mean_share_of_its_examples():
    keras.utils.set_random_seed(0)  # with other weights an example may have hardly a gradient
    groups, shares = np.array([1, 0, 1, 1]), np.array([1.0, 0.25, 0.5, 0.0])
    step = dp_sgd(functional((8,), lambda x: head(layers.Dense(6)(x), 3)), group_cap=3, batch_size=4)
    x, y = np.eye(8, dtype=np.float32)[:4] * 50, np.arange(4) % 3
    for group, share in ((0, 0.25), (1, 0.5)):
        own = groups == group
        found = step.clipped_sum(x[own], y[own], S, groups[own], shares[own])
        assert 0.99 < norm(found.sums) / (S * share) <= 1


def test_a_units_share_changes_no_bit_with_the_units_beside_it():
    rng = np.random.default_rng(3)
    groups, values = rng.integers(0, 9, 200), rng.random(200)
    order = rng.permutation(9)[groups]  # another place for each group
    own = Members(groups).means(values)
    for group in range(9):
        alone = Members(groups[groups == group]).means(values[groups == group])
        assert alone[0] == own[group] == Members(order).means(values)[order[groups == group][0]]


def test_the_same_in_numpy_one_by_one():
    rng = np.random.default_rng(1)
    rows, like = rng.normal(0, 1e3, (8, 5)), (np.zeros(5),)
    rows[4] = 1e-5  # short: not clipped

    def of(shares, chosen=range(8)):
        each = [lambda row=rows[i]: (row,) for i in chosen]
        shares = [float(shares[i]) for i in chosen]
        settings = {"clipping_norm": S, "noise_multiplier": 0.0, "noise": GaussianNoise(1)}
        return noisy_sum(each, like, **settings, shares=shares)[0]

    factors = np.minimum(1, S * SHARES / np.linalg.norm(rows, axis=1))
    np.testing.assert_allclose(of(SHARES), (factors[:, None] * rows).sum(axis=0), rtol=1e-4)
    for number in range(8):
        others = [i for i in range(8) if i != number]
        assert np.linalg.norm(of(SHARES) - of(SHARES, others)) <= S * SHARES[number]
        assert np.linalg.norm(of(HOSTILE, [number])) <= S


def test_another_number_of_shares_is_refused(steps):
    step = steps["rows"]
    with pytest.raises(ConfigError, match="shares must have the length of x and y, 8; got 3"):
        step.clipped_sum(*batch(step.model, 8), S, shares=SHARES[:3])


@pytest.mark.parametrize("method", ["rows", "in turn"])
def test_a_gradient_of_zero_at_a_share_of_zero_adds_zero(monkeypatch, method):
    """Its factor would be 0/0, and take the sum of the others along."""
    if method == "in turn":
        take_in_turn(monkeypatch)
    model = functional((8,), lambda x: head(x, 3))
    model.set_weights([np.zeros((8, 3)), np.array([1e3, 0.0, 0.0])])
    x, y, shares = np.ones((2, 8), np.float32), np.array([0, 1]), np.array([0.0, 1.0])
    step = dp_sgd(model)
    found = step.clipped_sum(x, y, S, shares=shares).sums
    assert step.method == method
    assert all(np.array_equal(a, b) for a, b in zip(found, step.clipped_sum(x[1:], y[1:], S).sums, strict=True))
