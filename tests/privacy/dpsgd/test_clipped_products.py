"""Sums of clipped gradients of a linear layer: what one unit moves them by, and what a twin lets it."""

from functools import partial

import numpy as np
import pytest

from cloister.privacy.dpsgd.noise import BLOCK, clipped_products, clipped_sum
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.utils.errors import ConfigError

FEATURES, OUTPUTS = 7, 3


def units(rng, count):
    """Inputs and errors of adversarial sizes."""
    sizes = rng.choice([0.0, 1e-162, 1e-30, 1e-3, 1.0, 1e4, 1e30, 1e153], (2, count, 1))
    return [sizes[0] * rng.normal(size=(count, FEATURES)), sizes[1] * rng.normal(size=(count, OUTPUTS))]


def single(parts):
    """The same in single precision, where the largest are not finite."""
    with np.errstate(over="ignore"):
        return [part.astype(np.float32) for part in parts]


def product(a, e):
    with np.errstate(invalid="ignore"):
        return np.outer(a, e).ravel(), e


@pytest.mark.parametrize("count", [0, 1, 5, BLOCK, 2 * BLOCK + 3])
def test_the_sum_is_that_of_gradients_clipped_one_by_one(count):
    rng = np.random.default_rng(count)
    inputs, errors = single(units(rng, count))
    shares = rng.uniform(0, 1, count)
    expected = clipped_sum(
        [partial(product, a, e) for a, e in zip(inputs.astype(float), errors.astype(float), strict=True)],
        (np.zeros(FEATURES * OUTPUTS), np.zeros(OUTPUTS)),
        0.3,
        shares,
    )
    sums, biases = clipped_products(inputs, errors, 0.3, shares)
    np.testing.assert_allclose(sums.ravel(), expected[0], atol=1e-12)
    np.testing.assert_allclose(biases, expected[1], atol=1e-12)


def most_moved(summing, trials=200):
    """The largest move of the sums over S, by a unit more: the others, and the unit, are adversarial."""
    largest = 0.0
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        bound = float(rng.choice([1e-6, 0.37, 1e4]))
        inputs, errors = units(rng, int(rng.integers(1, 40)))
        if trial % 3 == 0:
            inputs[-1] = 0
        if trial % 7 == 0:
            inputs[-1], errors[-1], bound = 1e153, 1.55e-162, 1e-12  # squares underflow in double precision
        if trial % 5 == 0:
            errors[-1] = rng.choice([np.nan, np.inf, -np.inf, 1e300])
        shares = np.ones(len(inputs))
        with np.errstate(all="ignore"):
            first = summing(inputs[:-1], errors[:-1], bound, shares[:-1])
            second = summing(inputs, errors, bound, shares)
            moved = np.sqrt(sum(np.square(one - other).sum() for one, other in zip(first, second, strict=True)))
        largest = max(largest, np.inf if np.isnan(moved) else moved / bound)
    return largest


def test_one_unit_moves_the_sum_by_the_bound_at_most():
    assert 0.99 < most_moved(clipped_products) <= 1


def without_bias(inputs, errors, bound, shares):
    """A broken twin: the bias has no part in the norm."""
    norms = np.linalg.norm(inputs, axis=1) * np.linalg.norm(errors, axis=1)
    factors = np.where((norms > 0) & (norms < np.inf), np.minimum(1, bound / norms), 1)
    kept = np.where(np.isfinite(errors).all(axis=1), factors, 0)[:, None] * np.nan_to_num(errors, posinf=0, neginf=0)
    return inputs.T @ kept, kept.sum(axis=0)


def with_what_is_not_finite(inputs, errors, bound, shares):
    """A broken twin: a factor of 0 is all that keeps a unit out."""
    norms = np.sqrt(np.square(inputs).sum(axis=1) + 1) * np.linalg.norm(errors, axis=1)
    factors = np.where((norms > 0) & (norms < np.inf), np.minimum(1, bound / norms), 0)[:, None]
    return inputs.T @ (factors * errors), (factors * errors).sum(axis=0)


@pytest.mark.parametrize("twin", [without_bias, with_what_is_not_finite])
def test_the_search_finds_a_twin(twin):
    assert most_moved(twin) > 1


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("where", [0, 1])
def test_a_unit_that_is_not_finite_counts_as_none(value, where):
    parts = units(np.random.default_rng(1), 6)
    parts[where][2] = value
    others = [np.delete(part, 2, axis=0) for part in parts]
    for found, expected in zip(
        clipped_products(*parts, 1.0, np.ones(6)), clipped_products(*others, 1.0, np.ones(5)), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("share", "factor"), [(0.25, 0.25), (-1.0, 0.0), (3.0, 1.0), (np.nan, 1.0)])
def test_a_unit_is_clipped_to_its_share_of_the_bound(share, factor):
    inputs, errors = np.full((1, FEATURES), 100.0), np.full((1, OUTPUTS), 100.0)
    found = clipped_products(inputs, errors, 2.0, np.array([share]))
    assert np.sqrt(sum(np.square(part).sum() for part in found)) == pytest.approx(2.0 * factor, rel=1e-4)


def test_a_bound_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="clipping_norm"):
        clipped_products(np.zeros((1, 2)), np.zeros((1, 2)), 0.0, np.ones(1))


class TestFactorsOfSoftmax:
    def model(self):
        model = SoftmaxRegression(64, 10)
        for number, weight in enumerate(model.weights.values()):
            weight[:] = np.random.default_rng(number).normal(size=weight.shape)
        return model

    def examples(self, count):
        rng = np.random.default_rng(9)
        return rng.normal(size=(count, 8, 8)).astype(np.float32), rng.integers(0, 10, count)

    def test_are_to_the_last_bit_those_of_the_example_alone(self):
        model, (x, y) = self.model(), self.examples(37)
        _, together = model.factors_alone(x, y)
        for row in range(37):
            _, alone = model.factors_alone(x[row : row + 1], y[row : row + 1])
            assert np.array_equal(alone[0], together[row])

    def test_give_the_gradient_by_their_product(self):
        model, (x, y) = self.model(), self.examples(5)
        inputs, errors = model.factors_alone(x, y)
        for row in range(5):
            _, gradient = model.loss_and_gradients(x[row : row + 1], y[row : row + 1])
            np.testing.assert_allclose(np.outer(inputs[row], errors[row]), gradient["softmax/kernel"], atol=1e-6)
            np.testing.assert_allclose(errors[row], gradient["softmax/bias"], atol=1e-6)

    @pytest.mark.parametrize("label", [-1, 10, 10**12])
    def test_are_no_numbers_for_a_label_that_is_no_class(self, label):
        model, (x, y) = self.model(), self.examples(3)
        _, others = model.factors_alone(x, y)
        y[1] = label
        _, found = model.factors_alone(x, y)
        assert np.isnan(found[1]).all() and np.array_equal(found[[0, 2]], others[[0, 2]])

    def test_of_no_example_are_none(self):
        model, (x, y) = self.model(), self.examples(3)
        assert [part.shape for part in model.factors_alone(x[:0], y[:0])] == [(0, 64), (0, 10)]


def test_a_unit_that_fails_leaves_the_units_after_it_in_the_sum():
    def fails():
        raise RuntimeError("no gradient")

    like, one = (np.zeros(2),), np.array([0.3, -0.2])
    (alone,) = clipped_sum([lambda: (one,)], like, 1.0)
    (found,) = clipped_sum([fails, lambda: (one,)], like, 1.0)
    np.testing.assert_array_equal(found, alone)
