"""Groups of examples are clipped as one: a person with several pictures moves the sum by S, and by no more."""

import tracemalloc

import keras
import numpy as np
import pytest
from examples_of_dpsgd import (
    MODELS,
    TURNS,
    batch,
    dp_sgd,
    functional,
    gradient_of_one,
    head,
    norm,
    perturbed,
    relative_error,
    smooth,
    take_in_turn,
)
from statistics_of_noise import std_is
from support import mostly_slow

from cloister.privacy.dpsgd.batches import rows_of, units_of
from cloister.privacy.dpsgd.clipped_sums import Call
from cloister.privacy.dpsgd.step import DpSgd
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils.errors import ConfigError

layers = keras.layers
CAP = 3
GROUPS = np.array([4, 0, 4, 2, 0, 4, 7, 2, 4])
"""Of four persons, one with more examples than the cap."""
SIZE = len(GROUPS)


def kept(group):
    return np.flatnonzero(group == GROUPS)[:CAP]


def mean_gradient(model, x, y, rows):
    each = [gradient_of_one(model, x[i], y[i]) for i in rows]
    return [np.mean(same, axis=0) for same in zip(*each, strict=True)]


def by_brute_force(model, x, y, bound, groups):
    total = 0.0
    for group in np.unique(groups):
        gradient = mean_gradient(model, x, y, np.flatnonzero(group == groups)[:CAP])
        factor = min(1.0, bound / norm(gradient))
        total = [factor * new for new in gradient] if not total else [a + factor * b for a, b in zip(total, gradient)]
    return total


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(7)


def assert_equal_to_brute_force(model, **options):
    x, y = batch(model, SIZE)
    bound = float(np.median([norm(mean_gradient(model, x, y, kept(group))) for group in np.unique(GROUPS)]))
    step = dp_sgd(model, group_cap=CAP, batch_size=4, **options)
    found = step.clipped_sum(x, y, bound, GROUPS)
    assert relative_error(found.sums, by_brute_force(model, x, y, bound, GROUPS)) < 5e-4
    assert found.examples == 4 and 0 < found.clipped < 4
    return step


@pytest.mark.parametrize("name", mostly_slow(["sequence", "shared", "attention"], ["sequence"]))
def test_the_mean_of_a_group_is_clipped(name):
    assert assert_equal_to_brute_force(smooth(perturbed(MODELS[name]()))).method == "rows"


@pytest.mark.long
@pytest.mark.parametrize("build", TURNS.values())
def test_the_mean_of_a_group_is_clipped_in_other_models(build):
    assert_equal_to_brute_force(smooth(perturbed(build())))


def test_the_mean_of_a_group_is_clipped_in_turn(monkeypatch):
    take_in_turn(monkeypatch)
    assert assert_equal_to_brute_force(smooth(perturbed(MODELS["sequence"]()))).method == "in turn"


def sensitivity(step, x, y, bound):
    whole = step.clipped_sum(x, y, bound, GROUPS).sums
    without = [step.clipped_sum(x[g != GROUPS], y[g != GROUPS], bound, GROUPS[g != GROUPS]).sums for g in set(GROUPS)]
    return max(norm([np.float64(a) - b for a, b in zip(whole, some, strict=True)]) for some in without) / bound


class ClipsExamples(DpSgd):
    """What is claimed for groups, done to examples."""

    def clipped_sum(self, x, y, clipping_norm, groups=None, shares=None):
        return super().clipped_sum(x, y, clipping_norm, np.arange(len(x)))


def clustered():
    """Examples of a group push in the same way."""
    x = np.eye(8, dtype=np.float32)[GROUPS] * 50
    return x, GROUPS % 3


def test_a_group_moves_the_sum_by_the_bound_at_most():
    model = functional((8,), lambda x: head(layers.Dense(6, activation="tanh")(x), 3))
    step = dp_sgd(model, group_cap=CAP, batch_size=4)
    for bound in (0.1, 1.0, 1e-9):
        assert 0.9 < sensitivity(step, *clustered(), bound) <= 1, bound


def test_clipping_examples_in_the_place_of_groups_is_caught():
    model = functional((8,), lambda x: head(x, 3))
    broken = ClipsExamples(
        model,
        batch_size=4,
        group_cap=CAP,
        noise_multiplier=1.0,
        clipping_norm=1.0,
        optimizer=keras.optimizers.SGD(0.1),
    )
    # As layers begin, an example may be classified with certainty, and have no gradient.
    model.set_weights([np.zeros((8, 3)), np.zeros(3)])
    assert sensitivity(broken, *clustered(), 0.1) > 1.5


@pytest.mark.slow
def test_noise_does_not_follow_the_size_of_groups():
    model = perturbed(functional((30,), lambda x: head(layers.Dense(2000, activation="tanh")(x))))
    step = dp_sgd(model, group_cap=CAP, batch_size=4, noise_multiplier=2.0, noise=GaussianNoise(seed=11))
    x, y = batch(model, SIZE)
    total = step.clipped_sum(x, y, 0.5, GROUPS).sums
    before = [np.array(variable, np.float64) for variable in model.trainable_variables]
    optimizer_rate = 0.1
    counts = step.step(x, y, 0.5, GROUPS)
    after = [np.array(variable, np.float64) for variable in model.trainable_variables]
    noise = [(b - a) * 4 / optimizer_rate - t for a, b, t in zip(after, before, total, strict=True)]
    assert counts.examples == 4
    assert std_is(np.concatenate([piece.ravel() for piece in noise]), 2.0 * 0.5)


def test_a_broken_example_takes_its_group_and_nobody_else():
    model = perturbed(MODELS["sequence"]())
    step = dp_sgd(model, group_cap=CAP, batch_size=4)
    x, y = batch(model, SIZE)
    rest = GROUPS != 2
    expected = step.clipped_sum(x[rest], y[rest], 0.5, GROUPS[rest])
    x[3] = np.nan
    found = step.clipped_sum(x, y, 0.5, GROUPS)
    assert found.non_finite == 1
    assert relative_error(found.sums, expected.sums) < 1e-5


@pytest.mark.slow
def test_memory_does_not_follow_the_number_of_groups():
    """A server chooses the cap: of a batch with more groups than memory lasts for nothing would be trained."""
    step = dp_sgd(functional((6,), head), group_cap=5000, batch_size=8)

    def peak(count):
        x, y = np.ones((count, 6), np.float32), np.zeros(count, int)
        step.clipped_sum(x, y, 1.0, np.arange(count))
        tracemalloc.start()
        try:
            step.clipped_sum(x, y, 1.0, np.arange(count))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # TensorFlow may give the arrays of one call back during the next; those of all calls would be four times as much.
    assert peak(256) < 1.5 * peak(64)


def test_groups_must_be_given_and_of_one_length():
    step = dp_sgd(functional((6,), head), group_cap=2)
    x, y = batch(step.model)
    with pytest.raises(ConfigError, match="groups must be given"):
        step.step(x, y)
    with pytest.raises(ConfigError, match="length of x and y"):
        step.step(x, y, groups=np.arange(3))
    with pytest.raises(ConfigError, match="group_cap"):
        dp_sgd(functional((6,), head), group_cap=0)


def test_a_group_that_is_empty_in_a_microbatch_counts_for_nothing():
    mask = np.array([[True, True], [True, False], [False, False]])
    shares = Call(np.zeros(6), np.zeros(6), mask, 1.0, np.zeros(0, np.int64)).shares
    np.testing.assert_array_equal(shares, [[0.5, 0.5], [1, 0], [0, 0]])


class TestDrawing:
    def test_units_are_groups_of_at_most_the_cap(self):
        units = units_of(np.array(["b", "a", "b", "b", "c"]), 2, seed=0)
        assert [len(rows) for rows in units] == [1, 2, 1] and list(units[0]) == [1] and set(units[1]) <= {0, 2, 3}

    def test_which_examples_of_a_large_group_are_kept_is_drawn(self):
        kept = {tuple(units_of(np.zeros(6), 2, seed)[0]) for seed in range(200)}
        assert len(kept) == 15  # all pairs; one of them is missed with probability below 15·(14/15)^200 = 2e-5

    def test_a_batch_of_units_in_rows(self):
        units = [np.array([5, 7]), np.array([1]), np.array([0, 2])]
        rows, groups = rows_of(units, np.array([2, 0]))
        assert list(rows) == [0, 2, 5, 7] and list(groups) == [0, 0, 1, 1]
        assert [len(part) for part in rows_of(units, np.zeros(0, np.intp))] == [0, 0]
