"""A step releases a sum of bounded sensitivity, the right noise, a public divisor."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from examples_of_dpsgd import (
    batch,
    brute_force,
    dp_sgd,
    functional,
    gradients,
    head,
    in_double_precision,
    made,
    norm,
    perturbed,
    relative_error,
    shared,
)
from statistics_of_noise import is_normal, std_is

from cloister.privacy.dpsgd import in_rows
from cloister.privacy.dpsgd import step as steps
from cloister.privacy.dpsgd.batches import poisson, shuffle
from cloister.privacy.dpsgd.noise import grid_of
from cloister.privacy.dpsgd.step import DpSgd
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils.errors import ConfigError

S, SIGMA, B = 0.5, 2.0, 8
layers = keras.layers


@pytest.fixture
def model():
    return wide()


def wide():
    keras.utils.set_random_seed(3)
    return perturbed(functional((30,), lambda x: head(layers.Dense(2000, activation="tanh")(x))))


@pytest.fixture(scope="module")
def traced():
    """A step, and the weights that its model begins with: to trace one takes a second."""
    step = make(DpSgd, wide())
    return step, step.model.get_weights()


@pytest.fixture
def step(traced):
    """Return that step as it began."""
    step, weights = traced
    step.model.set_weights(weights)
    step.noise, step.noise_multiplier = GaussianNoise(seed=11), SIGMA
    step.reseed(0)
    return step


def make(kind, model, **options):
    defaults = {"batch_size": B, "noise_multiplier": SIGMA, "clipping_norm": S, "optimizer": keras.optimizers.SGD(1.0)}
    return made(kind, model, **(defaults | {"noise": GaussianNoise(seed=11)} | options))


def moved(step, x, y, bound=None):
    """How far one step takes each weight."""
    before = [np.array(variable, np.float64) for variable in step.model.trainable_variables]
    step.step(x, y, bound)
    after = [np.array(variable, np.float64) for variable in step.model.trainable_variables]
    return [new - old for new, old in zip(after, before, strict=True)]


def noise_of(step, x, y):
    """B·Δw + the clipped sum: what was added, if the rest is right."""
    total = brute_force(step.model, x, y, step.clipping_norm)
    return np.concatenate([(-B * a - b).ravel() for a, b in zip(moved(step, x, y), total, strict=True)])


def sensitivity(step, x, y):
    """How far leaving out one example moves the sum, at most."""
    whole = step.clipped_sum(x, y, S).sums
    without = [step.clipped_sum(np.delete(x, i, 0), np.delete(y, i), S).sums for i in range(len(x))]
    return max(norm([a - b for a, b in zip(whole, some, strict=True)]) for some in without)


def test_noise_is_as_large_as_it_should_be_whatever_the_batch(model, monkeypatch):
    monkeypatch.setattr(in_rows, "most_at_once", lambda batch_size: 3)
    step = make(DpSgd, model)
    for size in (B, 21, 3, 0):
        assert std_is(noise_of(step, *batch(model, size)), SIGMA * S), size


def test_the_test_of_noise_sees_too_little_and_too_much(step):
    for wrong in (2 / 3, 3 / 2):
        step.noise_multiplier = wrong * SIGMA
        assert not std_is(noise_of(step, *batch(step.model)), SIGMA * S), wrong


def test_noise_is_normal_and_never_the_same_twice(step):
    x, y = batch(step.model, 0)
    first, second = noise_of(step, x, y), noise_of(step, x, y)
    assert is_normal(first, SIGMA * S)
    assert abs(np.corrcoef(first, second)[0, 1]) < 6 / np.sqrt(first.size)


def test_one_example_moves_the_sum_by_the_bound_at_most(step):
    x, y = batch(step.model, 6)
    assert max(map(norm, gradients(step.model, x, y))) > S
    assert S * (1 - 1e-3) < sensitivity(step, x, y) <= S


@pytest.mark.slow
def test_one_example_moves_the_sum_of_a_model_that_uses_layers_twice_by_the_bound_at_most():
    keras.utils.set_random_seed(3)
    step = make(DpSgd, perturbed(shared()))
    assert S * (1 - 1e-3) < sensitivity(step, *batch(step.model, 6)) <= S


def test_what_is_released_lies_on_a_public_grid(model):
    """In double precision: single precision has no room for 2²⁴ steps in a deviation."""
    step = make(DpSgd, in_double_precision(lambda: functional((30,), head)), batch_size=B)
    x, y = batch(step.model)
    grid = grid_of(S, SIGMA, 155)
    means = step._noised_mean(step.clipped_sum(x, y, S).sums, grid)
    cells = np.concatenate([mean.ravel() for mean in means]) * (B / grid.step)
    np.testing.assert_allclose(cells, np.rint(cells), rtol=2.0**-50)
    assert means[0].dtype == np.float64 and len(np.unique(np.rint(cells))) == 155


class Keeps(keras.optimizers.SGD):
    """Keeps the gradients of its first step, as they are: the variable may share their memory."""

    def apply(self, gradients, variables):
        if not hasattr(self, "kept"):
            self.kept = [tf.Variable(tf.zeros(gradient.shape), trainable=False) for gradient in gradients]
        for kept, gradient in zip(self.kept, gradients, strict=True):
            tf.cond(self.iterations == 0, lambda: kept.assign(gradient), lambda: kept.read_value())  # noqa: B023
        return super().apply(gradients, variables)


def test_a_gradient_that_an_optimizer_keeps_stays_what_it_is(model):
    optimizer = Keeps(1.0)
    step = make(DpSgd, model, optimizer=optimizer)
    first = moved(step, *batch(model, 0))
    moved(step, *batch(model, 0))
    assert relative_error([np.array(kept) for kept in optimizer.kept], [-piece for piece in first]) < 1e-5


def test_the_optimizer_reads_what_the_noise_was_written_to(model, monkeypatch):
    shared, seen = steps._shared, []
    monkeypatch.setattr(steps, "_shared", lambda array: seen.append((array, shared(array))) or seen[-1][1])
    make(DpSgd, model).step(*batch(model, 0))
    assert len(seen) == len(model.trainable_variables)
    for array, tensor in seen:
        array[...] = 7
        assert (tensor.numpy() == 7).all()


def test_every_number_of_a_step_is_written(model, poisoned_memory):
    """New memory holds 85 in each byte: a float of 2.5·10²⁴⁶, or of 1.4·10¹³."""
    assert max(np.abs(piece).max() for piece in moved(make(DpSgd, model), *batch(model, 3))) < 10 * SIGMA * S / B


def test_more_noise_than_a_grid_has_room_for_is_refused_before_anything_is_computed(model):
    with pytest.raises(ConfigError, match=r"noise_multiplier must be <= \d+ for 72005 parameters, got 1e\+06"):
        make(DpSgd, model, noise_multiplier=1e6)


def test_a_step_may_have_its_own_bound_and_divides_by_the_configured_batch_size(step):
    x, y = batch(step.model, 21)
    step.noise_multiplier = 0.0
    expected = [-total / B for total in brute_force(step.model, x, y, 0.1)]
    assert relative_error(moved(step, x, y, 0.1), expected) < 5e-4
    assert step.clipping_norm == S


def test_noise_follows_the_bound_of_its_step(step):
    x, y = batch(step.model, 0)
    for bound in (0.05, 3.0):
        apart = moved(step, x, y, bound)
        assert std_is(B * np.concatenate([piece.ravel() for piece in apart]), SIGMA * bound), bound


def test_any_optimizer_sees_the_noised_mean(model):
    seen = []

    class Spy(keras.optimizers.Adam):
        def apply(self, gradients, variables):
            seen.append([gradient.shape for gradient in gradients])
            return super().apply(gradients, variables)

    step = make(DpSgd, model, optimizer=Spy(0.01))
    apart = moved(step, *batch(model, 0))
    assert seen == [[variable.shape for variable in model.trainable_variables]]
    # Adam's first step has the size of its rate in every coordinate but those next to 0.
    assert abs(np.median(np.abs(apart[0])) / 0.01 - 1) < 1e-3


def test_frozen_weights_stay(model):
    model.layers[1].trainable = False
    kernel = np.array(model.layers[1].kernel)
    step = make(DpSgd, model)
    assert len(step.clipped_sum(*batch(model), S).sums) == 2
    step.step(*batch(model))
    assert np.array_equal(kernel, model.layers[1].kernel)


def learnable(size=400):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, size)
    return (np.eye(3)[y] @ rng.standard_normal((3, 6)) + 0.3 * rng.standard_normal((size, 6))).astype(np.float32), y


@pytest.mark.parametrize("drawn", [poisson(400, 0.1, 60, seed=4), shuffle(400, 40, 60, seed=4)])
def test_central_training_learns(drawn):
    keras.utils.set_random_seed(1)
    x, y = learnable()
    model = functional((6,), lambda inputs: head(inputs, 3))
    step = dp_sgd(model, batch_size=40, optimizer=keras.optimizers.SGD(0.5), noise=GaussianNoise(seed=2))
    for chosen in drawn:
        step.step(x[chosen], y[chosen])
    assert np.mean(np.argmax(model(x), axis=1) == y) > 0.9


def test_central_training_takes_empty_batches_too():
    x, y = learnable(20)
    step = dp_sgd(functional((6,), lambda inputs: head(inputs, 3)), batch_size=1)
    before = np.array(step.model.trainable_variables[0])
    step.step(x[:0], y[:0])
    assert not np.array_equal(before, step.model.trainable_variables[0])


def test_the_package_and_its_batches_do_without_tensorflow():
    script = (
        "import sys; import cloister.privacy, cloister.privacy.dpsgd.batches, cloister.privacy.dpsgd.descent;"
        "print([name for name in ('tensorflow', 'keras') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
